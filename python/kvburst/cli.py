"""The command ``kvburst``. Each command imports what it needs when it runs: torch takes seconds,
and ``--help``, ``--version`` and a shell's completion are not to wait for it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvburst._core import KVBurstError, __version__
from kvburst.demo_options import DemoOptions, Groups, Layout, Mode
from kvburst.links import LinkName

DEFAULTS = DemoOptions()

app = typer.Typer(
    help="Moves LLM KV-cache pages between host and device memory.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")
]


def main() -> None:
    """The entry point of the console script."""
    app()


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


@app.command()
def demo(
    geometry: Annotated[
        str, typer.Option(metavar="NAME", help="A model's pools; a wrong name lists the known.")
    ] = DEFAULTS.geometry,
    pages: Annotated[int, typer.Option(help="Pages that move; at least 1.")] = DEFAULTS.pages,
    device_pages: Annotated[
        int,
        typer.Option(
            help="Pages of the device pools, above twice --pages; 0 is a quarter more than that."
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
        Mode, typer.Option(help="Who issues the copies. inline: the thread that calls.")
    ] = DEFAULTS.mode,
    link: Annotated[
        Literal["none", LinkName],
        typer.Option(
            help="Whose timing. none: this machine's memory, as measured; the others are simulated,"
            " with 50 GB/s and 2.3 us (h100) or 0.5 us (h100-batch) a copy."
        ),
    ] = "none",
    forward: Annotated[
        float,
        typer.Option(
            help="Length of the forward, as a multiple of the time that the grouped copies take."
        ),
    ] = DEFAULTS.forward,
    chunk_pages: Annotated[
        int, typer.Option(help="Most pages that a backup hands over in one call; 0 is no bound.")
    ] = DEFAULTS.chunk_pages,
    seed: Annotated[
        int, typer.Option(help="Of the random bytes and of the order of the pages.")
    ] = DEFAULTS.seed,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also draw the timeline: .png, .svg, .pdf. Needs matplotlib."
        ),
    ] = None,
    json_file: JsonFile = None,
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
      kvburst demo --link h100 --pages 1024 --plot timeline.png
      kvburst demo --link h100 --pages 1024 --groups none
    """
    with _one_line_errors("demo"):
        _check_folder("--json", json_file)
        _check_folder("--plot", plot)
        options = DemoOptions(
            geometry=geometry,
            pages=pages,
            device_pages=device_pages,
            layout=layout,
            one_allocation=one_allocation,
            groups=groups,
            mode=mode,
            link=None if link == "none" else link,
            forward=forward,
            chunk_pages=chunk_pages,
            seed=seed,
        )
        from rich.console import Console

        from kvburst.demo import Demo, num_ticks
        from kvburst.demo_report import as_json, progress, show, show_verdict
        from kvburst.demo_timeline import check_plot
        from kvburst.demo_timeline import plot as draw

        if plot is not None:
            check_plot(plot)
        with progress(Console(stderr=True, quiet=quiet), num_ticks(options)) as tick:
            result = Demo(options, tick).run()
        if not quiet:
            show(result, Console())
        elif not result.bit_exact:
            show_verdict(result, Console(stderr=True))
        if plot is not None:
            draw([result], plot)
        _write_json(json_file, as_json(result))
    if not result.bit_exact:
        raise typer.Exit(1)


@app.command()
def doctor(json_file: JsonFile = None) -> None:
    """Say what this machine has for kvburst, and why it lacks what it lacks.

    \b
    Examples:
      kvburst doctor
      kvburst doctor --json doctor.json
    """
    with _one_line_errors("doctor"):
        _check_folder("--json", json_file)
        from rich.console import Console

        from kvburst import doctor as examination

        diagnosis = examination.examine()
        examination.show(diagnosis, Console())
        _write_json(json_file, examination.as_json(diagnosis))


@contextmanager
def _one_line_errors(command: str) -> Iterator[None]:
    """What is wrong with the options or the machine ends the command with one line, not a trace."""
    try:
        yield
    except (KVBurstError, OSError) as error:
        typer.echo(f"kvburst {command}: {error}", err=True)
        raise typer.Exit(2) from error


def _check_folder(option: str, file: Path | None) -> None:
    """Before anything runs, not after it."""
    if file is not None and not file.parent.is_dir():
        raise KVBurstError(f"{option}: {str(file.parent)!r} is not a folder")


def _write_json(file: Path | None, content: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(content, indent=2) + "\n")
