"""The agreement on one process: what is counted, what is skipped, what is everyone's error."""

import logging
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from agreement_helpers import (
    FakeBurst,
    FakeEvent,
    Network,
    SimPeers,
    SimTransport,
    add_ack,
    finish,
    numbers,
)
from devices import MakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs import PAGE, make_rig
from rigs import Blocking as BlockingCall

from kvburst import Ack, AckQueue, AgreementError, AgreementGroups, KVBurstError, StepBoard
from kvburst.agreement import (
    AckCounter,
    AckReducer,
    Agreement,
    Blocking,
    Board,
    ListCounter,
    LonePeers,
    Pipelined,
    QueueCounter,
    Transport,
    payload_length,
    require_same,
)

LAGS = pytest.mark.parametrize("lag", [0, 1], ids=["blocking", "lagging"])
Lag = Literal[0, 1]


@dataclass
class Min:
    """A collective in which others take part with `others`, one list of values a round."""

    others: list[list[int]] = field(default_factory=list)
    started: list[list[int]] = field(default_factory=list)

    def start(self, values: torch.Tensor) -> "Min":
        self.started.append(values.tolist())
        for other in self.others:
            values.copy_(torch.minimum(values, torch.tensor(other)))
        return self

    def wait(self) -> None:
        pass


def lone(queue: AckQueue, transport: Transport | None = None, **options: Any) -> AckReducer:
    transport = Blocking([]) if transport is None else transport
    return AckReducer([AckCounter("loads", queue)], transport, LonePeers(), **options)


def step(reducer: AckReducer, queue: AckQueue) -> list[int]:
    (count,) = reducer.collect()
    retired = queue.retire(count)
    reducer.issue()
    return numbers(retired)


# --- the ack queue -------------------------------------------------------------------------------


def test_queue_counts_what_is_retired_by_whatever_means() -> None:
    queue = AckQueue()
    for number in range(7):
        add_ack(queue, number, done=True)
    queue.pop(0)
    assert queue.retired == 1
    queue.retire(2)
    assert queue.retired == 3
    add_ack(queue, 7)
    queue.retire_complete()
    assert queue.retired == 7
    queue.clear()
    assert queue.retired == 8


def test_queue_refuses_to_retire_more_than_it_holds_and_retires_none() -> None:
    queue = AckQueue()
    add_ack(queue, 0, done=True)
    with pytest.raises(IndexError, match="count: 2 acks must be 0 to 1, those queued"):
        queue.retire(2)
    assert numbers(list(queue)) == [0]


# --- what is counted -----------------------------------------------------------------------------


def test_blocking_retires_in_the_same_step_and_lagging_one_step_later() -> None:
    for transport, when in ((Blocking([Min()]), 0), (Pipelined(Min()), 1)):
        queue = AckQueue()
        reducer = lone(queue, transport)
        add_ack(queue, 0, done=True)
        steps = [step(reducer, queue) for _ in range(3)]
        assert steps.index([0]) == when


def test_ack_behind_one_that_is_not_done_is_not_counted() -> None:
    queue = AckQueue()
    reducer = lone(queue)
    add_ack(queue, 0)
    add_ack(queue, 1, done=True)
    assert step(reducer, queue) == []
    finish(queue)
    assert step(reducer, queue) == [0, 1]


def test_each_takes_the_smallest_number_that_any_rank_has_ready() -> None:
    queue = AckQueue()
    other = [2, 1, 1, -1, 0, 0]
    reducer = lone(queue, Blocking([Min(), Min([other])]))
    for number in range(3):
        add_ack(queue, number, done=True)
    assert step(reducer, queue) == [0, 1]


def test_counting_after_taking_reports_the_remainder() -> None:
    minimum = Min()
    queue = AckQueue()
    reducer = lone(queue, Pipelined(minimum))
    for number in range(3):
        add_ack(queue, number, done=number < 2)
    reducer.issue()
    assert step(reducer, queue) == [0, 1]
    finish(queue)
    reducer.collect()
    assert [values[0] for values in minimum.started] == [2, 2]  # cumulative: nothing new


