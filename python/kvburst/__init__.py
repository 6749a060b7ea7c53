"""kvburst moves LLM KV-cache pages between host and device memory, in bursts.

Describe the pools (`pools`), hand out their pages (`PageAllocator`), and let a `BurstController`
move them over a device (`HostDevice`, `CudaDevice`). See the README for a first example.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvburst._core import (
    BoardError,
    BoardUseError,
    Burst,
    BurstError,
    ComputeDevice,
    CopyLimits,
    CudaDriver,
    Device,
    DeviceError,
    Event,
    HostDevice,
    KVBurstError,
    LayoutError,
    LinkModel,
    PageError,
    PlanOptions,
    RowMove,
    StepBoard,
    Stream,
    __version__,
)

if TYPE_CHECKING:
    from kvburst._indices import StreamIndices
    from kvburst.acks import Ack, AckQueue
    from kvburst.agreement import Agreement, AgreementError, AgreementGroups, make_groups
    from kvburst.burst_lane import PoolTransfer
    from kvburst.controller import BurstController
    from kvburst.cuda import CudaDevice
    from kvburst.exchange import GroupChannel, RankShard
    from kvburst.layer_done import LayerDoneCounter
    from kvburst.ownership import Ownership
    from kvburst.page_allocator import PageAllocator
    from kvburst.pools import DevicePool, HostPool, Pool

__all__ = [
    "Ack",
    "AckQueue",
    "Agreement",
    "AgreementError",
    "AgreementGroups",
    "BoardError",
    "BoardUseError",
    "Burst",
    "BurstController",
    "BurstError",
    "ComputeDevice",
    "CopyLimits",
    "CudaDevice",
    "CudaDriver",
    "Device",
    "DeviceError",
    "DevicePool",
    "Event",
    "GroupChannel",
    "HostDevice",
    "HostPool",
    "KVBurstError",
    "LayerDoneCounter",
    "LayoutError",
    "LinkModel",
    "Ownership",
    "PageAllocator",
    "PageError",
    "PlanOptions",
    "Pool",
    "PoolTransfer",
    "RankShard",
    "RowMove",
    "StepBoard",
    "Stream",
    "StreamIndices",
    "__version__",
    "make_groups",
]

# Imported at first use: these need torch, which takes seconds, and `kvburst --help` does not.
_MODULES = {
    "Ack": "acks",
    "AckQueue": "acks",
    "Agreement": "agreement",
    "AgreementError": "agreement",
    "AgreementGroups": "agreement",
    "make_groups": "agreement",
    "BurstController": "controller",
    "CudaDevice": "cuda",
    "PoolTransfer": "burst_lane",
    "GroupChannel": "exchange",
    "LayerDoneCounter": "layer_done",
    "Ownership": "ownership",
    "RankShard": "exchange",
    "PageAllocator": "page_allocator",
    "StreamIndices": "_indices",
    "DevicePool": "pools",
    "HostPool": "pools",
    "Pool": "pools",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
