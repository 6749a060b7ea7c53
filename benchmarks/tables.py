"""Writes the tables of the README and the docs from what was measured.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. Its numbers come from
the newest folder in ``results``, or, where they are counts that follow from the code alone, from
the planner itself.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import new_app, number
from issuing_devices import Wanted, absent_layouts
from page_patterns import slots_of

from kvburst._core import BurstPages, CopyLimits, CopyPlanner, KVBurstError
from kvburst._indices import index_view
from kvburst.geometries import geometry
from kvburst.replay.burst_log import DIRECTIONS, Direction

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
FILES = (ROOT / "README.md", ROOT / "docs" / "sharding.md", ROOT / "docs" / "tuning.md")
TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

POOL_WORDS = {"kv": "latent KV", "index_k": "index-K"}
GROUP_WORDS = {
    "none": "one per page and layer",
    "neighbours": "neighbouring pages merged",
    "ramp": "**layer groups with ramp**",
}


@dataclass(frozen=True)
class Results:
    """What was measured on one machine: a folder of JSON files, one a benchmark."""

    folder: Path

    def content(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return found

    def row(self, benchmark: str, metric: str, **scenario: object) -> dict[str, Any]:
        """The one row whose scenario has these values; the first of several that are alike."""
        for row in self.content(benchmark)["rows"]:
            values = row["scenario"]
            if row["metric"] == metric and all(values[key] == scenario[key] for key in scenario):
                found: dict[str, Any] = row
                return found
        raise KVBurstError(f"{self.folder.name}/{benchmark}.json: no {metric} of {scenario}")


def newest_results() -> Results:
    """Of the folders that are named by date and machine, and hold all benchmarks: that of a GPU
    has what was asked of it alone."""
    folders = sorted(file.parent for file in RESULTS.glob("*/replay.json"))
    if not folders:
        raise KVBurstError(f"{RESULTS}: no results")
    return Results(folders[-1])


# --- the tables ----------------------------------------------------------------------------


def copies_of_a_page(results: Results) -> str:
    """Of one page, by pool: a count that the planner makes."""
    shape = geometry("mla-dsa-78")
    rows = []
    for direction in reversed(DIRECTIONS):
        copies = _copies_by_pool(shape.name, direction)
        for pool, count in zip(shape.pools, copies, strict=True):
            layers = len(pool.layer_ids)
            name = "load-back" if direction == "load" else "backup"
            words = f"{name}: {POOL_WORDS[pool.name]}, {layers} layers"
            rows.append((words, f"{layers}", f"{count}", f"{layers / count:.2g}"))
    title = "a 78-layer MLA+DSA model, a page"
    return _table((title, "one copy per page and layer", "kvburst", "times fewer"), rows)


def _copies_by_pool(name: str, direction: Direction) -> list[int]:
    shape = geometry(name)
    limits = CopyLimits()
    layouts = absent_layouts(Wanted(shape, 4, "one-allocation", "h100"))
    planner = CopyPlanner(layouts, direction=direction, limits=limits)
    pages = BurstPages(layouts, direction=direction, page_size=shape.page_size)
    slots = slots_of(torch.tensor([2]), shape.page_size)
    pages.append(device=index_view("device", slots), host=index_view("host", slots))
    plan = planner.plan(pages)
    counts = [0] * len(layouts)
    for number_of, group in enumerate(planner.groups):
        counts[group.pool] += sum(len(batch) for batch in plan.batches(number_of))
    return counts


def copies_of_a_trace(results: Results) -> str:
    """Of a whole request trace; beside it what issuing one of its loads takes."""
    replay = results.content("replay")
    keys = {
        "none": "one_per_page_and_layer",
        "neighbours": "neighbours_merged",
        "ramp": "groups_with_ramp",
    }
    rows = []
    for groups, key in keys.items():
        issue = results.row(
            "issue_latency",
            "issue_us",
            device="host",
            pattern="trace",
            direction="load",
            groups=groups,
            mode="inline",
        )
        cells = [GROUP_WORDS[groups]]
        for direction in DIRECTIONS:
            copies = replay[f"{direction}s"]["copies"]
            fewer = copies["one_per_page_and_layer"] / copies[key]
            cells += [f"{copies[key]:,}", f"{fewer:.2f}"]
        took = f"{number(issue['median'] / 1000)} ms ({number(issue['p99'] / 1000)} ms)"
        cells.insert(3, took)
        rows.append(tuple(cells))
    head = ("copies", "loads", "times fewer", "issuing one, median (p99)", "backups", "times fewer")
    return _table(head, rows, bold_last=True)


def issue_times(results: Results) -> str:
    """By pages of a load: until all is issued, and what of it the calling thread pays."""
    rows = []
    sizes = sorted(
        {
            row["scenario"]["pages"]
            for row in results.content("issue_latency")["rows"]
            if row["scenario"]["pattern"] == "scattered"
        }
    )
    for pages in sizes:
        cells = [f"{pages:,}"]
        for groups, mode in (("none", "inline"), ("ramp", "inline"), ("ramp", "thread")):
            row = results.row(
                "issue_latency",
                "caller_us" if mode == "thread" else "issue_us",
                device="host",
                pattern="scattered",
                direction="load",
                pages=pages,
                groups=groups,
                mode=mode,
            )
            cells.append(f"{number(row['median'] / 1000)} ms")
        rows.append(tuple(cells))
    head = (
        "pages of a load",
        "issued, one copy per page and layer",
        "issued, layer groups",
        "what the caller pays, thread",
    )
    return _table(head, rows)


def layouts(results: Results) -> str:
    """What it is worth that the device's layers are one allocation."""
    pages = results.row("issue_latency", "copies", layout="per-layer")["scenario"]["pages"]
    rows = []
    for layout, words in (
        ("one-allocation", "all layers in one allocation"),
        ("per-layer", "an allocation for each layer"),
    ):
        cells = [words]
        for direction in DIRECTIONS:
            row = results.row(
                "issue_latency",
                "copies",
                layout=layout,
                direction=direction,
                groups="ramp",
                pattern="scattered",
                pages=pages,
            )
            cells += [f"{row['median']:,.0f}", f"{row['ratio']:.3g}"]
        rows.append(tuple(cells))
    head = (f"copies of {pages:,} scattered pages", "load", "times fewer", "backup", "times fewer")
    return _table(head, rows)


