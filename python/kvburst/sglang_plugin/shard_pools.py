"""SGLang's host pools with this rank's layers alone: how they are built, and where things lie."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import msgspec
import torch
from sglang.srt.mem_cache.pool_host.mla import MLAHostAllocation, MLATokenToKVPoolHost

from kvburst._core import LayoutError
from kvburst.settings import SWITCHES
from kvburst.sglang_plugin.pools import (
    Buffer,
    Row,
    UnsupportedPoolError,
    by_page,
    layout_of,
    name_of,
)
from kvburst.sglang_plugin.shard_facts import INDEXER, KV
from kvburst.sglang_plugin.shard_plan import HostShard, host_slots, slots_alone

UNSET = f"unset {SWITCHES['rank_shard']}"

_REFUSED = (
    "get_data_page",
    "get_dummy_flat_data_page",
    "set_from_flat_data_page",
    "get_page_buffer_meta",
    "get_contiguous_buf_infos",
    "load_to_device_per_layer",
    "backup_from_device_all_layer",
)
"""What would take a host pool for one with all layers."""


@dataclass
class ShardedPools:
    """The host pools of one cache, while SGLang builds them and afterwards."""

    shards: Mapping[str, HostShard]
    """By host pool; what this rank keeps of each."""
    page_bytes: Mapping[str, int]
    """Of a page of one layer of each."""
    keep_capacity: bool = False
    """As many slots as without sharing."""
    built: dict[Any, HostShard] = field(default_factory=dict)
    """By SGLang's host pool."""

    # --- building ------------------------------------------------------------------------------

    def build_mla(
        self,
        original: Callable[..., None],
        pool: Any,
        buffer_info: Any,
        host_to_device_ratio: float,
        host_size: float,
        page_size: int,
        layout: str,
        **named: Any,
    ) -> None:
        """Calls the constructor for the rank's own layers, and the slots that all ranks agree on.

        SGLang can build pools of some layers, and pools that have none and only hand out slots.
        """
        shard = self.shards[KV]
        slots = slots_alone(
            gigabytes=host_size,
            ratio=host_to_device_ratio,
            device_slots=named["device_capacity_tokens"],
            slot_bytes=self.page_bytes[KV] // page_size * shard.all_rows,
            page_size=page_size,
        )
        if not self.keep_capacity:
            slots = host_slots(slots, self.shards, self.page_bytes, page_size)
        drafts = named.pop("draft_buffer_infos", ())
        named |= {"host_token_capacity": slots, "target_layer_num": len(shard.kept_layers)}
        own: Any
        if shard.kept_rows:
            named["draft_buffer_infos"] = tuple(drafts[depth] for depth in shard.kept_drafts)
            own = _layers_of(buffer_info, shard.kept_layers)
        else:
            own = MLAHostAllocation(
                dtype=buffer_info.dtype,
                kv_lora_rank=buffer_info.kv_lora_rank,
                qk_rope_head_dim=buffer_info.qk_rope_head_dim,
                kv_cache_dim=named["override_kv_cache_dim"],
                size_per_token=0,
                packed_fp8=buffer_info.packed_fp8,
            )
        original(pool, own, host_to_device_ratio, host_size, page_size, layout, **named)
        self._is_built(pool, shard)

    def build_index(
        self, original: Callable[..., None], pool: Any, *, decl: Any, anchor_host: Any, **named: Any
    ) -> None:
        shard = self.shards[INDEXER]
        drafts = named.pop("packed_draft_device_pools", ())
        original(
            pool,
            decl=msgspec.structs.replace(decl, owned_device_layers=shard.kept_layers),
            anchor_host=anchor_host,
            packed_draft_device_pools=tuple(drafts[depth] for depth in shard.kept_drafts),
            is_dummy=not shard.kept_rows,
            **named,
        )
        self._is_built(pool, shard)

    def _is_built(self, pool: Any, shard: HostShard) -> None:
        self.built[pool] = shard
        for accessor in _REFUSED:
            # On this pool alone, and before SGLang's own, which knows nothing of other ranks.
            setattr(pool, accessor, partial(_refuse, f"{type(pool).__name__}.{accessor}"))

    # --- describing ----------------------------------------------------------------------------

    def describe(self, entry: Any, transfer_layers: int) -> Iterator[Buffer]:
        """The buffers of an entry: all layers on the device, this rank's on the host."""
        host = entry.host_pool
        shard = self.built.get(host)
        if shard is None:
            raise UnsupportedPoolError(f"pool {name_of(entry)!r}: it is not shared between ranks")
        mapped = {layer: entry.layer_mapper(layer) for layer in shard.layers}
        if any(layer != local for layer, local in mapped.items()) or not (
            transfer_layers > max(shard.layers)
        ):
            raise UnsupportedPoolError(
                f"pool {name_of(entry)!r}: layers {list(mapped)} are loaded as"
                f" {list(mapped.values())}, of {transfer_layers}"
            )
        if type(host) is MLATokenToKVPoolHost:
            yield _kv(entry, host, shard)
        else:
            yield _index_k(entry, host, shard)


