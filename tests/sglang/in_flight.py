"""What happens to SGLang's queues while a round is in flight: they are flushed, reset, taken from
by other numbers than the ranks have agreed on, and ranks fail.

Rank 0 goes on to that while rank 1 has not begun the round yet: it cannot have ended.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any
from unittest import mock

from ranks import Context
from real_cache import RealCache, build
from scenarios import on_the_host_only, prefix
from setups import Setup
from sglang.srt.mem_cache.hicache_storage import PoolName
from slowed import held, on_device
from storing import Storing

from kvburst import AgreementError
from kvburst.sglang_plugin import status
from kvburst.sglang_plugin.agreement import CacheAgreement


@dataclass(frozen=True)
class Meeting:
    """Where ranks tell each other how far they are, off every group."""

    folder: str
    rank: int

    def rank_1_waits_for(self, event: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while self.rank == 1 and not Path(self.folder, event).exists():
            assert time.monotonic() < deadline, f"{event} did not come"
            time.sleep(0.001)

    def rank_0_has(self, event: str) -> None:
        if self.rank == 0:
            Path(self.folder, event).touch()


def flush(context: Context, setup: Setup, folder: str) -> int:
    """A flush before an eviction takes an ack that the round in flight speaks of, and another
    comes: how many of them a step then leaves, which has one and cannot have copied it."""
    meeting = Meeting(folder, context.rank)
    with on_device() as device:
        cache = build(context, setup)
        _back_up(cache, prefix(1, 2, setup))
        meeting.rank_1_waits_for("flushed")
        cache.step()
        assert len(cache.controller.ack_write_queue) == 1
        cache.tree.writing_check(write_back=True)
        assert not cache.tree.ongoing_write_through
        meeting.rank_0_has("flushed")
        with held(device):
            assert cache.insert(prefix(2, 2, setup))
            cache.step()
            left = len(cache.controller.ack_write_queue)
        cache.settle()
    return left


def reset(context: Context, setup: Setup, folder: str) -> tuple[int, int]:
    """The cache is flushed under a round that speaks of a load and a backup: how many of each a
    step leaves, of one each, that came afterwards and cannot have been copied."""
    meeting = Meeting(folder, context.rank)
    tokens, others = prefix(1, 2, setup), prefix(2, 2, setup)
    with on_device() as device:
        cache = build(context, setup)
        on_the_host_only(cache, tokens)
        _load(cache, tokens)
        _back_up(cache, others)
        meeting.rank_1_waits_for("resetting")
        cache.step()
        assert len(cache.controller.ack_write_queue) == len(cache.controller.ack_load_queue) == 1
        meeting.rank_0_has("resetting")
        cache.tree.reset()
        cache.allocator.clear()
        on_the_host_only(cache, tokens)
        with held(device):
            assert cache.insert(others)
            assert cache.load_back(tokens) == len(tokens)
            cache.start()
            cache.step()
            cache.step()
            left = len(cache.controller.ack_write_queue), len(cache.controller.ack_load_queue)
        cache.settle()
        assert cache.forward(-1, tokens) == []
    return left


def own_checks(context: Context, setup: Setup) -> tuple[int, int]:
    """SGLang's checks are called outside of a step, where they reduce by themselves."""
    tokens, others, more = (prefix(name, 2, setup) for name in (1, 2, 3))
    with on_device() as device:
        cache = build(context, setup)
        on_the_host_only(cache, tokens, more)
        _load(cache, tokens)
        _back_up(cache, others)
        cache.step()
        cache.tree.writing_check()
        cache.tree.loading_check()
        assert not cache.tree.ongoing_write_through
        assert not cache.tree.ongoing_load_back
        with held(device):
            assert cache.insert(prefix(4, 2, setup))
            assert cache.load_back(more) == len(more)
            cache.start()
            cache.step()
            left = len(cache.controller.ack_write_queue), len(cache.controller.ack_load_queue)
        cache.settle()
    return left


