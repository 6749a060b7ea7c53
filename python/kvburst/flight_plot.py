"""What flight recorders saw, as a picture: a band for each rank, a line for each of its tracks.

For the docs, and where no trace viewer is at hand; the file of `timeline.save` has all the details.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvburst.timeline import (
    AGREEMENT,
    EXCHANGE,
    FORWARD,
    GATE,
    ISSUERS,
    LAUNCH,
    SCHEDULER,
    STREAMS,
    Flight,
    Span,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class _Look:
    """Of the spans of a track: the line that they are drawn on, and how."""

    line: str
    words: str
    colour: str
    edge: str = "none"


_SENT = "exchange, as its source"
_LAUNCHING = "scheduler thread, under the forward"

# From top to bottom: the looks of tracks, and of spans that look different from others of theirs.
_LOOKS = {
    SCHEDULER: _Look("scheduler thread", "hand-over", "#0b3c6f"),
    _LAUNCHING: _Look("scheduler thread", "launches the forward's layers", "#aec7e8"),
    AGREEMENT: _Look("scheduler thread", "agreement", "#8c564b"),
    ISSUERS["load"]: _Look("load issuer", "issuing", "#1f77b4"),
    STREAMS["load"]: _Look("load stream", "copies of the rank's own layers", "#9467bd"),
    _SENT: _Look("exchange", "layers that it sends", "#d62728"),
    EXCHANGE: _Look("exchange", "layers that it gets", "#ff7f0e"),
    GATE: _Look("forward stream", "waiting for a layer", "#f4a6a0"),
    FORWARD: _Look("forward stream", "computes a layer", "#2ca02c", "white"),
}
# Of the time scale: a hand-over that is shorter is drawn as long, to be seen.
_LEAST_SHARE = 0.004
_LINES = tuple(dict.fromkeys(look.line for look in _LOOKS.values()))


def plot(flights: Sequence[Flight], path: Path) -> None:
    """Draws the flights one below the other on one clock, milliseconds from the first span, into a
    file of the kind that its suffix says. Needs matplotlib (``kvburst[plot]``), but no display."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    used = {_kind(span, flight) for flight in flights for span in flight.spans}
    lines = [line for line in _LINES if any(_LOOKS[k].line == line for k in used if k in _LOOKS)]
    figure = Figure(figsize=(11, 1.2 + len(flights) * (0.4 + 0.2 * max(1, len(lines)))))
    figure.set_layout_engine("constrained")
    begin = min((flight.start_us for flight in flights if flight.spans), default=0.0)
    end = _end(flights, begin)
    every_axes = figure.subplots(len(flights), 1, sharex=True, squeeze=False)[:, 0]
    for axes, flight in zip(every_axes, flights, strict=True):
        _draw(axes, flight, lines, begin, end)
    every_axes[-1].set_xlabel("milliseconds")
    every_axes[-1].set_xlim(left=0, right=end)
    figure.suptitle(_title(flights), fontsize=11)
    figure.legend(
        handles=[
            Patch(color=look.colour, label=look.words)
            for kind, look in _LOOKS.items()
            if kind in used
        ],
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


def _end(flights: Sequence[Flight], begin: float) -> float:
    ends = (span.end_us or span.start_us for flight in flights for span in flight.spans)
    return 1.01 * max(1.0, (max(ends, default=begin) - begin) / 1e3)


def _title(flights: Sequence[Flight]) -> str:
    titles = ", ".join(dict.fromkeys(flight.title for flight in flights))
    simulated = ", ".join(dict.fromkeys(f.simulated for f in flights if f.simulated))
    return f"{titles} (simulated: {simulated})" if simulated else titles


def _draw(axes: "Axes", flight: Flight, lines: Sequence[str], begin: float, end: float) -> None:
    for kind, look in reversed(_LOOKS.items()):  # the first ones on top
        least = _LEAST_SHARE * end if kind == SCHEDULER else 0.0
        bars = [
            ((span.start_us - begin) / 1e3, max(least, (span.end_us - span.start_us) / 1e3))
            for span in _outermost(flight, kind)
            if span.end_us is not None
        ]
        if bars:
            height = len(lines) - 1 - lines.index(look.line)
            axes.broken_barh(
                bars, (height - 0.4, 0.8), facecolor=look.colour, edgecolor=look.edge, linewidth=0.3
            )
    axes.set_yticks(range(len(lines)), labels=list(reversed(lines)), fontsize=8)
    axes.set_ylim(-0.6, len(lines) - 0.4)
    axes.set_title(f"rank {flight.rank}", fontsize=9, loc="left", pad=2)
    axes.spines[["top", "right"]].set_visible(False)


def _kind(span: Span, flight: Flight) -> str:
    sends = span.track == EXCHANGE and span.details.get("source") == flight.rank
    if sends:
        return _SENT
    launches = span.track == SCHEDULER and (span.name == LAUNCH or "layer" in span.details)
    return _LAUNCHING if launches else span.track


def _outermost(flight: Flight, kind: str) -> list[Span]:
    """Spans that look like this, without those that another one of them contains."""
    found: list[Span] = []
    spans = (span for span in flight.spans if _kind(span, flight) == kind and span.end_us)
    for span in sorted(spans, key=lambda span: (span.start_us, -(span.end_us or 0))):
        if not found or span.start_us >= (found[-1].end_us or 0):
            found.append(span)
    return found
