"""Bursts by SGLang's own direct copies, `sgl_kernel.kvcacheio`, where that can be imported."""

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from peers_way import Indices

from kvburst import CudaDevice


class SglKernel(Protocol):
    """The two functions that SGLang's host pools call for page-first host memory."""

    transfer_kv_per_layer_direct_pf_lf: Callable[..., None]
    transfer_kv_all_layer_direct_lf_pf: Callable[..., None]


def load_sgl_kernel() -> SglKernel | None:
    """None where it is not installed; what it raises on import is raised."""
    if importlib.util.find_spec("sgl_kernel") is None:
        return None
    kernel: SglKernel = importlib.import_module("sgl_kernel.kvcacheio")
    return kernel


@dataclass(frozen=True)
class Side:
    """A pool on both tiers: ``[layers, slots, row]`` and ``[pages, layers, page_size, row]``."""

    device: torch.Tensor
    host: torch.Tensor


@dataclass(frozen=True)
class SglKernelWay:
    """As SGLang's host pools do: a load a call for each layer, a backup a call for all of them; a
    copy for every page of every layer."""

    kernel: SglKernel
    pools: Sequence[Side]
    page_size: int
    device: CudaDevice

    def issue(self, indices: Indices, direction: Literal["load", "backup"]) -> tuple[int, float]:
        """Copies, and microseconds of the calling thread. Returns once the bytes are there."""
        begin = time.perf_counter_ns()
        if direction == "load":
            self._load(indices)
        else:
            self._back_up(indices)
        microseconds = (time.perf_counter_ns() - begin) / 1000
        self.device.synchronize()
        pages = indices.device.numel() // self.page_size
        return pages * sum(len(pool.device) for pool in self.pools), microseconds

    def _load(self, indices: Indices) -> None:
        for layer in range(max(len(pool.device) for pool in self.pools)):
            for pool in self.pools:
                if layer < len(pool.device):
                    self.kernel.transfer_kv_per_layer_direct_pf_lf(
                        src_ptrs=[pool.host],
                        dst_ptrs=[pool.device[layer]],
                        src_indices=indices.host,
                        dst_indices=indices.device,
                        layer_id=layer,
                        page_size=self.page_size,
                    )

    def _back_up(self, indices: Indices) -> None:
        for pool in self.pools:
            self.kernel.transfer_kv_all_layer_direct_lf_pf(
                src_ptrs=list(pool.device),
                dst_ptrs=[pool.host],
                src_indices=indices.device,
                dst_indices=indices.host,
                page_size=self.page_size,
            )
