"""The scheduler's record of a burst: it exists from submission and is retired in order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import torch

from kvburst._core import Burst, BurstEvent

if TYPE_CHECKING:
    from kvburst.exchange.load import ExchangedEvent, ExchangedLoad


@dataclass(frozen=True)
class Ack:
    """One submitted burst. Has the fields of SGLang's `HiCacheAck`.

    The pages of the burst, on both tiers, stay reserved until the ack is retired.
    """

    burst: Burst
    num_burst_tokens: int
    """Token slots of the burst, counted once for all pools and layers."""
    num_tokens_by_pool: dict[str, int]
    caller_us: float = 0.0
    """Microseconds of the scheduler thread, the allocators not counted."""
    alloc_us: float = 0.0
    """Microseconds that the allocators took on it beside that."""
    submitted_ns: int = 0
    """When submission began, by `time.perf_counter_ns`."""
    kept: tuple[torch.Tensor, ...] = ()
    """Index tensors in device memory, which the issuer reads."""
    exchanged: "ExchangedLoad | None" = None
    """What is behind the copies of a sharded load."""

    @property
    def node_ids(self) -> list[int]:
        """Of the operations that were merged into the burst, in order."""
        return self.burst.node_ids

    @property
    def num_tokens(self) -> int:
        """Token slots that were moved: those of the burst, or 0 if it failed."""
        return self.num_burst_tokens if self.error is None else 0

    @property
    def num_bytes(self) -> int:
        """Bytes handed to the device, all pools and layers."""
        return self.burst.num_bytes

    @property
    def error(self) -> str | None:
        """Operation, group and nodes of a burst that failed; None otherwise."""
        return self.burst.error if self.exchanged is None else self.exchanged.error

    @property
    def start_event(self) -> "BurstEvent | ExchangedEvent":
        return self.burst.start_event if self.exchanged is None else self.exchanged.start_event

    @property
    def finish_event(self) -> "BurstEvent | ExchangedEvent":
        """`query` is true once the burst has been issued and its copies are done.

        Of a burst that failed, once the copies that had been issued are. Of a sharded load, once
        every layer has been exchanged, too.
        """
        return self.burst.finish_event if self.exchanged is None else self.exchanged.finish_event

    @property
    def timing_enabled(self) -> bool:
        return True


class AckQueue(Sequence[Ack]):
    """Acks in the order of submission. Taking one off retires it, which returns its pages.

    Stands for the plain lists of SGLang's controller: a tree may iterate over it, `pop(0)` from it
    and `clear` it. Belongs to the scheduler thread.
    """

    def __init__(self, *on_retire: Callable[[Ack], None]) -> None:
        self._acks: list[Ack] = []
        self._on_retire = list(on_retire)
        self.retired = 0
        """Acks taken off so far, by whatever means."""

    def tell(self, on_retire: Callable[[Ack], None]) -> None:
        """Call `on_retire`, after the others, with each ack that is retired from now on."""
        self._on_retire.append(on_retire)

    def append(self, ack: Ack) -> None:
        self._acks.append(ack)

    def pop(self, index: int) -> Ack:
        """Retire the oldest ack; blocks until its burst is done, since its pages are returned."""
        if index != 0:
            raise IndexError(f"index: {index} must be 0, acks are retired in order")
        if not self._acks:
            raise IndexError("no ack to retire: the queue is empty")
        ack = self._acks[0]
        ack.finish_event.synchronize()
        del self._acks[0]
        self.retired += 1
        for told in self._on_retire:
            told(ack)
        return ack

    def clear(self) -> None:
        """Retire every ack, waiting for each."""
        while self._acks:
            self.pop(0)

    def retire(self, count: int) -> list[Ack]:
        """Retire the `count` oldest acks, blocking until their bursts are done.

        Fewer acks than that: IndexError, and none is retired.
        """
        if not 0 <= count <= len(self._acks):
            raise IndexError(f"count: {count} acks must be 0 to {len(self._acks)}, those queued")
        return [self.pop(0) for _ in range(count)]

    def retire_complete(self) -> list[Ack]:
        """Retire the acks at the head whose bursts are done. Does not block."""
        retired = []
        while self._acks and self._acks[0].finish_event.query():
            retired.append(self.pop(0))
        return retired

    def __len__(self) -> int:
        return len(self._acks)

    def __iter__(self) -> Iterator[Ack]:
        return iter(self._acks)

    @overload
    def __getitem__(self, index: int) -> Ack: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Ack]: ...
    def __getitem__(self, index: int | slice) -> Ack | Sequence[Ack]:
        return self._acks[index]