def shared_tier_of_a_trace(results: Results) -> str:
    """Of a whole request trace, by host memory: what is found there, shared and not."""
    counted: dict[int, dict[str, dict[str, Any]]] = {}
    for row in results.content("replay_shard")["rows"]:
        counted.setdefault(row["scenario"]["host_pages"], {})[row["metric"]] = row
    lines = []
    for metrics in counted.values():
        scenario = metrics["host_pages"]["scenario"]
        cells = [
            f"{scenario['host_bytes_of_a_rank'] / 1e9:.0f} GB",
            f"{scenario['host_to_device']:.3g}",
        ]
        for metric in ("host_pages", "found_on_host", "prefilled_again"):
            row = metrics[metric]
            cells += [f"{row[side]:,}" for side in ("baseline_median", "median")]
        lines.append((*cells, f"{metrics['prefilled_again']['ratio']:.2f}"))
    head = (
        "host memory a rank",
        "of the device's",
        "host pages",
        "shared",
        "found on the host, pages",
        "shared",
        "prefilled again, tokens",
        "shared",
        "times fewer",
    )
    return _table(head, lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, bold_last: bool = False) -> str:
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for at, row in enumerate(rows):
        strong = bold_last and at == len(rows) - 1
        cells = [f"**{cell.strip('*')}**" if strong else cell for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TABLES: Mapping[str, Callable[[Results], str]] = {
    "copies-of-a-page": copies_of_a_page,
    "copies-of-a-trace": copies_of_a_trace,
    "issue-times": issue_times,
    "layouts": layouts,
    "shared-tier-of-a-trace": shared_tier_of_a_trace,
}


def filled(text: str, results: Results) -> str:
    """The text with all its tables made anew. Raises ``KVBurstError`` for a name of none."""

    def table(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in TABLES:
            raise KVBurstError(f"table: {name!r} is none of {', '.join(TABLES)}")
        return f"{found[1]}{TABLES[name](results)}{found[3]}"

    return TABLE.sub(table, text)


app = new_app("Write the tables of the README and the docs from benchmarks/results.")


@app.command()
def tables(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit status 1 if a table is outdated.")
    ] = False,
) -> None:
    """Write the tables of the README and the docs from the newest results.

    \b
    Examples:
      python benchmarks/report.py --results benchmarks/results/2026-11-29-two-cores
      python benchmarks/tables.py
    """
    results = newest_results()
    outdated = False
    for file in FILES:
        before = file.read_text()
        after = filled(before, results)
        if before != after:
            outdated = True
            if not check:
                file.write_text(after)
            typer.echo(f"{file.relative_to(ROOT)}: {'outdated' if check else 'written'}")
    if check and outdated:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
