"""Index tensors on their way into the native core."""

from dataclasses import dataclass

import torch

from kvburst._core import IndexView, PageError

_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class StreamIndices:
    """Indices that the current stream is still to write: they are read behind it, and not now.

    Tensors on a GPU are always taken so. What is wrong with their values shows when they are read,
    and fails the burst. The tensor is kept until the burst's ack is retired, and must not be
    written to until then, not even by the stream; the pages it names are the caller's to keep as
    long.
    """

    indices: torch.Tensor


def _check(name: str, indices: torch.Tensor) -> None:
    if indices.dtype not in _DTYPES:
        raise PageError(f"{name}: dtype {indices.dtype} must be torch.int32 or torch.int64")
    if indices.dim() != 1:
        raise PageError(f"{name}: {indices.dim()} dimensions, must be 1")
    if indices.layout != torch.strided:
        raise PageError(f"{name}: layout {indices.layout}, must be torch.strided")


def _view(name: str, indices: torch.Tensor) -> IndexView:
    return IndexView(
        name=name,
        address=indices.data_ptr(),
        count=indices.numel(),
        stride=indices.stride(0),
        itemsize=indices.element_size(),
    )


def index_view(name: str, indices: torch.Tensor) -> IndexView:
    """Describe a 1-D tensor of token slots, without copying it; `name` is for messages.

    The tensor must outlive the call that takes the view, and no longer. Raises PageError on a dtype
    other than int32 and int64, on another number of dimensions, and on memory that is not the
    host's.
    """
    _check(name, indices)
    if indices.device.type != "cpu":
        raise PageError(f"{name}: on device {indices.device}, must be on the CPU")
    return _view(name, indices)


def deferred_view(name: str, indices: torch.Tensor) -> IndexView:
    """The same for a tensor in the device's memory, which must stay until the burst is done."""
    _check(name, indices)
    return _view(name, indices)
