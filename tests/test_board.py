"""Step boards between real processes: what ranks agree on, and what they are told when one of them
is killed, stopped, interrupted or gone."""

import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import pytest

from kvburst import BoardError, BoardUseError, KVBurstError, StepBoard

SHARED_MEMORY = Path("/dev/shm")
# Longer than any test takes: who is named before that was not named for being late.
PATIENCE = 600.0
# A full run takes 20,000.
STEPS = int(os.environ.get("KVBURST_BOARD_STEPS", "1000"))

Body = Callable[..., None]
"""Called in a rank's process with the pipe to the test and the rank's boards."""

Shape = dict[str, Any]


# --- processes -----------------------------------------------------------------------------


class Rank:
    """A process that makes a rank's boards, and then runs ``body``."""

    def __init__(
        self, context: SpawnContext, rank: int, body: Body, shapes: tuple[Shape, ...]
    ) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=run_rank, args=(theirs, rank, body, shapes))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, words: object = None) -> None:
        self.pipe.send(words)

    def hear(self) -> Any:
        assert self.pipe.poll(60), "the rank said nothing for a minute"
        return self.pipe.recv()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait_until(self, state: str) -> None:
        """Until the kernel has found it asleep (S) or stopped (T) several times in a row."""
        found = 0
        while found < 5:
            now = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0]
            found = found + 1 if now == state else 0
            time.sleep(0.001)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run_rank(pipe: Connection, rank: int, body: Body, shapes: tuple[Shape, ...]) -> None:
    if rank == 0:
        boards = [StepBoard.create(**shape) for shape in shapes]
        pipe.send([(board.name, board.nonce) for board in boards])
        assert pipe.recv() == "all attached"
        for board in boards:
            board.unlink()
    else:
        boards = [
            StepBoard.attach(name, nonce, rank=rank, **shape)
            for (name, nonce), shape in zip(pipe.recv(), shapes, strict=True)
        ]
    pipe.send("ready")
    body(pipe, *boards)


@contextmanager
def ranks_of(
    count: int,
    body: Body,
    *,
    values: int = 1,
    timeout: float = PATIENCE,
    lags: tuple[int, ...] = (1,),
) -> Iterator[list[Rank]]:
    """Processes around one board for each of ``lags``, whose names are gone. They end with it."""
    context = multiprocessing.get_context("spawn")
    shapes = tuple(
        {"ranks": count, "values": values, "timeout": timeout, "lag": lag} for lag in lags
    )
    with ExitStack() as ends:
        ranks = []
        for number in range(count):
            ranks.append(Rank(context, number, body, shapes))
            ends.callback(ranks[-1].end)
        offers = ranks[0].hear()
        for rank in ranks[1:]:
            rank.tell(offers)
        for rank in ranks[1:]:
            assert rank.hear() == "ready"
        ranks[0].tell("all attached")
        assert ranks[0].hear() == "ready"
        assert not any((SHARED_MEMORY / name).exists() for name, _ in offers)
        yield ranks


# --- agreeing ------------------------------------------------------------------------------


def value_of(step: int, rank: int, place: int) -> int:
    return random.Random(f"{step} {rank} {place}").randint(-(2**63), 2**63 - 1)


def publish_and_read(pipe: Connection, board: StepBoard) -> None:
    """Every step: read the step before, then publish; with a few pauses of the rank's own."""
    pauses = random.Random(board.rank)
    seen = []
    for step in range(STEPS):
        if step:
            seen.append(board.read())
        if pauses.random() < 0.01:
            time.sleep(pauses.random() / 1000)
        board.publish([value_of(step, board.rank, place) for place in range(board.values)])
    seen.append(board.read())
    pipe.send(seen)
    board.close()


def test_eight_ranks_read_the_same_minima_step_by_step() -> None:
    with ranks_of(8, publish_and_read, values=3) as ranks:
        seen = [rank.hear() for rank in ranks]
    expected = [
        [min(value_of(step, rank, place) for rank in range(8)) for place in range(3)]
        for step in range(STEPS)
    ]
    assert all(each == expected for each in seen)


def use_two_boards(pipe: Connection, one: StepBoard, other: StepBoard) -> None:
    seen = []
    for step in range(100):
        if step >= 1:
            seen.append(one.read())
        if step >= 3:
            seen.append(other.read())
        one.publish([step * (one.rank + 1)])
        other.publish([-step * (one.rank + 1)])
    pipe.send(seen)


