"""What the benchmarks share: arms that take turns, rows, and how rows are shown.

A benchmark measures ours and its baseline in the same run, round by round, so that whatever else
the machine does in between meets both. It prints the machine first; what is simulated says so in
the table, the JSON and the picture.
"""

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from kvburst._core import KVBurstError, build_info

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = int | float | str
Better = Literal["lower", "higher"]
Tick = Callable[[str], None]

# Columns where there is no terminal to ask.
UNATTENDED_WIDTH = 100
OURS_COLOUR, BASELINE_COLOUR = "#1f77b4", "#7f7f7f"

Quick = Annotated[bool, typer.Option("--quick", help="A few seconds: to see that it runs.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Also draw the medians (matplotlib).")
]


# --- measuring -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One metric of one scenario, over ``n`` rounds.

    ``p90`` and ``p99``: nine, or 99, of a hundred rounds were at least this good, so for a rate
    they lie below the median. ``ratio`` says how many times better than the baseline the median is.
    """

    benchmark: str
    scenario: Mapping[str, Value]
    metric: str
    unit: str
    n: int
    median: float
    p90: float
    p99: float
    baseline_median: float | None = None
    ratio: float | None = None
    simulated: bool = False

    @classmethod
    def of(
        cls,
        benchmark: str,
        scenario: Mapping[str, Value],
        metric: str,
        unit: str,
        samples: Sequence[float],
        *,
        baseline: Sequence[float] | None = None,
        better: Better = "lower",
        simulated: bool = False,
    ) -> "Row":
        """From the samples of ours and, where there is one, of the baseline; at least one each."""
        median = percentile(samples, 50, better)
        baseline_median = None if baseline is None else percentile(baseline, 50, better)
        ratio = None
        if baseline_median is not None:
            ratio = baseline_median / median if better == "lower" else median / baseline_median
        return cls(
            benchmark=benchmark,
            scenario=scenario,
            metric=metric,
            unit=unit,
            n=len(samples),
            median=median,
            p90=percentile(samples, 90, better),
            p99=percentile(samples, 99, better),
            baseline_median=baseline_median,
            ratio=ratio,
            simulated=simulated,
        )

    def as_json(self) -> dict[str, Any]:
        """Without the keys that say nothing: those of a baseline that is not, and of no model."""
        row: dict[str, Any] = {
            "benchmark": self.benchmark,
            "scenario": dict(self.scenario),
            "metric": self.metric,
            "unit": self.unit,
            "n": self.n,
            "median": _rounded(self.median),
            "p90": _rounded(self.p90),
            "p99": _rounded(self.p99),
        }
        if self.baseline_median is not None and self.ratio is not None:
            row |= {
                "baseline_median": _rounded(self.baseline_median),
                "ratio": _rounded(self.ratio),
            }
        if self.simulated:
            row["simulated"] = True
        return row


def _rounded(value: float) -> float:
    """Six digits, which is more than any of them is worth."""
    return float(f"{value:.6g}")


def percentile(samples: Sequence[float], percent: float, better: Better = "lower") -> float:
    """The value that ``percent`` of a hundred samples are at least as good as, interpolated."""
    ordered = sorted(samples, reverse=better == "higher")
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = math.ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def take_turns(
    arms: Mapping[str, Callable[[], float]],
    rounds: int,
    *,
    warm_up: int = 1,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Runs every arm once a round and returns the samples of each, which the arms measure.

    The order moves on by one from round to round, so no arm always follows the same other one.
    The samples of the first ``warm_up`` rounds are dropped. ``tick`` is called after each round.
    """
    names = list(arms)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            sample = arms[name]()
            if number >= 0:
                samples[name].append(sample)
        tick()
    return samples


