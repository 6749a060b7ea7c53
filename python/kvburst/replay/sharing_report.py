"""What `SharingReplay` found, as a table and as rows of a benchmark."""

from collections.abc import Callable
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvburst.demo_report import human_bytes
from kvburst.replay import report
from kvburst.replay.server import ServerCounts
from kvburst.replay.sharing import Compared, SharingResult

Better = Literal["lower", "higher"]


def show(result: SharingResult, console: Console) -> None:
    """Prints what was compared, a pair of lines for each host size, and the verdict."""
    options, shape = result.last.options, result.last.geometry
    device_bytes = options.device_pages * shape.bytes_per_page
    console.print(
        Text.assemble(
            ("kvburst replay", "bold"),
            f": {result.last.server.requests:,} requests of {options.trace.name}, one host tier"
            f" between {result.ranks} ranks against a copy on each\n"
            f"{shape.name}; on every rank {options.device_pages:,} device pages of"
            f" {shape.page_size} tokens ({human_bytes(device_bytes)}), and host memory of the same"
            " bytes",
        )
    )
    console.print()
    console.print(_table(result))
    console.print()
    if result.interrupted:
        console.print(
            Text.assemble(
                ("interrupted", "bold yellow"),
                f": {len(result.compared)} of {result.sizes} host sizes were compared",
            )
        )
    console.print(Text("plan only: no bytes moved, none were checked"))


def _table(result: SharingResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in (
        "host bytes\na rank",
        "of the\ndevice's",
        "host tier",
        "\npages",
        "pages found\non the host",
        "tokens pre-\nfilled again",
        "times\nfewer",
    ):
        table.add_column(heading, justify="left" if heading == "host tier" else "right")
    for each in result.compared:
        size = each.size
        table.add_row(
            human_bytes(size.nbytes),
            f"{size.pages / result.last.options.device_pages:.3g}x",
            "not shared",
            f"{size.pages:,}",
            f"{_found_on_host(result, each.unshared):,}",
            f"{each.unshared.tokens_prefilled_again:,}",
            "",
        )
        table.add_row(
            "",
            "",
            "shared",
            f"{size.shared_pages:,}",
            f"{_found_on_host(result, each.shared):,}",
            f"{each.shared.tokens_prefilled_again:,}",
            _times_fewer(each),
            end_section=True,
        )
    return table


def _times_fewer(each: Compared) -> str:
    ours, baseline = each.shared.tokens_prefilled_again, each.unshared.tokens_prefilled_again
    return f"{baseline / ours:.2f}x" if ours else "none left" if baseline else ""


def _found_on_host(result: SharingResult, counts: ServerCounts) -> int:
    return counts.tokens_hit_on_host // result.last.geometry.page_size


def as_json(result: SharingResult) -> dict[str, Any]:
    """The last run of a tier that is not shared, as a replay by itself writes it; then ``ranks``
    and ``rows``, one for every host size and metric, with the unshared tier as the baseline.
    ``ratio`` says how many times better than it, null where one of the two is 0."""
    return report.as_json(result.last) | {
        "interrupted": result.interrupted,
        "ranks": result.ranks,
        "shard": True,
        "rows": [row for each in result.compared for row in _rows(result, each)],
    }


def _rows(result: SharingResult, each: Compared) -> list[dict[str, Any]]:
    size, options = each.size, result.last.options
    scenario = {
        "trace": options.trace.name,
        "geometry": result.last.geometry.name,
        "ranks": result.ranks,
        "device_pages": options.device_pages,
        "host_pages": size.pages,
        "host_pages_shared": size.shared_pages,
        "host_bytes_of_a_rank": size.nbytes,
        "host_to_device": size.pages / options.device_pages,
    }

    def row(metric: str, unit: str, better: Better, ours: int, baseline: int) -> dict[str, Any]:
        above, below = (baseline, ours) if better == "lower" else (ours, baseline)
        return {
            "benchmark": "replay_shard",
            "scenario": scenario,
            "metric": metric,
            "unit": unit,
            "n": 1,
            "median": ours,
            "p90": ours,
            "p99": ours,
            "baseline_median": baseline,
            "ratio": above / below if above and below else None,
        }

    def counted(
        metric: str, unit: str, better: Better, count: Callable[[ServerCounts], int]
    ) -> dict[str, Any]:
        return row(metric, unit, better, count(each.shared), count(each.unshared))

    return [
        row("host_pages", "pages", "higher", size.shared_pages, size.pages),
        counted("found_on_host", "pages", "higher", lambda c: _found_on_host(result, c)),
        counted("prefilled_again", "tokens", "lower", lambda c: c.tokens_prefilled_again),
        counted("prefilled", "tokens", "lower", lambda c: c.tokens_prefilled),
    ]
