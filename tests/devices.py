"""The devices that tests run on, and memory of theirs."""

import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from stand_in import VERSIONS, Order

from kvburst import ComputeDevice, CopyLimits, CudaDevice, DeviceError, HostDevice, LinkModel
from kvburst._core import build_info
from kvburst.cuda import tier_memory

MakeDevice = Callable[..., ComputeDevice]
"""From the limits it is to have, and whether it is `shallow`: so that whoever issues a burst on a
stream that is held up is stuck in the driver."""

# With one copy queued, the call that would queue a second waits for the first.
SHALLOW = LinkModel(gigabytes_per_second=1000, queue_depth=1)
# A driver counts every operation: room for what is recorded on a stream that is held up, but not
# for all of a load behind it. Of one copy a layer and pool the eighth operation is a copy.
SHALLOW_QUEUE = 7


@dataclass(frozen=True)
class StandInKind:
    """A stand-in driver: its version, and when its streams run."""

    version: int
    order: Order

    def __str__(self) -> str:
        major, minor = self.version // 1000, self.version % 1000 // 10
        return f"stand-in {major}.{minor} {self.order}"


ORDERS: tuple[Order, ...] = ("random", "latest")
STAND_INS = {
    str(kind): kind
    for kind in (StandInKind(version, order) for version in VERSIONS for order in ORDERS)
}


KERNEL_NAMES = ("kvburst_gather_rows", "kvburst_scatter_rows")


def kernel_image(names: tuple[str, ...] = KERNEL_NAMES) -> bytes:
    """A fat binary as far as a stand-in looks at one: its frame, and the names of kernels."""
    text = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(text)) + text


STAND_IN_KERNELS = None if build_info().cuda_toolkit else kernel_image()
"""What a device on a stand-in loads: the kernels of the build, where it has some."""


def make_host_device(*, limits: CopyLimits | None = None, shallow: bool = False) -> HostDevice:
    return HostDevice(limits=limits, link=SHALLOW if shallow else None)


def why_no_gpu() -> str | None:
    """None where tests can run on a GPU."""
    try:
        device = CudaDevice()
    except DeviceError as error:
        return str(error)
    if device.driver.stand_in:
        return f"{device.driver.library} stands in for a driver"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} does not compute on {device.gpu_name}"
    return None


NO_GPU = why_no_gpu()
DEVICES = ("host", *STAND_INS) if NO_GPU else ("host", *STAND_INS, "cuda")


def to_device(device: ComputeDevice, tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory of the device."""
    memory = tier_memory(device).device(max(1, tensor.nbytes))[: tensor.nbytes]
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
