"""A load whose layers the ranks exchange: the part of its record that is behind the copies."""

from collections.abc import Callable
from typing import Literal

import torch

from kvburst._core import Burst, BurstError, BurstEvent, Event, Stream
from kvburst.exchange.channel import Pending


class ExchangedLoad:
    """One sharded load on one rank, from submission until it is forgotten.

    Complete when this rank's own copies are done, every layer has been exchanged, and every rank
    has said that its copies went well. Written under the exchange's lock; read by any thread.
    """

    def __init__(
        self,
        burst: Burst,
        page_ids: tuple[torch.Tensor, ...],
        fences: tuple[Event, ...],
        finish: Event,
        flush: Callable[["ExchangedLoad"], None],
    ) -> None:
        self.burst = burst
        self.page_ids = page_ids
        """By pool: the device pages, in the order of submission."""
        self.fences = fences
        """What the pages' new bytes must not overtake."""
        self.plan: Pending | None = None
        """What all ranks said of their pages; None: this one could not say."""
        self.finish = finish
        """Behind the last exchange; recorded once it is `all_sent` or `given_up`."""
        self.finish_recorded = False
        self.layer_events: list[Event] = []
        """Behind each layer's exchange, where that is on a stream of its own."""
        self.next_layer = 0
        """The first that is not sent; all are sent in order."""
        self.all_sent = False
        self._outcome: Pending | None = None
        self._ranks = 0
        self._error: str | None = None
        self._flush = flush

    @property
    def id(self) -> int:
        return self.burst.id

    def fail(self, why: str) -> None:
        """The exchange is given up. The first reason stays."""
        if self._error is None:
            self._error = why

    def sent(self, outcome: Pending, ranks: int) -> None:
        """All layers are; `outcome` is the lowest rank whose copies failed, or `ranks`."""
        self._outcome = outcome
        self._ranks = ranks
        self.all_sent = True

    def _judge(self) -> None:
        """Looks at what every rank came to. Blocks until all have said so."""
        if self._outcome is None or self._error is not None:
            return
        try:
            (failed,) = self._outcome.result()
        except BurstError as error:
            self.fail(f"load {self.id}: {error}")
            return
        if failed < self._ranks:
            self.fail(f"load {self.id} failed on rank {failed}, which sent bytes of no meaning")

    @property
    def error(self) -> str | None:
        """Why not every page of every layer is in place; None so far."""
        if self._outcome is not None and self._outcome.done():
            self._judge()
        return self.burst.error or self._error

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise BurstError(self.error)

    @property
    def given_up(self) -> bool:
        """Whether nothing more of it will be exchanged, though not all is."""
        return self._error is not None and not self.all_sent

    def done(self) -> bool:
        """Never true while a page of it may still be written, whatever has failed."""
        over = self.given_up or (self._outcome is not None and self._outcome.done())
        return over and self.burst.finish_event.query() and self.finish.query()

    def synchronize(self) -> None:
        """Blocks until `done`; what no forward has asked for is exchanged now."""
        self._flush(self)
        self.burst.finish_event.synchronize()
        self._judge()
        self.finish.synchronize()

    def order(self, stream: Stream | None) -> None:
        """Orders `stream` (default: the current one) behind all of it; what no forward has asked
        for is exchanged now."""
        self._flush(self)
        self.burst.finish_event.wait(stream)
        self.finish.wait(stream)

    @property
    def start_event(self) -> "ExchangedEvent":
        return ExchangedEvent(self, "start")

    @property
    def finish_event(self) -> "ExchangedEvent":
        return ExchangedEvent(self, "finish")


class ExchangedEvent:
    """The start or the finish of a sharded load, its exchange included.

    `synchronize` and `wait` of the finish take part in the exchange of what is not exchanged yet:
    every rank must call them alike, as it does whatever else comes before or after a forward.
    """

    def __init__(self, load: ExchangedLoad, point: Literal["start", "finish"]) -> None:
        self._load = load
        self._is_finish = point == "finish"

    @property
    def _start(self) -> BurstEvent:
        return self._load.burst.start_event

    def query(self) -> bool:
        return self._load.done() if self._is_finish else self._start.query()

    def synchronize(self) -> None:
        if self._is_finish:
            self._load.synchronize()
        else:
            self._start.synchronize()

    def wait(self, stream: Stream | None = None) -> None:
        if self._is_finish:
            self._load.order(stream)
        else:
            self._start.wait(stream)

    def elapsed_time(self, end: "ExchangedEvent") -> float:
        """Milliseconds of this load, from its first copy to its last exchange."""
        return self._start.elapsed_time(end._load.finish)