def pool_registered(context: Context, setup: Setup) -> tuple[int, int]:
    """A pool with a storage queue of its own comes under a round that speaks of a backup: how many
    acks the next steps leave, and rounds there were in them."""
    cache = build(context, setup)
    _back_up(cache, prefix(1, 2, setup))
    cache.step()
    begin = status().agreements
    cache.controller.extra_host_mem_release_queues[PoolName.SWA] = Queue()
    cache.step()
    cache.step()
    return len(cache.controller.ack_write_queue), status().agreements - begin


def _back_up(cache: RealCache, tokens: list[int]) -> None:
    """It is done, and its ack not taken."""
    assert cache.insert(tokens)
    cache.tree.flush_pending_backups()
    cache.controller.ack_write_queue[-1].finish_event.synchronize()


def _load(cache: RealCache, tokens: list[int]) -> None:
    assert cache.load_back(tokens) == len(tokens)
    cache.start()
    cache.controller.ack_load_queue[-1].finish_event.synchronize()


# --- storage's queues ----------------------------------------------------------------------------


def _by_numbers_of_its_own(storing: Storing) -> None:
    storing.cache.tree.drain_storage_control_queues()


def _without_numbers(storing: Storing) -> None:
    storing.cache.tree.drain_storage_control_queues_local()


def _by_a_reset(storing: Storing) -> None:
    storing.cache.tree.reset()
    storing.cache.allocator.clear()


def _by_detaching(storing: Storing) -> None:
    storing.detach()
    storing.attach()


PLACES: dict[str, Callable[[Storing], None]] = {
    "by numbers of its own": _by_numbers_of_its_own,
    "without numbers": _without_numbers,
    "by a reset": _by_a_reset,
    "by detaching": _by_detaching,
}
"""Where SGLang takes from storage's queues, or drops them, other than in a step."""


def storage_popped(context: Context, setup: Setup, folder: str, place: str) -> list[int]:
    """Three entries are taken at `place` under a round that speaks of them. How many each later
    step takes, of two that rank 0 has then, and one that rank 1 has, until it has another."""
    meeting = Meeting(folder, context.rank)
    cache = build(context, setup)
    storing = Storing(cache, folder)
    storing.attach()
    taken: list[int] = []
    _release(cache, 3)
    meeting.rank_1_waits_for("popping")
    cache.step()
    assert cache.controller.host_mem_release_queue.qsize() == 3
    meeting.rank_0_has("popping")
    PLACES[place](storing)
    assert cache.controller.host_mem_release_queue.qsize() == 0
    _release(cache, 2 if context.rank == 0 else 1)
    for step in range(5):
        if step == 2 and context.rank == 1:
            _release(cache, 1)
        before = cache.controller.host_mem_release_queue.qsize()
        cache.step()
        taken.append(before - cache.controller.host_mem_release_queue.qsize())
    storing.detach()
    return taken


def storage_popped_untold(context: Context, setup: Setup, folder: str) -> str:
    """The control: the same, where the agreement is not told."""
    with mock.patch.object(CacheAgreement, "popped_elsewhere"):
        try:
            storage_popped(context, setup, folder, "without numbers")
        except AgreementError as error:
            return str(error)
    return "nothing"


def _release(cache: RealCache, pages: int) -> None:
    slots = cache.controller.mem_pool_host.alloc(pages * cache.setup.page_size)
    cache.controller.append_host_mem_release(slots)


# --- ranks that fail -----------------------------------------------------------------------------


def failed_backup(context: Context, setup: Setup) -> tuple[str, tuple[int, ...], Any]:
    """A copy fails on rank 1: what both are told."""
    with on_device() as device:
        cache = build(context, setup)
        if context.rank == 1:
            device.fail_copy_call(1)
        assert cache.insert(prefix(1, 2, setup))
        try:
            cache.settle()
        except AgreementError as error:
            return str(error), error.ranks, [failure.counter for failure in error.failures]
    return "nothing", (), []


def killed(context: Context, setup: Setup) -> tuple[str, tuple[int, ...], float]:
    """Rank 1 is killed after some steps; what the others are told, and how many seconds later."""
    cache = build(context, setup)
    for _ in range(5):
        cache.step()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + 60:
            cache.step()
    except AgreementError as error:
        return str(error), error.ranks, time.monotonic() - begin
    return "nothing", (), time.monotonic() - begin