class CountsBeforeTaking:
    """What counting after popping prevents, with counts that do not accumulate: the control."""

    def __init__(self, queue: AckQueue) -> None:
        self._queue = queue
        self._in_flight = 0

    def step(self) -> int:
        agreed = self._in_flight
        self._in_flight = sum(ack.finish_event.query() for ack in self._queue)  # before the pop
        return agreed


def test_control_counting_before_taking_over_reports() -> None:
    queue = AckQueue()
    broken = CountsBeforeTaking(queue)
    for number in range(3):
        add_ack(queue, number, done=number < 2)
    assert broken.step() == 0
    assert numbers(queue.retire(broken.step())) == [0, 1]
    assert broken.step() > sum(ack.finish_event.query() for ack in queue)


def test_flush_between_issue_and_collect_is_not_taken_again() -> None:
    queue = AckQueue()
    reducer = lone(queue, Pipelined(Min()))
    for number in range(3):
        add_ack(queue, number, done=True)
    reducer.issue()  # 3 are in flight
    queue.clear()  # a write-back eviction
    add_ack(queue, 3)
    assert step(reducer, queue) == []
    finish(queue)
    assert step(reducer, queue) == []
    assert step(reducer, queue) == [3]


def test_reset_consumes_what_is_in_flight_and_counts_from_zero() -> None:
    minimum = Min()
    queue = AckQueue()
    reducer = lone(queue, Pipelined(minimum))
    for number in range(3):
        add_ack(queue, number, done=True)
    reducer.issue()
    queue.clear()
    reducer.reset()
    add_ack(queue, 3, done=True)
    assert step(reducer, queue) == []
    assert minimum.started[-1][0] == 1
    assert step(reducer, queue) == [3]


def test_round_in_flight_is_not_overtaken_by_another() -> None:
    reducer = lone(AckQueue(), Pipelined(Min()))
    reducer.issue()
    with pytest.raises(KVBurstError, match="a round is in flight already"):
        reducer.issue()


def test_round_that_could_not_be_sent_is_not_collected() -> None:
    @dataclass
    class RefusesTheSecond(Min):
        def start(self, values: torch.Tensor) -> Min:
            super().start(values)
            if len(self.started) == 2:
                raise RuntimeError("Connection closed by peer")
            return self

    reducer = lone(AckQueue(), Pipelined(RefusesTheSecond()))
    reducer.issue()
    reducer.collect()
    with pytest.raises(AgreementError, match="Connection closed by peer"):
        reducer.issue()
    assert reducer.collect() == [0]
    reducer.issue()


def test_forked_child_is_refused_instead_of_waiting_for_threads_it_does_not_have() -> None:
    reducer = lone(AckQueue(), Pipelined(Min()))
    reducer.issue()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        for call in (reducer.collect, reducer.issue, reducer.reset):
            try:
                call()
            except KVBurstError as error:
                os.write(writes, str(error).encode() + b"\n")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read().splitlines()
    text = f"agreement: it belongs to process {os.getpid()}, and not to process {child} that"
    assert len(said) == 3
    assert all(line.startswith(text) for line in said)
    assert reducer.collect() == [0]


# --- plain lists and storage queues --------------------------------------------------------------


@dataclass
class PlainAck:
    """As SGLang's: it knows of no error."""

    finish_event: FakeEvent
    number: int


def test_plain_list_is_counted_whoever_takes_its_acks() -> None:
    acks: list[PlainAck] = []
    counter = ListCounter("loads", lambda: acks)
    acks += [PlainAck(FakeEvent(number != 2), number) for number in range(3)]
    assert counter.report(0).number == 2
    assert counter.due(2) == 2
    del acks[:2]
    assert counter.due(2) == 0
    acks.append(PlainAck(FakeEvent(True), 3))
    acks.clear()  # a flush of 2 and of 3, which this counter never saw: no rank did
    acks.append(PlainAck(FakeEvent(True), 4))
    assert counter.report(0).number == 3 + 1
    counter.reset()
    assert counter.report(0).number == 1


