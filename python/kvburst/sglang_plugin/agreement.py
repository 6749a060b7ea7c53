"""Ranks agree on the acks of SGLang's cache, and on the sizes of its storage queues, through
kvburst's reducer in place of SGLang's collective."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import proxy

import torch
import torch.distributed as dist

from kvburst.agreement import (
    AckReducer,
    Agreement,
    AgreementGroups,
    GroupPeers,
    ListCounter,
    QueueCounter,
)
from kvburst.settings import Settings
from kvburst.sglang_plugin.operations import FinishEvent
from kvburst.sglang_plugin.status import Counters

Counts = tuple[int, int, tuple[int, ...], tuple[Any, ...]]
"""What SGLang's own agreement returns: write and load acks, sizes of the storage queues, and the
names of the pools that the last of these are of."""


# A rank without the plugin answers with the next collective of SGLang's own. None of those is as
# long, so that gloo ends both ranks; with the same length they would go on, a step apart.
_NUMBERS_A_VOTE = 64
# Of the sum of two digests: it and its negative are numbers of 64 bits.
_DIGEST_BITS = (1 << 62) - 1


class CacheAgreement:
    """One cache's. Belongs to the scheduler thread; every rank calls the same, at the same step.

    SGLang takes what `collect` returns, and `issue` counts what is left. Its queues are its own:
    they are only looked at. The numbers of storage's queues are always part of a round, storage or
    not, so that it may come and go while a round is in flight.

    Raises AgreementError on every rank if one is missing, out of step, or has a failed burst.
    """

    def __init__(
        self,
        cache: Any,
        settings: Settings,
        counters: Counters,
        loaded_digest: Callable[[], int] = lambda: 0,
    ) -> None:
        # Whoever holds an agreement must not hold its cache.
        self._cache = proxy(cache)
        self._controller = proxy(cache.cache_controller)
        self._counters = counters
        self._agreement = Agreement(
            groups_of(cache),
            transport=settings.transport or "blocking",
            skip_idle=settings.skip_idle,
            digest=lambda: (self._decided() + loaded_digest()) & _DIGEST_BITS,
        )
        self._stepping = False
        self._collected = False
        self._pools: tuple[Any, ...] = ()
        self._storage: list[QueueCounter] = []
        self._reducer = self._new_reducer()
        self._counted = 0
        self._spent_us = 0.0

    @property
    def transport(self) -> str:
        return self._reducer.transport.name

    def _decided(self) -> int:
        return int(self._cache.tree_core.write_back_duplicate_reclaim_digest)

    def spent_us(self) -> float:
        """Microseconds of the scheduler thread since the last call."""
        before, self._spent_us = self._spent_us, self._reducer.stats().spent_us
        return self._spent_us - before

    # --- a step --------------------------------------------------------------------------------

    def step(self, original: Callable[[], None]) -> None:
        """SGLang's step, in which it asks for `collect`, then takes what that returned."""
        self._stepping, self._collected = True, False
        try:
            original()
        finally:
            self._stepping = False
        if self._collected:
            self._reducer.issue()
            self._counters.agreements += self._reducer.rounds - self._counted
            self._counted = self._reducer.rounds

    @property
    def stepping(self) -> bool:
        """Whether what SGLang asks for now is part of a step. Outside of one it has its own way."""
        return self._stepping

    def collect(self) -> Counts:
        """How many of each SGLang takes now."""
        if tuple(self._controller.extra_host_mem_release_queues) != self._pools:
            self._renew()
        writes, loads, *storage = self._reducer.collect()
        self._collected = True
        if not self._cache.enable_storage:
            return writes, loads, (), ()
        return writes, loads, tuple(storage), self._pools

    # --- what else happens to the queues -------------------------------------------------------

    def popped_elsewhere(self) -> None:
        """Storage's queues were drained, or are about to be, by other numbers than `collect`'s."""
        for counter in self._storage:
            counter.popped_elsewhere()

    def reset(self) -> None:
        """The queues are about to be cleared: what is in flight is consumed."""
        self._reducer.reset()

    def close(self) -> None:
        self._reducer.close()

    # --- the queues ----------------------------------------------------------------------------

    def _renew(self) -> None:
        """A pool has come that has a storage queue of its own, before the first load or backup."""
        self._reducer.reset()
        self._reducer.close()
        self._reducer = self._new_reducer()
        self._counted = 0
        self._spent_us = 0.0

    def _new_reducer(self) -> AckReducer:
        controller = self._controller
        self._pools = tuple(controller.extra_host_mem_release_queues)
        self._storage = [
            self._queue("prefetch_hit", lambda: controller.prefetch_hit_queue),
            self._queue("ack_prefetch", lambda: controller.ack_prefetch_queue),
            self._queue("ack_backup", lambda: controller.ack_backup_queue),
            self._queue("host_mem_release", lambda: controller.host_mem_release_queue),
            *(self._pools_queue(pool) for pool in self._pools),
        ]
        acks = [
            ListCounter("write", lambda: controller.ack_write_queue, failure_of, is_done),
            ListCounter("load", lambda: controller.ack_load_queue, failure_of, is_done),
        ]
        return self._agreement.reducer([*acks, *self._storage], idle=self._is_idle)

    def _queue(self, name: str, queue: Callable[[], Any]) -> QueueCounter:
        def size() -> int:
            # A controller that never had storage has no queues.
            return queue().qsize() if self._cache.enable_storage else 0

        return QueueCounter(name, size)

    def _pools_queue(self, pool: Any) -> QueueCounter:
        queues = self._controller.extra_host_mem_release_queues
        return self._queue(f"host_mem_release of {pool.value}", lambda: queues[pool])

    def _is_idle(self) -> bool:
        """By what is the same on every rank."""
        controller = self._controller
        return not (
            controller.ack_write_queue or controller.ack_load_queue or self._cache.enable_storage
        )


