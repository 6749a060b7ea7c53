"""What sharing one host copy of each layer between ranks costs a load-back, and what it saves.

Ranks are threads of this process, each with a `HostDevice` of its own behind a modelled link (H100
over PCIe), and the exchange is enqueued on their streams over another (NVLink). Rows in memory are
small, the links charge for the geometry's. The host tier is

- ``off``: not shared, every rank loads everything;
- ``rank0``: kept by rank 0, which sends all of it;
- ``rotating``: kept in turn, exchanged on the forward's stream, layer by layer;
- ``side_stream``: kept in turn, exchanged at once, and then the forward (as first proposed).

``load_back_ms`` is from the hand-over until all layers are in place on all ranks, for a forward
that computes nothing. Then a forward computes ``layer_ms`` a layer, or in all a multiple of the
time that the slowest rank's copies take: ``layer_0_ms`` is until its first layer is in place,
``forward_ms`` until it ends. ``overlap_ratio`` is 1 - (caller + stalls) / copies: a stall is time
that the forward's stream stood for bytes to come, the modelled time of its own exchange not
counted. Ranks are threads of one interpreter: on few cores they are late for each other. What is
``computed`` is by the plans and the links alone, with nothing else in the way.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, TypeVar

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
    whole_number,
    whole_numbers,
)

from kvburst import BurstController, DevicePool, HostDevice, HostPool, PageAllocator, Pool
from kvburst._core import KVBurstError
from kvburst.exchange import RankShard
from kvburst.exchange.in_process import InProcessGroup
from kvburst.exchange.timeline import (
    ModelledForward,
    PlannedLoad,
    charges_us,
    modelled_forward,
    planned_load,
)
from kvburst.geometries import Geometry, geometry
from kvburst.links import LINKS, NVLINK
from kvburst.ownership import Ownership

Each = TypeVar("Each")
Result = TypeVar("Result")
Tier = Literal["off", "rank0", "rotating", "side_stream"]

BENCHMARK = "shard"
TIERS: tuple[Tier, ...] = ("off", "rank0", "rotating", "side_stream")
GEOMETRY = "mla-dsa-78"
# Rows in memory are so much smaller than the geometry's.
ROW_SCALE = 128
STAGING_BYTES = 32 << 20
LINK = LINKS["h100"]
# The budget: this close to the overlap of a tier that is not shared.
BUDGET_OVERLAP = 0.1
UNDER_A_FORWARD = {
    "layer_0_ms": "ms",
    "forward_ms": "ms",
    "overlap_ratio": "1",
    "stalls_ms": "ms",
    "exchange_ms": "ms",
    "copies_ms": "ms",
}


@dataclass(frozen=True)
class Measured:
    """One load under one forward, on one rank; milliseconds from its hand-over."""

    load_back_ms: float
    """When the forward's wait for the last layer was over."""
    layer_0_ms: float
    forward_ms: float
    caller_ms: float
    stalls_ms: float
    exchange_ms: float
    copies_ms: float

    @classmethod
    def of_all(cls, ranks: Sequence["Measured"]) -> "Measured":
        """Of ranks that go on together: the stalls of one are everybody's, what all wait for is
        over when it is for the last, and copies take as long as the slowest rank's."""
        slowest = {
            field.name: max(getattr(rank, field.name) for rank in ranks)
            for field in dataclasses.fields(cls)
        }
        mean_stalls = sum(rank.stalls_ms for rank in ranks) / len(ranks)
        return cls(**(slowest | {"stalls_ms": mean_stalls}))

    @property
    def overlap_ratio(self) -> float:
        return min(1.0, max(0.0, 1 - (self.caller_ms + self.stalls_ms) / self.copies_ms))


