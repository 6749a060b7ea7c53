"""A flight recorder: what ran where and when, as a file that Perfetto and chrome://tracing open.

A `FlightRecorder` watches the acks of one controller, on one rank: each burst that is retired
leaves a span on the scheduler thread (its submission), on the issuer and on the transfer stream,
with an arrow through them. Whoever runs the forward adds what it knows: spans of threads, and spans
between two events of a stream. Ranks that agree pass `agreed` to their `Agreement`, and ranks that
share their host tier wrap their channel (`watched_channel`). It costs some microseconds a retired
burst, on the scheduler thread; a controller that nobody watches pays nothing.

All times are put on the machine's monotonic clock (`time.perf_counter_ns`), which its processes
share: `Flight`s of several ranks can be saved together as they are, a process of the picture for
each rank.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from kvburst._core import ComputeDevice, Event, KVBurstError
from kvburst.acks import Ack
from kvburst.agreement import AgreementStep
from kvburst.controller import BurstController

# From top to bottom; others follow in the order of their first span.
SCHEDULER = "scheduler thread"
AGREEMENT = "agreement"
ISSUERS = {"load": "load issuer", "backup": "backup issuer"}
STREAMS = {"load": "load stream", "backup": "backup stream"}
EXCHANGE = "exchange"
GATE = "gate"
FORWARD = "forward stream"
# The span of a scheduler thread that launches a forward.
LAUNCH = "launch the forward"
TRACKS = (SCHEDULER, AGREEMENT, *ISSUERS.values(), *STREAMS.values(), EXCHANGE, GATE, FORWARD)

Detail = int | float | str


@dataclass(frozen=True)
class Span:
    """Something on a track, in microseconds of the machine's monotonic clock.

    ``end_us`` None marks a point in time. Spans with the same ``flow``, which is unique within a
    flight, are joined by an arrow in the order of their starts. Spans of a track are one within
    the other or apart.
    """

    track: str
    name: str
    start_us: float
    end_us: float | None
    details: Mapping[str, Detail] = field(default_factory=dict)
    flow: int | None = None


@dataclass(frozen=True)
class Flight:
    """What the recorder of one rank has seen. ``simulated`` says whose link made the times up."""

    title: str
    spans: tuple[Span, ...]
    rank: int = 0
    dropped: int = 0
    """Older spans that made room."""
    simulated: str | None = None

    @property
    def start_us(self) -> float:
        """Of the first span; 0 if there is none."""
        return min((span.start_us for span in self.spans), default=0.0)

    def from_zero(self) -> "Flight":
        """The same with the first span at 0: for runs that are compared and not simultaneous."""
        return replace(self, spans=tuple(_shifted(span, self.start_us) for span in self.spans))


class FlightRecorder:
    """Collects the spans of one rank. Belongs to the scheduler thread.

    device: whose events are put on the machine's clock. It is synchronized with here, at once: a
        few times a stream of its own is waited for.
    limit: spans that are kept, the newest.
    """

    def __init__(
        self,
        device: ComputeDevice,
        title: str = "kvburst",
        *,
        rank: int = 0,
        simulated: str | None = None,
        limit: int = 200_000,
    ) -> None:
        if limit < 1:
            raise KVBurstError(f"limit: {limit} spans is below 1")
        self._title = title
        self._rank = rank
        self._simulated = simulated
        self._spans: deque[Span] = deque(maxlen=limit)
        self._added = 0
        self._flows = 0
        self._origin, self._origin_us = _origin(device)

    def watch(self, controller: BurstController) -> None:
        """Record each burst of `controller` as its ack is retired, from now on."""
        controller.ack_load_queue.tell(self._retired)
        controller.ack_write_queue.tell(self._retired)

    def agreed(self, step: AgreementStep) -> None:
        """Record what a call of the agreement took: for ``Agreement(tell=...)``."""
        self.add(
            Span(
                AGREEMENT,
                f"{step.call} {step.step}",
                step.begin_ns / 1000,
                step.end_ns / 1000,
                {"taken": ", ".join(map(str, step.taken))} if step.taken else {},
            )
        )

    def clear(self) -> None:
        """Forget all spans: the flight begins here."""
        self._spans.clear()
        self._added = 0

    def add(self, span: Span) -> None:
        self._added += 1
        self._spans.append(span)

    @contextmanager
    def on_thread(self, track: str, name: str, **details: Detail) -> Iterator[None]:
        """A span of the calling thread, for as long as the block takes."""
        start_us = now_us()
        try:
            yield
        finally:
            self.add(Span(track, name, start_us, now_us(), details))

    def on_stream(
        self, track: str, name: str, start: Event, end: Event | None = None, **details: Detail
    ) -> None:
        """A span between two events of the device, which are reached; without `end`, a mark."""
        end_us = None if end is None else self._at(end)
        self.add(Span(track, name, self._at(start), end_us, details))

    def flight(self) -> Flight:
        """All spans so far."""
        return Flight(
            title=self._title,
            spans=tuple(self._spans),
            rank=self._rank,
            dropped=self._added - len(self._spans),
            simulated=self._simulated,
        )

    def _at(self, event: Event) -> float:
        return self._origin_us + 1000 * self._origin.elapsed_time(event)

    def _retired(self, ack: Ack) -> None:
        burst = ack.burst
        name = f"{burst.direction} {burst.id}"
        flow = self._flows
        self._flows += 1
        submitted_us = ack.submitted_ns / 1000
        self.add(
            Span(
                SCHEDULER,
                f"submit {name}",
                submitted_us,
                submitted_us + burst.caller_us,
                {"pages": burst.num_pages, "caller_us": round(ack.caller_us, 1)},
                flow,
            )
        )
        if ack.error is not None:
            self.add(
                Span(
                    ISSUERS[burst.direction],
                    f"{name} failed",
                    submitted_us,
                    None,
                    {"error": ack.error},
                    flow,
                )
            )
            return
        taken_up_us = submitted_us + burst.queue_us
        copies: dict[str, Detail] = {
            "pages": burst.num_pages,
            "copies": burst.num_copies,
            "bytes_moved": burst.num_bytes,
        }
        self.add(
            Span(
                ISSUERS[burst.direction],
                f"issue {name}",
                taken_up_us,
                taken_up_us + burst.issue_us,
                copies,
                flow,
            )
        )
        start_us, end_us = (
            self._origin_us + 1000 * event.elapsed_since(self._origin)
            for event in (burst.start_event, burst.finish_event)
        )
        self.add(Span(STREAMS[burst.direction], name, start_us, end_us, copies, flow))


def now_us() -> float:
    """Microseconds of the machine's monotonic clock, which the device ``host`` reads as well."""
    return perf_counter_ns() / 1000