@given(st.lists(st.sampled_from(["append", "finish", "take", "clear", "look"]), max_size=60))
def test_plain_list_counts_as_an_ack_queue_does(operations: list[str]) -> None:
    acks: list[PlainAck] = []
    queue = AckQueue()
    plain, counted = ListCounter("a", lambda: acks), AckCounter("b", queue)
    for number, operation in enumerate(operations):
        if operation == "append":
            event = FakeEvent()
            acks.append(PlainAck(event, number))
            queue.append(Ack(FakeBurst(number, None, event), 1, {}))
            plain.report(0)  # ranks look at every step
        elif operation == "finish" and acks:
            acks[number % len(acks)].finish_event.done = True
        elif operation == "take" and acks and acks[0].finish_event.done:
            acks.pop(0)
            queue.pop(0)
        elif operation == "clear":
            queue.clear()
            acks.clear()
        assert plain.report(0).number == counted.report(0).number
        assert plain.due(number) == counted.due(number)


def test_failure_of_a_plain_list_is_known_if_the_caller_says_how() -> None:
    acks = [PlainAck(FakeEvent(True), 0), PlainAck(FakeEvent(True), 1)]
    counter = ListCounter("loads", lambda: acks, lambda ack: "bad" if ack.number == 1 else None)
    (failure,) = counter.report(rank=3).failures
    assert (failure.rank, failure.counter, failure.position, failure.text) == (3, "loads", 1, "bad")
    counter.reported([failure])
    assert counter.report(rank=3) == (2, ())


def test_storage_queue_taken_by_other_means_voids_what_is_in_flight() -> None:
    size = 5
    counter = QueueCounter("prefetch", lambda: size)
    reducer = AckReducer([counter], Pipelined(Min()), LonePeers())
    reducer.issue()
    size = 1  # drained elsewhere, on every rank, of however many each had
    counter.popped_elsewhere()
    assert reducer.collect() == [0]
    reducer.issue()
    assert reducer.collect() == [1]


def test_storage_queue_taken_untold_is_an_error_and_no_endless_wait() -> None:
    size = 5
    reducer = AckReducer([QueueCounter("prefetch", lambda: size)], Pipelined(Min()), LonePeers())
    reducer.issue()
    size = 1
    with pytest.raises(AgreementError, match="5 of 'prefetch' to take, this one has 1 left"):
        reducer.collect()


def test_entries_of_a_storage_queue_are_not_taken_twice() -> None:
    entries = list(range(4))
    reducer = AckReducer(
        [QueueCounter("prefetch", lambda: len(entries))], Pipelined(Min()), LonePeers()
    )
    taken = []
    for arriving in (0, 2, 0, 1, 0, 0):
        entries += [9] * arriving
        (count,) = reducer.collect()
        taken.append(count)
        del entries[:count]
        reducer.issue()
    assert taken == [0, 4 + 2 - 2, 2, 0, 1, 0]
    assert not entries


# --- the payload ---------------------------------------------------------------------------------


# sgl-project/sglang#39267
def test_payload_is_as_long_whatever_is_pending() -> None:
    minimum = Min()
    queue, stored = AckQueue(), [0] * 4
    counters = [AckCounter("loads", queue)]
    counters += [QueueCounter(f"storage {i}", lambda i=i: stored[i]) for i in range(4)]
    reducer = AckReducer(counters, Pipelined(minimum), LonePeers())
    chance = random.Random(0)
    for number in range(100):
        add_ack(queue, number, done=chance.random() < 0.5)
        stored = [chance.choice((0, 5)) for _ in stored]
        counts = reducer.collect() if not minimum.started else [0] * 5
        queue.retire(counts[0])
        reducer.issue()
        reducer.reset()
    assert {len(values) for values in minimum.started} == {payload_length(5)}


@pytest.mark.parametrize("digest", [-(1 << 63), 1 << 63])
def test_digest_that_has_no_negative_in_64_bits_is_refused(digest: int) -> None:
    reducer = lone(AckQueue(), digest=lambda: digest)
    with pytest.raises(KVBurstError, match=f"digest: {digest} must be "):
        reducer.collect()


def test_digest_is_compared_as_it_was_when_the_round_began() -> None:
    digests = iter([5, 6, 7])
    minimum = Min([[9, 1, 1, -1, 5, -5]])
    reducer = lone(AckQueue(), Pipelined(minimum), digest=lambda: next(digests))
    reducer.collect()
    minimum.others = [[9, 1, 1, -1, 5, -5]]  # the other rank had 5 as well, then
    reducer.issue()
    assert next(digests) == 6  # it has moved on since
    assert reducer.collect() == [0]


