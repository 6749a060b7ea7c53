"""Random work of ranks that agree, and are not equally fast: what each of them retired, and what is
left in the end."""

import gc
import hashlib
import random
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import real_cache
import torch.distributed as dist
from agreed import Agreed
from ranks import Context
from real_cache import RealCache, build
from setups import Setup
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.utils import rank_consensus_checker
from slowed import on_device
from workload import CONVERSATIONS, Workload

from kvburst import LinkModel
from kvburst.sglang_plugin import status

# A page of a layer is 2 KiB: 0.2 ms a copy, some 5 ms a load.
SLOWER = LinkModel(gigabytes_per_second=0.01)


@dataclass
class Retired:
    """Watches a tree take acks off its queues, by whatever means."""

    tree: Any
    log: dict[str, list[str]] = field(default_factory=lambda: {"write": [], "load": []})
    _names: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree.writing_check = partial(self._watch, "write", self.tree.writing_check)
        self.tree.loading_check = partial(self._watch, "load", self.tree.loading_check)

    def _watch(self, kind: str, check: Callable[..., None], *args: Any, **named: Any) -> None:
        controller = self.tree.cache_controller
        if named.get("write_back"):
            controller.start_writing()  # As `check` does first.
        before = list(self._queue(kind))
        check(*args, **named)
        left = {id(ack) for ack in self._queue(kind)}
        for ack in before:
            if id(ack) not in left:
                # Numbers of nodes go on from cache to cache.
                names = [self._names.setdefault(node, len(self._names)) for node in ack.node_ids]
                self.log[kind].append(f"{names}, {ack.num_tokens} slots")

    def _queue(self, kind: str) -> list[Any]:
        controller = self.tree.cache_controller
        return controller.ack_write_queue if kind == "write" else controller.ack_load_queue


@dataclass
class UnevenWork(Workload):
    """Every operation is a step of the scheduler, to which some rank comes late."""

    rank: int = 0
    world: int = 1
    steps: int = 0

    def __post_init__(self) -> None:
        step = self.cache.tree.check_hicache_events
        late = random.Random(f"{self.rank}")

        def late_step() -> None:
            self.steps += 1
            if late.random() < 0.3 / self.world:
                time.sleep(late.random() * 0.005)
            step()

        self.cache.tree.check_hicache_events = late_step

    def _operations(self) -> dict[str, Callable[[Sequence[int]], object]]:
        return {
            name: partial(self._after_a_step, operation)
            for name, operation in super()._operations().items()
        }

    def _after_a_step(
        self, operation: Callable[[Sequence[int]], object], tokens: Sequence[int]
    ) -> object:
        self.cache.step()
        return operation(tokens)


def work(
    context: Context,
    setup: Setup,
    seed: int,
    operations: int,
    *,
    strict: bool,
    groups: Literal["tp", "cp x tp", "stages"] = "tp",
) -> Agreed:
    """On a cache of its own. Any rank may be late, and the last one's link is slow."""
    _check_consensus(context)
    before = status()
    with on_device(SLOWER if context.rank == context.world - 1 else None):
        cache = _BUILDERS[groups](context, setup)
    retired = Retired(cache.tree)
    workload = UnevenWork(
        cache, random.Random(seed), strict, rank=context.rank, world=context.world
    )
    workload.run(operations)
    _wait_for_consensus()
    now = status()
    return Agreed(
        log=workload.log,
        retired=retired.log,
        prefixes=prefixes(workload),
        bytes=bytes_of(cache),
        wrong=workload.wrong,
        steps=workload.steps,
        transport=now.transport,
        agreements=now.agreements - before.agreements,
        reasons=now.features["agreement"].reasons,
    )


def _grid(context: Context, setup: Setup) -> RealCache:
    """Four ranks, two by two."""
    lists = {"attn_cp_cache_group": [[0, 2], [1, 3]], "attn_tp_cache_group": [[0, 1], [2, 3]]}
    groups = {
        name: [dist.new_group(ranks, backend="gloo") for ranks in them][
            [context.rank in ranks for ranks in them].index(True)
        ]
        for name, them in lists.items()
    }
    with mock.patch.object(real_cache, "CacheInitParams", partial(CacheInitParams, **groups)):
        return build(context, setup)


def _stages(context: Context, setup: Setup) -> RealCache:
    """Each rank is a stage of a pipeline."""
    stages = partial(
        CacheInitParams,
        pp_cache_group=context.group,
        pp_rank=context.rank,
        pp_size=context.world,
    )
    with mock.patch.object(real_cache, "CacheInitParams", stages):
        return build(replace(context, group=None), setup)


_BUILDERS = {"tp": build, "cp x tp": _grid, "stages": _stages}


def prefixes(workload: Workload) -> list[str]:
    """What the tree has of each conversation: pages on the device, and slots on the host alone."""
    cache = workload.cache
    found = []
    for name in range(CONVERSATIONS):
        match = cache.match(workload.conversation(name, pages=8))
        pages = cache.pages_of(cache.device_slots(match))
        found.append(f"{name}: device {pages}, host {match.host_hit_length} slots")
    return found


def bytes_of(cache: RealCache) -> str:
    """A digest of all that both tiers hold."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (*cache.device_bytes(), *cache.host_bytes()):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def forgotten(context: Context, setup: Setup) -> bool:
    """Whether a tree goes when the last one that has it does."""
    cache = build(context, setup)
    cache.step()
    tree = weakref.ref(cache.tree)
    del cache
    gc.collect()
    return tree() is None


def _check_consensus(context: Context) -> None:
    """SGLang's own checker, where the variable asks for it."""
    if context.group is not None and not rank_consensus_checker.enabled():
        rank_consensus_checker.configure([SimpleNamespace(cpu_group=context.group)])


def _wait_for_consensus(seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while rank_consensus_checker.enabled() and not rank_consensus_checker._q.empty():
        assert time.monotonic() < deadline, "the consensus checker does not come to an end"
        time.sleep(0.01)


def diverge(context: Context) -> None:
    """What the checker is there for."""
    _check_consensus(context)
    rank_consensus_checker.assert_same("this is rank %d", context.rank)
    _wait_for_consensus()
    time.sleep(20)
