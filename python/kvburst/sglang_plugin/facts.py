"""The facts about a server that decide what it is eligible for, asked of SGLang's objects."""

from typing import Any

from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from kvburst.sglang_plugin.agreement import ranks_of
from kvburst.sglang_plugin.eligibility import Facts


def gather(
    cache: Any,
    sglang_knows: frozenset[str],
    one_piece_pools: int,
    not_shared: tuple[str, ...] = (),
) -> Facts:
    """Of a cache with HiCache on it, before its pools are described."""
    controller = cache.cache_controller
    allocator = controller.mem_pool_device_allocator
    # Hybrid allocators hand out slots of full attention through one of their own.
    full = getattr(allocator, "full_attn_allocator", allocator)
    return Facts(
        io_backend=controller.io_backend,
        layout=controller.mem_pool_host.layout,
        page_size=controller.page_size,
        allocator_page_size=full.page_size,
        unified_memory=(
            type(allocator).set_hicache_transfer_done_event
            is not BaseTokenToKVPoolAllocator.set_hicache_transfer_done_event
        ),
        kv_sharded=controller.is_kv_sharded,
        sglang_knows=sglang_knows,
        pools_refused=None,
        one_piece_pools=one_piece_pools,
        ranks=ranks_of(cache),
        stages=cache.pp_size,
        not_shared=not_shared,
    )


def rides_on(cache: Any) -> dict[str, str]:
    """The pools of a cache that move the pages of another pool, and that pool."""
    return {
        str(spec.pool_name.value): str(spec.indices_from_pool.value)
        for spec in cache.sidecar_pool_specs
    }
