"""What planning and issuing a burst costs the processor, for each page and layer it covers.

Ours runs on the device ``null``, which takes every copy and moves nothing, so no driver is
counted; the addresses are those of pools that do not exist. The baseline works the peer's way and
counts no driver either: for every layer and pool, from Python, it rebuilds three arrays from the
index tensors (destination addresses, source addresses, sizes) and hands them over, one copy for
every page of every layer. It is ours, in vectorised torch, and says nothing about how fast the
peer's own code is.

Two metrics. ``caller``: all that the calling thread does, from the index tensors on, against the
baseline. ``native``: of that what the core reports itself, the hand-over of the collected pages,
the plan, and every call on the device.
"""

import time
from functools import partial
from typing import Annotated, Literal

import torch
import typer
from harness import (
    JsonFile,
    Outputs,
    PlotFile,
    Quick,
    Row,
    Value,
    new_app,
    one_line_errors,
    progress,
    report,
    take_turns,
    whole_number,
    whole_numbers,
)
from peers_way import PAGE_SIZE, Indices, Pattern, PeersWay, Pool, like_the_peers, pools_of

from kvburst import CopyLimits, KVBurstError, PlanOptions
from kvburst._core import BurstIssuer, BurstPages, LayerGate, NullDevice
from kvburst._indices import index_view

Groups = Literal["none", "neighbours", "ramp"]
Direction = Literal["load", "backup"]

BENCHMARK = "plan_cost"
PATTERNS: tuple[Pattern, ...] = ("scattered", "contiguous")
GROUPS: tuple[Groups, ...] = ("none", "neighbours", "ramp")
UNIT = "ns per page and layer"

# The budget: the product's groups, 1,024 scattered pages.
BUDGET_PAGES = 1024
BUDGET_NS = 5.0


class Ours:
    """Bursts as the product issues them, on a device that moves nothing."""

    def __init__(self, pools: tuple[Pool, ...], groups: Groups, direction: Direction) -> None:
        self._device = NullDevice(limits=CopyLimits(tall_copies=groups != "none"))
        layouts = [pool.layout() for pool in pools]
        self._pages = BurstPages(layouts, direction=direction, page_size=PAGE_SIZE)
        self._issuer = BurstIssuer(
            self._device,
            layouts,
            direction=direction,
            gate=LayerGate(self._device, layouts) if direction == "load" else None,
            options=PlanOptions(ramp=groups == "ramp", merge_neighbours=groups != "none"),
        )
        self._native: list[float] = []

    def issue(self, indices: Indices) -> float:
        """Nanoseconds of the calling thread for each page and layer."""
        stream = self._device.current_stream()
        begin = time.perf_counter_ns()
        self._pages.append(
            device=index_view("device_indices", indices.device),
            host=index_view("host_indices", indices.host),
        )
        burst = self._issuer.submit(self._pages, [1], stream=stream)
        nanoseconds = time.perf_counter_ns() - begin
        if burst is None or burst.error is not None:
            raise KVBurstError("no pages" if burst is None else f"{burst.error}")
        self._native.append(1000 * burst.caller_us / burst.one_per_page_and_layer)
        return nanoseconds / burst.one_per_page_and_layer

    def native(self, rounds: int) -> list[float]:
        """Of the last ``rounds`` bursts what the core itself took."""
        return self._native[-rounds:]


app = new_app("What planning and issuing a burst costs, for each page and layer it covers.")


@app.command()
def plan_cost(
    pages: Annotated[str, typer.Option(metavar="N,N,...", help="Pages of a burst.")] = (
        "64,256,1024,4096"
    ),
    layers: Annotated[
        int,
        typer.Option(
            parser=whole_number(1, 1000), metavar="N", help="Layers of each of the two pools."
        ),
    ] = 78,
    direction: Annotated[Direction, typer.Option(help="Which way the pages go.")] = "load",
    rounds: Annotated[
        int, typer.Option(parser=whole_number(1, 100_000), metavar="N", help="Bursts a scenario.")
    ] = 50,
    quick: Quick = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Plan and issue bursts on a device that moves nothing, against arrays rebuilt in Python.

    \b
    No driver is counted. The budget is 5 ns for each page and layer, with the product's groups
    (ramp) and 1,024 scattered pages.

    \b
    Examples:
      python benchmarks/plan_cost.py
      python benchmarks/plan_cost.py --pages 1024 --direction backup --json plan_cost.json
    """
    burst_pages = whole_numbers("--pages", pages, least=1, most=65536)
    outputs = Outputs(json_file, plot_file)
    rounds = 3 if quick else rounds
    available = 2 * max(burst_pages)
    pools = pools_of(layers, available)
    scenarios = [
        (count, pattern, groups)
        for count in burst_pages
        for pattern in PATTERNS
        for groups in GROUPS
    ]
    random = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    with one_line_errors(), progress(len(scenarios) * (rounds + 1)) as tick:
        for count, pattern, groups in scenarios:
            indices = Indices.of(count, available, pattern, random)
            ours = Ours(pools, groups, direction)
            peers_way = PeersWay(pools, direction)
            samples = take_turns(
                {
                    "peer's way": partial(peers_way.ns_per_copy, indices),
                    "ours": partial(ours.issue, indices),
                },
                rounds,
                tick=partial(tick, f"{count} pages, {pattern}, {groups}"),
            )
            scenario: dict[str, Value] = {
                "device": "null",
                "layers": layers,
                "pools": len(pools),
                "direction": direction,
                "pages": count,
                "pattern": pattern,
                "groups": groups,
            }
            rows += [
                Row.of(
                    BENCHMARK,
                    scenario,
                    "caller_ns_per_page_and_layer",
                    UNIT,
                    samples["ours"],
                    baseline=samples["peer's way"],
                ),
                Row.of(
                    BENCHMARK, scenario, "native_ns_per_page_and_layer", UNIT, ours.native(rounds)
                ),
            ]
    report(rows, outputs, title="Planning and issuing, no driver counted", notes=_notes(rows))


def _notes(rows: list[Row]) -> list[str]:
    notes = [
        "device null: it takes every copy and moves nothing; baseline: three arrays rebuilt for"
        " every layer and pool, from Python, whose calls are most of it below 1,024 pages"
    ]
    for row in rows:
        judged = (row.scenario["pages"], row.scenario["pattern"], row.scenario["groups"])
        if judged != (BUDGET_PAGES, "scattered", "ramp"):
            continue
        verdict = "kept" if row.median <= BUDGET_NS else "missed"
        notes.append(
            f"budget {verdict}: {BUDGET_PAGES:,} scattered pages, ramp: {row.metric}"
            f" {row.median:.2f} (budget: at most {BUDGET_NS:g})"
        )
        if row.baseline_median is not None:
            notes.append(like_the_peers(row.baseline_median))
    return notes


if __name__ == "__main__":
    app()
