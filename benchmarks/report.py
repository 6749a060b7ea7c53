"""Runs all benchmarks and writes one page with everything: tables, pictures, machine and versions.

The page is one HTML file that needs no other and no network. A benchmark that fails is on the page
with what it said, and makes the exit status 1.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from harness import Quick, machine, new_app, one_line_errors, progress
from report_page import Part, page

HERE = Path(__file__).parent
SECONDS = 3600
KVBURST = ("-c", "from kvburst.cli import main; main()")


@dataclass(frozen=True)
class Benchmark:
    """A program with ``--json`` and ``--plot``: a script beside this one, or a command of kvburst.

    ``quick`` are its options where seconds are all there is.
    """

    name: str
    title: str
    words: str
    program: tuple[str, ...]
    quick: tuple[str, ...] = ("--quick",)


def _script(name: str, title: str, words: str, quick: tuple[str, ...] = ("--quick",)) -> Benchmark:
    return Benchmark(name, title, words, (str(HERE / f"{name}.py"),), quick)


# In the order of the page.
BENCHMARKS = (
    Benchmark(
        "demo",
        "A load-back under a forward",
        "Inline with one copy per page and layer above; layer groups from a thread below. Times are"
        " those of a link model, so simulated; the bytes are real, and every one is compared.",
        (*KVBURST, "demo", "--geometry", "mla-dsa-78-full", "--link", "h100", "--compare"),
        ("--pages", "256"),
    ),
    _script(
        "issue_latency",
        "Issuing a burst",
        "What a burst costs by layer and copy, who pays it, and how many copies it takes.",
    ),
    _script("handoff", "Handing a load over", "What a load costs the thread that calls for it."),
    _script(
        "ack_latency",
        "Ranks that agree",
        "What it costs a scheduler step that ranks agree on the acks they retire.",
        ("--quick", "--ranks", "2,4"),
    ),
    _script("plan_cost", "Planning and issuing", "What the core itself takes, no driver counted."),
    _script(
        "copy_bandwidth",
        "The host device",
        "Scattered copies against one plain memcpy of the same bytes.",
    ),
)


def run(benchmark: Benchmark, quick: bool, folder: Path) -> Part:
    """Its rows and its picture, by way of files in ``folder``."""
    rows, picture = folder / f"{benchmark.name}.json", folder / f"{benchmark.name}.svg"
    options = (*benchmark.program, *(benchmark.quick if quick else ()))
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *options, "--json", str(rows), "--plot", str(picture)],
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        failure = None if done.returncode == 0 else f"exit status {done.returncode}\n{done.stderr}"
        printed = done.stdout
    except subprocess.TimeoutExpired:
        failure, printed = f"not done after {SECONDS} s", ""
    content: dict[str, Any] = {} if failure else json.loads(rows.read_text())
    return Part(
        name=benchmark.name,
        title=benchmark.title,
        words=benchmark.words,
        rows=content.get("rows", []),
        picture=None if failure else picture.read_bytes(),
        printed=printed,
        seconds=time.monotonic() - begin,
        failure=failure,
    )


app = new_app("Run all benchmarks and write one page.")


@app.command()
def report(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the page goes.")] = Path(
        "report.html"
    ),
    only: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help=f"Of {', '.join(b.name for b in BENCHMARKS)}."),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also keep the JSON of each benchmark there."),
    ] = None,
    quick: Quick = False,
) -> None:
    """Run all benchmarks and write one self-contained HTML page.

    Exit status: 0 if all ran, 1 if one failed, 2 for a bad option.

    \b
    Examples:
      python benchmarks/report.py --quick
      python benchmarks/report.py --results benchmarks/results/2026-11-29
    """
    chosen = _chosen(only)
    _check_folder("--out", out.parent)
    if results is not None:
        _check_folder("--results", results.parent)
    with one_line_errors(), TemporaryDirectory() as scratch:
        folder = Path(scratch) if results is None else results
        folder.mkdir(exist_ok=True)
        parts = []
        with progress(len(chosen)) as tick:
            for benchmark in chosen:
                parts.append(run(benchmark, quick, folder))
                tick(benchmark.title)
        for picture in folder.glob("*.svg"):
            picture.unlink()
        today = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        out.write_text(page(parts, machine(), today, quick=quick))
    for part in parts:
        outcome = "failed" if part.failure else "ran"
        typer.echo(f"{part.name}: {outcome}, {part.seconds:.0f} s")
    typer.echo(f"written: {out}")
    if any(part.failure for part in parts):
        raise typer.Exit(1)


def _chosen(only: str | None) -> Sequence[Benchmark]:
    if only is None:
        return BENCHMARKS
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    for name in only.split(","):
        if name not in known:
            raise typer.BadParameter(
                f"{name!r} is not one of {', '.join(known)}", param_hint="--only"
            )
    return [benchmark for benchmark in BENCHMARKS if benchmark.name in only.split(",")]


def _check_folder(option: str, folder: Path) -> None:
    if not folder.is_dir():
        raise typer.BadParameter(f"{str(folder)!r} is not a folder", param_hint=option)


if __name__ == "__main__":
    app()
