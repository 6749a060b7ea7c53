"""Acks whose bursts finish when told, and ranks that are threads on a simulated network."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from kvburst import Ack, AckQueue
from kvburst.agreement import TransportName

T = TypeVar("T")


# --- acks ----------------------------------------------------------------------------------------


@dataclass
class FakeEvent:
    """`synchronize` finishes it, as time would; `waits` says how often that was needed."""

    done: bool = False
    waits: int = 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waits += not self.done
        self.done = True


@dataclass
class FakeBurst:
    id: int
    fails: str | None = None
    finish_event: FakeEvent = field(default_factory=FakeEvent)

    @property
    def error(self) -> str | None:
        return self.fails if self.finish_event.done else None


def add_ack(queue: AckQueue, number: int, *, done: bool = False, fails: str | None = None) -> None:
    queue.append(Ack(FakeBurst(number, fails, FakeEvent(done)), 1, {}))


def numbers(acks: Sequence[Ack]) -> list[int]:
    return [ack.burst.id for ack in acks]


def finish(queue: AckQueue, count: int | None = None) -> None:
    """The oldest `count`, or all, are done."""
    for ack in list(queue)[:count]:
        ack.finish_event.done = True


# --- ranks as threads ----------------------------------------------------------------------------


class NobodyCameError(RuntimeError):
    """What a process group raises after its timeout."""


class Network:
    """The nth thing that each rank posts meets the nth of the others; logs what each posted."""

    def __init__(self, ranks: int, timeout: float = 20.0) -> None:
        self.ranks = ranks
        self.logs: list[list[tuple[str, int]]] = [[] for _ in range(ranks)]
        self._timeout = timeout
        self._posted: list[list[Any]] = [[] for _ in range(ranks)]
        self._came = threading.Condition()
        self._over = [False] * ranks

    def post(self, rank: int, kind: str, item: Any) -> int:
        with self._came:
            length = len(item) if kind == "round" else 1
            self.logs[rank].append((kind, length))
            self._posted[rank].append(item)
            self._came.notify_all()
            return len(self._posted[rank]) - 1

    def fetch(self, place: int) -> list[Any]:
        with self._came:

            def all_came() -> bool:
                return all(len(posted) > place for posted in self._posted)

            def one_never_will() -> bool:
                pairs = zip(self._posted, self._over, strict=True)
                return any(over and len(posted) <= place for posted, over in pairs)

            self._came.wait_for(lambda: all_came() or one_never_will(), self._timeout)
            if not all_came():
                raise NobodyCameError(f"timed out in operation {place}")
            return [posted[place] for posted in self._posted]

    def over(self, rank: int) -> None:
        """It posts nothing any more."""
        with self._came:
            self._over[rank] = True
            self._came.notify_all()

    def run(self, body: Callable[[int], T]) -> list[T | BaseException]:
        """`body(rank)` on a thread a rank: what each returned or raised."""
        results: list[T | BaseException] = [NobodyCameError("did not end")] * self.ranks

        def one(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except BaseException as error:
                results[rank] = error
            finally:
                self.over(rank)

        threads = [
            threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results


class SimTransport:
    """Rounds over a `Network`, consumed at once or a step later."""

    def __init__(self, network: Network, rank: int, lag: Literal[0, 1]) -> None:
        self.name: TransportName = "pipelined" if lag else "blocking"
        self.lag = lag
        self._network = network
        self._rank = rank
        self._place: int | None = None

    def issue(self, values: Sequence[int]) -> None:
        assert self._place is None, "one round at a time"
        self._place = self._network.post(self._rank, "round", list(values))

    def collect(self) -> list[int]:
        assert self._place is not None
        place, self._place = self._place, None
        everyones = self._network.fetch(place)
        assert len({len(values) for values in everyones}) == 1, "lengths differ"
        return [min(values) for values in zip(*everyones, strict=True)]

    def close(self) -> None:
        self._network.over(self._rank)


@dataclass(frozen=True)
class SimPeers:
    network: Network
    rank: int

    def exchange(self, item: T) -> Mapping[int, T]:
        everyones = self.network.fetch(self.network.post(self.rank, "exchange", item))
        return dict(enumerate(everyones))
