"""The cache configurations that SGLang's wheel ships for its own tests, on `direct` copies.

Full attention at five page sizes, with sliding-window layers, with Mamba states: built by the
wheel's own fixtures, with their `kernel` copies replaced, and on the allocator that a server uses.
"""

import functools
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from ranks import Context
from scenarios import moved
from setups import ConfigurationTrip, Layout
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import fixtures, mixins
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig, supports_hicache

from kvburst.sglang_plugin import status

HICACHE = [configuration for configuration in CONFIGS if supports_hicache(configuration)]
EVERYTHING = 1 << 20


class Steps(mixins.UnifiedRadixCacheFixtures, unittest.TestCase):  # type: ignore[misc]
    """The steps of SGLang's own tests, with which they build, back up and load back."""

    def __init__(self, configuration: CacheConfig) -> None:
        super().__init__("run")
        self.cfg = configuration


def labels(_: Context) -> list[str]:
    return [configuration.label for configuration in HICACHE]


def round_trip(context: Context, index: int, layout: Layout) -> ConfigurationTrip:
    """A chain of nodes goes to the host, off the device, and comes back elsewhere."""
    steps = Steps(HICACHE[index])
    begin = status()
    context.copies.forget()
    try:
        with direct_copies(layout):
            cache, allocator, requests = fixtures.build_fixture(steps.cfg)
            steps._init_hicache(cache, write_policy="write_back")
        buffers = buffers_of(allocator.get_kvcache(), requests)
        chain = steps._build_chain_pages(cache, allocator, requests, pages_of(steps.cfg))
        tokens = steps._match_tokens_for_chain(cache, chain)
        fill(buffers)
        before = {node: contents(cache, node, buffers) for node in chain}
        steps._backup_tree(cache)
        cache.evict(
            EvictParams(num_tokens=EVERYTHING, swa_num_tokens=EVERYTHING, mamba_num=EVERYTHING)
        )
        still_there = [node for node in chain if contents(cache, node, buffers)]
        fill(buffers)

        steps._load_back_through_admission(cache, requests, tokens)
        consumer = cache.ready_to_load_host_cache()
        counter = cache.cache_controller.layer_done_counter
        counter.set_consumer(consumer)
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
        after = {node: contents(cache, node, buffers) for node in chain}
        counter.set_consumer(-1)
        while cache.ongoing_load_back:
            cache.check_hicache_events()
    finally:
        steps.doCleanups()

    loaded = {node: [kind.name for kind in after[node]] for node in chain if after[node]}
    wrong = [
        f"node {position}: {kind.name}"
        for position, node in enumerate(chain)
        for kind, bytes_ in after[node].items()
        if not all(map(torch.equal, bytes_, before[node][kind]))
    ]
    return ConfigurationTrip(
        nodes=len(chain),
        left_on_device=len(still_there),
        loaded=sorted({name for names in loaded.values() for name in names}),
        full_nodes=sum("FULL" in names for names in loaded.values()),
        wrong=wrong,
        moved=moved(begin, context.copies.total),
    )


def pages_of(configuration: CacheConfig) -> int:
    """A window's, and two more."""
    window = configuration.sliding_window_size or 1
    return min(-(-window // configuration.page_size), 6) + 2


@contextmanager
def direct_copies(layout: Layout) -> Iterator[None]:
    arguments = functools.partial(mixins.ServerArgs)

    def with_direct(**named: Any) -> Any:
        named |= {"hicache_io_backend": "direct", "hicache_mem_layout": layout}
        return arguments(**named)

    token_allocator = fixtures.TokenToKVPoolAllocator

    def as_a_server_allocates(size: int, dtype: torch.dtype, device: str, **named: Any) -> Any:
        """The fixtures allocate slot by slot, whatever the page size."""
        page_size = named["kvcache"].page_size
        if page_size == 1:
            return token_allocator(size=size, dtype=dtype, device=device, **named)
        return PagedTokenToKVPoolAllocator(
            size=size, page_size=page_size, dtype=dtype, device=device, **named
        )

    with (
        mock.patch.object(mixins, "ServerArgs", with_direct),
        mock.patch.object(fixtures, "get_device", return_value="cpu"),
        mock.patch.object(fixtures, "TokenToKVPoolAllocator", as_a_server_allocates),
    ):
        yield


Buffers = dict[ComponentType, list[torch.Tensor]]


def buffers_of(kv: Any, requests: Any) -> Buffers:
    """`[slots, ...]` of each layer, by the component whose indices they take."""
    full = getattr(kv, "full_kv_pool", kv)
    buffers: Buffers = {ComponentType.FULL: [*full.k_buffer, *full.v_buffer]}
    if hasattr(kv, "swa_kv_pool"):
        buffers[ComponentType.SWA] = [*kv.swa_kv_pool.k_buffer, *kv.swa_kv_pool.v_buffer]
    if hasattr(requests, "mamba_pool"):
        states = requests.mamba_pool.mamba_cache
        conv = [layer for kind in states.conv for layer in kind]
        buffers[ComponentType.MAMBA] = [*states.temporal, *conv]
    return buffers


def fill(buffers: Buffers) -> None:
    for tensors in buffers.values():
        for tensor in tensors:
            tensor.copy_(torch.randint(-1000, 1000, tensor.shape))


def contents(cache: Any, node: int, buffers: Buffers) -> Buffers:
    """What a node has on the device."""
    found: Buffers = {}
    for kind, tensors in buffers.items():
        slots = fixtures.node_device_value(cache, node, kind)
        if slots is not None and slots.numel():
            found[kind] = [tensor[slots.reshape(-1).long()] for tensor in tensors]
    return found
