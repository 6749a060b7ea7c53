"""What it costs a scheduler step that ranks agree on the acks they retire.

``agree_us`` is the time on the calling thread of one step's ``collect`` and ``issue``, of every
rank; ``steps_per_s`` how many steps the slowest rank made, against steps without any agreement.
The baseline of ``agree_us`` is ``blocking`` in the same run: an all_reduce that each step waits
for.

Ranks are processes on this machine, joined by gloo. A step sleeps, so that more ranks than cores do
not measure the cores: for ``step_ms``, give or take a tenth, alike on all ranks as their forwards
are, and a hundredth of each rank's own. In each step one ack of either queue becomes ready, and
what the ranks agree on is retired.

``injected_ms``: the collective is a stub that takes so long, whatever the machine; the board needs
no collective and is as it is. The default is a public report: 3.2 ms a collective on two sockets
with four ranks.
"""

import multiprocessing
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
import torch.distributed as dist
import typer
from harness import (
    JsonFile,
    Outputs,
    PlotFile,
    Quick,
    Row,
    Tick,
    Value,
    new_app,
    one_line_errors,
    progress,
    report,
    take_turns,
    whole_number,
    whole_numbers,
)

from kvburst._core import KVBurstError, StepBoard
from kvburst.agreement.board_group import connect_board
from kvburst.agreement.counters import ListCounter
from kvburst.agreement.groups import GroupPeers
from kvburst.agreement.reducer import AckReducer, payload_length
from kvburst.agreement.transports import Blocking, Board, Collective, GroupMin, Pipelined, Transport

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

BENCHMARK = "ack_latency"
TRANSPORTS = ("blocking", "pipelined", "board")
ALONE = "none"
QUEUES = ("write", "load")
# Counts of either queue, and what the reducer adds.
VALUES = payload_length(len(QUEUES))
STEPS_A_TURN = 50
COMMON_JITTER, OWN_JITTER = 0.1, 0.01
SECONDS = 120.0
S2_MS = "3.2"

# The budgets.
BUDGET_RANKS, BUDGET_RATIO = 4, 20.0
BUDGET_STEP_MS, BUDGET_KEPT = 5, 0.95


@dataclass(frozen=True)
class Setting:
    """One scenario, measured with every transport in turn."""

    ranks: int
    step_ms: int
    injected_ms: float


# --- a rank --------------------------------------------------------------------------------


class InjectedLatency:
    """Stands for a collective over a network: the MIN is there so long after this rank came.

    A board carries the values, so that they are really agreed on.
    """

    def __init__(self, board: StepBoard, milliseconds: float) -> None:
        self._board = board
        self._seconds = milliseconds / 1000

    def start(self, values: torch.Tensor) -> "InjectedWork":
        # As an array: the stub is not to add operations of torch to those of the transport.
        array = values.numpy()
        self._board.publish(array.tolist())
        return InjectedWork(self._board, array, time.perf_counter() + self._seconds)


class InjectedWork(NamedTuple):
    board: StepBoard
    values: "NDArray[int64]"
    ends: float

    def wait(self) -> None:
        left = self.ends - time.perf_counter()
        if left > 0:
            time.sleep(left)
        self.values[:] = self.board.read()


class ReadyAck:
    """An ack of a burst that is complete, and its own finish event."""

    @property
    def finish_event(self) -> "ReadyAck":
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@dataclass
class Arm:
    """Steps with one transport, or with none; what it measured is in ``samples``."""

    setting: Setting
    transport: Transport | None
    start_together: Callable[[], object]
    common_chance: random.Random
    own_chance: random.Random
    agree_us: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queues: list[list[ReadyAck]] = [[] for _ in QUEUES]
        self._reducer: AckReducer | None = None
        if self.transport is not None:
            counters = [
                ListCounter(name, partial(list.__getitem__, self._queues, place))
                for place, name in enumerate(QUEUES)
            ]
            self._reducer = AckReducer(counters, self.transport, GroupPeers([everybody()]))

    def turn(self) -> float:
        """A number of steps; the seconds they took. Every step retires what it is to."""
        pauses = [self._step_seconds() for _ in range(STEPS_A_TURN)]
        self.start_together()
        begin = time.perf_counter()
        for pause in pauses:
            if self._reducer is not None:
                self._agree(self._reducer)
            if pause:
                time.sleep(pause)
        self.seconds.append(time.perf_counter() - begin)
        if self._reducer is not None:
            left = [len(queue) for queue in self._queues]
            if left != [self._reducer.transport.lag] * len(QUEUES):
                raise KVBurstError(f"{self._reducer.transport.name}: {left} acks are left over")
            self._reducer.reset()
        for queue in self._queues:
            queue.clear()
        return self.seconds[-1]

    def forget(self) -> None:
        """What was measured so far was to warm up."""
        self.agree_us.clear()
        self.seconds.clear()

    def _agree(self, reducer: AckReducer) -> None:
        for queue in self._queues:
            queue.append(ReadyAck())
        begin = time.perf_counter_ns()
        counts = reducer.collect()
        for queue, count in zip(self._queues, counts, strict=True):
            del queue[:count]
        reducer.issue()
        self.agree_us.append((time.perf_counter_ns() - begin) / 1000)

    def _step_seconds(self) -> float:
        common = 1 + COMMON_JITTER * self.common_chance.uniform(-1, 1)
        own = 1 + OWN_JITTER * self.own_chance.uniform(-1, 1)
        return self.setting.step_ms / 1000 * common * own


