"""What ``kvburst demo --ranks N`` prints, and writes as JSON."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvburst.demo_ranks import RankResult
from kvburst.demo_report import SHOWN_MISMATCHES, human_bytes
from kvburst.links import LINKS, NVLINK


def bit_exact(ranks: Sequence[RankResult]) -> bool:
    return all(rank.result.bit_exact for rank in ranks)


def show(ranks: Sequence[RankResult], console: Console) -> None:
    """Prints a table with a row for each rank, what is simulated, and the verdict."""
    options = ranks[0].result.options
    shared = "one host copy of each layer" if options.shard else "a host copy of its own on each"
    console.print(
        Text.assemble(
            ("kvburst demo", "bold"),
            f": {ranks[0].result.geometry.name}, {options.pages:,} pages,"
            f" {len(ranks)} ranks, {shared}",
        )
    )
    console.print()
    console.print(_table(ranks))
    for note in _notes(ranks):
        console.print(Text(note))
    console.print()
    show_verdict(ranks, console)


def show_verdict(ranks: Sequence[RankResult], console: Console) -> None:
    """Prints whether every byte of every rank was right and, if not, the first that were wrong."""
    if bit_exact(ranks):
        checked = sum(rank.result.checked_bytes for rank in ranks)
        console.print(
            Text.assemble(
                ("bit-exact", "bold green"),
                f": {human_bytes(checked)} compared on {len(ranks)} ranks: every layer's snapshot,"
                " both tiers",
            )
        )
        return
    for rank in ranks:
        wrong = rank.result.mismatches
        if wrong:
            console.print(
                Text.assemble(
                    (f"rank {rank.rank} NOT bit-exact", "bold red"),
                    f": {len(wrong):,} pages differ, the first: {wrong[0]}",
                )
            )


def _table(ranks: Sequence[RankResult]) -> Table:
    # Two lines, so that a table of two pools fits a terminal.
    simulated = "\nsimulated" if ranks[0].result.simulated else ""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("rank", justify="right")
    for pool in ranks[0].rows:
        table.add_column(f"{pool}\nrows", justify="right")
    for heading in (
        "host\nbytes",
        "copies\nissued",
        "received",
        f"copies, ms{simulated}",
        f"waited, ms{simulated}",
        f"overlap{simulated}",
    ):
        table.add_column(heading, justify="right")
    for rank in ranks:
        table.add_row(
            str(rank.rank),
            *(str(rows) for rows in rank.rows.values()),
            human_bytes(rank.result.host_bytes),
            f"{_copies(rank):,}",
            human_bytes(rank.exchange_bytes),
            f"{rank.copies_ms:.2f}",
            f"{rank.stalls_ms:.2f}",
            f"{rank.overlap_ratio:.2f}",
        )
    table.add_section()
    table.add_row(
        "all",
        *("" for _ in ranks[0].rows),
        human_bytes(sum(rank.result.host_bytes for rank in ranks)),
        f"{sum(map(_copies, ranks)):,}",
        human_bytes(sum(rank.exchange_bytes for rank in ranks)),
    )
    return table


def _notes(ranks: Sequence[RankResult]) -> list[str]:
    first = ranks[0]
    options = first.result.options
    notes = []
    if options.link is not None:
        notes.append(f"simulated: {LINKS[options.link].source}")
    if first.modelled is not None:
        notes.append(
            f"simulated: exchange over {NVLINK.source}: {first.modelled.forward.exchange_ms:.2f} ms"
            " of the forward's stream, which are no wait for copies; copies and waits are by the"
            " plans and the links alone"
        )
    elif options.shard:
        notes += [
            "exchanged by gloo on this CPU, which holds up the thread that launches the forward:"
            " copies, waits and overlap are no GPU's",
            f"with modelled links: kvburst demo --ranks {options.ranks} --shard --link h100"
            " --forward 16",
        ]
    if first.result.row_scale > 1:
        notes.append(
            f"simulated: rows in memory are 1/{first.result.row_scale} of the geometry's; the link"
            " charges for all"
        )
    return notes


def _copies(rank: RankResult) -> int:
    return rank.result.backup.copies + rank.result.load.copies


def as_json(ranks: Sequence[RankResult]) -> dict[str, Any]:
    """The run as one object; ``ranks`` has one for each. ``host_bytes`` are summed from the
    tensors, ``exchange_bytes`` are those of pages that came from other ranks."""
    result = ranks[0].result
    options = result.options
    return {
        "bit_exact": bit_exact(ranks),
        "shard": options.shard,
        "mode": options.mode,
        "link": options.link or "none",
        "simulated": result.simulated,
        "geometry": result.geometry.name,
        "page_size": result.geometry.page_size,
        "pages": options.pages,
        "device_pages": result.device_pages,
        "host_pages": result.host_pages,
        "layers": result.geometry.num_layers,
        "pools": {
            pool.name: {"layers": len(pool.layer_ids), "row_bytes": pool.row_bytes}
            for pool in result.geometry.pools
        },
        "layout": options.layout,
        "groups": options.groups,
        "chunk_pages": options.chunk_pages,
        "seed": options.seed,
        "row_scale": result.row_scale,
        "forward": options.forward,
        "host_bytes": sum(rank.result.host_bytes for rank in ranks),
        "ranks": [_rank_json(rank) for rank in ranks],
    }


def _rank_json(rank: RankResult) -> dict[str, Any]:
    result = rank.result
    return {
        "rank": rank.rank,
        "bit_exact": result.bit_exact,
        "rows": dict(rank.rows),
        "host_bytes": result.host_bytes,
        "copies_issued": _copies(rank),
        "exchange_bytes": rank.exchange_bytes,
        "overlap_ratio": rank.overlap_ratio,
        "stalls_ms": rank.stalls_ms,
        "copies_ms": rank.copies_ms,
        "caller_us": result.load.stats.caller_us,
        "exchange_ms": None if rank.modelled is None else rank.modelled.forward.exchange_ms,
        "layer_0_ms": None if rank.modelled is None else rank.modelled.forward.layer_0_ms,
        "wrong_pages": len(result.mismatches),
        "first_mismatches": [str(each) for each in result.mismatches[:SHOWN_MISMATCHES]],
    }
