"""What a rank does in the tests with real processes. Everything random is seeded."""

import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from agreement_helpers import add_ack, finish, numbers
from rigs import make_rig

from kvburst import AckQueue, AgreementError, AgreementGroups, HostDevice, make_groups
from kvburst.agreement import (
    AckCounter,
    AckReducer,
    Agreement,
    QueueCounter,
    TransportName,
    board_group,
    choose_transport,
    host_identity,
    payload_length,
    require_same,
)

_COLLECTIVES = (
    "all_reduce",
    "all_gather_object",
    "broadcast_object_list",
    "send",
    "recv",
    "isend",
    "new_group",
)


@contextmanager
def recorded() -> Iterator[list[tuple[str, Any]]]:
    """Every call of torch.distributed that concerns other ranks, with the ranks concerned."""
    calls: list[tuple[str, Any]] = []
    originals = {name: getattr(dist, name) for name in _COLLECTIVES}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            ranks = args[0] if group is None else tuple(dist.get_process_group_ranks(group))
            calls.append((name, ranks))
            return originals[name](*args, **kwargs)

        return call

    for name in _COLLECTIVES:
        setattr(dist, name, wrapped(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class Recorder:
    """A transport that notes the length of what is issued, and where."""

    def __init__(self, transport: Any, calls: list[tuple[str, Any]]) -> None:
        self._transport = transport
        self._calls = calls
        self.name: TransportName = transport.name
        self.lag: int = transport.lag

    def issue(self, values: Sequence[int]) -> None:
        self._calls.append((f"round of {self.name}", len(values)))
        self._transport.issue(values)

    def collect(self) -> list[int]:
        values: list[int] = self._transport.collect()
        return values

    def close(self) -> None:
        self._transport.close()


def record(reducer: AckReducer, calls: list[tuple[str, Any]]) -> None:
    reducer._transport = Recorder(reducer._transport, calls)


# --- groups --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """Four ranks in two rows of two, and whole."""

    whole: Any
    row: Any
    column: Any


_grids: dict[int, Grid] = {}


def grid() -> Grid:
    """Made once a process."""
    if not _grids:
        whole, *halves = make_groups([[0, 1, 2, 3], [0, 1], [2, 3], [0, 2], [1, 3]], timeout=30)
        rows, columns = halves[:2], halves[2:]
        (row,) = (group for group in rows if group is not None)
        (column,) = (group for group in columns if group is not None)
        _grids[0] = Grid(whole, row, column)
    return _grids[0]


def groups_of(shape: str) -> AgreementGroups:
    made = grid()
    return {
        "each for itself": AgreementGroups(),
        "tp": AgreementGroups(tp=made.whole),
        "cp": AgreementGroups(cp=made.whole),
        "cp x tp": AgreementGroups(cp=made.column, tp=made.row),
        "cp x tp, one group": AgreementGroups(cp=made.column, tp=made.row, grid=made.whole),
        "pp": AgreementGroups(tp=made.row, pp=made.column),
    }[shape]


# --- many random steps ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    transport: TransportName
    shape: str = "tp"
    steps: int = 300
    seed: int = 0
    skip: bool = False
    resets: bool = False
    clears: bool = False
    storage: bool = False
    failing_rank: int | None = None


@dataclass
class Outcome:
    """What must be the same on every rank."""

    transport: str = ""
    taken: list[tuple[int, str, list[int]]] = field(default_factory=list)
    """Step, queue and acks, or entries, in the order in which they were taken by agreement."""
    errors: list[tuple[int, str]] = field(default_factory=list)
    gone: dict[str, list[int]] = field(default_factory=dict)
    """Every ack, by queue, in the order in which it left by whatever means."""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    skips: int = 0
    forced: int = 0


def random_steps(plan: Plan) -> Outcome:
    rank = dist.get_rank()
    same = random.Random(plan.seed)
    here = random.Random(1000 * plan.seed + rank)
    outcome = Outcome(gone={"backups": [], "loads": []})
    queues = {
        name: AckQueue(lambda ack, name=name: outcome.gone[name].append(ack.burst.id))
        for name in ("backups", "loads")
    }
    posted: list[int] = []  # storage entries that every rank's storage will bring, some time
    brought = drained = 0  # of them: here so far, and by agreement taken

    counters: list[Any] = [AckCounter(name, queue) for name, queue in queues.items()]
    counters.append(QueueCounter("storage", lambda: brought - drained))
    digest = 1

    def idle() -> bool:
        return not plan.storage and not any(queues.values())

    with recorded() as calls:
        reducer = Agreement(
            groups=groups_of(plan.shape),
            transport=plan.transport,
            skip_idle=plan.skip,
            force_every=7,
            digest=lambda: digest,
        ).reducer(counters, idle=idle)
        calls.clear()  # rank 0 of a group sets it up
        record(reducer, calls)
        outcome.transport = reducer.transport.name
        number = 0
        for step in range(plan.steps + 60):
            busy = step < plan.steps and step % 50 < 30
            for queue in queues.values():
                for _ in range(same.choice((0, 0, 1, 2)) if busy else 0):
                    bad = plan.failing_rank == rank and number % 37 == 11
                    add_ack(queue, number, fails=f"burst {number} failed: copy" if bad else None)
                    number += 1
            if plan.storage and busy:
                posted += [len(posted)] * same.choice((0, 0, 1, 5))
            if plan.clears and same.random() < 0.05:
                queues["backups"].clear()
            if plan.resets and same.random() < 0.02:
                for queue in queues.values():
                    queue.clear()
                reducer.reset()
            for queue in queues.values():
                for ack in queue:
                    if here.random() < 0.3 or step >= plan.steps + 50:
                        ack.finish_event.done = True
            brought = here.randint(brought, len(posted))
            if step >= plan.steps + 50:
                brought = len(posted)

            try:
                *counts, entries = reducer.collect()
            except AgreementError as error:
                outcome.errors.append((step, str(error)))
                continue
            for (name, queue), count in zip(queues.items(), counts, strict=True):
                acks = numbers(queue.retire(count))
                if acks:
                    outcome.taken.append((step, name, acks))
                for ack in acks:
                    digest = (digest * 1000003 + ack + 1) & ((1 << 62) - 1)
            if entries:
                outcome.taken.append((step, "storage", posted[drained : drained + entries]))
                drained += entries
            reducer.issue()
        assert not any(queues.values()), "the last steps retire all"
        assert drained == len(posted)
        outcome.calls = list(calls)
    outcome.skips, outcome.forced = reducer.stats().skips, reducer.stats().forced
    reducer.close()
    return outcome


# --- controllers ---------------------------------------------------------------------------------


def controllers(
    transport: TransportName, steps: int, seed: int, skip: bool, failing_rank: int | None
) -> Any:
    """Real bursts on a device whose forward stream is held up now and then, other on each rank."""
    rank = dist.get_rank()
    same = random.Random(seed)
    here = random.Random(1000 * seed + rank)
    device = HostDevice()
    rig = make_rig(
        device,
        agreement=Agreement(
            groups=groups_of("tp"), transport=transport, skip_idle=skip, force_every=5
        ),
    )
    controller = rig.controller
    retired: list[tuple[int, list[int]]] = []
    errors: list[tuple[int, str]] = []
    on_host: list[Any] = []
    stall = None
    node = 0
    with recorded() as calls:
        for step in range(steps):
            if stall is None and here.random() < 0.3:
                stall = device.stall(device.current_stream())
            elif stall is not None and here.random() < 0.4:
                stall.release()
                stall = None
            busy = step % 40 < 25
            writes, loads = same.random() < 0.4, same.random() < 0.4
            if busy and writes:
                node += 1
                slots = rig.device_pages.alloc(4)
                if slots is not None:
                    written = controller.write(slots, node_id=node)
                    rig.device_pages.free(slots)
                    if written is not None:
                        on_host.append(written)
            if busy and loads and on_host and controller.has_free_load_back_slot():
                node += 1
                if failing_rank == rank and len(errors) == 0 and step > steps // 2:
                    device.fail_copy_call(2)
                target = controller.load(on_host[0], node_id=node)
                if target is not None:
                    controller.start_loading()
                    rig.device_pages.free(target)
            if len(on_host) > 4:
                rig.host_pages.free(on_host.pop(0))
            # A reset forgets what failed, if it comes first.
            flush, reset = same.random() < 0.03, same.random() < 0.02 and failing_rank is None
            if (flush or reset) and stall is not None:
                stall.release()
                stall = None
            if flush:
                controller.ack_write_queue.clear()
            if reset:
                controller.reset()
            try:
                acks = controller.poll()
            except AgreementError as error:
                errors.append((step, str(error)))
                continue
            if acks:
                retired.append((step, [ack.node_ids[0] for ack in acks]))
        if stall is not None:
            stall.release()
        controller.drain()
        device.synchronize()
        for _ in range(8):
            try:
                retired.append((-1, [ack.node_ids[0] for ack in controller.poll()]))
            except AgreementError as error:
                errors.append((-1, str(error)))
        assert not controller.has_inflight_device_transfers()
        calls = list(calls)
    stats = controller.stats().agreement
    assert stats is not None
    controller.stop()
    free = (rig.device_pages.available_pages, rig.host_pages.available_pages)
    return retired, errors, calls, free, (stats.rounds, stats.skips, stats.forced)


# --- single scenes -------------------------------------------------------------------------------


def one_is_empty(transport: TransportName) -> Any:
    """Rank 0's queue is empty, the others have three acks that are done."""
    queue = AckQueue()
    for number in range(0 if dist.get_rank() == 0 else 3):
        add_ack(queue, number, done=True)
    with recorded() as calls:
        reducer = Agreement(groups=groups_of("tp"), transport=transport).reducer(
            [AckCounter("loads", queue)], idle=lambda: False
        )
        calls.clear()
        record(reducer, calls)
        counts = []
        for _ in range(20):
            counts += reducer.collect()
            reducer.issue()
        reducer.reset()
        calls = list(calls)
    reducer.close()
    return counts, calls, len(queue)


def local_state_varies(transport: TransportName) -> set[int]:
    """Lengths of the payloads of 100 steps; pools and storage differ between ranks and steps."""
    rank = dist.get_rank()
    here = random.Random(rank)
    pools = 1 + rank % 3
    loads = AckQueue()
    stored = [0] * 3
    counters: list[Any] = [AckCounter("loads", loads)]
    # A counter for each pool that any rank may have; where it has none, nothing is ever ready.
    counters += [QueueCounter(f"pool {i}", lambda i=i: stored[i]) for i in range(3)]
    with recorded() as calls:
        reducer = Agreement(groups=groups_of("tp"), transport=transport).reducer(
            counters, idle=lambda: False
        )
        record(reducer, calls)
        for step in range(100):
            add_ack(loads, step, done=here.random() < 0.5)
            stored[:pools] = [max(have, here.choice((0, 5))) for have in stored[:pools]]
            counts = reducer.collect()
            loads.retire(counts[0])
            stored = [have - count for have, count in zip(stored, counts[1:], strict=True)]
            finish(loads)
            reducer.issue()
        reducer.reset()
    reducer.close()
    return {length for name, length in calls if name.startswith("round")}


def counters_differ() -> None:
    rank = dist.get_rank()
    counters = [QueueCounter(f"pool {i}", lambda: 0) for i in range(1 + rank % 3)]
    Agreement(groups=groups_of("tp")).reducer(counters, idle=lambda: False)


def feature_differs() -> None:
    grid()
    require_same(groups_of("tp").peers(), "rank_shard", dist.get_rank() < 2)


def two_tp_groups() -> Any:
    """Shard and ack groups of two TP groups of two."""
    with recorded() as calls:
        lists = [[0, 1], [2, 3]]
        shard = make_groups(lists, timeout=20)
        ack = make_groups(lists, timeout=20)
        mine = [group for group in (*shard, *ack) if group is not None]
        reducer = Agreement(groups=AgreementGroups(tp=mine[1]), transport="blocking").reducer(
            [], idle=lambda: False
        )
        reducer.collect()
    created = [ranks for name, ranks in calls if name == "new_group"]
    return created, [dist.get_process_group_ranks(group) for group in mine]


def groups_in_another_order() -> None:
    lists = [[0, 1], [2, 3]]
    make_groups(lists if dist.get_rank() < 3 else lists[::-1], timeout=20)


def group_of_others() -> None:
    """Every rank gives a group that two of them are in."""
    AgreementGroups(tp=dist.new_group([0, 1]))


def grid_of_a_row(transport: TransportName) -> None:
    made = grid()
    groups = AgreementGroups(cp=made.column, tp=made.row, grid=made.row)
    Agreement(groups, transport=transport).reducer([], idle=lambda: False)


def grid_on_some() -> None:
    made = grid()
    whole = None if dist.get_rank() == 3 else made.whole
    groups = AgreementGroups(cp=made.column, tp=made.row, grid=whole)
    Agreement(groups).reducer([], idle=lambda: False)


def killed_in_set_up(victim: int) -> None:
    tp = make_groups([[0, 1, 2, 3]], timeout=10)[0]
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    Agreement(AgreementGroups(tp=tp)).reducer([], idle=lambda: False)


def digests_differ(transport: TransportName, shape: str) -> Any:
    rank = dist.get_rank()
    queue = AckQueue()
    add_ack(queue, 0, done=True)
    reducer = Agreement(
        groups=groups_of(shape), transport=transport, digest=lambda: 6 if rank == 1 else 5
    ).reducer([AckCounter("loads", queue)], idle=lambda: False)
    for _ in range(2):
        try:
            queue.retire(reducer.collect()[0])
        except AgreementError as error:
            reducer.close()
            return str(error), error.ranks, len(queue)
        reducer.issue()
    raise AssertionError("no rank noticed")


def stage_behind(queued: int, ready: int, failing: bool, leaders: int) -> Any:
    """Two stages of two ranks: the first has `leaders` acks that are done, the second `queued`."""
    rank = dist.get_rank()
    leads = rank < 2
    queue = AckQueue()
    for number in range(leaders if leads else queued):
        fails = "load 1 failed: copy" if failing and rank == 3 and number == 1 else None
        add_ack(queue, number, done=leads or number < ready, fails=fails)
    events = [ack.finish_event for ack in queue]
    reducer = Agreement(groups=groups_of("pp"), transport="blocking").reducer(
        [AckCounter("loads", queue)], idle=lambda: False
    )
    try:
        (count,) = reducer.collect()
    except AgreementError as error:
        reducer.close()
        return str(error), len(queue), queue.retired
    retired = numbers(queue.retire(count))
    reducer.issue()
    reducer.close()
    return retired, [event.waits for event in events], len(queue)


def leaders_leave(said: Path) -> Any:
    """The first stage stops after its last poll and ends; the second polls when that began."""
    leads = dist.get_rank() < 2
    rig = make_rig(HostDevice(), agreement=Agreement(groups=groups_of("pp"), transport="blocking"))
    rig.controller.write(rig.take(), node_id=7)
    rig.settle()
    if not leads:
        while len(list(said.iterdir())) < 2:
            time.sleep(0.01)
    retired = [ack.node_ids for ack in rig.controller.poll()]
    if leads:
        (said / str(dist.get_rank())).touch()
        rig.controller.stop()
        os.kill(os.getpid(), signal.SIGKILL)
    return retired


def a_rank_gets(
    signal_number: int, victim: int, transport: TransportName, shape: str, timeout: float
) -> None:
    """Steps without end, on groups and boards that give up after `timeout` seconds."""
    lists = {"tp": [[0, 1, 2, 3]], "pp": [[0, 1], [2, 3], [0, 2], [1, 3]]}[shape]
    tp, *pp = [group for group in make_groups(lists, timeout=timeout) if group is not None]
    queue = AckQueue()
    reducer = Agreement(
        AgreementGroups(tp=tp, pp=pp[0] if pp else None), transport=transport, timeout=timeout
    ).reducer([AckCounter("loads", queue)], idle=lambda: False)
    number = 0
    while True:
        add_ack(queue, number, done=True)
        number += 1
        if dist.get_rank() == victim and number == 50:
            os.kill(os.getpid(), signal_number)
        queue.retire(reducer.collect()[0])
        reducer.issue()


def chosen(transport: TransportName, shape: str, elsewhere: int | None) -> Any:
    """What is used, what is logged, and a MIN; rank `elsewhere` believes to be on another node."""
    if dist.get_rank() == elsewhere:
        board_group.host_identity = lambda: "another machine"
    try:
        return _chosen(transport, shape)
    finally:
        board_group.host_identity = host_identity


def _chosen(transport: TransportName, shape: str) -> Any:
    groups = groups_of(shape)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: said.append(entry.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kvburst")
    logger.addHandler(handler)
    try:
        made = choose_transport(transport, groups, values=payload_length(1), timeout=30)
    finally:
        logger.removeHandler(handler)
    made.issue([dist.get_rank() + 3] * payload_length(1))
    values = made.collect()
    made.close()
    return made.name, said, values[0]
