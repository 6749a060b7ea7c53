"""Ranges on a profiler's timeline."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch

Ranges: TypeAlias = Callable[[str], AbstractContextManager[Any]]
"""Makes the range of that name: what runs within is in it."""


def no_range(name: str) -> AbstractContextManager[Any]:
    return nullcontext()


def new_ranges() -> Ranges:
    """NVTX's, in a domain "kvburst", where nvtx and CUDA are there; otherwise nothing."""
    if find_spec("nvtx") is None or not torch.cuda.is_available():
        return no_range
    import nvtx

    return partial(nvtx.annotate, domain="kvburst")
