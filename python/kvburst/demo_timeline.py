"""The timeline of a demo run, as text and as a picture: what ran where, when, and what waited.

Three lines on one scale: the scheduler's thread, the transfer stream, the forward's layers.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from kvburst._core import KVBurstError
from kvburst.demo_result import DemoResult, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_WIDTH = 110
MIN_BAR_WIDTH = 20
LABEL_WIDTH = 10
RULER_STEP = 10
# Of the picture's time scale: a bar that is shorter than this is drawn as long.
LEAST_SHARE = 0.004
# What the words for the hand-over take.
WORDS_SHARE = 0.25


@dataclass(frozen=True)
class Activity:
    """Something that a line of the timeline shows, and how: as a block, as an ASCII letter where
    the terminal has no blocks, in a terminal's colour, in a picture's."""

    words: str
    block: str
    letter: str
    style: str
    colour: str


HAND_OVER = Activity("hand-over", "█", "#", "cyan", "#1f77b4")
LAUNCH = Activity("launches the forward", "▒", "=", "blue", "#aec7e8")
COPYING = Activity("copies", "█", "#", "magenta", "#9467bd")
LAYER = Activity("computes a layer", "█", "#", "green", "#2ca02c")
STALL = Activity("waits", "░", ".", "red", "#f4a6a0")
ACTIVITIES = (HAND_OVER, LAUNCH, COPYING, LAYER, STALL)

Bars = tuple[tuple[Activity, Span], ...]


def title(result: DemoResult) -> str:
    """What is shown, and that it is simulated where a link model made the times."""
    options = result.options
    words = f"Load-back under a forward, mode {options.mode}, groups {options.groups}"
    if not result.simulated:
        return words
    source = f"link {options.link}" if options.link is not None else "a stand-in driver"
    return f"{words}, {source} (simulated)"


def show_timeline(result: DemoResult, console: Console, end: float) -> None:
    """Prints the bars, on a scale from 0 to ``end`` milliseconds as wide as the terminal."""
    width = max(MIN_BAR_WIDTH, min(console.width, MAX_WIDTH) - LABEL_WIDTH)
    console.print(Text(title(result), style="bold"))
    for name, bars in _lines(result.timeline).items():
        line = Text(name.ljust(LABEL_WIDTH))
        for activity in cells(bars, end, width):
            line.append_text(Text(" ") if activity is None else _mark(activity, console))
        _print_line(line, console)
    starts = [span.start for span in result.timeline.layers]
    _print_line(Text("layer".ljust(LABEL_WIDTH) + layer_ruler(starts, end, width)), console)
    _print_line(Text("ms".ljust(LABEL_WIDTH) + _time_ruler(end, width)), console)
    console.print(
        Text("  ").join(
            Text.assemble(_mark(activity, console), f" {activity.words}") for activity in ACTIVITIES
        )
    )


def _mark(activity: Activity, console: Console) -> Text:
    letter = activity.letter if console.options.ascii_only else activity.block
    return Text(letter, style=activity.style)


def _print_line(line: Text, console: Console) -> None:
    console.print(line, no_wrap=True, crop=True, overflow="crop")


def _lines(timeline: Timeline) -> dict[str, Bars]:
    forward = zip(timeline.stalls, timeline.layers, strict=True)
    return {
        "scheduler": ((HAND_OVER, timeline.hand_over), (LAUNCH, timeline.launch)),
        "transfer": ((COPYING, timeline.copying),),
        "forward": tuple(
            bar for stall, layer in forward for bar in ((STALL, stall), (LAYER, layer))
        ),
    }


def cells(bars: Bars, end: float, width: int) -> list[Activity | None]:
    """For each of ``width`` equal parts of 0..``end`` what went on for most of it, if anything."""
    size = end / width
    shares: list[dict[Activity | None, float]] = [{None: size} for _ in range(width)]
    for activity, span in bars:
        first, last = (min(width - 1, max(0, int(edge / size))) for edge in (span.start, span.end))
        for cell in range(first, last + 1):
            share = max(0.0, min(span.end, (cell + 1) * size) - max(span.start, cell * size))
            shares[cell][activity] = shares[cell].get(activity, 0.0) + share
            shares[cell][None] -= share
    return [max(share, key=lambda activity: share[activity]) for share in shares]


def layer_ruler(starts: Sequence[float], end: float, width: int) -> str:
    """Numbers of layers, each below the place where its layer starts, as far as there is room."""
    ruler = ""
    for layer, start in enumerate(starts):
        cell, number = int(start / end * width), str(layer)
        wanted = layer % RULER_STEP == 0 or layer == len(starts) - 1
        room = cell + len(number) <= width and (not ruler or len(ruler) < cell)
        if wanted and room:
            ruler = ruler.ljust(cell) + number
    return ruler


def _time_ruler(end: float, width: int) -> str:
    middle, last = f"{end / 2:.2f}", f"{end:.2f}"
    return ("0".ljust(width // 2) + middle).ljust(width - len(last)) + last


# --- the picture ---------------------------------------------------------------------------


def check_plot(path: Path) -> None:
    """Refuses with ``KVBurstError`` what ``plot`` could not do, before anything runs."""
    if importlib.util.find_spec("matplotlib") is None:
        raise KVBurstError(
            "--plot: matplotlib is not installed; install it with: pip install 'kvburst[plot]'"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise KVBurstError(f"--plot: {str(path)!r} ends in none of .{', .'.join(sorted(known))}")


def plot(results: Sequence[DemoResult], path: Path) -> None:
    """Draws the timelines one above the other, on one scale, into a file of the kind that its
    suffix says. Needs matplotlib (``kvburst[plot]``), but no display."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 0.9 + 1.7 * len(results)), layout="constrained")
    every_axes = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    end = max(result.timeline.end for result in results)
    for axes, result in zip(every_axes, results, strict=True):
        _draw(axes, result, end)
    every_axes[-1].set_xlabel("milliseconds from the hand-over")
    figure.legend(
        handles=[Patch(color=each.colour, label=each.words) for each in ACTIVITIES],
        loc="outside lower center",
        ncols=len(ACTIVITIES),
        frameon=False,
    )
    figure.savefig(path, dpi=150)


