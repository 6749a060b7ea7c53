"""kvburst moves LLM KV-cache pages between host and device memory, in bursts.

Describe the pools (`pools`), hand out their pages (`PageAllocator`), and let a `BurstController`
move them over a device (`HostDevice`). See the README for a first example.
"""

from kvburst._core import (
    Burst,
    BurstError,
    CopyLimits,
    DeviceError,
    Event,
    HostDevice,
    KVBurstError,
    LayoutError,
    LinkModel,
    PageError,
    PlanOptions,
    Stream,
    __version__,
)
from kvburst.acks import Ack, AckQueue
from kvburst.controller import BurstController, PoolTransfer
from kvburst.layer_done import LayerDoneCounter
from kvburst.page_allocator import PageAllocator
from kvburst.pools import DevicePool, HostPool, Pool

__all__ = [
    "Ack",
    "AckQueue",
    "Burst",
    "BurstController",
    "BurstError",
    "CopyLimits",
    "DeviceError",
    "DevicePool",
    "Event",
    "HostDevice",
    "HostPool",
    "KVBurstError",
    "LayerDoneCounter",
    "LayoutError",
    "LinkModel",
    "PageAllocator",
    "PageError",
    "PlanOptions",
    "Pool",
    "PoolTransfer",
    "Stream",
    "__version__",
]
