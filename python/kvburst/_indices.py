"""Index tensors on their way into the native core."""

import torch

from kvburst._core import IndexView, PageError

_DTYPES = (torch.int32, torch.int64)


def index_view(name: str, indices: torch.Tensor) -> IndexView:
    """Describe a 1-D tensor of token slots, without copying it; `name` is for messages.

    The tensor must outlive the call that takes the view, and no longer. Raises PageError on a dtype
    other than int32 and int64, on another number of dimensions, and on memory that is not the
    host's.
    """
    if indices.dtype not in _DTYPES:
        raise PageError(f"{name}: dtype {indices.dtype} must be torch.int32 or torch.int64")
    if indices.dim() != 1:
        raise PageError(f"{name}: {indices.dim()} dimensions, must be 1")
    if indices.device.type != "cpu":
        raise PageError(f"{name}: on device {indices.device}, must be on the CPU")
    return IndexView(
        name=name,
        address=indices.data_ptr(),
        count=indices.numel(),
        stride=indices.stride(0),
        itemsize=indices.element_size(),
    )
