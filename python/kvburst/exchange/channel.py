"""What an exchange needs of a group of ranks: a broadcast, and the least of everybody's numbers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from kvburst._core import BurstError, LayoutError, Stream
from kvburst.cuda import as_torch_stream
from kvburst.exchange.roll import Process, ended


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


# Which of them block is known; another would be treated as the wrong one.
_BACKENDS = (dist.Backend.GLOO, dist.Backend.NCCL)


def current_for_torch(stream: Stream, memory: torch.Tensor) -> AbstractContextManager[object]:
    """What torch enqueues on `memory` within goes on `stream`; on the CPU it runs at once."""
    if memory.device.type == "cpu":
        return nullcontext()
    index = torch.cuda.current_device() if memory.device.index is None else memory.device.index
    return torch.cuda.stream(as_torch_stream(stream.handle, index))


class GroupChannel:
    """Over torch process groups: one that broadcasts device memory, and one that takes the CPU's.

    Every rank makes its own at the same point; they tell each other who they are, so that an error
    can name a rank whose process has ended.

    `group`: for the pools' memory; gloo broadcasts at once, on the calling thread, NCCL on the
    stream. `cpu_group`: of the same ranks, for numbers; by default `group`, which then must take
    CPU tensors. `timeout`: seconds that a rank waits for the others, which may be compiling a
    kernel; a rank whose process is gone is noticed at once. What NCCL has enqueued is not waited
    for here, and ends by NCCL's own watchdog. Under DP attention both are those of the attention
    TP group. Raises LayoutError on a group of another kind, and on groups of different ranks.
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
        backend = dist.get_backend(group)
        if backend not in _BACKENDS:
            raise LayoutError(f"group: backend {backend!r} must be one of {', '.join(_BACKENDS)}")
        self._on_stream = backend == dist.Backend.NCCL
        self._roll: list[Process] = [Process.own()] * len(self._global_ranks)
        dist.all_gather_object(self._roll, Process.own(), group=self._cpu_group)

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
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        if self._on_stream:
            # NCCL makes its communicator for the first collective: now, and not under a forward.
            dist.broadcast(memory[:1], self._global_ranks[0], group=self._group)
        return memory

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
            raise BurstError(f"broadcast from rank {source}: {_why(error, self._roll)}") from error

    def minimum(self, values: Sequence[int]) -> Pending:
        return _GroupMinimum(values, self._cpu_group, self._timeout, self._roll)


class _GroupMinimum:
    def __init__(
        self,
        values: Sequence[int],
        group: dist.ProcessGroup,
        timeout: timedelta,
        roll: Sequence[Process],
    ) -> None:
        self._values = torch.tensor(values, dtype=torch.int64)
        self._timeout = timeout
        self._roll = roll
        try:
            self._work = dist.all_reduce(
                self._values, dist.ReduceOp.MIN, group=group, async_op=True
            )
        except RuntimeError as error:
            raise BurstError(f"agreement of the ranks: {_why(error, self._roll)}") from error

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def result(self) -> list[int]:
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise BurstError(f"agreement of the ranks: {_why(error, self._roll)}") from error
        return self._values.tolist()


def _why(error: RuntimeError, roll: Sequence[Process]) -> str:
    """The ranks whose processes have ended, if any, and what torch says."""
    gone = "".join(f"rank {rank} has ended: " for rank in ended(roll))
    return gone + str(error).strip().splitlines()[0]
