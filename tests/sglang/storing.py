"""Storage behind the host tier, which comes and goes while ranks agree; and every other place that
takes what ranks have agreed on, with a round in flight."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import real_cache
import torch
from agreed import Stored
from ranks import Context
from real_cache import RealCache, build
from scenarios import prefix
from setups import Setup
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

from kvburst.sglang_plugin import status

QUEUES = ("prefetch_hit_queue", "ack_prefetch_queue", "ack_backup_queue", "host_mem_release_queue")


@dataclass
class Storing:
    """A cache that may have storage of kind `file` in `folder`."""

    cache: RealCache
    folder: str
    popped: list[str] = field(default_factory=list)
    """Of storage's queues, by whatever means, in order."""
    put: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _requests: int = 0
    _taken: list[Any] = field(default_factory=list)

    def attach(self) -> None:
        config = {
            "prefetch_threshold": self.cache.setup.page_size,
            "file_storage_path": self.folder,
        }
        context = self.cache.context
        with get_parallel().override(
            tp_rank=context.rank,
            pp_rank=0,
            **dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), context.world),
        ):
            done, message = self.cache.tree.attach_storage_backend(
                "file", json.dumps(config), "small", "wait_complete"
            )
        assert done, message
        controller = self.cache.controller
        for name in QUEUES:
            self._watch(name, getattr(controller, name))

    def detach(self) -> None:
        done, message = self.cache.tree.detach_storage_backend()
        assert done, message

    def _watch(self, name: str, queue: Any) -> None:
        def get(own: Callable[..., Any], *args: Any, **named: Any) -> Any:
            item = own(*args, **named)
            if any(item is other for other in self._taken):
                self.wrong.append(f"{name}: {_named(item)} was taken twice")
            self._taken.append(item)
            self.popped.append(f"{name}: {_named(item)}")
            return item

        def put(own: Callable[..., None], item: Any, *args: Any, **named: Any) -> None:
            self.put[name] += 1
            own(item, *args, **named)

        queue.get = partial(get, queue.get)
        queue.put = partial(put, queue.put)

    def settle(self, seconds: float = 60) -> None:
        """Steps until storage has all it is to have: as many on every rank."""
        tree = self.cache.tree
        deadline = time.monotonic() + seconds
        while (
            tree.ongoing_write_through
            or tree.ongoing_load_back
            or tree.ongoing_backup
            or tree.ongoing_prefetch
        ):
            assert time.monotonic() < deadline, f"{tree.ongoing_backup} {tree.ongoing_prefetch}"
            self.cache.step()
            time.sleep(0.001)

    def prefetch(self, tokens: list[int]) -> CacheRequestHandle:
        tree = self.cache.tree
        match = self.cache.match(tokens)
        have = match.device_prefix_len + match.host_hit_length
        self._requests += 1
        handle = CacheRequestHandle(f"{self._requests}", 0)
        tree.prefetch_from_storage(
            handle,
            match.last_host_node,
            self.cache.key(tokens[have:]).token_ids,
            tree.get_last_hash_value(match.last_host_node),
            matched_prefix_tokens=self.cache.key(tokens[:have]).token_ids,
        )
        return handle

    def load(self, tokens: list[int]) -> None:
        """Reads them as a forward does, from wherever they are; they must be somewhere."""
        tree = self.cache.tree
        while not tree.has_free_load_back_slot():
            self.cache.step()
        loaded = self.cache.load_back(tokens)
        consumer = self.cache.start() if loaded else -1
        if self.cache.match(tokens).device_prefix_len != len(tokens):
            self.wrong.append(f"{tokens[0]} is lost")
        self.wrong += self.cache.forward(consumer, tokens)
        self.settle()


def _named(item: Any) -> str:
    """Of what two ranks have, the same."""
    operation = getattr(item, "operation", item)
    handle = getattr(operation, "handle", None)
    if handle is not None:
        return f"request {handle.rid}"
    if hasattr(operation, "hash_value"):
        return f"backup of {operation.hash_value}"
    return f"slots {item.tolist()}"


