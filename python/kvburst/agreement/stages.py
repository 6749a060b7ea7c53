"""Pipeline stages: the first one agrees, and its numbers are handed from stage to stage."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from kvburst.agreement.errors import AgreementError, Failure, first_line

# One of our own, so that these never meet what the server itself sends over the group.
_TAG = 7301

Told = tuple[str, tuple[int, ...], tuple[Failure, ...]]
"""Message, ranks and failures of an AgreementError."""


class Stages(Protocol):
    """One place in every stage, from the leader's to the last one's."""

    @property
    def leads(self) -> bool: ...
    def forward(self, values: Sequence[int]) -> None:
        """By the leader, at every step: hand its numbers on. Waits for the hand-over before."""
        ...

    def receive(self) -> list[int]:
        """By a follower, at every step: the leader's numbers, handed on. Blocks for them."""
        ...

    def tell(self, message: str, ranks: Sequence[int], failures: Sequence[Failure]) -> None:
        """By the leader: why it raises."""
        ...

    def hear(self) -> Told:
        """By a follower, once the numbers say that the leader raises."""
        ...

    def hand_over(self) -> None:
        """Wait until the next stage has what was handed on last."""
        ...


class PipelineStages:
    """Stages of a process group that moves CPU tensors; its first rank is the leader's.

    length: values of a step. Every call is bounded by the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup, *, length: int) -> None:
        self._group = group
        self._length = length
        self._ranks = dist.get_process_group_ranks(group)
        self._stage = dist.get_rank(group)
        # What is on its way to the next stage; the tensor lives as long as that takes.
        self._sent: tuple[dist.Work, torch.Tensor] | None = None

    @property
    def leads(self) -> bool:
        return self._stage == 0

    def forward(self, values: Sequence[int]) -> None:
        self._send(torch.tensor(values, dtype=torch.int64))

    def receive(self) -> list[int]:
        values = torch.empty(self._length, dtype=torch.int64)
        source = self._ranks[self._stage - 1]
        try:
            dist.recv(values, src=source, group=self._group, tag=_TAG)
        except RuntimeError as error:
            raise self._failed(f"no numbers from rank {source}", source, error) from error
        self._send(values)
        return [int(value) for value in values.tolist()]

    def _send(self, values: torch.Tensor) -> None:
        if self._stage + 1 == len(self._ranks):
            return
        target = self._ranks[self._stage + 1]
        try:
            self._wait_for_hand_over()
            work = dist.isend(values, dst=target, group=self._group, tag=_TAG)
        except RuntimeError as error:
            raise self._failed(f"rank {target} took no numbers", target, error) from error
        assert work is not None, "this rank is in the group"
        self._sent = (work, values)

    def _wait_for_hand_over(self) -> None:
        if self._sent is not None:
            sent, self._sent = self._sent, None
            sent[0].wait()

    def hand_over(self) -> None:
        # A send whose `Work` is dropped may never arrive.
        try:
            self._wait_for_hand_over()
        except RuntimeError as error:
            target = self._ranks[self._stage + 1]
            raise self._failed(f"rank {target} took no numbers", target, error) from error

    def tell(self, message: str, ranks: Sequence[int], failures: Sequence[Failure]) -> None:
        self._broadcast((message, tuple(ranks), tuple(failures)))

    def hear(self) -> Told:
        return self._broadcast(("", (), ()))

    def _broadcast(self, told: Told) -> Told:
        box = [told]
        try:
            dist.broadcast_object_list(box, src=self._ranks[0], group=self._group)
        except RuntimeError as error:
            raise self._failed("the leader's error is not known", self._ranks[0], error) from error
        return box[0]

    def _failed(self, what: str, rank: int, error: RuntimeError) -> AgreementError:
        return AgreementError(
            f"pipeline stage {self._stage}: {what}, it has ended or did not come within the "
            f"group's timeout: {first_line(error)}",
            ranks=[rank],
        )
