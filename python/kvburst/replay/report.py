"""What a replay looks like to a person, as tables, and to a machine, as JSON."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvburst.replay.burst_log import BurstCounts, CopyCounts
from kvburst.replay.replay import ReplayResult
from kvburst.replay.server import ServerCounts

SHOWN_MISMATCHES = 8


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[ServerCounts], None]]:
    """A bar of ``total`` requests on a terminal, nothing elsewhere."""
    columns = (
        TextColumn("replaying requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda counts: bar.update(task, completed=counts.requests)


def show(result: ReplayResult, console: Console) -> None:
    """Prints what was replayed, what the cache found, the copies and the verdict."""
    console.print(_heading(result))
    console.print()
    console.print(_served(result.server))
    console.print()
    console.print(_bursts(result))
    console.print()
    console.print(_copies(result))
    console.print()
    show_verdict(result, console)


def show_verdict(result: ReplayResult, console: Console) -> None:
    """Prints whether every page held what it must and, if not, where the first that did not were
    seen."""
    served = result.server
    if result.interrupted:
        console.print(
            Text.assemble(
                ("interrupted", "bold yellow"),
                f": {served.requests:,} of {result.requests_in_trace:,} requests were served",
            )
        )
    if result.mismatched_pages is None:
        console.print(Text("plan only: no bytes moved, none were checked"))
    elif result.mismatched_pages == 0:
        words = f": {served.pages_checked:,} pages compared byte by byte, none differs"
        console.print(Text.assemble(("bit-exact", "bold green"), words))
    else:
        words = f": {result.mismatched_pages:,} of {served.pages_checked:,} compared pages differ"
        console.print(Text.assemble(("NOT bit-exact", "bold red"), words))
        for where in result.mismatches[:SHOWN_MISMATCHES]:
            console.print(Text(f"  {where}"))


def as_json(result: ReplayResult) -> dict[str, Any]:
    """Copies of all bursts together, then of loads and backups apart, and of those in the later
    half of the bursts. ``mismatched_pages`` is null where no bytes moved."""
    options, served = result.options, result.server
    loads, backups = result.loads, result.backups
    return {
        "trace": str(options.trace),
        "geometry": result.geometry.name,
        "device_pages": options.device_pages,
        "host_pages": options.host_pages,
        "page_size": result.geometry.page_size,
        "plan_only": options.plan_only,
        "interrupted": result.interrupted,
        "requests": served.requests,
        "requests_hit_on_device": served.requests_hit_on_device,
        "requests_hit_on_host": served.requests_hit_on_host,
        "tokens_hit_on_device": served.tokens_hit_on_device,
        "tokens_hit_on_host": served.tokens_hit_on_host,
        "tokens_prefilled": served.tokens_prefilled,
        "tokens_prefilled_again": served.tokens_prefilled_again,
        "load_bursts": loads.bursts,
        "backup_bursts": backups.bursts,
        "pages_loaded": loads.pages,
        "pages_backed_up": backups.pages,
        "pages_checked": served.pages_checked,
        "mismatched_pages": result.mismatched_pages,
        "copies_issued": result.copies_issued,
        "copies_one_per_page_and_layer": (
            loads.copies.one_per_page_and_layer + backups.copies.one_per_page_and_layer
        ),
        "copies_neighbours_merged": (
            loads.copies.neighbours_merged + backups.copies.neighbours_merged
        ),
        "loads": asdict(loads),
        "backups": asdict(backups),
        "later_loads": asdict(result.later_loads),
        "later_backups": asdict(result.later_backups),
        "seconds": result.seconds,
    }


def _heading(result: ReplayResult) -> Text:
    options = result.options
    return Text.assemble(
        ("kvburst replay", "bold"),
        f": {result.server.requests:,} requests of {options.trace.name} in"
        f" {result.seconds:.1f} s\n",
        f"{result.geometry.name}; {options.device_pages:,} device and {options.host_pages:,} host"
        f" pages of {result.geometry.page_size} tokens",
    )


def _served(served: ServerCounts) -> Table:
    table = _table("input", "tokens", "of all", "requests")
    tokens = (
        ("found on the device", served.tokens_hit_on_device, f"{served.requests_hit_on_device:,}"),
        ("found on the host", served.tokens_hit_on_host, f"{served.requests_hit_on_host:,}"),
        ("prefilled", served.tokens_prefilled, f"{served.started:,}"),
        ("  of it, again", served.tokens_prefilled_again, ""),
    )
    total = served.tokens_hit_on_device + served.tokens_hit_on_host + served.tokens_prefilled
    for what, count, requests in tokens:
        table.add_row(what, f"{count:,}", f"{100 * count / max(1, total):.1f} %", requests)
    return table


def _bursts(result: ReplayResult) -> Table:
    table = _table("", "bursts", "pages", "a burst, p50", "p90", "p99")
    for what, counts in (("loads", result.loads), ("backups", result.backups)):
        sizes = (counts.pages_p50, counts.pages_p90, counts.pages_p99)
        numbers = (counts.bursts, counts.pages, *sizes)
        table.add_row(what, *(f"{number:,}" for number in numbers))
    return table


def _copies(result: ReplayResult) -> Table:
    table = _table("copies", "loads", "fewer", "backups", "fewer")

    def row(
        what: str, count: Callable[[CopyCounts], int], loads: BurstCounts, backups: BurstCounts
    ) -> None:
        cells = []
        for copies in (loads.copies, backups.copies):
            number = count(copies)
            fewer = f"{copies.one_per_page_and_layer / number:.2f}x" if number else ""
            cells += [f"{number:,}", fewer]
        table.add_row(what, *cells)

    both = (result.loads, result.backups)
    later = (result.later_loads, result.later_backups)
    issued = "planned" if result.options.plan_only else "issued"
    row("one per page and layer", lambda copies: copies.one_per_page_and_layer, *both)
    row("neighbours merged", lambda copies: copies.neighbours_merged, *both)
    row("  in the later half", lambda copies: copies.neighbours_merged, *later)
    row("groups without ramp", lambda copies: copies.groups_without_ramp, *both)
    row(f"groups with ramp ({issued})", lambda copies: copies.groups_with_ramp, *both)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in others:
        table.add_column(name, justify="right")
    return table
