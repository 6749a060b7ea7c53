"""What an exchange needs of a group of ranks: a broadcast, and the least of everybody's numbers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from kvburst._core import BurstError, LayoutError, Stream


class Pending(Protocol):
    """The least of what every rank gave, element by element, once all have given theirs."""

    def done(self) -> bool:
        """Whether `result` would not block."""

    def result(self) -> list[int]:
        """Blocks until every rank has given its numbers, for the channel's timeout at most.

        Raises BurstError after that, and if a rank is gone.
        """


class Channel(Protocol):
    """One rank's end of a group. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Of this process, within the group."""

    @property
    def ranks(self) -> int: ...

    @property
    def on_stream(self) -> bool:
        """Whether `broadcast` only enqueues; otherwise it is over when it returns."""

    @property
    def numbers_apart(self) -> bool:
        """Whether `minimum` and `broadcast` may be called by two threads, each in its own order."""

    def staging(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """The memory that `broadcast` sends from and receives into: uint8, `nbytes` of them."""

    def broadcast(self, staged: torch.Tensor, source: int, stream: Stream) -> None:
        """Brings the bytes that rank `source` has in `staged`, the first of its staging memory,
        into that of every other; the length is the same on all.

        Raises BurstError if that cannot be, and after the channel's timeout where it blocks.
        """

    def minimum(self, values: Sequence[int]) -> Pending:
        """Gives numbers of 64 bits, as many on every rank, and does not wait for the others'."""


def current_for_torch(stream: Stream, memory: torch.Tensor) -> AbstractContextManager[object]:
    """What torch enqueues on `memory` within goes on `stream`; on the CPU it runs at once."""
    if memory.device.type == "cpu":
        return nullcontext()
    theirs = torch.cuda.ExternalStream(stream.handle, memory.device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(theirs)


class GroupChannel:
    """Over torch process groups: one that broadcasts device memory, and one that takes the CPU's.

    `group`: any with `broadcast` for the pools' memory; gloo broadcasts at once, on the calling
    thread, NCCL on the stream. `cpu_group`: of the same ranks, for numbers; by default
    `group`, which then must take CPU tensors. `timeout`: seconds that a rank waits for the others,
    which may be compiling a kernel; a rank whose process is gone is noticed at once.
    Under DP attention both are those of the attention TP group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        cpu_group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 300.0,
    ) -> None:
        if not timeout > 0:
            raise LayoutError(f"timeout: {timeout} seconds must be above 0")
        self._group = group
        self._cpu_group = group if cpu_group is None else cpu_group
        self._timeout = timedelta(seconds=timeout)
        self._global_ranks = dist.get_process_group_ranks(group)
        if dist.get_process_group_ranks(self._cpu_group) != self._global_ranks:
            raise LayoutError(
                f"cpu_group: ranks {dist.get_process_group_ranks(self._cpu_group)} must be those of"
                f" group, {self._global_ranks}"
            )
        self._on_stream = dist.get_backend(group) == dist.Backend.NCCL

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def ranks(self) -> int:
        return len(self._global_ranks)

    @property
    def on_stream(self) -> bool:
        return self._on_stream

    @property
    def numbers_apart(self) -> bool:
        return self._cpu_group is not self._group

    def staging(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def broadcast(self, staged: torch.Tensor, source: int, stream: Stream) -> None:
        try:
            with current_for_torch(stream, staged):
                work = dist.broadcast(
                    staged, self._global_ranks[source], group=self._group, async_op=True
                )
                if self._on_stream:
                    work.wait()  # orders the stream behind it
                else:
                    work.wait(self._timeout)
        except RuntimeError as error:
            raise BurstError(f"broadcast from rank {source}: {_first_line(error)}") from error

    def minimum(self, values: Sequence[int]) -> Pending:
        return _GroupMinimum(values, self._cpu_group, self._timeout)


class _GroupMinimum:
    def __init__(self, values: Sequence[int], group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._values = torch.tensor(values, dtype=torch.int64)
        self._timeout = timeout
        try:
            self._work = dist.all_reduce(
                self._values, dist.ReduceOp.MIN, group=group, async_op=True
            )
        except RuntimeError as error:
            raise BurstError(f"agreement of the ranks: {_first_line(error)}") from error

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def result(self) -> list[int]:
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise BurstError(f"agreement of the ranks: {_first_line(error)}") from error
        return self._values.tolist()


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0]