def test_two_boards_of_the_same_ranks_do_not_mix() -> None:
    with ranks_of(3, use_two_boards, lags=(1, 3)) as ranks:
        seen = [rank.hear() for rank in ranks]
    expected = []
    for step in range(100):
        expected += [[step - 1]] if step >= 1 else []
        expected += [[-3 * (step - 3)]] if step >= 3 else []
    assert seen == [expected] * 3


def test_other_threads_run_while_a_read_blocks() -> None:
    one, other = pair()
    one.publish([1])
    seen: list[list[int]] = []
    reader = threading.Thread(target=lambda: seen.append(one.read()))
    reader.start()
    while not one.stats.sleeps:
        time.sleep(0.001)
    other.publish([-1])
    reader.join(timeout=60)
    assert seen == [[-1]]
    assert other.stats.wakes == 1


# --- ranks that go missing -----------------------------------------------------------------


def go_on_until_told(pipe: Connection, board: StepBoard) -> None:
    """Steps, until a read raises: then what it raised, and when. The last rank stops after three
    steps and waits to be told."""
    try:
        for step in range(1_000_000):
            if step:
                board.read()
            board.publish([step])
            if step == 2 and board.rank == board.ranks - 1:
                pipe.send("published three rounds")
                pipe.recv()
                board.close()
                pipe.send("closed")
                pipe.recv()
    except BoardError as error:
        pipe.send((error.ranks, str(error), time.monotonic()))
        pipe.recv()


def test_killed_rank_is_named_by_the_others_within_a_second() -> None:
    with ranks_of(4, go_on_until_told) as ranks:
        *others, last = ranks
        assert last.hear() == "published three rounds"
        killed = time.monotonic()
        last.send_signal(signal.SIGKILL)
        for rank in others:
            named, message, when = rank.hear()
            assert named == (3,)
            assert f"rank 3 (pid {last.pid}) ended without closing its board" in message
            assert "round 4 of the board" in message
            assert "its last one is 3" in message
            assert when - killed < 1.0


def test_rank_that_closed_its_board_is_named_by_the_others() -> None:
    with ranks_of(3, go_on_until_told) as ranks:
        *others, last = ranks
        assert last.hear() == "published three rounds"
        last.tell()
        assert last.hear() == "closed"
        for rank in others:
            named, message, _ = rank.hear()
            assert named == (2,)
            assert f"rank 2 (pid {last.pid}) closed its board" in message


def step_until_told(pipe: Connection, board: StepBoard) -> None:
    try:
        for step in range(1_000_000):
            board.publish([step])
            board.read()
            if step == 100:
                pipe.send("a hundred steps")
            time.sleep(0.001)
    except BoardError as error:
        pipe.send((error.ranks, str(error)))
        pipe.recv()


@pytest.mark.slow
def test_stopped_rank_is_named_by_the_timeout_and_told_when_it_goes_on() -> None:
    with ranks_of(3, step_until_told, timeout=1.0) as ranks:
        stopped, *others = ranks
        for rank in ranks:
            assert rank.hear() == "a hundred steps"
        stopped.send_signal(signal.SIGSTOP)
        for rank in others:
            named, message = rank.hear()
            assert named == (0,)
            assert f"rank 0 (pid {stopped.pid}) did not publish it within 1 s" in message
        stopped.send_signal(signal.SIGCONT)
        named, message = stopped.hear()
        assert named == (1, 2)
        assert f"rank 1 (pid {others[0].pid}) gave up on another rank" in message


def read_when_told(pipe: Connection, board: StepBoard) -> None:
    if board.rank == 1:
        pipe.recv()
    board.publish([board.rank])
    pipe.send(board.read())


@pytest.mark.slow
def test_rank_that_was_itself_stopped_does_not_blame_the_others() -> None:
    with ranks_of(2, read_when_told, timeout=3.0) as (waits, late):
        waits.wait_until("S")
        waits.send_signal(signal.SIGSTOP)
        waits.wait_until("T")
        # It stands for longer than the timeout, which it did not wait.
        time.sleep(3.5)
        waits.send_signal(signal.SIGCONT)
        waits.wait_until("S")
        late.tell()
        assert waits.hear() == [0]


