"""The device that copies for a server, and torch's streams as that device's.

Here, and nowhere else in the plugin, it is decided which device that is.
"""

from typing import Any, TypeAlias

import torch

from kvburst._core import DeviceError, HostDevice, Stream, __version__

TransferDevice: TypeAlias = HostDevice


def new_device(where: torch.device) -> TransferDevice:
    """The device for pools that lie on `where`. Raises DeviceError if there is none."""
    if where.type == "cpu":
        return HostDevice()
    raise DeviceError(f"kvburst {__version__} has no device for memory on {where}, only for cpu")


def stream_of(device: TransferDevice, stream: Any) -> Stream | None:
    """One of torch's streams as a stream of `device`.

    None where torch is synchronous: on a CPU its work is done when the call that asks for it
    returns, and there is nothing to be ordered behind, or to order.
    """
    return None


def torch_stream(device: TransferDevice) -> Stream | None:
    """Torch's current stream as a stream of `device`; None where torch is synchronous."""
    return None