def _refuse(accessor: str, *args: object, **kwargs: object) -> NoReturn:
    raise LayoutError(
        f"{accessor}: the host tier is shared between ranks, and no rank has a whole page; {UNSET}"
    )


def _layers_of(info: Any, layers: tuple[int, ...]) -> Any:
    """An ``MLABufferInfo`` with only these layers of it."""
    pointers = [info.data_ptrs[layer : layer + 1] for layer in layers]
    return msgspec.structs.replace(
        info,
        buffers=tuple(info.buffers[layer] for layer in layers),
        data_ptrs=torch.cat(pointers) if pointers else info.data_ptrs[:0],
        layer_indices=layers,
    )


def _kv(entry: Any, host: Any, shard: HostShard) -> Buffer:
    if shard.kept_rows:
        registered, buffer = host.kv_buffer, by_page(host, host.kv_buffer)
    else:
        page_bytes = host.page_size * host.token_stride_size
        registered = buffer = _no_rows(host, host.page_num, page_bytes)
    return Buffer(
        name_of(entry),
        layout_of(entry),
        buffer,
        registered,
        False,
        _rows(shard, entry.device_pool.kv_buffer),
        _draft_rows(shard, [pool.kv_buffer[0] for pool in entry.packed_draft_device_pools]),
    )


def _index_k(entry: Any, host: Any, shard: HostShard) -> Buffer:
    drafts = [pool.index_k_with_scale_buffer[0] for pool in entry.packed_draft_device_pools]
    buffer = host.index_k_with_scale_buffer
    if not shard.kept_rows:
        buffer = _no_rows(host, host.indexer_page_num, host.indexer_page_stride_size)
    return Buffer(
        name_of(entry),
        layout_of(entry),
        buffer,
        buffer,
        True,
        _rows(shard, entry.device_pool.index_k_with_scale_buffer),
        _draft_rows(shard, drafts),
    )


def _no_rows(host: Any, pages: int, page_bytes: int) -> torch.Tensor:
    axes = (0, pages) if host.layout == "layer_first" else (pages, 0)
    return torch.empty(*axes, page_bytes, dtype=torch.uint8)


def _rows(shard: HostShard, tensors: Any) -> tuple[Row, ...]:
    rows = {layer: row for row, layer in enumerate(shard.kept_layers)}
    return tuple(Row(layer, rows.get(layer), tensors[layer]) for layer in shard.layers)


def _draft_rows(shard: HostShard, tensors: list[torch.Tensor]) -> tuple[Row, ...]:
    behind = len(shard.kept_layers)
    rows = {depth: behind + at for at, depth in enumerate(shard.kept_drafts)}
    layers = (shard.owned.pools[shard.first + 1 + depth][0] for depth in range(shard.drafts))
    return tuple(
        Row(layer, rows.get(depth), tensor)
        for depth, (layer, tensor) in enumerate(zip(layers, tensors, strict=True))
    )