# --- idle skip -----------------------------------------------------------------------------------


@LAGS
def test_nothing_outstanding_means_no_round_but_for_the_forced_one(lag: Lag) -> None:
    minimum = Min()
    queue = AckQueue()
    transport = Pipelined(minimum) if lag else Blocking([minimum])
    reducer = lone(queue, transport, idle=lambda: not queue, force_every=3)
    for _ in range(8):
        step(reducer, queue)
    stats = reducer.stats()
    assert (stats.steps, stats.rounds, stats.skips, stats.forced) == (8, 2, 6, 2)
    assert len(minimum.started) == 2

    add_ack(queue, 0, done=True)
    assert [step(reducer, queue) for _ in range(2)].count([0]) == 1
    assert reducer.stats().forced == 2


def test_what_is_in_flight_is_consumed_although_nothing_is_outstanding_now() -> None:
    queue = AckQueue()
    minimum = Min()
    reducer = lone(queue, Pipelined(minimum), idle=lambda: not queue)
    add_ack(queue, 0, done=True)
    reducer.issue()
    assert step(reducer, queue) == [0]
    assert step(reducer, queue) == []
    assert reducer.stats().skips == 2
    reducer.issue()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"force_every": 0}, "force_every: 0 skipped rounds must be at least 1"),
        ({"log_every": -1}, "log_every: -1 steps must be at least 0"),
    ],
)
def test_bad_options_are_refused_by_name(option: dict[str, int], message: str) -> None:
    with pytest.raises(KVBurstError, match=message):
        lone(AckQueue(), **option)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf"), 2e9])
def test_timeout_out_of_bounds_is_refused_by_name(timeout: float) -> None:
    with pytest.raises(KVBurstError, match=f"timeout: {timeout} seconds must be more than 0, and"):
        Agreement(AgreementGroups(), timeout=timeout)


def test_log_has_a_line_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvburst")
    queue = AckQueue()
    reducer = lone(queue, idle=lambda: True, log_every=4)
    for _ in range(9):
        step(reducer, queue)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("agreement, blocking: ")
    assert lines[0].endswith(" us a step; 4 steps, 0 rounds, 4 skipped, 0 forced")


# --- failures ------------------------------------------------------------------------------------


def both(lag: Lag, body: Callable[[AckReducer, AckQueue, int], Any], ranks: int = 3) -> list[Any]:
    """`body` on three ranks, each with a queue of three acks that are done."""
    network = Network(ranks)

    def one(rank: int) -> Any:
        queue = AckQueue()
        for number in range(3):
            bad = "load 1 failed: copy" if rank == 1 and number == 1 else None
            add_ack(queue, number, done=True, fails=bad)
        reducer = AckReducer(
            [AckCounter("loads", queue)],
            SimTransport(network, rank, lag),
            SimPeers(network, rank),
        )
        return body(reducer, queue, rank)

    results = network.run(one)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@LAGS
def test_burst_that_failed_on_one_rank_is_raised_on_all_before_anything_is_retired(
    lag: Lag,
) -> None:
    def body(reducer: AckReducer, queue: AckQueue, rank: int) -> Any:
        if lag:
            assert step(reducer, queue) == []
        with pytest.raises(AgreementError) as raised:
            reducer.collect()
        left = len(queue)
        after = [step(reducer, queue) for _ in range(2)]
        return str(raised.value), raised.value.ranks, raised.value.failures, left, after[lag]

    outcomes = both(lag, body)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    message, ranks, failures, left, after = outcomes[0]
    assert message == "step 1: on rank 1, load 1 failed: copy; nothing was retired"
    assert ranks == (1,)
    assert [(one.rank, one.counter, one.position) for one in failures] == [(1, "loads", 1)]
    assert left == 3
    assert after == [0, 1, 2]  # told once, it does not stop the others for ever


