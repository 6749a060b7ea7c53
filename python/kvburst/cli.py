"""The command ``kvburst``. Each command imports what it needs when it runs: torch takes seconds,
and ``--help``, ``--version`` and a shell's completion are not to wait for it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvburst._core import KVBurstError, __version__
from kvburst.cli_parts import (
    Commands,
    JsonFile,
    Quiet,
    TimelineFile,
    check_file,
    number,
    one_line_errors,
    whole_number,
    write_json,
    write_timeline,
)
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
    SHARED_HOST_RATIOS,
    ReplayOptions,
)

DEFAULTS = DemoOptions()
GEOMETRY_NAMES = [geometry.name for geometry in GEOMETRIES]
_HOST_RATIOS = f"{', '.join(map(str, SHARED_HOST_RATIOS[:-1]))} and {SHARED_HOST_RATIOS[-1]}"

app = typer.Typer(
    cls=Commands,
    help="Moves LLM KV-cache pages between host and device memory.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
        str,
        typer.Option(
            metavar="NAME",
            help=f"A model's pools: {', '.join(GEOMETRY_NAMES)}.",
            autocompletion=lambda: GEOMETRY_NAMES,
        ),
    ] = DEFAULTS.geometry,
    pages: Annotated[
        int | None,
        typer.Option(
            parser=whole_number,
            metavar="N",
            help=f"Pages that move; {DEFAULT_PAGES} if left out, {DEFAULT_MODELLED_PAGES} with a"
            " link.",
        ),
    ] = None,
    device_pages: Annotated[
        int,
        typer.Option(
            parser=whole_number,
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
            parser=number,
            metavar="X",
            help="Length of the forward, as a multiple of the time that the grouped copies take.",
        ),
    ] = DEFAULTS.forward,
    chunk_pages: Annotated[
        int,
        typer.Option(
            parser=whole_number,
            metavar="N",
            help="Most pages that a backup hands over in one call; 0 is no bound.",
        ),
    ] = DEFAULTS.chunk_pages,
    seed: Annotated[
        int,
        typer.Option(
            parser=whole_number,
            metavar="N",
            help="Of the random bytes and of the order of the pages.",
        ),
    ] = DEFAULTS.seed,
    ranks: Annotated[
        int,
        typer.Option(
            parser=whole_number,
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
    quiet: Quiet = False,
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
      kvburst demo --ranks 4 --shard --link h100 --timeline ranks.json --plot ranks.png
    """
    with one_line_errors("demo"):
        check_file("--json", json_file)
        check_file("--plot", plot)
        check_file("--timeline", timeline)
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
            if compare:
                raise KVBurstError(f"--compare: is for one rank, --ranks is {ranks}")
            exact = _demo_of_ranks(options, json_file, plot, timeline, quiet)
            raise typer.Exit(0 if exact else 1)
        plain = replace(options, mode="inline", groups="none")
        wanted = [plain, options] if compare else [options]
        from rich.console import Console

        from kvburst.cli_output import Output
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
                show(result, Output(), end=max(each.timeline.end for each in results))
            elif not result.bit_exact:
                show_verdict(result, Console(stderr=True))
        if plot is not None:
            draw(results, plot)
        write_timeline(timeline, [each.flight.from_zero() for each in results if each.flight])
        content = as_json(results[-1])
        if compare:
            content["compared_with"] = as_json(results[0])
        write_json(json_file, content)
    if not all(result.bit_exact for result in results):
        raise typer.Exit(1)


def _demo_of_ranks(
    options: DemoOptions,
    json_file: Path | None,
    plot: Path | None,
    timeline: Path | None,
    quiet: bool,
) -> bool:
    from rich.console import Console

    from kvburst import demo_ranks_report as report
    from kvburst.cli_output import Output
    from kvburst.demo_ranks import num_rank_ticks, run_ranks
    from kvburst.demo_report import progress
    from kvburst.demo_timeline import check_plot
    from kvburst.flight_plot import plot as draw

    if plot is not None:
        check_plot(plot)
    record = plot is not None or timeline is not None
    with progress(Console(stderr=True, quiet=quiet), num_rank_ticks(options)) as tick:
        results = run_ranks(options, tick, record=record)
    if not quiet:
        report.show(results, Output())
    elif not report.bit_exact(results):
        report.show_verdict(results, Console(stderr=True))
    flights = [rank.result.flight for rank in results if rank.result.flight]
    if plot is not None:
        draw(flights, plot)
    write_timeline(timeline, flights)
    write_json(json_file, report.as_json(results))
    return report.bit_exact(results)


@app.command(short_help="Say what this machine has for kvburst, and what it lacks.")
def doctor(
    json_file: JsonFile = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing: for --json alone.")
    ] = False,
) -> None:
    """Say what this machine has for kvburst, and why it lacks what it lacks.

    \b
    Examples:
      kvburst doctor
      kvburst doctor --json doctor.json
    """
    with one_line_errors("doctor"):
        check_file("--json", json_file)
        from kvburst import doctor as examination
        from kvburst.cli_output import Output

        diagnosis = examination.examine()
        if not quiet:
            examination.show(diagnosis, Output())
        write_json(json_file, examination.as_json(diagnosis))


