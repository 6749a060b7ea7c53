"""What a run of the demo looks like to a person, as a table, and to a machine, as JSON.

Whatever was timed with a link model is labelled *simulated*.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from kvburst.demo import Tick
from kvburst.demo_result import DemoResult, Transfer
from kvburst.demo_timeline import show_timeline
from kvburst.links import LINKS

SHOWN_MISMATCHES = 8


@contextmanager
def progress(console: Console, total: int) -> Iterator[Tick]:
    """A bar of ``total`` ticks on a terminal, nothing elsewhere. It is drawn between the steps and
    never beside one: a thread that draws would be seen in what is timed."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    shown = console.is_terminal
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not shown
    ) as bar:
        task = bar.add_task("filling the pools with random bytes", total=total)

        def tick(step: str) -> None:
            bar.update(task, advance=1, description=step, refresh=True)

        yield tick


def show(result: DemoResult, console: Console, end: float | None = None) -> None:
    """Prints the table, why copies could not be grouped, the timeline and the verdict. ``end``: of
    the time scale, in milliseconds; None: of the run."""
    console.print(_heading(result))
    console.print()
    console.print(_table(result))
    for note in _notes(result):
        console.print(Text(note))
    console.print()
    show_timeline(result, console, result.timeline.end if end is None else end)
    console.print()
    show_verdict(result, console)


def show_verdict(result: DemoResult, console: Console) -> None:
    """Prints whether every byte was right and, if not, the first pages that were wrong."""
    if result.bit_exact:
        held = result.host_pages - result.options.pages
        words = (
            f": {human_bytes(result.checked_bytes)} compared: every layer's snapshot, both tiers,"
            f" {result.held_device_pages} device and {held} host pages that had to stay unchanged"
        )
        console.print(Text.assemble(("bit-exact", "bold green"), words))
        return
    wrong = result.mismatches
    console.print(Text.assemble(("NOT bit-exact", "bold red"), f": {len(wrong):,} pages differ"))
    for mismatch in wrong[:SHOWN_MISMATCHES]:
        console.print(Text(f"  {mismatch}"))
    if len(wrong) > SHOWN_MISMATCHES:
        console.print(Text(f"  and {len(wrong) - SHOWN_MISMATCHES:,} more"))


def _heading(result: DemoResult) -> Text:
    geometry, options = result.geometry, result.options
    pools = ", ".join(
        f"{pool.name}: {len(pool.layer_ids)} layers of {pool.row_bytes} bytes a token"
        for pool in geometry.pools
    )
    allocation = "one allocation" if options.one_allocation else "separate allocations"
    return Text.assemble(
        ("kvburst demo", "bold"),
        f": {geometry.name} ({pools})\n",
        f"{options.pages:,} pages of {geometry.page_size} tokens, {options.layout},"
        f" layers in {allocation}\n",
        f"device {result.device}",
    )