class RankOfTier:
    """One rank: a device, pools, a controller, and pages on the host to load."""

    def __init__(
        self, tier: Tier, ranks: int, rank: int, group: InProcessGroup, shape: Geometry, pages: int
    ) -> None:
        full = geometry(GEOMETRY)
        self.tier = tier
        self.layers = shape.num_layers
        self.device = HostDevice(
            link=LINK.model(byte_scale=full.bytes_per_page / shape.bytes_per_page)
        )
        layers = tuple(pool.layer_ids for pool in shape.pools)
        owned = Ownership(ranks, layers, "rank0" if tier == "rank0" else "round_robin")
        shard = None
        self.charges_ms = [0.0] * self.layers
        if tier != "off":
            shard = RankShard(
                owned,
                group.channel(rank, self.device),
                exchange="side_stream" if tier == "side_stream" else "forward_stream",
                staging_bytes=STAGING_BYTES // ROW_SCALE,
            )
            page_bytes = [pool.page_bytes(full.page_size) for pool in full.pools]
            charged = charges_us(owned, page_bytes, pages, STAGING_BYTES, NVLINK)
            self.charges_ms = [microseconds / 1e3 for microseconds in charged]
        self.pools = []
        for number, spec in enumerate(shape.pools):
            on_device = DevicePool.allocate(spec, pages=pages, page_size=shape.page_size)
            stored = None if shard is None else owned.layers_of(rank, number)
            on_host = HostPool.allocate(on_device, pages=pages, stored_layers=stored)
            self.pools.append(Pool.pair(on_device, on_host))
        self.device_pages = _scattered("device", pages, shape.page_size, "lifo", 1 + rank)
        self.host_pages = _scattered("host", pages, shape.page_size, "fifo", 0)
        self.controller = BurstController(
            self.pools,
            self.device,
            device_allocator=self.device_pages,
            host_allocator=self.host_pages,
            mode="inline" if tier == "side_stream" else "thread",
            shard=shard,
        )
        on_host_slots = self.host_pages.alloc(pages * shape.page_size)
        assert on_host_slots is not None
        self.on_host = on_host_slots
        self.forward = self.device.new_stream()
        # Handed over in the same order on all ranks, which keeps them in step.
        self.controller.load_fence_stream = self.forward

    @property
    def planned(self) -> PlannedLoad:
        """A load by its plan and the link alone; the pages are those of the next one."""
        slots = self.device_pages.alloc(self.device_pages.size)
        assert slots is not None
        self.device_pages.undo_alloc(slots)
        assert self.device.link is not None
        return planned_load(
            [pool.layout for pool in self.pools],
            slots,
            self.on_host,
            self.controller.page_size,
            self.device.link,
        )

    @property
    def host_bytes(self) -> int:
        return sum(pool.host.tensor.nbytes for pool in self.pools)

    def load(self, layer_ms: float) -> Measured:
        """Under a forward that waits for each layer and computes `layer_ms` on it."""
        device, controller = self.device, self.controller
        gate = controller.layer_done_counter
        origin, gated = device.new_event(), device.new_event()
        arrived = [device.new_event() for _ in range(self.layers)]
        passed = [device.new_event() for _ in range(self.layers)]
        ended = device.new_event()
        with self.forward:
            origin.record()
            begin = time.perf_counter_ns()
            slots = controller.load(self.on_host)
            burst = controller.start_loading()
            caller_ms = (time.perf_counter_ns() - begin) / 1e6
            if slots is None:
                raise KVBurstError("device: no room for a burst")
            gated.record()
            gate.set_consumer(burst)
            for layer in range(self.layers):
                if layer > 0:
                    arrived[layer].record()
                gate.wait_until(layer)
                passed[layer].record()
                device.busy(self.forward, 1e3 * layer_ms)
            ended.record()
        # The gate of a whole exchange is passed before the first layer is asked for.
        arrived[0] = gated
        controller.drain()
        device.synchronize()
        (ack,) = controller.poll()
        if ack.error is not None:
            raise KVBurstError(ack.error)
        copies_ms = controller.stats().loads.recent[-1].copies_took_ms
        self.device_pages.free(slots)
        on_forward = self.charges_ms if self.tier != "side_stream" else [0.0] * self.layers
        stalls = (
            max(0.0, before.elapsed_time(after) - charge)
            for before, after, charge in zip(arrived, passed, on_forward, strict=True)
        )
        return Measured(
            load_back_ms=origin.elapsed_time(passed[-1]),
            layer_0_ms=origin.elapsed_time(passed[0]),
            forward_ms=origin.elapsed_time(ended),
            caller_ms=caller_ms - ack.alloc_us / 1e3,
            stalls_ms=sum(stalls),
            exchange_ms=sum(self.charges_ms),
            copies_ms=copies_ms,
        )


