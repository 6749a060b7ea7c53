"""How many rounds a step board's ring must hold: every interleaving of a few ranks is tried.

A model of `csrc/agreement/round_ring.h`: a rank's entry of round r lies at r % ring. The C++ tests
check that a board's ring is never below what is found to be enough here.
"""

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import pytest

Order = Literal["read first", "publish first"]


class Operation(NamedTuple):
    """One thing that a rank does at once; ``of`` is the rank whose entry it looks at."""

    kind: Literal["begin write", "end write", "see stamp", "take values"]
    round: int
    of: int


class OverwrittenError(Exception):
    """A rank met an entry that no longer is of the round it looks for."""


def program(rank: int, ranks: int, lag: int, order: Order, steps: int) -> list[Operation]:
    """What a rank does: a step for each round."""
    operations = []
    for step in range(1, steps + 1):
        write = [Operation("begin write", step, rank), Operation("end write", step, rank)]
        read = []
        if step > lag:
            read = [Operation("see stamp", step - lag, of) for of in range(ranks)]
            read += [Operation("take values", step - lag, of) for of in range(ranks)]
        operations += read + write if order == "read first" else write + read
    return operations


def rounds_done(operations: Sequence[Operation], kind: str) -> list[int]:
    """The last round that a write of that kind was for, by the number of operations done."""
    last = [0]
    for operation in operations:
        last.append(operation.round if operation.kind == kind else last[-1])
    return last


class Model:
    def __init__(self, ranks: int, lag: int, ring: int, order: Order, steps: int) -> None:
        self.ring = ring
        self.programs = [program(rank, ranks, lag, order, steps) for rank in range(ranks)]
        self.begun = [rounds_done(each, "begin write") for each in self.programs]
        self.ended = [rounds_done(each, "end write") for each in self.programs]

    def may_run(self, operation: Operation, at: Sequence[int]) -> bool:
        """Whether it can be done where every rank has come to ``at``. Raises OverwrittenError."""
        if operation.kind == "see stamp":
            newest = self.ended[operation.of][at[operation.of]]
            if newest >= operation.round + self.ring:
                raise OverwrittenError(
                    f"{operation}: its stamp is gone, it would be waited for for ever"
                )
            return newest >= operation.round
        if operation.kind == "take values":
            writing = self.begun[operation.of][at[operation.of]]
            if writing >= operation.round + self.ring:
                raise OverwrittenError(f"{operation}: round {writing} is being written over it")
        return True

    def run(self) -> int:
        """Tries every interleaving, and returns how many states there are.

        Raises OverwrittenError."""
        start = (0,) * len(self.programs)
        seen = {start}
        todo = deque([start])
        stuck = 0
        while todo:
            at = todo.popleft()
            can_go_on = False
            for rank, position in enumerate(at):
                if position == len(self.programs[rank]):
                    continue
                if self.may_run(self.programs[rank][position], at):
                    can_go_on = True
                    after = (*at[:rank], position + 1, *at[rank + 1 :])
                    if after not in seen:
                        seen.add(after)
                        todo.append(after)
            stuck += not can_go_on
        # The state in which all are done, and no other.
        assert stuck == 1
        return len(seen)


# Twice around the ring that is needed, and some: a state repeats itself a ring later.
SIZES = [(2, 1, 9), (2, 2, 13), (2, 3, 17), (3, 1, 7), (3, 2, 8)]


def least_ring(ranks: int, lag: int, steps: int, order: Order) -> int:
    ring = 1
    while True:
        try:
            Model(ranks, lag, ring, order, steps).run()
        except OverwrittenError:
            ring += 1
        else:
            return ring


@pytest.mark.parametrize(("ranks", "lag", "steps"), SIZES)
def test_ring_of_two_rounds_for_each_of_lag_is_never_written_over(
    ranks: int, lag: int, steps: int
) -> None:
    assert Model(ranks, lag, 2 * lag, "read first", steps).run() > steps


@pytest.mark.parametrize(("ranks", "lag", "steps"), SIZES)
def test_ring_of_one_round_less_is_written_over(ranks: int, lag: int, steps: int) -> None:
    with pytest.raises(OverwrittenError):
        Model(ranks, lag, 2 * lag - 1, "read first", steps).run()


@pytest.mark.parametrize(("ranks", "lag", "steps"), SIZES)
def test_publishing_before_reading_would_need_two_rounds_more(
    ranks: int, lag: int, steps: int
) -> None:
    assert least_ring(ranks, lag, steps, "publish first") == 2 * lag + 2
