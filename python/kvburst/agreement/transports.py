"""How the numbers of one round travel: the element-wise MIN over ranks, now or a step later."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from kvburst._core import BoardError, StepBoard
from kvburst.agreement.errors import AgreementError, first_line
from kvburst.agreement.groups import ranks_text

TransportName = Literal["blocking", "pipelined", "board"]


class Transport(Protocol):
    """One round at a time: `issue`, then `collect`. Every rank makes the same calls.

    Belongs to one thread. Raises AgreementError when a rank is missing.
    """

    @property
    def name(self) -> TransportName: ...
    @property
    def lag(self) -> int:
        """Steps between `issue` and `collect`: 0 where `collect` itself waits for the network."""
        ...

    def issue(self, values: Sequence[int]) -> None:
        """Start a round with this rank's values, each of 64 bits. Does not block."""
        ...

    def collect(self) -> list[int]:
        """The MIN over ranks of each value of the round issued. Blocks until all have issued it."""
        ...

    def close(self) -> None:
        """What is in flight is dropped."""
        ...


class _Work(Protocol):
    def wait(self) -> object: ...


class Collective(Protocol):
    """Something that takes the MIN over ranks, in place."""

    def start(self, values: torch.Tensor) -> _Work:
        """Begin; `values` is the result once `wait` has returned."""
        ...


class GroupMin:
    """The all_reduce of a process group that moves CPU tensors; bounded by the group's timeout."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, values: torch.Tensor) -> _Work:
        work: _Work = dist.all_reduce(
            values, op=dist.ReduceOp.MIN, group=self._group, async_op=True
        )
        return work

    def __str__(self) -> str:
        return f"all_reduce over {ranks_text(dist.get_process_group_ranks(self._group))}"


class _Round:
    """The tensor of a collective under way."""

    def __init__(self, number: int, values: Sequence[int]) -> None:
        self.number = number
        self.values = torch.tensor(values, dtype=torch.int64)

    def failed(self, collective: Collective, error: RuntimeError) -> AgreementError:
        return AgreementError(
            f"round {self.number}: {collective} failed, a rank has ended or did not come within "
            f"the group's timeout: {first_line(error)}"
        )


class Blocking:
    """A chain of collectives, each waited for: a MIN of MINs. No collective: one rank, alone."""

    name: Literal["blocking"] = "blocking"
    lag = 0

    def __init__(self, collectives: Sequence[Collective]) -> None:
        self._collectives = tuple(collectives)
        self._rounds = 0
        self._round: _Round | None = None

    def issue(self, values: Sequence[int]) -> None:
        self._round = _Round(self._rounds, values)
        self._rounds += 1

    def collect(self) -> list[int]:
        assert self._round is not None, "collect without issue"
        current, self._round = self._round, None
        for collective in self._collectives:
            try:
                collective.start(current.values).wait()
            except RuntimeError as error:
                raise current.failed(collective, error) from error
        return [int(value) for value in current.values.tolist()]

    def close(self) -> None:
        self._round = None


class Pipelined:
    """One collective, started in a step and consumed in the next: normally it is long done."""

    name: Literal["pipelined"] = "pipelined"
    lag = 1

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._rounds = 0
        self._under_way: tuple[_Round, _Work] | None = None

    def issue(self, values: Sequence[int]) -> None:
        current = _Round(self._rounds, values)
        self._rounds += 1
        try:
            self._under_way = current, self._collective.start(current.values)
        except RuntimeError as error:
            raise current.failed(self._collective, error) from error

    def collect(self) -> list[int]:
        assert self._under_way is not None, "collect without issue"
        (current, work), self._under_way = self._under_way, None
        try:
            work.wait()
        except RuntimeError as error:
            raise current.failed(self._collective, error) from error
        return [int(value) for value in current.values.tolist()]

    def close(self) -> None:
        self._under_way = None


class Board:
    """A StepBoard in shared memory: ranks of one node, and no collective.

    ranks: those of the board, as the default group numbers them; none named: they are the same.
    """

    name: Literal["board"] = "board"

    def __init__(self, board: StepBoard, ranks: Sequence[int] = ()) -> None:
        self._board = board
        self._ranks = tuple(ranks) or tuple(range(board.ranks))
        self.lag = board.lag

    def issue(self, values: Sequence[int]) -> None:
        try:
            self._board.publish(values)
        except BoardError as error:
            raise self._missing(error) from error

    def collect(self) -> list[int]:
        try:
            return self._board.read()
        except BoardError as error:
            raise self._missing(error) from error

    def close(self) -> None:
        self._board.close()

    def _missing(self, error: BoardError) -> AgreementError:
        where = ""
        if self._ranks != tuple(range(len(self._ranks))):
            where = f" (ranks count from 0 on the board, they are {list(self._ranks)})"
        return AgreementError(f"{error}{where}", ranks=[self._ranks[one] for one in error.ranks])
