"""The device "cuda" for benchmarks: on a GPU, or on the library that stands in for its driver."""

import torch
from driver_library import CudaName, driver_library

from kvburst import CudaDevice
from kvburst._core import CopyLimits, KVBurstError


def open_device(
    name: CudaName, *, limits: CopyLimits | None = None, single_copies: bool = False
) -> CudaDevice:
    """GPU 0 of it. Raises DeviceError where there is none, and KVBurstError where what
    KVBURST_LIBCUDA names is the other kind."""
    device = CudaDevice(driver=driver_library(name), limits=limits, single_copies=single_copies)
    if device.driver.stand_in != (name == "stand-in"):
        kind = "stands in for a driver" if device.driver.stand_in else "is a driver of GPUs"
        raise KVBurstError(f"device {name}: {device.driver.library} {kind} (KVBURST_LIBCUDA)")
    return device


def host_memory(nbytes: int) -> torch.Tensor:
    """Zeroed bytes of plain host memory, however little seems to be free: a virtual machine may be
    given its memory only as it uses it, and would not be measured at all."""
    return torch.zeros(nbytes, dtype=torch.uint8)
