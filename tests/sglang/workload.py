"""Random work on a real tree, written down so that two servers can be compared.

What a server decides depends on which pages are free and which are locked, and a load or a backup
locks its pages until its ack is retired. In a `strict` workload every ack is retired before what
may evict, so that stock and plugin decide alike; loads are still under way while prefixes are
matched, forwards read, and the cache is flushed. In a lazy one acks are retired whenever all ranks
have them, and only the ranks are alike.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from ranks import Context
from real_cache import RealCache, build
from scenarios import moved
from setups import Setup, Worked
from slowed import on_device

from kvburst import LinkModel
from kvburst.sglang_plugin import status

OPERATIONS = {"insert": 30, "load": 40, "match": 10, "evict": 12, "step": 7, "flush": 1}
"""Weights."""

CONVERSATIONS = 30

# A page of a layer is 2 KiB, a load a few pages: about 0.2 s a layer.
SLOW = LinkModel(gigabytes_per_second=0.00003)


@dataclass
class Workload:
    cache: RealCache
    random: random.Random
    strict: bool
    log: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    consumer: int = -1
    """Of the last load since the last flush."""

    def run(self, operations: int) -> None:
        """With something on the host, and nothing on the device, to begin with."""
        for name in range(4):
            assert self.cache.insert(self.conversation(name, pages=5))
            self.cache.step()
        self.cache.settle()
        self.cache.evict(self.cache.allocator.size)
        names, weights = list(OPERATIONS), list(OPERATIONS.values())
        for number in range(operations):
            name = self.random.choices(names, weights)[0]
            tokens = self._tokens()
            result = self._operations()[name](tokens)
            self.log.append(f"{number} {name}: {result}; {self._state()}")
        self.cache.settle()
        self.log.append(f"settled: {self._state()}")

    def _operations(self) -> dict[str, Callable[[Sequence[int]], object]]:
        return {
            "insert": self._insert,
            "load": self._load,
            "match": self._match,
            "evict": self._evict,
            "step": self._step,
            "flush": self._flush,
        }

    def _tokens(self) -> list[int]:
        return self.conversation(self.random.randrange(CONVERSATIONS), self.random.randint(1, 8))

    def conversation(self, name: int, pages: int) -> list[int]:
        """Up to some page; some begin alike."""
        size = self.cache.setup.page_size
        shared = [name % 4 * 1_000_000 + token for token in range(1, 2 * size + 1)]
        own = [name * 10_000 + 5_000 + token for token in range(6 * size)]
        return (shared + own)[: pages * size]

    def _settle_if_strict(self) -> None:
        if self.strict:
            self.cache.settle()

    def _insert(self, tokens: Sequence[int]) -> object:
        self._settle_if_strict()
        inserted = self.cache.insert(tokens)
        self.cache.step()
        return inserted

    def _load(self, tokens: Sequence[int]) -> object:
        """One or two requests are admitted, and their forward reads what it was promised."""
        second = self._tokens() if self.random.random() < 0.5 else None
        self._settle_if_strict()
        while not self.cache.tree.has_free_load_back_slot():
            self.cache.step()
        loaded = self.cache.load_back(tokens)
        if second is not None:
            loaded += self.cache.load_back(second)
        if loaded:
            self.consumer = self.cache.start()
        # Bursts complete in order, so who waits for the last one has all before it.
        for each in filter(None, (tokens, second)):
            self.wrong += self.cache.forward(self.consumer, each)
        return loaded, self.consumer

    def _match(self, tokens: Sequence[int]) -> object:
        match = self.cache.match(tokens)
        return match.device_prefix_len, match.host_hit_length

    def _evict(self, _: Sequence[int]) -> object:
        self._settle_if_strict()
        return self.cache.evict(self.random.randint(1, 12) * self.cache.setup.page_size)

    def _step(self, _: Sequence[int]) -> object:
        self.cache.step()
        self._settle_if_strict()
        return None

    def _flush(self, _: Sequence[int]) -> object:
        """Under a load, if there is something to load."""
        tokens = self._tokens()
        self._settle_if_strict()
        loading = self.cache.load_back(tokens)
        if loading:
            self.cache.start()
        self.cache.tree.reset()
        self.cache.allocator.clear()
        self.cache.scribble_free_pages()
        self.consumer = -1
        return loading

    def _state(self) -> str:
        """Which pages are free, in the order in which they will be handed out."""
        host = self.cache.controller.mem_pool_host.anchor_entry.host_pool
        tree = self.cache.tree
        digest = hashlib.blake2b(digest_size=8)
        for pages in (
            self.cache.allocator.get_all_free_pages(),
            host.free_slots,
            *host.release_slots,
        ):
            digest.update(pages.contiguous().view(torch.uint8).numpy().tobytes())
        # Which of them are locked is a matter of time.
        return f"{digest.hexdigest()}, {tree.evictable_size() + tree.protected_size()} slots in use"


def work(
    context: Context,
    setup: Setup,
    seed: int,
    operations: int,
    *,
    strict: bool,
    slow_rank: int | None = None,
) -> Worked:
    """On a cache of its own. The link of `slow_rank` takes some 0.2 s a layer."""
    begin = status()
    context.copies.forget()
    with on_device(SLOW if context.rank == slow_rank else None):
        workload = Workload(build(context, setup), random.Random(seed), strict)
    workload.run(operations)
    return Worked(workload.log, workload.wrong, moved(begin, context.copies.total))