@LAGS
def test_burst_that_failed_under_a_flush_is_raised_on_all_at_the_next_round(lag: Lag) -> None:
    def body(reducer: AckReducer, queue: AckQueue, rank: int) -> str:
        queue.clear()
        if lag:
            reducer.issue()
        with pytest.raises(AgreementError) as raised:
            reducer.collect()
        return str(raised.value)

    assert len(set(both(lag, body))) == 1


@LAGS
def test_digest_that_differs_is_raised_on_all_and_names_who_has_which(lag: Lag) -> None:
    network = Network(4)

    def one(rank: int) -> Any:
        queue = AckQueue()
        add_ack(queue, 0, done=True)
        reducer = AckReducer(
            [AckCounter("loads", queue)],
            SimTransport(network, rank, lag),
            SimPeers(network, rank),
            digest=lambda: 7 if rank == 2 else 5,
        )
        if lag:
            step(reducer, queue)
        with pytest.raises(AgreementError) as raised:
            reducer.collect()
        return str(raised.value), raised.value.ranks, len(queue)

    results = network.run(one)
    message = "step 1: the digest differs: 5 on ranks 0, 1, 3; 7 on rank 2; nothing was retired"
    assert results == [(message, (2,), 1)] * 4


def test_burst_that_fails_between_two_looks_is_never_counted_without_its_failure() -> None:
    class DoneAtTheSecondLook(FakeEvent):
        def query(self) -> bool:
            self.waits += 1
            self.done = self.waits > 1
            return self.done

    queue = AckQueue()
    queue.append(Ack(FakeBurst(0, "load 0 failed: copy", DoneAtTheSecondLook()), 1, {}))
    counter = AckCounter("loads", queue)
    reports = [counter.report(0) for _ in range(3)]
    assert [(report.number, len(report.failures)) for report in reports] == [(0, 0), (1, 1), (1, 1)]


def test_error_is_raised_with_what_is_known_if_the_others_cannot_be_asked() -> None:
    class NoPeers:
        rank = 0

        def exchange(self, item: object) -> Any:
            raise RuntimeError("Connection closed by peer\nsomewhere")

    queue = AckQueue()
    add_ack(queue, 0, done=True, fails="load 0 failed: copy")
    reducer = AckReducer([AckCounter("loads", queue)], Blocking([]), NoPeers())
    with pytest.raises(AgreementError) as raised:
        reducer.collect()
    assert str(raised.value) == (
        "step 1: some rank cannot go on, and asking which one failed: Connection closed by peer; "
        "on rank 0, load 0 failed: copy"
    )
    assert len(queue) == 1


class Lost:
    """A collective whose other ranks are gone."""

    def start(self, values: torch.Tensor) -> "Lost":
        return self

    def wait(self) -> None:
        raise RuntimeError("Timed out waiting 1000ms for recv\n(torch's stack)")

    def __str__(self) -> str:
        return "all_reduce over ranks 0, 1"


@pytest.mark.parametrize("transport", [Blocking([Lost()]), Pipelined(Lost())])
def test_rank_that_is_missing_is_an_error_that_says_where(transport: Transport) -> None:
    queue = AckQueue()
    add_ack(queue, 0, done=True)
    reducer = lone(queue, transport)
    if transport.lag:
        reducer.issue()
    with pytest.raises(AgreementError) as raised:
        reducer.collect()
    assert str(raised.value) == (
        "round 0: all_reduce over ranks 0, 1 failed, a rank has ended or did not come within the "
        "group's timeout: Timed out waiting 1000ms for recv"
    )
    assert len(queue) == 1


def test_rank_that_is_missing_on_a_board_is_named_as_the_world_numbers_it() -> None:
    ours = StepBoard.create(ranks=2, values=1, timeout=10)
    theirs = StepBoard.attach(ours.name, ours.nonce, rank=1, ranks=2, values=1, timeout=10)
    ours.unlink()
    transport = Board(ours, ranks=[4, 7])
    transport.issue([1])
    theirs.close()
    with pytest.raises(AgreementError, match=r"they are \[4, 7\]") as raised:
        transport.collect()
    assert raised.value.ranks == (7,)
    transport.close()