def everybody() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "the ranks have joined"
    return group


def new_board() -> StepBoard:
    connection = connect_board(values=VALUES, timeout=SECONDS)
    if connection.board is None:
        raise KVBurstError(f"no board: {connection.reason}")
    return connection.board


def arms_of(setting: Setting) -> dict[str, Arm]:
    """Every rank makes them in this order, since making them is collective."""
    rank = dist.get_rank()

    def collective() -> Collective:
        if setting.injected_ms:
            return InjectedLatency(new_board(), setting.injected_ms)
        return GroupMin(everybody())

    transports: dict[str, Transport | None] = {
        ALONE: None,
        "blocking": Blocking([collective()]),
        "pipelined": Pipelined(collective()),
        "board": Board(new_board()),
    }
    return {
        name: Arm(setting, transport, dist.barrier, random.Random(0), random.Random(1 + rank))
        for name, transport in transports.items()
    }


def measure(settings: Sequence[Setting], turns: int, pipe: Connection) -> None:
    """Every setting in turn; after each round a sign of life, then what was measured."""
    for setting in settings:
        arms = arms_of(setting)
        for arm in arms.values():
            arm.turn()
            arm.forget()
        take_turns(
            {name: arm.turn for name, arm in arms.items()},
            turns,
            warm_up=0,
            tick=partial(pipe.send, "round"),
        )
        for arm in arms.values():
            if arm.transport is not None:
                arm.transport.close()
        pipe.send({name: (arm.agree_us, arm.seconds) for name, arm in arms.items()})


def run_rank(
    rank: int,
    ranks: int,
    rendezvous: str,
    settings: Sequence[Setting],
    turns: int,
    pipe: Connection,
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=SECONDS),
        )
        measure(settings, turns, pipe)
        dist.destroy_process_group()
    except Exception:
        pipe.send(f"rank {rank} of {ranks}: {traceback.format_exc()}")


# --- all ranks -----------------------------------------------------------------------------

Measured = dict[str, tuple[list[float], list[float]]]
"""By arm: of every step the microseconds of the agreement, of every turn the seconds it took."""


