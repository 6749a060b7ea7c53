"""The command ``kvburst``. Each command imports what it needs when it runs: torch takes seconds,
and ``--help``, ``--version`` and a shell's completion are not to wait for it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvburst._core import KVBurstError, __version__
from kvburst.demo_options import (
    DEFAULT_MODELLED_PAGES,
    DEFAULT_PAGES,
    DemoOptions,
    DeviceName,
    Groups,
    Layout,
    Mode,
)
from kvburst.geometries import GEOMETRIES
from kvburst.links import LinkName
from kvburst.replay.options import (
    DEFAULT_DEVICE_PAGES,
    DEFAULT_HOST_PAGES,
    DEFAULT_LAYERS,
    DEFAULT_PAGE_BYTES,
    ReplayOptions,
)

if TYPE_CHECKING:
    from kvburst.timeline import Flight

DEFAULTS = DemoOptions()
GEOMETRY_NAMES = [geometry.name for geometry in GEOMETRIES]

app = typer.Typer(
    help="Moves LLM KV-cache pages between host and device memory.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a whole number") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number") from error


JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")
]
TimelineFile = Annotated[
    Path | None,
    typer.Option(
        "--timeline",
        metavar="FILE",
        help="Also write what ran where and when, for ui.perfetto.dev or chrome://tracing.",
    ),
]


def main() -> None:
    """The entry point of the console script."""
    app(prog_name="kvburst")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvburst {__version__}")
        raise typer.Exit


@app.callback()
def _kvburst(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@app.command(short_help="Move pages out and back under a forward; compare every byte.")
def demo(
    device: Annotated[
        DeviceName,
        typer.Option(
            help="host: host memory plays both tiers; cuda: the first GPU, whose driver"
            " KVBURST_LIBCUDA may name."
        ),
    ] = DEFAULTS.device,
    geometry: Annotated[
        str, typer.Option(metavar="NAME", help=f"A model's pools: {', '.join(GEOMETRY_NAMES)}.")
    ] = DEFAULTS.geometry,
    pages: Annotated[
        int | None,
        typer.Option(
            parser=_whole_number,
            metavar="N",
            help=f"Pages that move; {DEFAULT_PAGES} if left out, {DEFAULT_MODELLED_PAGES} with a"
            " link.",
        ),
    ] = None,
    device_pages: Annotated[
        int,
        typer.Option(
            parser=_whole_number,
            metavar="N",
            help="Pages of the device pools, above twice --pages; 0 takes some more than that.",
        ),
    ] = DEFAULTS.device_pages,
    layout: Annotated[
        Layout, typer.Option(help="How the host pools lie in memory.")
    ] = DEFAULTS.layout,
    one_allocation: Annotated[
        bool,
        typer.Option(
            "--one-allocation/--separate",
            help="All layers of a device pool in one allocation, or each in its own.",
        ),
    ] = DEFAULTS.one_allocation,
    groups: Annotated[
        Groups,
        typer.Option(
            help="What shares a copy. ramp: a page of 1, 2, 4, ... 16 layers; neighbours: in a load"
            " only pages that lie side by side; none: nothing, one copy per page and layer."
        ),
    ] = DEFAULTS.groups,
    mode: Annotated[
        Mode,
        typer.Option(
            help="Who issues the copies. thread: a thread of their own; inline: the thread that"
            " calls."
        ),
    ] = DEFAULTS.mode,
    link: Annotated[
        Literal["none", LinkName],
        typer.Option(
            help="Whose timing. none: the device's own, as measured; the others are simulated,"
            " with 50 GB/s and 2.3 us (h100) or 0.5 us (h100-batch) a copy."
        ),
    ] = "none",
    forward: Annotated[
        float,
        typer.Option(
            parser=_number,
            metavar="X",
            help="Length of the forward, as a multiple of the time that the grouped copies take.",
        ),
    ] = DEFAULTS.forward,
    chunk_pages: Annotated[
        int,
        typer.Option(
            parser=_whole_number,
            metavar="N",
            help="Most pages that a backup hands over in one call; 0 is no bound.",
        ),
    ] = DEFAULTS.chunk_pages,
    seed: Annotated[
        int,
        typer.Option(
            parser=_whole_number,
            metavar="N",
            help="Of the random bytes and of the order of the pages.",
        ),
    ] = DEFAULTS.seed,
    ranks: Annotated[
        int,
        typer.Option(
            parser=_whole_number,
            metavar="N",
            help="Run N processes, each with pools and a controller of its own.",
        ),
    ] = DEFAULTS.ranks,
    shard: Annotated[
        bool,
        typer.Option("--shard", help="The ranks keep one host copy of each layer between them."),
    ] = DEFAULTS.shard,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Before it the same inline, with one copy per page and layer."
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also draw the timeline: .png, .svg, .pdf. Needs matplotlib."
        ),
    ] = None,
    json_file: JsonFile = None,
    timeline: TimelineFile = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing, unless bytes are wrong.")
    ] = False,
) -> None:
    """Back pages up to the host, load them back elsewhere under a forward, compare every byte.

    Exit status: 0 if every byte is right, 1 if one is not, 2 for a bad option.

    \b
    Examples:
      kvburst demo
      kvburst demo --geometry llama-3.1-70b --pages 8 --layout layer_first
      kvburst demo --separate
      kvburst demo --link h100 --compare --plot timeline.png
      kvburst demo --link h100 --forward 1 --groups none
      kvburst demo --link h100 --timeline timeline.json
      kvburst demo --device cuda --pages 256
      kvburst demo --ranks 4 --shard
    """
    with _one_line_errors("demo"):
        _check_file("--json", json_file)
        _check_file("--plot", plot)
        _check_file("--timeline", timeline)
        usual_pages = DEFAULT_PAGES if link == "none" else DEFAULT_MODELLED_PAGES
        options = DemoOptions(
            device=device,
            geometry=geometry,
            pages=usual_pages if pages is None else pages,
            device_pages=device_pages,
            layout=layout,
            one_allocation=one_allocation,
            groups=groups,
            mode=mode,
            link=None if link == "none" else link,
            forward=forward,
            chunk_pages=chunk_pages,
            seed=seed,
            ranks=ranks,
            shard=shard,
        )
        if ranks > 1:
            if compare or plot is not None or timeline is not None:
                raise KVBurstError(
                    "--compare, --plot and --timeline: are for one rank, --ranks is " + str(ranks)
                )
            exact = _demo_of_ranks(options, json_file, quiet)
            raise typer.Exit(0 if exact else 1)
        plain = replace(options, mode="inline", groups="none")
        wanted = [plain, options] if compare else [options]
        from rich.console import Console

        from kvburst.demo import Demo, num_ticks
        from kvburst.demo_report import as_json, progress, show, show_verdict
        from kvburst.demo_timeline import check_plot
        from kvburst.demo_timeline import plot as draw

        if plot is not None:
            check_plot(plot)
        with progress(Console(stderr=True, quiet=quiet), sum(map(num_ticks, wanted))) as tick:
            results = [Demo(each, tick, record=timeline is not None).run() for each in wanted]
        for result in results:
            if not quiet:
                show(result, Console(), end=max(each.timeline.end for each in results))
            elif not result.bit_exact:
                show_verdict(result, Console(stderr=True))
        if plot is not None:
            draw(results, plot)
        _write_timeline(timeline, [each.flight.from_zero() for each in results if each.flight])
        content = as_json(results[-1])
        if compare:
            content["compared_with"] = as_json(results[0])
        _write_json(json_file, content)
    if not all(result.bit_exact for result in results):
        raise typer.Exit(1)


def _demo_of_ranks(options: DemoOptions, json_file: Path | None, quiet: bool) -> bool:
    from rich.console import Console

    from kvburst import demo_ranks_report as report
    from kvburst.demo_ranks import num_rank_ticks, run_ranks
    from kvburst.demo_report import progress

    with progress(Console(stderr=True, quiet=quiet), num_rank_ticks(options)) as tick:
        results = run_ranks(options, tick)
    if not quiet:
        report.show(results, Console())
    elif not report.bit_exact(results):
        report.show_verdict(results, Console(stderr=True))
    _write_json(json_file, report.as_json(results))
    return report.bit_exact(results)


@app.command(short_help="Say what this machine has for kvburst, and what it lacks.")
def doctor(json_file: JsonFile = None) -> None:
    """Say what this machine has for kvburst, and why it lacks what it lacks.

    \b
    Examples:
      kvburst doctor
      kvburst doctor --json doctor.json
    """
    with _one_line_errors("doctor"):
        _check_file("--json", json_file)
        from rich.console import Console

        from kvburst import doctor as examination

        diagnosis = examination.examine()
        examination.show(diagnosis, Console())
        _write_json(json_file, examination.as_json(diagnosis))


@app.command(short_help="Let a request trace decide which pages move, and check them.")
def replay(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Mooncake's JSON lines, plain or gzipped.")
    ],
    limit: Annotated[
        int | None,
        typer.Option(parser=_whole_number, metavar="N", help="Only the first N requests."),
    ] = None,
    device_pages: Annotated[
        int,
        typer.Option(parser=_whole_number, metavar="N", help="Pages of the device tier."),
    ] = DEFAULT_DEVICE_PAGES,
    host_pages: Annotated[
        int, typer.Option(parser=_whole_number, metavar="N", help="Pages of the host tier.")
    ] = DEFAULT_HOST_PAGES,
    geometry: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A model's pools, for --plan-only above all; a wrong name lists the known.",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            parser=_whole_number,
            metavar="N",
            help=f"Layers of a pool of no model; {DEFAULT_LAYERS} if left out.",
        ),
    ] = None,
    page_bytes: Annotated[
        int | None,
        typer.Option(
            parser=_whole_number,
            metavar="N",
            help=f"Bytes of a page of one such layer; {DEFAULT_PAGE_BYTES} if left out.",
        ),
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Count the copies, but move no bytes.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the page ids of all bursts.")
    ] = None,
    json_file: JsonFile = None,
    timeline: TimelineFile = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing, unless bytes are wrong.")
    ] = False,
) -> None:
    """Let a request trace decide which pages move, and check every one that did.

    A small prefix cache serves the requests over two tiers that are scattered as SGLang's
    allocators scatter them. Ctrl-C ends it with the report so far.

    Exit status: 0 if every byte is right, 1 if one is not, 2 for a bad option or trace, 130 after
    Ctrl-C.

    \b
    Examples:
      kvburst replay conversation_trace.jsonl.gz --limit 3000
      kvburst replay conversation_trace.jsonl.gz --plan-only --layers 78
      kvburst replay conversation_trace.jsonl.gz --plan-only --geometry mla-dsa-78
      kvburst replay conversation_trace.jsonl.gz --limit 200 --record bursts.kvb
    """
    with _one_line_errors("replay"):
        _check_file("--json", json_file)
        _check_file("--record", record)
        _check_file("--timeline", timeline)
        options = ReplayOptions(
            trace=trace,
            limit=limit,
            device_pages=device_pages,
            host_pages=host_pages,
            geometry=geometry,
            layers=layers,
            page_bytes=page_bytes,
            plan_only=plan_only,
        )
        from rich.console import Console

        from kvburst.replay import report
        from kvburst.replay.interrupt import noting_interrupts
        from kvburst.replay.recording import save_recording
        from kvburst.replay.replay import Replay

        run = Replay(options, record=timeline is not None)
        console = Console(stderr=True, quiet=quiet)
        with noting_interrupts() as stopped, report.progress(console, len(run.requests)) as tick:
            result = run.run(tick, stopped)
        if not quiet:
            report.show(result, Console())
        elif result.mismatched_pages:
            report.show_verdict(result, Console(stderr=True))
        if record is not None:
            save_recording(record, result.recording)
        _write_timeline(timeline, [result.flight] if result.flight else [])
        _write_json(json_file, report.as_json(result))
    if result.mismatched_pages:
        raise typer.Exit(1)
    if result.interrupted:
        raise typer.Exit(130)


@contextmanager
def _one_line_errors(command: str) -> Iterator[None]:
    """What is wrong with the options or the machine ends the command with one line, not a trace."""
    try:
        yield
    except (KVBurstError, OSError) as error:
        typer.echo(f"kvburst {command}: {error}", err=True)
        raise typer.Exit(2) from error


def _check_file(option: str, file: Path | None) -> None:
    """Before anything runs, not after it."""
    if file is None:
        return
    if file.is_dir():
        raise KVBurstError(f"{option}: {str(file)!r} is a folder")
    if not file.parent.is_dir():
        raise KVBurstError(f"{option}: {str(file.parent)!r} is not a folder")


def _write_timeline(file: Path | None, flights: "Sequence[Flight]") -> None:
    if file is not None:
        from kvburst.timeline import save

        try:
            save(file, flights)
        except OSError as error:
            raise KVBurstError(f"--timeline: cannot write {file}: {error.strerror}") from error


def _write_json(file: Path | None, content: dict[str, Any]) -> None:
    if file is not None:
        try:
            file.write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise KVBurstError(f"--json: cannot write {file}: {error.strerror}") from error