def test_setting_that_differs_is_refused_on_every_rank() -> None:
    network = Network(4)
    results = network.run(
        lambda rank: require_same(SimPeers(network, rank), "rank_shard", rank != 3)
    )
    text = (
        "rank_shard: must be the same on every rank, but is True on ranks 0, 1, 2; False on rank 3"
    )
    assert [str(result) for result in results] == [text] * 4
    assert all(isinstance(result, AgreementError) for result in results)


# --- pipeline stages -----------------------------------------------------------------------------


@dataclass
class Follower:
    """Stages as a follower sees them: what the leader hands on, step by step."""

    handed_on: list[list[int]]
    leads = False

    def receive(self) -> list[int]:
        return self.handed_on.pop(0)


def leader_says(count: int, digest: int = 0) -> list[int]:
    return [count, 1, 1, -1, digest, -digest]


def follower(queue: AckQueue, *handed_on: list[int], **options: Any) -> AckReducer:
    return lone(queue, stages=Follower(list(handed_on)), **options)


# sgl-project/sglang#27285
def test_follower_waits_on_its_own_events_and_retires_the_leaders_number() -> None:
    queue = AckQueue()
    for number in range(3):
        add_ack(queue, number, done=number == 0)
    events = [ack.finish_event for ack in queue]
    reducer = follower(queue, leader_says(3))
    assert reducer.collect() == [3]
    assert [event.waits for event in events] == [0, 1, 1]
    assert len(queue) == 3  # the caller takes them


def test_follower_with_fewer_acks_raises_before_anything_changes() -> None:
    queue = AckQueue()
    for number in range(2):
        add_ack(queue, number)
    reducer = follower(queue, leader_says(3))
    with pytest.raises(AgreementError, match="first pipeline stage takes 3 of 'loads', and 2 are"):
        reducer.collect()
    assert len(queue) == 2
    assert not any(ack.finish_event.done for ack in queue)
    assert queue.retired == 0


def test_follower_without_acks_takes_none_of_none() -> None:
    assert follower(AckQueue(), leader_says(0)).collect() == [0]


def test_follower_whose_digest_differs_raises_before_it_takes_anything() -> None:
    queue = AckQueue()
    add_ack(queue, 0, done=True)
    reducer = follower(queue, leader_says(1, digest=5), digest=lambda: 6)
    with pytest.raises(AgreementError, match="the digest is 6, that of the first pipeline stage 5"):
        reducer.collect()
    assert len(queue) == 1


def test_follower_whose_burst_fails_while_it_waits_raises_before_it_takes_anything() -> None:
    queue = AckQueue()
    add_ack(queue, 0, fails="load 0 failed: copy")
    reducer = follower(queue, leader_says(1))
    with pytest.raises(AgreementError, match="step 1: on rank 0, load 0 failed: copy"):
        reducer.collect()
    assert len(queue) == 1


@LAGS
def test_follower_takes_storage_again_after_it_was_drained_by_other_means(lag: Lag) -> None:
    size = 1
    counter = QueueCounter("prefetch", lambda: size)
    stages = Follower([leader_says(count) for count in (0, 1, 1, 3)])
    transport = Pipelined(Min()) if lag else Blocking([])
    reducer = AckReducer([counter], transport, LonePeers(), stages=stages)
    taken = []
    for drained in (False, False, True, False):
        if drained:
            counter.popped_elsewhere()
        taken += reducer.collect()
        reducer.issue()
    assert taken == [0, 1, 0, 2]


def test_follower_does_not_wait_for_storage_whoever_takes_it_does() -> None:
    reducer = AckReducer(
        [QueueCounter("prefetch", lambda: 0)],
        Blocking([]),
        LonePeers(),
        stages=Follower([leader_says(2)]),
    )
    assert reducer.collect() == [2]


# --- any order of anything -----------------------------------------------------------------------


@dataclass(frozen=True)
class Act:
    """What happens before a step. The same on every rank, but for `ready`."""

    appended: int
    ready: tuple[int, ...]
    """How many of the acks are done by then, a rank; the rest is not."""
    event: Literal["", "clear", "reset"]
    fails_on: int = -1
    """The rank on which the first of the appended fails, if any."""


