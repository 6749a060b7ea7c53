"""Streams, communicators and launch order as an explicit-state model, explored to the last state.

Each rank has a host program that launches operations in a fixed order onto streams. A stream starts
an operation once the one before it has ended and the operations it waits for have. A *collective*
needs all ranks: it starts on each by itself, from then on occupies that rank's device, which has
room for one (a receive kernel spins on the device until its peers have come), and ends when every
rank has started it. Which rank launches, starts or ends what next is left open: every order is
tried. A state with work left and nothing that can happen is a deadlock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Order = Literal["forward stream", "side stream"]
COPY, SIDE, FORWARD = range(3)


@dataclass(frozen=True)
class Operation:
    """`collective` names what all ranks do together; None: a copy, or a kernel of this rank's.
    `waits` are positions of earlier operations of the same program."""

    stream: int
    collective: str | None = None
    waits: tuple[int, ...] = ()


Program = tuple[Operation, ...]


@dataclass(frozen=True)
class Scenario:
    """Loads and forwards of `ranks` ranks. `steps` are ("load", burst), ("forward", burst, layers):
    a forward that launches only so many layers was aborted; one of 0 layers never ran.

    `gate`: the first kernel of a forward waits for every exchange submitted so far. `fence`: a
    load, and with it its exchange, waits for the forwards launched before it. `flush`: what an
    aborted forward leaves is sent at its end.
    """

    order: Order
    ranks: int
    layers: int
    steps: tuple[tuple[str, int, int], ...]
    gate: bool = False
    fence: bool = True
    flush: bool = True

    def program(self, rank: int) -> Program:
        """What the host of one rank launches, in order."""
        ops: list[Operation] = []
        copied: dict[tuple[int, int], int] = {}
        sent: dict[tuple[int, int], int] = {}
        last_forward: list[int] = []

        def launch(stream: int, collective: str | None = None, waits: Sequence[int] = ()) -> int:
            ops.append(Operation(stream, collective, tuple(waits)))
            return len(ops) - 1

        def exchange(burst: int, layer: int, stream: int) -> None:
            own = [copied[burst, layer]] if (burst, layer) in copied else []
            fence = last_forward if self.fence and stream == SIDE else []
            sent[burst, layer] = launch(stream, f"exchange {burst}.{layer}", [*own, *fence])

        for step, burst, layers in self.steps:
            if step == "load":
                for layer in range(self.layers):
                    if layer % self.ranks == rank:
                        fence = last_forward if self.fence else []
                        copied[burst, layer] = launch(COPY, None, fence)
                if self.order == "side stream":
                    for layer in range(self.layers):
                        exchange(burst, layer, SIDE)
                continue
            gate = list(sent.values()) if self.order == "side stream" and self.gate else []
            for layer in range(layers):
                if self.order == "forward stream":
                    exchange(burst, layer, FORWARD)
                forward = launch(FORWARD, f"forward {burst}.{layer}", [*gate, sent[burst, layer]])
                last_forward = [forward]
            if self.order == "forward stream" and self.flush:
                for layer in range(layers, self.layers):
                    exchange(burst, layer, FORWARD)
        return tuple(ops)


@dataclass(frozen=True)
class Verdict:
    """`deadlock` describes the first one found, rank by rank; None: there is none."""

    states: int
    complete: bool
    """Whether every reachable state was looked at."""
    deadlock: str | None


# Of one rank: operations launched, operations ended as a bit set, the collective that occupies its
# device or -1.
RankState = tuple[int, int, int]


@dataclass(frozen=True)
class Model:
    programs: tuple[Program, ...]

    def explore(self, limit: int = 2_000_000) -> Verdict:
        """Looks at every reachable state, or at `limit` of them."""
        start: tuple[RankState, ...] = ((0, 0, -1),) * len(self.programs)
        seen = {start}
        todo = [start]
        while todo:
            state = todo.pop()
            successors = list(self.successors(state))
            if not successors and not self.is_final(state):
                return Verdict(len(seen), True, self.describe(state))
            for successor in successors:
                if successor not in seen:
                    if len(seen) >= limit:
                        return Verdict(len(seen), False, None)
                    seen.add(successor)
                    todo.append(successor)
        return Verdict(len(seen), True, None)

    def is_final(self, state: Sequence[RankState]) -> bool:
        return all(
            ended == (1 << len(program)) - 1
            for (_, ended, _), program in zip(state, self.programs, strict=True)
        )

    def ready(self, rank: int, state: RankState) -> Iterator[int]:
        """The next operation of each stream, where nothing holds it up."""
        launched, ended, _ = state
        heads = set()
        for number in range(launched):
            operation = self.programs[rank][number]
            if ended >> number & 1 or operation.stream in heads:
                continue
            heads.add(operation.stream)
            if all(ended >> other & 1 for other in operation.waits):
                yield number

    def successors(self, state: tuple[RankState, ...]) -> Iterator[tuple[RankState, ...]]:
        for rank, (launched, ended, running) in enumerate(state):
            program = self.programs[rank]

            def become(mine: RankState, rank: int = rank) -> tuple[RankState, ...]:
                return (*state[:rank], mine, *state[rank + 1 :])

            if launched < len(program):
                yield become((launched + 1, ended, running))
            for number in self.ready(rank, state[rank]):
                if program[number].collective is None:
                    yield become((launched, ended | 1 << number, running))
                elif running < 0:
                    yield become((launched, ended, number))
        names = {
            program[running].collective if running >= 0 else None
            for program, (_, _, running) in zip(self.programs, state, strict=True)
        }
        if len(names) == 1 and None not in names:
            yield tuple((launched, ended | 1 << on, -1) for launched, ended, on in state)

    def describe(self, state: Sequence[RankState]) -> str:
        return "; ".join(
            f"rank {rank} in {program[on].collective if on >= 0 else 'nothing'}"
            for rank, (program, (_, _, on)) in enumerate(zip(self.programs, state, strict=True))
        )

    def launch_order(self, rank: int) -> list[str]:
        """The collectives of a rank, both communicators merged, as its host launches them."""
        return [op.collective for op in self.programs[rank] if op.collective is not None]


def model_of(scenario: Scenario) -> Model:
    return Model(tuple(scenario.program(rank) for rank in range(scenario.ranks)))
