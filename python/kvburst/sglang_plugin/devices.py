"""The device that copies for a server, and torch's streams as that device's.

Here, and nowhere else in the plugin, it is decided which device that is.
"""

from typing import Any, TypeAlias

import torch

from kvburst._core import Device, DeviceError, HostDevice, Stream, __version__
from kvburst.cuda import CudaDevice

TransferDevice: TypeAlias = Device


def new_device(where: torch.device) -> TransferDevice:
    """The device for pools that lie on `where`. Raises DeviceError if there is none."""
    if where.type == "cpu":
        return HostDevice()
    if where.type == "cuda":
        return CudaDevice(torch.cuda.current_device() if where.index is None else where.index)
    raise DeviceError(f"kvburst {__version__} has no device for memory on {where}")


def stream_of(device: TransferDevice, stream: Any) -> Stream | None:
    """One of torch's streams as a stream of `device`.

    None where torch is synchronous: on a CPU its work is done when the call that asks for it
    returns, and there is nothing to be ordered behind, or to order.
    """
    if isinstance(device, CudaDevice) and not device.driver.stand_in:
        return device.wrap_stream(stream.cuda_stream)
    return None


def torch_stream(device: TransferDevice) -> Stream | None:
    """Torch's current stream as a stream of `device`; None where torch is synchronous."""
    if isinstance(device, CudaDevice) and not device.driver.stand_in:
        return device.current_stream()
    return None
