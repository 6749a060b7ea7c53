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
from dataclasses import dataclass
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

from kvburst import CopyLimits, KVBurstError, PlanOptions
from kvburst._core import (
    BurstIssuer,
    BurstPages,
    DeviceTier,
    HostTier,
    LayerGate,
    NullDevice,
    PoolLayout,
)
from kvburst._indices import index_view
from kvburst.geometries import geometry

Pattern = Literal["scattered", "contiguous"]
Groups = Literal["none", "neighbours", "ramp"]
Direction = Literal["load", "backup"]

BENCHMARK = "plan_cost"
PATTERNS: tuple[Pattern, ...] = ("scattered", "contiguous")
GROUPS: tuple[Groups, ...] = ("none", "neighbours", "ramp")
# fp8 MLA and index-K, both in every layer; the geometry's layer count is an option here.
POOLS = {pool.name: pool for pool in geometry("mla-dsa-78-full").pools}
PAGE_SIZE = geometry("mla-dsa-78-full").page_size
UNIT = "ns per page and layer"

# The budget: the product's groups, 1,024 scattered pages.
BUDGET_PAGES = 1024
BUDGET_NS = 5.0
# What a copy costs the peer's way; outside of it the baseline would not be the peer's.
PEER_NS = (20.0, 80.0)


@dataclass(frozen=True)
class Pool:
    """Where the layers of a pool would be, one allocation on the device, page-first on the host.
    No such memory exists: planning reads no byte of it."""

    name: str
    layers: int
    pages: int
    page_bytes: int
    device: int
    host: int

    @property
    def size(self) -> int:
        """Bytes of either tier."""
        return self.layers * self.pages * self.page_bytes

    def layout(self) -> PoolLayout:
        layer_bytes = self.pages * self.page_bytes
        return PoolLayout(
            name=self.name,
            layer_ids=range(self.layers),
            device=DeviceTier(
                layers=[self.device + layer * layer_bytes for layer in range(self.layers)],
                pages=self.pages,
                page_bytes=self.page_bytes,
                allocations=[(self.device, self.size)],
            ),
            host=HostTier(
                address=self.host,
                size=self.size,
                pages=self.pages,
                page_bytes=self.page_bytes,
                page_stride=self.layers * self.page_bytes,
                layer_stride=self.page_bytes,
                rows=range(self.layers),
            ),
        )


def pools_of(layers: int, pages: int) -> tuple[Pool, ...]:
    """The pools of the geometry with ``layers`` layers, at addresses that do not overlap."""
    pools = []
    free = 1 << 40
    for spec in POOLS.values():
        size = layers * pages * spec.page_bytes(PAGE_SIZE)
        pools.append(
            Pool(
                name=spec.name,
                layers=layers,
                pages=pages,
                page_bytes=spec.page_bytes(PAGE_SIZE),
                device=free,
                host=free + size,
            )
        )
        free += 2 * size
    return tuple(pools)


@dataclass(frozen=True)
class Indices:
    """Token slots of the pages of one burst on both tiers, as a scheduler holds them."""

    device: torch.Tensor
    host: torch.Tensor

    @classmethod
    def of(cls, pages: int, available: int, pattern: Pattern, random: torch.Generator) -> "Indices":
        def slots() -> torch.Tensor:
            chosen = (
                torch.arange(pages)
                if pattern == "contiguous"
                else torch.randperm(available, generator=random)[:pages]
            )
            return (chosen[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()

        return cls(slots(), slots())


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


class PeersWay:
    """Three arrays for every layer and pool, from Python."""

    def __init__(self, pools: tuple[Pool, ...], direction: Direction) -> None:
        self._pools = pools
        self._to_device = direction == "load"
        self._handed_over = 0

    def issue(self, indices: Indices) -> float:
        """Nanoseconds of the calling thread for each page and layer."""
        self._handed_over = 0
        begin = time.perf_counter_ns()
        for layer in range(self._pools[0].layers):
            for pool in self._pools:
                layer_bytes = pool.pages * pool.page_bytes
                device_pages = indices.device[::PAGE_SIZE] // PAGE_SIZE
                host_pages = indices.host[::PAGE_SIZE] // PAGE_SIZE
                device = device_pages * pool.page_bytes + (pool.device + layer * layer_bytes)
                page_stride = pool.layers * pool.page_bytes
                host = host_pages * page_stride + (pool.host + layer * pool.page_bytes)
                sizes = torch.full_like(device, pool.page_bytes)
                if self._to_device:
                    self._hand_over(device, host, sizes)
                else:
                    self._hand_over(host, device, sizes)
        nanoseconds = time.perf_counter_ns() - begin
        return nanoseconds / self._handed_over

    def _hand_over(self, dst: torch.Tensor, src: torch.Tensor, sizes: torch.Tensor) -> None:
        """Where a driver would be called."""
        if dst.data_ptr() and src.data_ptr() and sizes.data_ptr():
            self._handed_over += sizes.numel()


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
                    "peer's way": partial(peers_way.issue, indices),
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
            f" {row.median:.2f}, at most {BUDGET_NS:g} is asked for"
        )
        if row.baseline_median is not None:
            least, most = PEER_NS
            like = "as" if least <= row.baseline_median <= most else "unlike"
            notes.append(
                f"baseline: {row.baseline_median:.1f} ns a copy, {like} the peer's"
                f" {least:g} to {most:g}"
            )
    return notes


if __name__ == "__main__":
    app()
