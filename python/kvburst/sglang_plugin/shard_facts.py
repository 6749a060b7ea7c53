"""The facts that decide whether a cache's host tier can be shared between ranks: asked of SGLang
before it builds its host pools, since afterwards nothing can be taken back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_disagg, get_memory, get_model, get_parallel

from kvburst._core import KVBurstError, LayoutError
from kvburst.ownership import TierFacts
from kvburst.pools import DevicePool
from kvburst.settings import NUMBERS, SWITCHES, Settings
from kvburst.sglang_plugin import devices
from kvburst.sglang_plugin.agreement import size_of

KV, INDEXER = "kv", "indexer"
"""SGLang's names of the host pools that can be shared."""


@dataclass(frozen=True)
class SharedStack:
    """What a cache's host pools would be built from."""

    facts: TierFacts
    layers: Mapping[str, tuple[int, ...]]
    """Of each host pool's device pool, in SGLang's order."""
    drafts: int
    """Packed draft layers behind them."""
    page_bytes: Mapping[str, int]
    """Of a page of one layer of each."""


def gather(cache: Any, params: Any, settings: Settings) -> SharedStack:
    """Of a cache that is about to get its host pools. Talks to nobody."""
    memory, parallel = get_memory(), get_parallel()
    allocator = params.token_to_kv_pool_allocator
    kv = allocator.get_kvcache()
    drafts = params.mtp_draft_device_pools
    fp4 = isinstance(kv, MLATokenToKVPoolFP4)
    others = _against(settings)
    layers: dict[str, tuple[int, ...]] = {}
    page_bytes: dict[str, int] = {}
    if type(kv) in (MLATokenToKVPool, DSATokenToKVPool):
        layers = layers_of(kv)
        others += _against_pools(kv, drafts)
        try:
            devices.new_device(torch.device(kv.device))
            page_bytes = {n: device_pool(n, kv, params.page_size).page_bytes for n in layers}
        except KVBurstError as error:
            others.append(str(error))
        others += [
            f"{NUMBERS['rank_shard_staging_mb']}: {settings.staging_bytes >> 20} MiB have no room"
            f" for one page of pool {name!r}, {nbytes} bytes"
            for name, nbytes in page_bytes.items()
            if nbytes > settings.staging_bytes
        ]
    elif not isinstance(kv, (MHATokenToKVPool, SWAKVPool, HybridLinearKVPool)) and not fp4:
        others.append(f"pool {KV!r}: {type(kv).__name__} is not known")
    others += [
        f"a draft pool that comes later, {type(pool).__name__}, is not part of it"
        for pool in params.sidecar_draft_device_pools
    ]
    if allocator.page_size != params.page_size:
        others.append(
            f"the device allocator aligns slots to {allocator.page_size}, pages are"
            f" {params.page_size} slots"
        )
    if memory.enable_hisparse:
        others.append("HiSparse keeps a host copy of its own")
    group = group_of(cache)
    facts = TierFacts(
        ranks=size_of(group),
        replicated=_replicated(cache, kv, drafts),
        host_layout=memory.hicache_mem_layout,
        direct_copies=memory.hicache_io_backend == "direct",
        context_parallel=max(params.attn_cp_size, size_of(cache.attn_cp_group)),
        pipeline_stages=params.pp_size,
        nodes=_nodes_of(group),
        storage_attached=(
            memory.hicache_storage_backend is not None or memory.hicache_host_memory_mode != "cache"
        ),
        decode_of_disaggregation=get_disagg().disaggregation_mode == "decode",
        packed_fp4=fp4,
        exchange=settings.exchange,
        threaded_loads=settings.exchange == "forward_stream",
        decode_context_parallel=parallel.attn_dcp_size,
        unified_memory=(
            memory.enable_unified_memory
            or type(allocator).set_hicache_transfer_done_event
            is not BaseTokenToKVPoolAllocator.set_hicache_transfer_done_event
        ),
        waits_for_no_layer=_waits_for_no_layer(),
        others=tuple(others),
    )
    return SharedStack(facts, layers, len(drafts), page_bytes)


def group_of(cache: Any) -> dist.ProcessGroup | None:
    """The ranks that hold the same bytes: those of attention TP, or where there is none of TP."""
    tp: dist.ProcessGroup | None = cache.tp_group
    attention: dist.ProcessGroup | None = cache.attn_tp_group
    return attention if size_of(attention) > 1 else tp


def layers_of(kv: Any) -> dict[str, tuple[int, ...]]:
    """Of an MLA or DSA device pool: layers by host pool. Those that share another layer's top-k
    have no index-K, and where no layer has any there is no pool of it."""
    return {
        str(declared.pool_name.value): (
            tuple(range(kv.layer_num))
            if declared.owned_device_layers is None
            else tuple(declared.owned_device_layers)
        )
        for declared in kv.host_pool_decls()
    }


def device_pool(name: str, kv: Any, page_size: int) -> DevicePool:
    """The device side of host pool `name`. Raises LayoutError on rows that are not packed."""
    layers = layers_of(kv)[name]
    if name not in (KV, INDEXER):
        raise LayoutError(f"pool {name!r} is not known")
    if name == INDEXER:
        tensors = [kv.index_k_with_scale_buffer[layer] for layer in layers]
        return DevicePool.from_paged_layers(name, tensors, page_size=page_size, layer_ids=layers)
    whole = kv.kv_buffer[0].shape[0] // page_size * page_size
    tensors = [kv.kv_buffer[layer][:whole] for layer in layers]
    return DevicePool.from_layers(name, tensors, page_size=page_size, layer_ids=layers)


def _replicated(cache: Any, kv: Any, drafts: Any) -> dict[str, bool]:
    """By pool; one of an unknown class has another reason against it."""
    full = kv
    if isinstance(kv, (SWAKVPool, HybridLinearKVPool)):
        full = kv.full_kv_pool
    found = {KV: not isinstance(full, MHATokenToKVPool)}
    found |= {str(kind): False for kind in cache.components if not kind.is_full}
    if found[KV]:
        found |= {f"draft {depth}": type(draft) is type(kv) for depth, draft in enumerate(drafts)}
    return found


def _against(settings: Settings) -> list[str]:
    """Of what else is asked for."""
    found = []
    if settings.async_load_enqueue is False:
        found.append(
            f"{SWITCHES['async_load_enqueue']} is False, a shared tier's loads are kvburst's"
        )
    if settings.d2h_issue_chunk_pages == 0:
        found.append(
            f"{NUMBERS['d2h_issue_chunk_pages']} is 0, a shared tier's backups are kvburst's"
        )
    return found


def _against_pools(kv: Any, drafts: Any) -> list[str]:
    found = []
    for pool in (kv, *drafts):
        if pool.host_transfer_translate is not None:
            found.append(f"pool {KV!r}: its slots are virtual")
        if pool.layer_shard_enabled:
            found.append(f"pool {KV!r}: its layers are spread over ranks")
    return found


def _waits_for_no_layer() -> str | None:
    if get_model().is_embedding:
        return "an embedding server's forwards"
    if get_disagg().enable_pdmux:
        return "the split prefills of PD multiplexing"
    return None


def _nodes_of(group: dist.ProcessGroup | None) -> int:
    if group is None:
        return 1
    # SGLang places as many on each.
    per_node = max(1, dist.get_world_size() // get_parallel().nnodes)
    return len({rank // per_node for rank in dist.get_process_group_ranks(group)})