def minimum(cache: Any, values: Sequence[int]) -> list[int]:
    """The least of each number over the ranks that hold the same tree: a vote."""
    tensor = torch.zeros(_NUMBERS_A_VOTE, dtype=torch.int64)
    tensor[: len(values)] = torch.tensor(list(values))
    cache._all_reduce_attn_groups(tensor, dist.ReduceOp.MIN)
    return [int(value) for value in tensor[: len(values)]]


def is_done(ack: Any) -> bool:
    """Of one of SGLang's acks, whose burst may have failed."""
    event = ack.finish_event
    return event.reached() if isinstance(event, FinishEvent) else bool(event.query())


def failure_of(ack: Any) -> str | None:
    """Of an ack that is done."""
    event = ack.finish_event
    return event.operation.failure() if isinstance(event, FinishEvent) else None


def groups_of(cache: Any) -> AgreementGroups:
    """The ranks that hold the same tree: those over which SGLang reduces. May block."""
    cp, tp = (_if_several(group) for group in (cache.attn_cp_group, cache.attn_tp_group))
    if cp is None and tp is None:
        return AgreementGroups(tp=_if_several(cache.tp_group))
    if cp is None or tp is None:
        return AgreementGroups(tp=tp, cp=cp)
    return AgreementGroups(tp=tp, cp=cp, grid=_grid(cache.tp_group, cp, tp))


def ranks_of(cache: Any) -> int:
    """How many hold the same tree."""
    attention = size_of(cache.attn_cp_group) * size_of(cache.attn_tp_group)
    return attention if attention > 1 else size_of(cache.tp_group)


def size_of(group: dist.ProcessGroup | None) -> int:
    """In ranks."""
    return 1 if group is None else dist.get_world_size(group)


def _if_several(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return group if size_of(group) > 1 else None


def _grid(
    whole: dist.ProcessGroup | None, cp: dist.ProcessGroup, tp: dist.ProcessGroup
) -> dist.ProcessGroup | None:
    """`whole`, if on every rank it is of exactly those ranks that the two groups connect."""
    peers = GroupPeers([cp, tp])
    ranks = set() if whole is None else set(dist.get_process_group_ranks(whole))
    same = ranks == set(peers.exchange(None))
    return whole if all(peers.exchange(same).values()) else None