def fork_and_go_on(pipe: Connection, board: StepBoard) -> None:
    """The last rank forks a child, which has its files and its memory, and ends after it."""
    if board.rank == board.ranks - 1:
        child = os.fork()
        if child == 0:
            try:
                board.publish([7])
                pipe.send("published")
            except BoardUseError as error:
                pipe.send(str(error))
            board.close()
            pipe.send("closed")
            pipe.poll(None)
            os._exit(0)
    go_on_until_told(pipe, board)


def test_killed_rank_is_named_although_a_child_of_its_own_lives() -> None:
    with ranks_of(2, fork_and_go_on) as (other, last):
        # From the rank, and from its child, which closes nothing for it.
        heard = {last.hear() for _ in range(3)}
        (refused,) = heard - {"closed", "published three rounds"}
        assert f"belongs to process {last.pid}, and not to process" in refused
        last.send_signal(signal.SIGKILL)
        named, message, _ = other.hear()
        assert named == (1,)
        assert f"rank 1 (pid {last.pid}) ended" in message


def read_without_descriptors(pipe: Connection, board: StepBoard) -> None:
    if board.rank == 1:
        pipe.recv()
        board.publish([1])
        pipe.recv()
        return
    board.publish([2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (pipe.fileno() + 1, pipe.fileno() + 1))
    held = []
    with suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    agreed = board.read()
    pipe.send((agreed, board.stats.look_ups))


def test_late_rank_is_not_taken_for_dead_by_one_that_can_open_no_file() -> None:
    with ranks_of(2, read_without_descriptors) as (reader, late):
        reader.wait_until("S")
        time.sleep(0.2)  # it looks up every 50 ms
        late.tell()
        agreed, look_ups = reader.hear()
        assert agreed == [1]
        assert look_ups > 0


def be_interrupted(pipe: Connection, board: StepBoard) -> None:
    if board.rank == 1:
        pipe.recv()
        board.publish([1])
        return
    board.publish([2])
    try:
        board.read()
    except KeyboardInterrupt:
        pipe.send("interrupted")
    pipe.send(board.read())


def test_interrupt_ends_a_read_and_the_round_can_be_read_again() -> None:
    with ranks_of(2, be_interrupted) as (reader, late):
        reader.wait_until("S")
        reader.send_signal(signal.SIGINT)
        assert reader.hear() == "interrupted"
        late.tell()
        assert reader.hear() == [1]


# --- what is left --------------------------------------------------------------------------


def create_and_wait(pipe: Connection) -> None:
    board = StepBoard.create(ranks=2, values=1, timeout=1)
    pipe.send(board.name)
    pipe.recv()


def test_segment_of_a_rank_killed_before_it_was_unlinked_is_swept() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=create_and_wait, args=(theirs,))
    process.start()
    try:
        assert pipe.poll(60)
        name = pipe.recv()
        StepBoard.sweep()
        assert (SHARED_MEMORY / name).exists()
    finally:
        process.kill()
        process.join()
    StepBoard.sweep()
    assert not (SHARED_MEMORY / name).exists()


# --- refusals ------------------------------------------------------------------------------


def pair(values: int = 1, lag: int = 1) -> tuple[StepBoard, StepBoard]:
    """Both ranks of a board."""
    one = StepBoard.create(ranks=2, values=values, timeout=PATIENCE, lag=lag)
    try:
        other = StepBoard.attach(
            one.name, one.nonce, rank=1, ranks=2, values=values, timeout=PATIENCE, lag=lag
        )
    finally:
        one.unlink()
    return one, other


def refusal(call: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, 2], "values: 2 are given, a round of this board has 3"),
        ([1, 2, 3, 4], "values: 4 are given, a round of this board has 3"),
        ([1, 2**63, 3], "values: number 1 is 9223372036854775808, which 64 bits do not hold"),
        ([-(2**63) - 1, 2, 3], "values: number 0 is -9223372036854775809, which 64 bits"),
        ([1, 2, 3.0], "values: number 2 is 3.0, and not an integer"),
        ([1, "2", 3], "values: number 1 is '2', and not an integer"),
    ],
)
def test_bad_values_are_refused_and_nothing_is_published(values: Any, words: str) -> None:
    one, other = pair(values=3)
    assert words in refusal(lambda: one.publish(values), BoardUseError)
    assert one.rounds == 0
    one.publish([2**63 - 1, -(2**63), True])
    other.publish([2**63 - 1, 0, 5])
    assert one.read() == other.read() == [2**63 - 1, -(2**63), 1]