@contextmanager
def rank_processes(
    ranks: int, settings: Sequence[Setting], turns: int
) -> Iterator[list[Connection]]:
    """One process a rank, which measures; the pipes they report to. They end with the context."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        processes = []
        try:
            for rank in range(ranks):
                pipe, theirs = context.Pipe(duplex=False)
                arguments = (rank, ranks, f"{folder}/rendezvous", settings, turns, theirs)
                process = context.Process(target=run_rank, args=arguments)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(pipe)
            yield pipes
        finally:
            for process in processes:
                process.kill()
                process.join()


def hear(pipe: Connection) -> Measured | None:
    """What a rank measured, or nothing after a round that goes on. Raises what it raised."""
    if not pipe.poll(SECONDS):
        raise KVBurstError(f"a rank said nothing for {SECONDS:g} s")
    try:
        said = pipe.recv()
    except EOFError as error:
        raise KVBurstError("a rank ended before it had measured everything") from error
    if isinstance(said, dict):
        return said
    if said != "round":
        raise KVBurstError(said)
    return None


def measured_by_all(pipes: Sequence[Connection], turns: int, tick: partial[None]) -> Measured:
    """One setting: the steps of all ranks, and of each turn the seconds of the slowest."""
    of_ranks: list[Measured] = []
    for pipe in pipes:
        for _ in range(turns):
            hear(pipe)
            if not of_ranks:
                tick()
        measured = hear(pipe)
        assert measured is not None, "a rank made more rounds than it was told to"
        of_ranks.append(measured)
    return {
        name: (
            [sample for measured in of_ranks for sample in measured[name][0]],
            [
                max(times)
                for times in zip(*(measured[name][1] for measured in of_ranks), strict=True)
            ],
        )
        for name in of_ranks[0]
    }


def rows_of(setting: Setting, measured: Measured) -> list[Row]:
    rates = {name: [STEPS_A_TURN / took for took in times] for name, (_, times) in measured.items()}
    rows = []
    for name in TRANSPORTS:
        scenario: dict[str, Value] = {
            "transport": name,
            "ranks": setting.ranks,
            "step_ms": setting.step_ms,
            "injected_ms": setting.injected_ms,
        }
        row = partial(Row.of, BENCHMARK, scenario, simulated=setting.injected_ms > 0)
        baseline = measured["blocking"][0] if name != "blocking" else None
        rows.append(row("agree_us", "us", measured[name][0], baseline=baseline))
        if setting.step_ms:
            rows.append(
                row("steps_per_s", "1/s", rates[name], baseline=rates[ALONE], better="higher")
            )
    return rows


def settings_of(ranks: Sequence[int], steps_ms: Sequence[int], injected_ms: float) -> list[Setting]:
    """Real collectives at every step; injected latency where steps are not empty."""
    settings = []
    for count in ranks:
        settings += [Setting(count, step, 0.0) for step in steps_ms]
        settings += [Setting(count, step, injected_ms) for step in steps_ms if step and injected_ms]
    return settings


def run(ranks: Sequence[int], settings: Sequence[Setting], turns: int, tick: Tick) -> list[Row]:
    rows = []
    for count in ranks:
        own = [setting for setting in settings if setting.ranks == count]
        with rank_processes(count, own, turns) as pipes:
            for setting in own:
                words = f"{count} ranks, steps of {setting.step_ms} ms"
                measured = measured_by_all(pipes, turns, partial(tick, words))
                rows += rows_of(setting, measured)
    return rows


# --- the command ---------------------------------------------------------------------------


def milliseconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number") from error
    if not 0 <= number <= 1000:
        raise typer.BadParameter(f"{number:g} is not from 0 to 1000")
    return number


app = new_app("What it costs a scheduler step that ranks agree on the acks they retire.")


@app.command()
def ack_latency(
    ranks: Annotated[str, typer.Option(metavar="N,N,...", help="Processes that agree.")] = "2,4,8",
    steps_ms: Annotated[
        str, typer.Option("--step-ms", metavar="N,N,...", help="Milliseconds that a step sleeps.")
    ] = "0,1,5",
    injected_ms: Annotated[
        float,
        typer.Option(
            parser=milliseconds,
            metavar="X",
            help="Milliseconds of a collective in the scenarios with a stub; 0: none of them.",
        ),
    ] = S2_MS,  # type: ignore[assignment]  # the parser reads it
    turns: Annotated[
        int,
        typer.Option(
            parser=whole_number(1, 10_000),
            metavar="N",
            help=f"Turns of {STEPS_A_TURN} steps that every transport has.",
        ),
    ] = 10,
    quick: Quick = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Agree over a blocking all_reduce, a pipelined one, and a board in shared memory, in turn.

    \b
    The budgets: at 4 ranks the board takes the calling thread 20 times less than the blocking
    all_reduce; with 3.2 ms a collective and steps of 5 ms, pipelined and board keep 95 of 100 steps
    of those without agreement.

    \b
    Examples:
      python benchmarks/ack_latency.py
      python benchmarks/ack_latency.py --ranks 4 --step-ms 5 --json ack_latency.json
    """
    rank_counts = whole_numbers("--ranks", ranks, least=1, most=64)
    step_lengths = whole_numbers("--step-ms", steps_ms, least=0, most=1000)
    outputs = Outputs(json_file, plot_file)
    turns = 2 if quick else turns
    settings = settings_of(rank_counts, step_lengths, injected_ms)
    with one_line_errors(), progress(len(settings) * turns) as tick:
        rows = run(rank_counts, settings, turns, tick)
    report(rows, outputs, title="Agreeing on acks", notes=_notes(rows))


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = [
        "baseline of agree_us: the blocking all_reduce of the same run; of steps_per_s: steps"
        " without agreement",
        "injected ms above 0: simulated, the collective is a stub that takes so long; the board"
        " takes what it takes",
    ]

    def verdict(kept: bool, words: str) -> None:
        notes.append(f"budget {'kept' if kept else 'missed'}: {words}")

    for row in rows:
        scenario = row.scenario
        transport, step, injected = (
            scenario[key] for key in ("transport", "step_ms", "injected_ms")
        )
        if scenario["ranks"] != BUDGET_RANKS or row.ratio is None:
            continue
        if row.metric == "agree_us" and transport == "board" and not injected:
            verdict(
                row.ratio >= BUDGET_RATIO,
                f"{BUDGET_RANKS} ranks, steps of {step} ms: the board takes {row.ratio:.0f} times"
                f" less than blocking (budget: at least {BUDGET_RATIO:g})",
            )
        elif row.metric == "steps_per_s" and step == BUDGET_STEP_MS and injected:
            words = (
                f"{BUDGET_RANKS} ranks, steps of {step} ms, {injected:g} ms a collective:"
                f" {transport} keeps {100 * row.ratio:.1f} of 100 steps"
            )
            if transport == "blocking":
                notes.append(words)
            else:
                verdict(row.ratio >= BUDGET_KEPT, f"{words} (budget: at least 95)")
    return notes


if __name__ == "__main__":
    app()