@app.command(short_help="Serve a request trace from a prefix cache; check all pages it moves.")
def replay(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Mooncake's JSON lines, plain or gzipped.")
    ],
    limit: Annotated[
        int | None,
        typer.Option(parser=whole_number, metavar="N", help="Only the first N requests."),
    ] = None,
    device_pages: Annotated[
        int,
        typer.Option(parser=whole_number, metavar="N", help="Pages of the device tier."),
    ] = DEFAULT_DEVICE_PAGES,
    host_pages: Annotated[
        int | None,
        typer.Option(
            parser=whole_number,
            metavar="N",
            help=f"Pages of the host tier; {DEFAULT_HOST_PAGES} if left out. With --shard what a"
            f" rank's memory holds unshared; if left out, {_HOST_RATIOS} times --device-pages.",
        ),
    ] = None,
    geometry: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A model's pools, for --plan-only above all; a wrong name lists the known.",
            autocompletion=lambda: GEOMETRY_NAMES,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            parser=whole_number,
            metavar="N",
            help=f"Layers of a pool of no model; {DEFAULT_LAYERS} if left out.",
        ),
    ] = None,
    page_bytes: Annotated[
        int | None,
        typer.Option(
            parser=whole_number,
            metavar="N",
            help=f"Bytes of a page of one such layer; {DEFAULT_PAGE_BYTES} if left out.",
        ),
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Count the copies, but move no bytes.")
    ] = False,
    ranks: Annotated[
        int,
        typer.Option(parser=whole_number, metavar="N", help="For --shard: of how many ranks."),
    ] = 1,
    shard: Annotated[
        bool,
        typer.Option(
            "--shard",
            help="Compare a host tier that --ranks share, one copy of each layer between them, with"
            " one of the same bytes on every rank that they do not. Needs --plan-only.",
        ),
    ] = False,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the page ids of all bursts.")
    ] = None,
    json_file: JsonFile = None,
    timeline: TimelineFile = None,
    quiet: Quiet = False,
) -> None:
    """Serve the requests of a trace from a prefix cache; check every page that it moves.

    A small prefix cache serves the requests over two tiers that are scattered as SGLang's
    allocators scatter them. Ctrl-C ends it with the report so far. With --shard it says what one
    host copy between the ranks is worth: pages found on the host, tokens prefilled again.

    Exit status: 0 if every byte is right, 1 if one is not, 2 for a bad option or trace, 130 after
    Ctrl-C.

    \b
    Examples:
      kvburst replay conversation_trace.jsonl.gz --limit 3000
      kvburst replay conversation_trace.jsonl.gz --plan-only --layers 78
      kvburst replay conversation_trace.jsonl.gz --plan-only --geometry mla-dsa-78
      kvburst replay conversation_trace.jsonl.gz --limit 200 --record bursts.kvb
      kvburst replay conversation_trace.jsonl.gz --plan-only --geometry mla-dsa-78 --ranks 4 --shard
    """
    with one_line_errors("replay"):
        check_file("--json", json_file)
        check_file("--record", record)
        check_file("--timeline", timeline)
        options = ReplayOptions(
            trace=trace,
            limit=limit,
            device_pages=device_pages,
            host_pages=DEFAULT_HOST_PAGES if host_pages is None else host_pages,
            geometry=geometry,
            layers=layers,
            page_bytes=page_bytes,
            plan_only=plan_only,
        )
        if shard or ranks != 1:
            _check_shard(ranks, shard, record, timeline)
            sizes = [ratio * device_pages for ratio in SHARED_HOST_RATIOS]
            if host_pages is not None:
                sizes = [host_pages]
            interrupted = _replay_of_ranks(options, ranks, sizes, json_file, quiet)
            raise typer.Exit(130 if interrupted else 0)
        from rich.console import Console

        from kvburst.cli_output import Output
        from kvburst.replay import report
        from kvburst.replay.interrupt import noting_interrupts
        from kvburst.replay.recording import save_recording
        from kvburst.replay.replay import Replay

        run = Replay(options, record=timeline is not None)
        console = Console(stderr=True, quiet=quiet)
        with noting_interrupts() as stopped, report.progress(console, len(run.requests)) as tick:
            result = run.run(tick, stopped)
        if not quiet:
            report.show(result, Output())
        elif result.mismatched_pages:
            report.show_verdict(result, Console(stderr=True))
        if record is not None:
            save_recording(record, result.recording)
        write_timeline(timeline, [result.flight] if result.flight else [])
        write_json(json_file, report.as_json(result))
    if result.mismatched_pages:
        raise typer.Exit(1)
    if result.interrupted:
        raise typer.Exit(130)


def _check_shard(ranks: int, shard: bool, record: Path | None, timeline: Path | None) -> None:
    if ranks < 1:
        raise KVBurstError(f"--ranks: {ranks} is below 1")
    if not shard:
        raise KVBurstError(f"--ranks: all {ranks} would do the same; add --shard to let them share")
    if ranks == 1:
        raise KVBurstError("--shard: needs --ranks of at least 2, it is 1")
    for option, file in (("--record", record), ("--timeline", timeline)):
        if file is not None:
            raise KVBurstError(f"{option}: with --shard there are several replays, leave one out")


def _replay_of_ranks(
    options: ReplayOptions, ranks: int, sizes: Sequence[int], json_file: Path | None, quiet: bool
) -> bool:
    """Whether it was interrupted."""
    from rich.console import Console

    from kvburst.cli_output import Output
    from kvburst.replay import sharing_report
    from kvburst.replay.interrupt import noting_interrupts
    from kvburst.replay.report import progress
    from kvburst.replay.sharing import SharingReplay

    run = SharingReplay(options, ranks, sizes)
    console = Console(stderr=True, quiet=quiet)
    with noting_interrupts() as stopped, progress(console, run.total_requests) as tick:
        result = run.run(tick, stopped)
    if not quiet:
        sharing_report.show(result, Output())
    write_json(json_file, sharing_report.as_json(result))
    return result.interrupted