def test_rounds_are_read_in_turn() -> None:
    one, _other = pair()
    assert "publish round 1 first" in refusal(one.read, BoardUseError)
    one.publish([1])
    words = "round 1 is not read yet, and with a lag of 1 it must be before round 2"
    assert words in refusal(lambda: one.publish([2]), BoardUseError)
    assert one.rounds == 1


def test_closed_board_refuses_rounds_and_tells_the_others() -> None:
    one, other = pair()
    one.close()
    one.close()
    assert "closed" in refusal(lambda: one.publish([1]), BoardUseError)
    assert "closed" in refusal(one.read, BoardUseError)
    other.publish([1])
    with pytest.raises(BoardError, match=r"rank 0 \(pid \d+\) closed its board") as caught:
        other.read()
    assert caught.value.ranks == (0,)
    assert isinstance(caught.value, KVBurstError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ranks": 0}, "ranks: 0 must be from 1 to 1024"),
        ({"ranks": 2**40}, "ranks: 1099511627776 must be from 0 to"),
        ({"values": 0}, "values: 0 must be from 1 to 31"),
        ({"values": 32}, "values: 32 must be from 1 to 31"),
        ({"lag": 0}, "lag: 0 must be from 1 to 16"),
        ({"lag": 17}, "lag: 17 must be from 1 to 16"),
        ({"timeout": 0.0}, "timeout: 0 s must be above 0"),
        ({"timeout": float("nan")}, "timeout: nan s must be above 0"),
        ({"timeout": float("inf")}, "timeout: inf s must be above 0 and at most"),
    ],
)
def test_shape_out_of_bounds_is_refused_by_name(arguments: Shape, words: str) -> None:
    shape: Shape = {"ranks": 2, "values": 1, "timeout": 1.0, "lag": 1} | arguments
    assert words in refusal(lambda: StepBoard.create(**shape), BoardUseError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 2}, "rank: 2 must be from 0 to 1"),
        ({"rank": -1}, "rank: -1 must be from 0 to"),
        ({"nonce": -1}, "nonce: -1 must be from 0 to"),
        ({"name": "/etc/passwd"}, "name: '/etc/passwd' is not 'kvburst-' and 32 digits"),
    ],
)
def test_attaching_with_bad_arguments_is_refused_by_name(arguments: Shape, words: str) -> None:
    one = StepBoard.create(ranks=2, values=1, timeout=1)
    one.unlink()
    given: Shape = {
        "name": one.name,
        "nonce": one.nonce,
        "rank": 1,
        "ranks": 2,
        "values": 1,
        "timeout": 1,
    }
    assert words in refusal(lambda: StepBoard.attach(**given | arguments), BoardUseError)


def test_segment_that_is_not_the_one_meant_is_refused_by_name() -> None:
    one = StepBoard.create(ranks=3, values=2, timeout=1)

    def attach(**other: Any) -> str:
        given = {"nonce": one.nonce, "rank": 1, "ranks": 3, "values": 2, "timeout": 1}
        message = refusal(lambda: StepBoard.attach(one.name, **given | other), BoardError)
        assert one.name in message
        return message

    try:
        assert f"its nonce is {one.nonce}" in attach(nonce=one.nonce ^ 1)
        assert "its number of ranks is 3, and not 2" in attach(ranks=2)
        assert "its number of values is 2, and not 5" in attach(values=5)
        assert "its lag is 1, and not 4" in attach(lag=4)
        assert "rank 0 is attached already" in attach(rank=0)
        os.chmod(SHARED_MEMORY / one.name, 0o644)
        assert "its mode is 644, and not 600" in attach()
    finally:
        one.unlink()
    assert "No such file or directory" in attach()


def test_error_about_a_segment_names_no_ranks() -> None:
    one = StepBoard.create(ranks=2, values=1, timeout=1)
    one.unlink()
    with pytest.raises(BoardError) as caught:
        StepBoard.attach(one.name, one.nonce, rank=1, ranks=2, values=1, timeout=1)
    assert caught.value.ranks == ()