def _scattered(
    name: str, pages: int, page_size: int, order: Literal["lifo", "fifo"], seed: int
) -> PageAllocator:
    allocator = PageAllocator(name=name, pages=pages, page_size=page_size, order=order)
    slots = allocator.alloc(allocator.size)
    assert slots is not None
    random = torch.Generator().manual_seed(seed)
    at = torch.randperm(pages, generator=random)
    allocator.free(slots.view(pages, page_size)[at].flatten())
    return allocator


@dataclass(frozen=True)
class Computed:
    """A load under a forward by the plans and the links alone, with nothing else in the way."""

    forward: ModelledForward
    copies_ms: float

    @property
    def overlap_ratio(self) -> float:
        return max(0.0, 1 - self.forward.stalls_ms / self.copies_ms)


class Arm:
    """All ranks of one tier, which load together."""

    def __init__(self, tier: Tier, ranks: int, pages: int, shape: Geometry) -> None:
        full = geometry(GEOMETRY)
        scale = full.bytes_per_page / shape.bytes_per_page
        group = InProcessGroup(ranks, link=NVLINK, byte_scale=scale)
        self._threads = ThreadPoolExecutor(ranks)
        self.ranks = self._on_all(
            range(ranks), lambda rank: RankOfTier(tier, ranks, rank, group, shape, pages)
        )
        self.copies_ms = self.load(0.0).copies_ms

    def _on_all(self, ranks: Iterable[Each], body: Callable[[Each], Result]) -> list[Result]:
        """On a thread for each, all at once: they wait for each other."""
        return list(self._threads.map(body, ranks))

    def load(self, layer_ms: float) -> Measured:
        return Measured.of_all(self._on_all(self.ranks, lambda rank: rank.load(layer_ms)))

    def computed(self, layer_ms: float | None, forward: float) -> Computed:
        """At `layer_ms` a layer; None: at `forward` times what the copies take."""
        first = self.ranks[0]
        plans = [rank.planned for rank in self.ranks]
        copies_ms = max(plan.copies_ms for plan in plans)
        if layer_ms is None:
            layer_ms = forward * copies_ms / first.layers
        arrivals = [plan.arrivals_ms for plan in plans]
        charged = [1e3 * charge for charge in first.charges_ms]
        if first.tier == "side_stream":
            # All at once: the forward begins when the last layer has been exchanged.
            whole = modelled_forward(arrivals, charged, 0.0, 0.0)
            ends = whole.ends_ms + layer_ms * first.layers
            gated = ModelledForward(whole.ends_ms, whole.exchange_ms, whole.ends_ms, ends)
            return Computed(gated, copies_ms)
        return Computed(modelled_forward(arrivals, charged, layer_ms, 0.0), copies_ms)

    def close(self) -> None:
        self._on_all(self.ranks, lambda rank: rank.controller.stop())
        self._threads.shutdown()


def measure(
    arm: Arm,
    scenario: dict[str, Value],
    metrics: Mapping[str, str],
    layer_ms: float,
    rounds: int,
    tick: Callable[[], None],
) -> list[Row]:
    """Rows of one tier at one pace."""
    samples: dict[str, list[float]] = {metric: [] for metric in metrics}
    for _ in range(rounds):
        measured = arm.load(layer_ms)
        for metric, values in samples.items():
            values.append(getattr(measured, metric))
        tick()
    return [
        Row.of(
            BENCHMARK,
            scenario,
            metric,
            metrics[metric],
            values,
            better="higher" if metric == "overlap_ratio" else "lower",
            simulated=True,
        )
        for metric, values in samples.items()
    ]


app = new_app("What sharing one host copy of each layer costs a load-back, and what it saves.")


