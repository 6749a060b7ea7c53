"""What ranks that share one host copy of each layer keep, and what they move."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import real_cache
import torch
import torch.distributed as dist
import workload
from ranks import Context
from real_cache import RealCache, build, host_tensors
from scenarios import on_the_host_only, prefix, round_trip
from setups import RoundTrip, Setup, Worked
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.server_args import ServerArgs
from sharing import HostTier

from kvburst.exchange.primitive import LayerBroadcast


def host_tier(
    context: Context, setup: Setup, *, alone: bool = False, gigabytes: float = 0.0
) -> HostTier:
    """Of a cache with some pages backed up; `alone`: of a rank that has nobody to share with.

    With `gigabytes` for the host tier, or otherwise with SGLang's ratio to the device's.
    """
    if alone:
        context = replace(context, group=None)
    arguments = partial(ServerArgs, hicache_size=gigabytes)
    with mock.patch.object(real_cache, "ServerArgs", arguments):
        cache = build(context, setup)
    tensors = host_buffers(cache.controller)
    pages = cache.controller.mem_pool_host.anchor_entry.host_pool.free_slots.numel()
    tokens = prefix(1, 5, setup)
    cache.scribble_free_pages()
    on_the_host_only(cache, tokens)
    at = host_pages(cache, tokens)
    return HostTier(
        pages=pages // setup.page_size,
        nbytes=sum(tensor.nbytes for tensor in tensors),
        rows=[_rows(cache, tokens, tensor, at) for tensor in tensors],
        layers=[f"{buffer.name} {layer}" for buffer in cache.buffers for layer in buffer.layer_ids],
    )


def host_buffers(controller: Any) -> list[torch.Tensor]:
    """`[pages, layers, ...]` of each, as far as the rank has any. Not of recurrent state."""
    pools = [entry.host_pool for entry in controller.mem_pool_host.entries]
    return [
        tensor
        for pool in pools
        if not isinstance(pool, MambaPoolHost)
        for tensor in host_tensors(pool)
    ]


def host_pages(cache: RealCache, tokens: list[int]) -> list[int]:
    """Those that `tokens` are loaded from."""
    assert cache.load_back(tokens) == len(tokens)
    slots = torch.cat([operation.host_indices for operation in cache.controller.load_queue])
    assert cache.forward(cache.start(), tokens) == []
    cache.settle()
    return cache.pages_of(slots)


def _rows(cache: RealCache, tokens: list[int], tensor: torch.Tensor, pages: list[int]) -> list[str]:
    """By what all `pages`, those of `tokens`, have in them."""
    size = cache.setup.page_size
    rows: list[str] = []
    for row in range(tensor.shape[1]):
        names = set()
        for number, page in enumerate(pages):
            contents = cache.bytes_of(tokens[: (number + 1) * size])
            names.add(_named(cache, contents, tensor[page, row]))
        rows.append(names.pop() if len(names) == 1 else "?")
    return rows


def _named(cache: RealCache, contents: list[torch.Tensor], found: torch.Tensor) -> str:
    """The layer whose bytes these are."""
    bytes_ = found.contiguous().view(torch.uint8).flatten()
    for buffer, layers in zip(cache.buffers, contents, strict=True):
        for layer, content in zip(buffer.layer_ids, layers, strict=True):
            if torch.equal(bytes_, content):
                return f"{buffer.name} {layer}"
    return "?"


# --- who shares with whom ------------------------------------------------------------------------


def work_in_pairs(context: Context, setup: Setup, seed: int, operations: int) -> Worked:
    """Under DP attention: each two ranks hold the same bytes, and do what the others do not."""
    pairs = [
        dist.new_group([rank, rank + 1], backend="gloo") for rank in range(0, context.world, 2)
    ]
    number = context.rank // 2
    mine = partial(CacheInitParams, attn_tp_cache_group=pairs[number])
    with mock.patch.object(real_cache, "CacheInitParams", mine):
        pair = replace(context, group=pairs[number])
        return workload.work(pair, setup, seed + number, operations, strict=False)


# --- without the exchange ------------------------------------------------------------------------


@contextmanager
def nothing_exchanged() -> Iterator[None]:
    """Ranks take what others own for sent: the negative control."""
    with mock.patch.object(LayerBroadcast, "send"):
        yield


def round_trip_without_exchange(context: Context, setup: Setup) -> RoundTrip:
    """A `scenarios.round_trip` that must go wrong."""
    with nothing_exchanged():
        return round_trip(context, setup)


def work_without_exchange(
    context: Context, setup: Setup, seed: int, operations: int, *, strict: bool
) -> Worked:
    """A `workload.work` that must go wrong."""
    with nothing_exchanged():
        return workload.work(context, setup, seed, operations, strict=strict)