def save(path: Path, flights: Sequence[Flight]) -> None:
    """Writes one JSON file of all flights, in Chrome's trace-event format.

    Raises ``OSError`` if it cannot be written.
    """
    path.write_text(json.dumps(as_trace_events(flights)) + "\n")


def as_trace_events(flights: Sequence[Flight]) -> dict[str, Any]:
    """The same as an object: a process for each flight, a thread for each of its tracks. Times
    begin at 0 with the first span of all."""
    begin = min((flight.start_us for flight in flights if flight.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for process, flight in enumerate(flights, start=1):
        events += _process(process, flight, begin)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "recorded_by": "kvburst",
            "simulated": sorted({each.simulated for each in flights if each.simulated}),
            "dropped_spans": sum(flight.dropped for flight in flights),
        },
    }


# --- the format ----------------------------------------------------------------------------


def _process(process: int, flight: Flight, begin: float) -> Iterator[dict[str, Any]]:
    name = f"rank {flight.rank}: {flight.title}"
    if flight.simulated:
        name += f" (simulated: {flight.simulated})"
    yield _metadata("process_name", process, name=name)
    yield _metadata("process_sort_index", process, sort_index=flight.rank)
    threads = _threads(flight)
    for track, thread in threads.items():
        yield _metadata("thread_name", process, thread, name=track)
        yield _metadata("thread_sort_index", process, thread, sort_index=thread)
    flows: dict[int, list[Span]] = {}
    for span in flight.spans:
        yield _slice(span, process, threads[span.track], begin)
        if span.flow is not None:
            flows.setdefault(span.flow, []).append(span)
    for flow, spans in flows.items():
        if len(spans) > 1:
            yield from _arrows(f"{process}.{flow}", spans, process, threads, begin)


def _threads(flight: Flight) -> dict[str, int]:
    """Numbers of the tracks that have spans, from 1 on."""
    used = dict.fromkeys(span.track for span in flight.spans)
    known = [track for track in TRACKS if track in used]
    return {
        track: number
        for number, track in enumerate([*known, *(t for t in used if t not in known)], start=1)
    }


def _metadata(what: str, process: int, thread: int = 0, **args: Detail) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": args}


def _slice(span: Span, process: int, thread: int, begin: float) -> dict[str, Any]:
    start = _nanoseconds(span.start_us, begin)
    event: dict[str, Any] = {
        "name": span.name,
        "cat": "kvburst",
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start / 1000,
        "args": dict(span.details),
    }
    if span.end_us is None:
        return event | {"ph": "i", "s": "t"}
    # Two events of one moment, read one after the other, may seem to be the wrong way round. From
    # rounded ends: a viewer drops a slice that begins a nanosecond before its neighbour has ended.
    return event | {"dur": max(0, _nanoseconds(span.end_us, begin) - start) / 1000}


def _nanoseconds(at_us: float, begin: float) -> int:
    return round(1000 * (at_us - begin))


def _arrows(
    flow: str, spans: Sequence[Span], process: int, threads: Mapping[str, int], begin: float
) -> Iterator[dict[str, Any]]:
    ordered = sorted(spans, key=lambda span: span.start_us)
    for number, span in enumerate(ordered):
        last = number == len(ordered) - 1
        event = {
            "name": "burst",
            "cat": "kvburst",
            "ph": "s" if number == 0 else "f" if last else "t",
            "id": flow,
            "pid": process,
            "tid": threads[span.track],
            "ts": _nanoseconds(span.start_us, begin) / 1000,
        }
        # Bound to the span that begins here, and not to the next one.
        yield event | {"bp": "e"} if last else event


def _shifted(span: Span, by: float) -> Span:
    end_us = None if span.end_us is None else span.end_us - by
    return replace(span, start_us=span.start_us - by, end_us=end_us)


def _origin(device: ComputeDevice) -> tuple[Event, float]:
    """An event of the device, and when it was: of a few tries the one known best."""
    stream = device.new_stream()
    found: list[tuple[float, Event, float]] = []
    for _ in range(8):
        event = device.new_event()
        before = now_us()
        event.record(stream)
        event.synchronize()
        after = now_us()
        found.append((after - before, event, (before + after) / 2))
    _, event, at = min(found, key=lambda each: each[0])
    return event, at
