"""How the issue latencies are shown: a line a scenario, and one picture."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import (
    Row,
    Value,
    heading,
    new_table,
    number,
    show_machine,
    side_of,
    spaced,
    varying_keys,
    with_commas,
)
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Columns of a terminal that shows all of a table.
WIDTH = 132
# Columns where there is no terminal to ask: no table has as many, whatever its numbers.
UNATTENDED_WIDTH = 240
# Above this a table is in milliseconds.
MOST_US = 50_000


@dataclass(frozen=True)
class Section:
    """Rows of one thing that was changed."""

    title: str
    rows: tuple[Row, ...]


Key = tuple[tuple[str, Value], ...]


def by_scenario(rows: Sequence[Row]) -> dict[Key, dict[str, Row]]:
    """The metrics of every scenario, in the order in which they were measured."""
    found: dict[Key, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.scenario.items()), {})[row.metric] = row
    return found


@dataclass(frozen=True)
class Column:
    """``cell``: of the metrics of a scenario and of what times are divided by. ``wide``: left out
    where the terminal is narrow."""

    title: str
    cell: Callable[[Mapping[str, Row], float], str]
    wide: bool = False


COLUMNS = (
    Column("n", lambda of, scale: f"{of['issue_us'].n}"),
    Column("copies", lambda of, scale: number(of["copies"].median)),
    Column("issue {unit}", lambda of, scale: number(of["issue_us"].median / scale)),
    Column("p90", lambda of, scale: number(of["issue_us"].p90 / scale), wide=True),
    Column("p99", lambda of, scale: number(of["issue_us"].p99 / scale), wide=True),
    Column("us/layer", lambda of, scale: number(of["issue_us_per_layer"].median), wide=True),
    Column("us/copy", lambda of, scale: number(of["issue_us_per_copy"].median), wide=True),
    Column("peer {unit}", lambda of, scale: _optional(of["issue_us"].baseline_median, scale)),
    Column("times", lambda of, scale: _times(of["issue_us"].ratio)),
    Column("caller {unit}", lambda of, scale: number(of["caller_us"].median / scale)),
    Column("p99", lambda of, scale: number(of["caller_us"].p99 / scale), wide=True),
    Column("times", lambda of, scale: _times(of["caller_us"].ratio)),
)


def show(
    sections: Sequence[Section],
    measured_on: Mapping[str, Any],
    console: Console,
    notes: Sequence[str],
) -> None:
    """The machine, a table for each section, the notes."""
    show_machine(measured_on, console)
    for section in sections:
        console.print(f"\n[bold]{section.title}[/bold]", highlight=False)
        console.print(heading(section.rows), highlight=False, style="dim")
        console.print(_table(section, wide=console.width >= WIDTH))
    console.print()
    for note in notes:
        console.print(note, highlight=False)


def _table(section: Section, wide: bool) -> Table:
    table = new_table("")
    keys = varying_keys(section.rows)
    if "geometry" in keys:
        keys = [key for key in keys if key not in ("layers", "pools")]
    longest = max(row.median for row in section.rows if row.metric == "issue_us")
    unit, scale = ("ms", 1000.0) if longest > MOST_US else ("us", 1.0)
    for key in keys:
        table.add_column(_words(key), justify=side_of(section.rows[0].scenario[key]), no_wrap=True)
    columns = [column for column in COLUMNS if wide or not column.wide]
    for column in columns:
        table.add_column(column.title.format(unit=unit), justify="right", no_wrap=True)
    for scenario, metrics in by_scenario(section.rows).items():
        values = dict(scenario)
        table.add_row(
            *(with_commas(values[key]) for key in keys),
            *(column.cell(metrics, scale) for column in columns),
        )
    return table


def _words(key: str) -> str:
    return {"copies_per_call": "a call", "chunk_pages": "chunk"}.get(key, spaced(key))


def _optional(us: float | None, scale: float) -> str:
    return "" if us is None else number(us / scale)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


# --- the picture ---------------------------------------------------------------------------

COLOURS = {
    "peer": "#7f7f7f",
    "none": "#d62728",
    "neighbours": "#ff9f40",
    "ramp": "#1f77b4",
    "thread": "#2ca02c",
}
WORDS = {
    "peer": "baseline: the peer's way, from Python",
    "none": "one copy a page and layer",
    "neighbours": "neighbouring pages merged",
    "ramp": "layer groups with ramp",
    "thread": "layer groups with ramp, handed to a thread",
}
PATTERN_ORDER = ("contiguous", "runs", "scattered", "trace")


def draw(rows: Sequence[Row], file: Path) -> None:
    """For each device the time until all is issued and that of the calling thread; beside them, the
    same on all devices, how many copies are saved. Needs matplotlib."""
    from matplotlib.figure import Figure

    devices = list(dict.fromkeys(row.scenario["device"] for row in rows))
    figure = Figure(figsize=(15, 1.6 + 3.4 * len(devices)), layout="constrained")
    grid = figure.add_gridspec(len(devices), 3, width_ratios=(1, 1, 1.05))
    for line, device in enumerate(devices):
        of_device = [row for row in rows if row.scenario["device"] == device]
        _draw_issue(figure.add_subplot(grid[line, 0]), of_device)
        _draw_caller(figure.add_subplot(grid[line, 1]), of_device)
    first = [row for row in rows if row.scenario["device"] == devices[0]]
    _draw_copies(figure.add_subplot(grid[:, 2]), first)
    shape = rows[0].scenario
    figure.suptitle(
        f"Issuing a burst: {shape['geometry']}, {shape['layers']} layers, {shape['pools']} pools",
        fontweight="bold",
    )
    curves = {
        str(line.get_label()): line
        for axes in figure.axes
        for line in axes.lines
        if not str(line.get_label()).startswith("_")
    }
    figure.legend(handles=list(curves.values()), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=110)


def _title(rows: Sequence[Row]) -> str:
    scenario = rows[0].scenario
    if scenario["link"] == "none":
        return f"device {scenario['device']} (no driver counted)"
    return f"device {scenario['device']}, link {scenario['link']} (simulated)"


def _sweep(rows: Sequence[Row], metric: str) -> list[Row]:
    """Of the first section, which changes the pages alone: one load for every size."""
    first = rows[0].scenario
    fixed = ("geometry", "pattern", "direction", "layout", "chunk_pages")
    found: dict[Key, Row] = {}
    for row in rows:
        same = all(row.scenario[key] == first[key] for key in fixed)
        if row.metric == metric and same and row.scenario["copies_per_call"] != 1:
            found.setdefault(tuple(row.scenario.items()), row)
    return list(found.values())


def _curve(rows: Sequence[Row], groups: str, mode: str) -> tuple[list[float], list[float]]:
    points = sorted(
        (float(row.scenario["pages"]), row.median)
        for row in rows
        if row.scenario["groups"] == groups and row.scenario["mode"] == mode
    )
    return [pages for pages, _ in points], [time for _, time in points]


def _peers_curve(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Not a number where there is no baseline: a gap in the picture."""
    points = {
        float(row.scenario["pages"]): math.nan
        if row.baseline_median is None
        else row.baseline_median
        for row in rows
    }
    return list(points), list(points.values())