def _draw(axes: "Axes", result: DemoResult, end: float) -> None:
    lines = _lines(result.timeline)
    for height, bars in enumerate(reversed(lines.values())):
        for activity in ACTIVITIES:
            spans = [(span.start, span.end - span.start) for kind, span in bars if kind is activity]
            # White edges keep neighbouring layers apart.
            edge = "white" if activity is LAYER else "none"
            axes.broken_barh(
                spans,
                (height - 0.35, 0.7),
                facecolor=activity.colour,
                edgecolor=edge,
                linewidth=0.3,
            )
    _draw_hand_over(axes, result, len(lines) - 1, end)
    axes.set_yticks(range(len(lines)), labels=list(reversed(lines)))
    axes.set_title(f"{title(result)}: overlap ratio {result.overlap_ratio:.2f}")
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_hand_over(axes: "Axes", result: DemoResult, height: int, end: float) -> None:
    """Its bar, long enough to be seen, and the table's caller time (the allocator not counted): on
    the bar if that has room, else where the scheduler has nothing more to do."""
    span, launch = result.timeline.hand_over, result.timeline.launch
    length = span.end - span.start
    drawn = max(length, LEAST_SHARE * end)
    axes.broken_barh([(span.start, drawn)], (height - 0.35, 0.7), facecolor=HAND_OVER.colour)
    held_ms = result.load.stats.caller_us / 1e3
    words = f"{HAND_OVER.words} {held_ms:.{0 if held_ms >= 10 else 2}f} ms"
    room = WORDS_SHARE * end
    if length >= room:
        axes.text(span.start + length / 2, height, words, color="white", ha="center", va="center")
        return
    free = launch.end if launch.end + room < end else span.start + drawn
    axes.annotate(
        words,
        xy=(span.start + drawn, height),
        xytext=(free + 0.03 * end, height),
        arrowprops={"arrowstyle": "->"},
        va="center",
    )