def machine() -> dict[str, Any]:
    """What was measured on. Sizes in bytes; ``load_average`` of the last minute says how much else
    the machine had to do."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "kvburst": build_info().version,
        "compiler": build_info().compiler,
    }


def _cpu_name() -> str:
    architecture = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return f"{value.strip()} ({architecture})"
    return architecture


# --- showing -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outputs:
    """Where the result goes besides the terminal. Refuses, before anything is measured, what
    could not be written in the end."""

    json_file: Path | None
    plot_file: Path | None

    def __post_init__(self) -> None:
        for option, file in (("--json", self.json_file), ("--plot", self.plot_file)):
            if file is None:
                continue
            if file.is_dir():
                raise typer.BadParameter(f"{str(file)!r} is a folder", param_hint=option)
            if not file.parent.is_dir():
                raise typer.BadParameter(f"{str(file.parent)!r} is not a folder", param_hint=option)
        if self.plot_file is not None:
            _check_can_plot(self.plot_file)


def report(rows: Sequence[Row], outputs: Outputs, *, title: str, notes: Sequence[str] = ()) -> None:
    """Prints the machine, the rows and the notes, and writes what was asked for."""
    measured_on = machine()
    console = new_console()
    show(rows, measured_on, console, title=title, notes=notes)
    write_json(rows, measured_on, outputs.json_file)
    if outputs.plot_file is not None:
        plot(rows, outputs.plot_file, title=title)


def new_console(unattended_width: int = UNATTENDED_WIDTH) -> Console:
    """As wide as the terminal, or of this many columns where there is none."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=unattended_width)


def write_json(rows: Sequence[Row], measured_on: Mapping[str, Any], file: Path | None) -> None:
    """One object with ``machine`` and ``rows``, each on a line, if a file was asked for."""
    if file is not None:
        lines = ",\n".join(json.dumps(row.as_json()) for row in rows)
        text = f'{{"machine": {json.dumps(measured_on)},\n"rows": [\n{lines}\n]}}\n'
        file.write_text(text)


def show(
    rows: Sequence[Row],
    measured_on: Mapping[str, Any],
    console: Console,
    *,
    title: str,
    notes: Sequence[str] = (),
) -> None:
    """A table for each metric. What all scenarios have in common stands above them."""
    show_machine(measured_on, console)
    console.print(f"\n[bold]{title}[/bold]: {heading(rows)}", highlight=False)
    for metric, of_metric in by_metric(rows).items():
        console.print()
        console.print(_table(metric, of_metric, varying_keys(rows)))
    console.print()
    for note in notes:
        console.print(note, highlight=False)


def show_machine(measured_on: Mapping[str, Any], console: Console) -> None:
    """Two lines: the machine, and the versions."""
    versions = ", ".join(f"{name} {measured_on[name]}" for name in ("python", "torch", "kvburst"))
    console.print(
        f"{measured_on['cpu']}, {measured_on['cores']} cores,"
        f" {measured_on['memory_bytes'] / 2**30:.0f} GiB, load {measured_on['load_average']},"
        f" Linux {measured_on['kernel']}\n{versions} ({measured_on['compiler']})",
        highlight=False,
    )


def new_table(title: str) -> Table:
    """Without columns yet; with as few lines as can be."""
    return Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )


def _table(metric: str, rows: Sequence[Row], varying: Sequence[str]) -> Table:
    table = new_table(f"{metric}, {rows[0].unit}{simulated_mark(rows)}")
    for key in varying:
        table.add_column(spaced(key), justify=side_of(rows[0].scenario[key]))
    columns = ["n", "median", "p90", "p99"]
    if any(row.ratio is not None for row in rows):
        columns += ["baseline", "ratio"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [with_commas(row.scenario[key]) for key in varying]
        cells += [str(row.n), *(number(value) for value in (row.median, row.p90, row.p99))]
        if row.baseline_median is not None and row.ratio is not None:
            cells += [number(row.baseline_median), f"{row.ratio:.2f}x"]
        table.add_row(*cells)
    return table


def plot(rows: Sequence[Row], file: Path, *, title: str) -> None:
    """A panel for each metric: the median of ours, a line to its p99, and the baseline beside."""
    from matplotlib.figure import Figure

    metrics = by_metric(rows)
    most = max(len(panel) for panel in metrics.values())
    figure = Figure(figsize=(2 + 5 * len(metrics), 1.6 + 0.28 * most), layout="constrained")
    figure.suptitle(f"{title}\n{heading(rows)}", fontsize=10)
    panels: Sequence[Axes] = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, (metric, panel) in zip(panels, metrics.items(), strict=True):
        _draw_panel(axes, metric, panel, varying_keys(rows))
    figure.savefig(file, dpi=150)


def _draw_panel(axes: "Axes", metric: str, rows: Sequence[Row], varying: Sequence[str]) -> None:
    positions = range(len(rows))
    for position, row in zip(positions, rows, strict=True):
        axes.plot([row.median, row.p99], [position, position], color=OURS_COLOUR, linewidth=1.5)
    axes.plot([row.median for row in rows], positions, "o", color=OURS_COLOUR, label="kvburst")
    compared = [(row.baseline_median, at) for at, row in enumerate(rows) if row.ratio is not None]
    if compared:
        medians, at = zip(*compared, strict=True)
        axes.plot(medians, at, "d", color=BASELINE_COLOUR, fillstyle="none", label="baseline")
    values = [row.median for row in rows] + [row.baseline_median or row.median for row in rows]
    if max(values) > 10 * min(values):
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.set_title(f"{metric}{simulated_mark(rows)}", fontsize=9)
    axes.set_xlabel(f"{rows[0].unit}, median and p99")
    axes.set_yticks(positions, [_label(row, varying) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)


def _check_can_plot(file: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise typer.BadParameter(
            "needs matplotlib: pip install 'kvburst[plot]'", param_hint="--plot"
        ) from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix[1:] not in known:
        raise typer.BadParameter(
            f"{str(file)!r} does not end with one of {', '.join(known)}", param_hint="--plot"
        )


def by_metric(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of every metric, in the order of their first."""
    metrics = dict.fromkeys(row.metric for row in rows)
    return {metric: [row for row in rows if row.metric == metric] for metric in metrics}


def simulated_mark(rows: Sequence[Row]) -> str:
    """For a title, where a link model made the numbers."""
    return " (simulated)" if any(row.simulated for row in rows) else ""


def _common(rows: Sequence[Row]) -> dict[str, Value]:
    first = rows[0].scenario
    return {
        key: value
        for key, value in first.items()
        if all(row.scenario.get(key) == value for row in rows)
    }


def varying_keys(rows: Sequence[Row]) -> list[str]:
    """The keys in which the scenarios differ."""
    common = _common(rows)
    return [key for key in rows[0].scenario if key not in common]


def heading(rows: Sequence[Row]) -> str:
    """What all scenarios have in common, in words."""
    common = _common(rows)
    return ", ".join(f"{spaced(key)} {with_commas(value)}" for key, value in common.items())


def _label(row: Row, varying: Sequence[str]) -> str:
    """Words speak for themselves, numbers need their name."""
    values = {key: row.scenario[key] for key in varying}
    return ", ".join(
        value if isinstance(value, str) else f"{spaced(key)} {value:,}"
        for key, value in values.items()
    )


def spaced(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


def with_commas(value: Value) -> str:
    """A whole number in groups of three digits; anything else as it is."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def side_of(value: Value) -> Literal["left", "right"]:
    return "left" if isinstance(value, str) else "right"


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# --- running -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cores:
    """Where the caller and the issuing thread run; the same one if there is no other."""

    caller: int
    issuer: int

    @classmethod
    def of(cls, allowed: Sequence[int]) -> "Cores":
        return cls(caller=allowed[0], issuer=allowed[-1])

    @contextmanager
    def caller_pinned(self) -> Iterator[None]:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self.caller})
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def __str__(self) -> str:
        apart = "another core" if self.issuer != self.caller else "the same core, there is no other"
        return f"the caller on core {self.caller}, the issuing thread on {apart}"


def new_app(help_text: str) -> typer.Typer:
    """A command line like that of kvburst itself."""
    return typer.Typer(
        help=help_text,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Reads an option's number. Refuses, naming value and bound."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError as error:
            raise typer.BadParameter(f"{text!r} is not a whole number") from error
        if not least <= number <= most:
            raise typer.BadParameter(f"{number} is not from {least} to {most}")
        return number

    return parse


def whole_numbers(option: str, text: str, *, least: int, most: int) -> tuple[int, ...]:
    """The numbers of "64,256,1024", each once. Refuses, naming option, value and bound."""
    parse = whole_number(least, most)
    try:
        return tuple(dict.fromkeys(parse(part) for part in text.split(",")))
    except typer.BadParameter as error:
        error.param_hint = option
        raise


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What kvburst refuses, such as pools beyond the memory, ends the script with one line."""
    try:
        yield
    except (KVBurstError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


@contextmanager
def progress(total: int) -> Iterator[Tick]:
    """A bar of ``total`` ticks on a terminal, nothing elsewhere. It is drawn between the rounds:
    a thread that draws would be seen in what is timed."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns,
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("starting", total=total)

        def tick(step: str) -> None:
            bar.update(task, advance=1, description=step, refresh=True)

        yield tick
