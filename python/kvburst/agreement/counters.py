"""What one rank has ready: a number that only grows, since it counts what was taken as well.

Ranks agree on the MIN of it, and each takes what it has not taken yet. A result that comes late, or
after acks were taken by other means, can then never be more than what every rank has.
"""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvburst.acks import Ack, AckQueue
from kvburst.agreement.errors import Failure


class Report(NamedTuple):
    """What a rank says of one queue. Both parts are of one look: bursts end at any time."""

    number: int
    """Taken since the last reset, and ready at the head now."""
    failures: tuple[Failure, ...] = ()
    """Of those, what failed, unless all ranks know it already."""


class ReadyCounter(Protocol):
    """A queue whose head every rank takes alike. Belongs to the scheduler thread.

    Between `report` and `take` lies the agreement; what `take` returns, the caller takes off the
    queue before the next `report`.
    """

    @property
    def name(self) -> str: ...
    @property
    def fills_late(self) -> bool:
        """Whether what all ranks agreed to take may not be there yet on a later pipeline stage."""
        ...

    def report(self, rank: int) -> Report:
        """The number to agree on, and what `rank`, which is this one, has to say of it."""
        ...

    def due(self, agreed: int) -> int:
        """How many more to take, of `agreed` in all. Never negative."""
        ...

    def take(self, count: int) -> None:
        """The caller takes `count` now."""
        ...

    def waiting(self) -> int:
        """How many there are, ready or not."""
        ...

    def wait(self, count: int) -> None:
        """Block until the first `count` are ready."""
        ...

    def reported(self, failures: Sequence[Failure]) -> None:
        """Every rank knows of these."""
        ...

    def reset(self) -> None:
        """Count from here."""
        ...


class _Event(Protocol):
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class AckLike(Protocol):
    """What both this library's acks and SGLang's `HiCacheAck` are."""

    @property
    def finish_event(self) -> _Event: ...


AckT = TypeVar("AckT", bound=AckLike)


class AckCounter:
    """The acks of an `AckQueue`, which itself counts what is retired, by whatever means.

    A burst that failed is ready, and all ranks are told of it before its ack is retired; of one
    that `clear` or `pop` retired on this rank first, at the next round.
    """

    fills_late = False

    def __init__(self, name: str, queue: AckQueue) -> None:
        self.name = name
        self._queue = queue
        self._before = queue.retired
        self._reported = -1  # position of the last failure that all ranks know of
        self._missed: list[tuple[int, str]] = []
        queue.tell(self._retired)

    @property
    def _taken(self) -> int:
        return self._queue.retired - self._before

    def report(self, rank: int) -> Report:
        taken = self._taken
        failed = list(self._missed)
        number = taken
        for ack in self._queue:
            if not ack.finish_event.query():
                break
            error = ack.error
            if error is not None and number > self._reported:
                failed.append((number, error))
            number += 1
        return Report(number, tuple(Failure(rank, self.name, *one) for one in failed))

    def due(self, agreed: int) -> int:
        return max(0, agreed - self._taken)

    def take(self, count: int) -> None:
        pass

    def waiting(self) -> int:
        return len(self._queue)

    def wait(self, count: int) -> None:
        for ack in self._queue[:count]:
            ack.finish_event.synchronize()

    def reported(self, failures: Sequence[Failure]) -> None:
        self._reported = max((self._reported, *(one.position for one in failures)))
        self._missed = [one for one in self._missed if one[0] > self._reported]

    def reset(self) -> None:
        self._before = self._queue.retired
        self._reported = -1
        self._missed = []

    def _retired(self, ack: Ack) -> None:
        position = self._taken - 1
        if ack.error is not None and position > self._reported:
            self._missed.append((position, ack.error))


class ListCounter(Generic[AckT]):
    """The acks of a plain list, appended at its end and taken, or cleared, by others.

    acks: gives the list as it is now, such as `lambda: controller.ack_write_queue`.
    ready: whether an ack can be taken, done or failed; by default its finish event is asked.
    error: what is known to have failed of an ack that is ready; by default nothing is.

    What was taken follows from the newest ack seen and from what is left, at calls that every rank
    makes at the same points.
    """

    fills_late = False

    def __init__(
        self,
        name: str,
        acks: Callable[[], Sequence[AckT]],
        error: Callable[[AckT], str | None] | None = None,
        ready: Callable[[AckT], bool] = lambda ack: ack.finish_event.query(),
    ) -> None:
        self.name = name
        self._acks = acks
        self._error = error
        self._ready = ready
        self._newest: AckT | None = None
        self._seen = 0
        self._reported = -1

    def _taken(self) -> int:
        acks = self._acks()
        new = 0
        while new < len(acks) and acks[-1 - new] is not self._newest:
            new += 1
        self._seen += new
        if new:
            self._newest = acks[-1]
        return self._seen - len(acks)

    def report(self, rank: int) -> Report:
        number = self._taken()
        failures = []
        for ack in self._acks():
            if not self._ready(ack):
                break
            text = None if self._error is None else self._error(ack)
            if text is not None and number > self._reported:
                failures.append(Failure(rank, self.name, number, text))
            number += 1
        return Report(number, tuple(failures))

    def due(self, agreed: int) -> int:
        return max(0, agreed - self._taken())

    def take(self, count: int) -> None:
        pass

    def waiting(self) -> int:
        return len(self._acks())

    def wait(self, count: int) -> None:
        for ack in self._acks()[:count]:
            ack.finish_event.synchronize()

    def reported(self, failures: Sequence[Failure]) -> None:
        self._reported = max((self._reported, *(one.position for one in failures)))

    def reset(self) -> None:
        self._newest = None
        self._seen = 0
        self._reported = -1


class QueueCounter:
    """A queue of which only the size is known, and which a thread of each rank fills: storage.

    size: entries that could be taken now; 0 where there is no storage.

    What is taken by other means than the agreement, on all ranks at the same point, is told by
    `popped_elsewhere`: ranks may have dropped different numbers.
    """

    fills_late = True

    def __init__(self, name: str, size: Callable[[], int]) -> None:
        self.name = name
        self._size = size
        self._taken = 0
        self._stale = False

    def popped_elsewhere(self) -> None:
        """The queue was drained, in part or whole: what is in flight no longer speaks of it."""
        self._stale = True

    def report(self, rank: int) -> Report:
        self._stale = False
        return Report(self._taken + self._size())

    def due(self, agreed: int) -> int:
        return 0 if self._stale else max(0, agreed - self._taken)

    def take(self, count: int) -> None:
        self._taken += count

    def waiting(self) -> int:
        return self._size()

    def wait(self, count: int) -> None:
        pass  # Whoever takes the entries waits for them.

    def reported(self, failures: Sequence[Failure]) -> None:
        pass

    def reset(self) -> None:
        self._taken = 0
        self._stale = False