def _draw_issue(axes: "Axes", rows: Sequence[Row]) -> None:
    sweep = _sweep(rows, "issue_us")
    every_size, peers = _peers_curve(sweep)
    axes.plot(every_size, peers, "d--", color=COLOURS["peer"], label=WORDS["peer"])
    for groups, marker in (("none", "o"), ("neighbours", "x"), ("ramp", "o")):
        pages, times = _curve(sweep, groups, "inline")
        axes.plot(pages, times, f"{marker}-", color=COLOURS[groups], label=WORDS[groups])
    _finish(axes, every_size, f"Until the last copy is issued\n{_title(rows)}")


def _draw_caller(axes: "Axes", rows: Sequence[Row]) -> None:
    sweep = _sweep(rows, "caller_us")
    every_size, peers = _peers_curve(sweep)
    axes.plot(every_size, peers, "d--", color=COLOURS["peer"])
    for groups in ("none", "ramp"):
        axes.plot(*_curve(sweep, groups, "inline"), "o-", color=COLOURS[groups])
    pages, times = _curve(sweep, "ramp", "thread")
    axes.plot(pages, times, "s-", color=COLOURS["thread"], label=WORDS["thread"])
    _finish(axes, every_size, f"What the scheduler thread pays\n{_title(rows)}")


def _finish(axes: "Axes", pages: Sequence[float], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(pages, [f"{page:,.0f}" for page in pages])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda us, at: _duration(us))
    axes.set_xlabel("pages of a load, scattered; median times", fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def _duration(us: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:,g} {unit}"
    return f"{us:,g} us"


def _draw_copies(axes: "Axes", rows: Sequence[Row]) -> None:
    """How many times fewer copies than one a page and layer, by pattern and direction."""
    first = rows[0].scenario
    fewer: dict[tuple[str, str, str], float] = {}
    for row in rows:
        scenario = row.scenario
        same = all(scenario[key] == first[key] for key in ("geometry", "layout", "chunk_pages"))
        if row.metric == "copies" and same and row.ratio is not None:
            direction, pattern, groups = (
                str(scenario[key]) for key in ("direction", "pattern", "groups")
            )
            fewer.setdefault((direction, pattern, groups), row.ratio)
    places = [
        (direction, pattern)
        for direction in ("load", "backup")
        for pattern in PATTERN_ORDER
        if (direction, pattern, "ramp") in fewer
    ]
    for shift, groups in ((-0.2, "neighbours"), (0.2, "ramp")):
        found = [
            (at, fewer[direction, pattern, groups])
            for at, (direction, pattern) in enumerate(places)
            if (direction, pattern, groups) in fewer
        ]
        times = [each for _, each in found]
        bars = axes.barh([at + shift for at, _ in found], times, 0.38, color=COLOURS[groups])
        axes.bar_label(bars, [f"{number(each)}x" for each in times], fontsize=8, padding=3)
    axes.set_yticks(range(len(places)), [f"{direction}\n{what}" for direction, what in places])
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlim(1, 4 * max(fewer.values()))
    axes.xaxis.set_major_formatter(lambda times, at: f"{times:,g}x")
    axes.set_title("How many times fewer copies\nthan one a page and layer, by pages", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