def acts(ranks: int) -> st.SearchStrategy[list[Act]]:
    act = st.builds(
        Act,
        appended=st.integers(0, 2),
        ready=st.tuples(*[st.integers(0, 3)] * ranks),
        event=st.sampled_from(["", "", "", "", "clear", "reset"]),
        fails_on=st.sampled_from([-1] * 5 + list(range(ranks))),
    )
    return st.lists(act, min_size=1, max_size=20)


RANKS = 3


@dataclass
class History:
    retired: list[tuple[int, list[int]]] = field(default_factory=list)
    errors: list[tuple[int, str]] = field(default_factory=list)
    over_reported: bool = False
    untold: bool = False
    """Whether an ack that failed somewhere was retired before an error said so."""


def play(
    script: list[Act], lag: Lag, idle: Callable[[AckQueue], bool] | None, network: Network
) -> list[Any]:
    def one(rank: int) -> History:
        queue = AckQueue()
        reducer = AckReducer(
            [AckCounter("loads", queue)],
            SimTransport(network, rank, lag),
            SimPeers(network, rank),
            idle=None if idle is None else lambda: idle(queue),
            force_every=4,
        )
        history = History()
        number = 0
        for place, act in enumerate([*script, *[Act(0, (9,) * RANKS, "")] * 3]):
            for first in (True, False)[: act.appended]:
                fails = first and act.fails_on == rank
                add_ack(queue, number, fails=f"load {number} failed" if fails else None)
                number += 1
            if act.event:
                queue.clear()
            if act.event == "reset":
                reducer.reset()
            finish(queue, act.ready[rank])
            try:
                (count,) = reducer.collect()
            except AgreementError as error:
                if not error.failures:
                    raise
                history.errors.append((place, str(error)))
                continue
            ready = sum(1 for ack in queue if ack.finish_event.query())
            history.over_reported |= count > ready
            retired = queue.retire(count)
            for ack in retired:
                told = any(str(ack.error) in text for _, text in history.errors)
                history.untold |= ack.error is not None and not told
            history.retired.append((place, numbers(retired)))
            reducer.issue()
        return history

    return network.run(one)


@LAGS
@settings(deadline=None, max_examples=60)
@given(script=acts(RANKS), skip=st.booleans())
def test_ranks_retire_alike_and_never_more_than_each_has_ready(
    lag: Lag, script: list[Act], skip: bool
) -> None:
    network = Network(RANKS)
    histories = play(script, lag, (lambda queue: not queue) if skip else None, network)
    assert all(isinstance(history, History) for history in histories), histories
    alike = [(history.retired, history.errors) for history in histories]
    assert alike[0] == alike[1] == alike[2]
    assert not any(history.over_reported or history.untold for history in histories)
    assert network.logs[0] == network.logs[1] == network.logs[2]


# sgl-project/sglang#26921
@LAGS
def test_control_skipping_on_local_emptiness_sends_ranks_apart(lag: Lag) -> None:
    script = [Act(2, (2, 0, 0), ""), *[Act(0, (2, 0, 0), "")] * 4]

    def nothing_is_ready_here(queue: AckQueue) -> bool:
        return not any(ack.finish_event.query() for ack in queue)

    network = Network(RANKS)
    outcomes = play(script, lag, nothing_is_ready_here, network)
    assert not any(isinstance(outcome, History) for outcome in outcomes)
    assert any("the ranks are out of step" in str(outcome) for outcome in outcomes)


# --- the controller ------------------------------------------------------------------------------


def test_controller_alone_retires_without_an_agreement(make_device: MakeDevice) -> None:
    rig = make_rig(make_device())
    rig.load(rig.on_host(0x11), node_id=7)
    rig.settle()
    assert [ack.node_ids for ack in rig.controller.poll()] == [[7]]
    assert rig.controller.stats().agreement is None


def test_pop_still_waits_for_a_burst_that_is_under_way(make_device: MakeDevice) -> None:
    rig = make_rig(make_device())
    with rig.held():
        rig.controller.write(rig.take())
        call = BlockingCall(lambda: rig.controller.ack_write_queue.retire(1))
        assert call.blocks()
    call.join()
    assert rig.controller.ack_write_queue.retired == 1
    assert rig.host_pages.available_pages * PAGE == (32 - 1) * PAGE