@app.command()
def shard(
    ranks: Annotated[str, typer.Option(metavar="N,N,...", help="Ranks that share.")] = "2,4",
    pages: Annotated[
        int, typer.Option(parser=whole_number(1, 65536), metavar="N", help="Pages of a load.")
    ] = 1024,
    layer_ms: Annotated[
        float, typer.Option(metavar="X", help="Milliseconds that the forward computes on a layer.")
    ] = 1.0,
    forward: Annotated[
        float,
        typer.Option(
            metavar="X", help="And a forward of so many times the time that the tier's copies take."
        ),
    ] = 3.0,
    rounds: Annotated[
        int, typer.Option(parser=whole_number(1, 10_000), metavar="N", help="Loads a scenario.")
    ] = 5,
    quick: Quick = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Load back under a forward with the host tier not shared, and shared in three ways.

    \b
    All times are simulated: links are modelled, and so is the forward. The budget: rotating owners
    on the forward's stream overlap as much as a tier that is not shared, within 0.1.

    \b
    Examples:
      python benchmarks/shard.py
      python benchmarks/shard.py --ranks 8 --layer-ms 3 --json shard.json
    """
    counts = whole_numbers("--ranks", ranks, least=2, most=16)
    outputs = Outputs(json_file, plot_file)
    if quick:
        counts, pages, rounds = counts[:1], min(pages, 64), 1
    full = geometry(GEOMETRY)
    shape = dataclasses.replace(
        full,
        pools=tuple(
            dataclasses.replace(pool, row_bytes=max(1, round(pool.row_bytes / ROW_SCALE)))
            for pool in full.pools
        ),
    )
    rows: list[Row] = []
    torch.set_num_threads(1)
    with one_line_errors(), progress(len(counts) * len(TIERS) * 3 * rounds) as tick:
        for count in counts:
            for tier in TIERS:
                arm = Arm(tier, count, pages, shape)
                scenario: dict[str, Value] = {"pages": pages, "ranks": count, "tier": tier}
                scale = full.bytes_per_page // shape.bytes_per_page
                idle = scenario | {"forward": "none"}
                rows += [
                    Row.of(BENCHMARK, idle, metric, "GB", [nbytes * scale / 1e9])
                    for metric, nbytes in (
                        ("host_gb_all_ranks", sum(rank.host_bytes for rank in arm.ranks)),
                        ("host_gb_most", max(rank.host_bytes for rank in arm.ranks)),
                    )
                ]
                step = partial(tick, f"{count} ranks, {tier}")
                rows += measure(arm, idle, {"load_back_ms": "ms"}, 0.0, rounds, step)
                for pace, fixed_ms in (
                    (f"{layer_ms:g} ms a layer", layer_ms),
                    (f"{forward:g} x copies", None),
                ):
                    under = scenario | {"forward": pace}
                    each_layer_ms = fixed_ms
                    if each_layer_ms is None:
                        each_layer_ms = forward * arm.copies_ms / shape.num_layers
                    rows += measure(arm, under, UNDER_A_FORWARD, each_layer_ms, rounds, step)
                    by_plan = arm.computed(fixed_ms, forward)
                    rows += [
                        Row.of(BENCHMARK, under, metric, unit, [value], simulated=True)
                        for metric, unit, value in (
                            ("computed_layer_0_ms", "ms", by_plan.forward.layer_0_ms),
                            ("computed_forward_ms", "ms", by_plan.forward.ends_ms),
                            ("computed_overlap_ratio", "1", by_plan.overlap_ratio),
                        )
                    ]
                arm.close()
    report(
        rows,
        outputs,
        title="Sharing one host copy of each layer between ranks",
        notes=_notes(rows, f"{forward:g} x copies"),
    )


def _notes(rows: Sequence[Row], pace: str) -> list[str]:
    notes = [
        f"simulated: {LINK.source}; each rank has a link of its own",
        f"simulated: exchange over {NVLINK.source}",
    ]
    overlap = {
        (row.scenario["ranks"], row.scenario["tier"]): row.median
        for row in rows
        if row.metric == "computed_overlap_ratio" and row.scenario["forward"] == pace
    }
    for (count, tier), ratio in overlap.items():
        if tier == "rotating":
            off = overlap[count, "off"]
            kept = "kept" if ratio >= off - BUDGET_OVERLAP else "missed"
            notes.append(
                f"budget {kept}: {count} ranks, rotating owners: computed overlap ratio"
                f" {ratio:.2f}, not shared {off:.2f} (budget: at most {BUDGET_OVERLAP:g} less)"
            )
    return notes


if __name__ == "__main__":
    app()