def _table(result: DemoResult) -> Table:
    timed = " (simulated)" if result.simulated else ""
    table = Table("", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("backup", justify="right")
    table.add_column("load-back", justify="right")

    def row(what: str, cell: Callable[[Transfer], str]) -> None:
        table.add_row(what, cell(result.backup), cell(result.load))

    row("pages", lambda _: f"{result.options.pages:,}")
    row("bytes", lambda transfer: human_bytes(transfer.bytes))
    row("copies issued", lambda transfer: f"{transfer.copies:,}")
    row("one per page and layer", lambda transfer: f"{transfer.one_per_page_and_layer:,}")
    row("times fewer", lambda transfer: f"{transfer.one_per_page_and_layer / transfer.copies:.1f}")
    row(f"copies took{timed}", lambda transfer: f"{transfer.stats.copies_took_ms:.2f} ms")
    row(f"GB/s{timed}", lambda transfer: f"{transfer.gbps:.1f}")
    row(f"caller time{timed}", lambda transfer: f"{transfer.stats.caller_us:,.0f} us")
    table.add_row(f"forward waited{timed}", "", f"{result.stalls_ms:.2f} ms")
    table.add_row(f"overlap ratio{timed}", "", f"{result.overlap_ratio:.2f}")
    return table


def _notes(result: DemoResult) -> Iterator[str]:
    for transfer in (result.backup, result.load):
        for reason, copies in transfer.fallbacks.items():
            yield f"{transfer.direction}: {copies:,} copies more than grouped layers need: {reason}"
    if result.options.link is not None:
        yield f"simulated: {LINKS[result.options.link].source}"
    if result.stand_in:
        yield "simulated: a stand-in plays the driver; times are this machine's, and no GPU's"
    if result.row_scale > 1:
        yield (
            f"simulated: rows in memory are 1/{result.row_scale} of the geometry's, so"
            f" {human_bytes(result.load.bytes_moved)} really moved each way; the link charges for"
            " all"
        )


def human_bytes(count: int) -> str:
    """In decimal units, as links are sold."""
    if count < 1000:
        return f"{count} B"
    value, unit = count / 1e3, "kB"
    for larger in ("MB", "GB", "TB"):
        if value >= 1000:
            value, unit = value / 1000, larger
    return f"{value:.1f} {unit}"


def as_json(result: DemoResult) -> dict[str, Any]:
    """The run as one object of numbers and words. ``copies_issued`` and
    ``copies_one_per_page_and_layer`` are of both directions together; ``bytes``, ``caller_us``,
    ``gbps`` and ``overlap_ratio`` are the load-back's; ``transfers`` has each direction by itself.
    """
    options, geometry = result.options, result.geometry
    transfers = (result.backup, result.load)
    return {
        "bit_exact": result.bit_exact,
        "device": options.device,
        "device_in_words": result.device,
        "mode": options.mode,
        "link": options.link or "none",
        "simulated": result.simulated,
        "geometry": geometry.name,
        "page_size": geometry.page_size,
        "pages": options.pages,
        "device_pages": result.device_pages,
        "host_pages": result.host_pages,
        "layers": geometry.num_layers,
        "pools": {
            pool.name: {"layers": len(pool.layer_ids), "row_bytes": pool.row_bytes}
            for pool in geometry.pools
        },
        "layout": options.layout,
        "one_allocation": options.one_allocation,
        "groups": options.groups,
        "chunk_pages": options.chunk_pages,
        "seed": options.seed,
        "row_scale": result.row_scale,
        "bytes": result.load.bytes,
        "copies_issued": sum(transfer.copies for transfer in transfers),
        "copies_one_per_page_and_layer": sum(
            transfer.one_per_page_and_layer for transfer in transfers
        ),
        "caller_us": result.load.stats.caller_us,
        "gbps": result.load.gbps,
        "overlap_ratio": result.overlap_ratio,
        "stalls_ms": result.stalls_ms,
        "forward": options.forward,
        "forward_ms": result.forward_ms,
        "grouped_copies_ms": result.grouped_ms,
        "host_bytes": result.host_bytes,
        "checked_bytes": result.checked_bytes,
        "wrong_pages": len(result.mismatches),
        "first_mismatches": [str(each) for each in result.mismatches[:SHOWN_MISMATCHES]],
        "transfers": {transfer.direction: _transfer_json(transfer) for transfer in transfers},
    }


def _transfer_json(transfer: Transfer) -> dict[str, Any]:
    stats = transfer.stats
    return {
        "copies_issued": transfer.copies,
        "copies_one_per_page_and_layer": transfer.one_per_page_and_layer,
        "calls": transfer.calls,
        "bytes": transfer.bytes,
        "bytes_moved": transfer.bytes_moved,
        "gbps": transfer.gbps,
        "fallbacks": transfer.fallbacks,
        "stats": {
            "caller_us": stats.caller_us,
            "alloc_us": stats.alloc_us,
            "queue_us": stats.queue_us,
            "first_copy_us": stats.first_copy_us,
            "issue_us": stats.issue_us,
            "copies_took_ms": stats.copies_took_ms,
            "stalls_ms": stats.stalls_ms,
            "overlap_ratio": stats.overlap_ratio,
        },
    }
