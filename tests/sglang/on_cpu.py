"""What the released SGLang lacks on a machine without CUDA, and nothing more.

Its host pools import three copy functions only where there is CUDA, and register their memory with
it. Here they get copies by torch's own indexing, which share no code with kvburst's, and a
registration that does nothing. Nor is memory kept free that such a machine may not have.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

HOST_POOLS = ("mha", "mla", "dsa", "mamba")


@dataclass
class StockCopies:
    """Calls of SGLang's own copy functions since the last `forget`."""

    loads: int = 0
    backups: int = 0
    direct: int = 0

    def forget(self) -> None:
        self.loads = self.backups = self.direct = 0

    @property
    def total(self) -> int:
        return self.loads + self.backups + self.direct

    def transfer_kv_per_layer_direct_pf_lf(
        self,
        src_ptrs: Sequence[torch.Tensor],
        dst_ptrs: Sequence[torch.Tensor],
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        layer_id: int,
        page_size: int,
    ) -> None:
        self.loads += 1
        page, slot = src_indices // page_size, src_indices % page_size
        layers = len(dst_ptrs) // len(src_ptrs)
        for number, target in enumerate(dst_ptrs):
            kind, layer = divmod(number, layers)
            rows = src_ptrs[kind][page, layer_id + layer, slot]
            target[dst_indices] = rows.reshape(-1, *target.shape[1:])

    def transfer_kv_all_layer_direct_lf_pf(
        self,
        src_ptrs: Sequence[torch.Tensor],
        dst_ptrs: Sequence[torch.Tensor],
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        page_size: int,
    ) -> None:
        self.backups += 1
        page, slot = dst_indices // page_size, dst_indices % page_size
        layers = len(src_ptrs) // len(dst_ptrs)
        for number, source in enumerate(src_ptrs):
            kind, layer = divmod(number, layers)
            target = dst_ptrs[kind]
            target[page, layer, slot] = source[src_indices].reshape(-1, *target.shape[3:])

    def transfer_kv_direct(
        self,
        src_layers: Sequence[torch.Tensor],
        dst_layers: Sequence[torch.Tensor],
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        page_size: int,
    ) -> None:
        self.direct += 1
        assert src_indices.numel() % page_size == 0
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices].reshape(-1, *target.shape[1:])


def prepare() -> StockCopies:
    """Completes SGLang in this process, before any host pool is made. Call once."""
    copies = StockCopies()
    common = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    common._cuda_host_register = _register_nothing  # type: ignore[attr-defined]
    # What a server leaves free, 10 GiB, is more than a small machine has beside four ranks.
    base = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # type: ignore[attr-defined]
    for module in host_pool_modules():
        for function in (
            copies.transfer_kv_per_layer_direct_pf_lf,
            copies.transfer_kv_all_layer_direct_lf_pf,
            copies.transfer_kv_direct,
        ):
            setattr(module, function.__name__, function)
    return copies


def host_pool_modules() -> list[ModuleType]:
    """Each has the copy functions in globals of its own."""
    return [
        importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}") for name in HOST_POOLS
    ]


def _register_nothing(buffer: torch.Tensor, _granularity: int | None = None) -> None:
    """Notes no range, as SGLang does for each range that it registers."""
    buffer._sglang_cuda_host_registered_ranges = []  # type: ignore[attr-defined]