def storage_comes_and_goes(
    context: Context, setup: Setup, folder: str, seed: int, rounds: int
) -> Stored:
    """In each round storage is attached, filled, flushed behind, read from, and detached, with work
    before and behind that it has no part in."""
    before = status()
    cache = build(context, setup)
    for entry in cache.controller.mem_pool_host.entries:
        entry.host_pool.pin_memory = False  # There is nothing to pin pages of storage for.
    storing = Storing(cache, folder)
    decide, late = random.Random(seed), random.Random(context.rank)
    step = cache.tree.check_hicache_events

    def late_step() -> None:
        if late.random() < 0.3:
            time.sleep(late.random() * 0.004)
        step()

    cache.tree.check_hicache_events = late_step
    stored: list[int] = []
    for number in range(rounds):
        _without_storage(storing, decide)
        storing.attach()
        for name in decide.sample(range(10), 3):
            assert cache.insert(prefix(name, 4, setup))
            cache.step()
            stored += [] if name in stored else [name]
        storing.settle()
        if number % 2:
            # Whatever is under way is dropped, and so is all on both tiers.
            cache.insert(prefix(20 + number, 3, setup))
            cache.step()
        cache.tree.reset()
        cache.allocator.clear()
        cache.scribble_free_pages()
        wanted = decide.sample(stored, min(2, len(stored)))
        handles = [storing.prefetch(prefix(name, 4, setup)) for name in wanted]
        cache.insert(prefix(30 + number, 2, setup))
        cache.step()
        storing.settle()
        assert all(cache.tree.check_prefetch_progress(handle) for handle in handles)
        for name in wanted:
            storing.load(prefix(name, 4, setup))
        storing.settle()
        storing.detach()
    _without_storage(storing, decide)
    now = status()
    return Stored(
        popped=storing.popped,
        put=dict(storing.put),
        wrong=storing.wrong,
        leaked=leaked(cache),
        transport=now.transport,
        agreements=now.agreements - before.agreements,
    )


def host_is_a_buffer(context: Context, setup: Setup, folder: str) -> Stored:
    """The host keeps nothing: what is backed up goes through it to storage, and comes back to it
    for a request alone."""
    before = status()
    arguments = partial(ServerArgs, hicache_host_memory_mode="buffer_only")
    with mock.patch.object(real_cache, "ServerArgs", arguments):
        cache = build(context, setup)
    for entry in cache.controller.mem_pool_host.entries:
        entry.host_pool.pin_memory = False
    storing = Storing(cache, folder)
    storing.attach()
    prefixes = [prefix(name, 3, setup) for name in range(4)]
    for tokens in prefixes:
        assert cache.insert(tokens)
        cache.step()
    pipeline = cache.tree.buffer_pipeline
    _step_until(cache, pipeline.is_idle)
    cache.evict(cache.allocator.size)
    for tokens in prefixes:
        if _staged(storing, tokens) != len(tokens):
            storing.wrong.append(f"{tokens[0]} does not come back from storage")
    _step_until(cache, pipeline.is_idle)
    now = status()
    return Stored(
        popped=storing.popped,
        put=dict(storing.put),
        wrong=storing.wrong,
        leaked=leaked(cache),
        transport=now.transport,
        agreements=now.agreements - before.agreements,
    )


def _staged(storing: Storing, tokens: list[int]) -> int:
    """How many of them come back to the buffer, for a request that then gives up."""
    tree = storing.cache.tree
    handle = storing.prefetch(tokens)
    _step_until(storing.cache, lambda: not tree.has_ongoing_prefetch(handle))
    staged = tree.buffer_pipeline.staged_prefetches.get(handle)
    tree.release_aborted_request(handle)
    return 0 if staged is None else int(staged.num_tokens)


def _step_until(cache: RealCache, done: Callable[[], bool], seconds: float = 60) -> None:
    """As many steps on every rank: `done` says the same on all of them."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        cache.step()
        time.sleep(0.001)


def _without_storage(storing: Storing, decide: random.Random) -> None:
    tokens = prefix(40 + decide.randrange(3), 3, storing.cache.setup)
    assert storing.cache.insert(tokens)
    storing.cache.step()
    storing.settle()
    storing.cache.evict(storing.cache.allocator.size)
    storing.load(tokens)


def leaked(cache: RealCache) -> int:
    """Slots of the host that are not free after a flush, or are free twice."""
    cache.tree.reset()
    cache.allocator.clear()
    host = cache.controller.mem_pool_host.anchor_entry.host_pool
    free = torch.cat([host.free_slots, *host.release_slots]).tolist()
    return int(host.size) - len(set(free)) + len(free) - len(set(free))
