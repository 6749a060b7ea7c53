"""How near a burst of scattered pages comes to one large copy of as many bytes.

A burst is timed on the GPU, from its start event to its finish event, and so is the large copy
between two events on its own stream; beside it stands the burst in wall-clock time, from its
submission until it is known to be done, planning and issuing included. Every burst's bytes are
compared once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from harness import take_turns
from page_patterns import Direction, made_up
from peers_way import Indices

from gpu_check.bench import Bench, new_pools
from kvburst import CopyLimits, CudaDevice, KVBurstError, PlanOptions, Pool
from kvburst._core import BurstIssuer, BurstPages
from kvburst._indices import index_view
from kvburst.geometries import PoolSpec

LAYERS, PAGE_SIZE = 78, 64
PAGE_BYTES = (8 << 10, 41_984, 128 << 10)  # of 656-byte rows in the middle
DIRECTIONS: tuple[Direction, ...] = ("load", "backup")
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Plan:
    """``groups``: none is a copy for every page and layer; ramp lets one move a page of 1, 2, 4 and
    at most ``max_group`` layers, and of all of them in a backup."""

    groups: Literal["none", "ramp"]
    max_group: int

    @property
    def options(self) -> PlanOptions:
        ramp = self.groups == "ramp"
        return PlanOptions(max_group=self.max_group, ramp=ramp, merge_neighbours=ramp)


PLANS = {
    "load": (Plan("none", 1), Plan("ramp", 4), Plan("ramp", 16), Plan("ramp", 64)),
    "backup": (Plan("none", 1), Plan("ramp", 16)),
}


class Burst:
    """The same pages, again and again, by one plan."""

    def __init__(
        self, device: CudaDevice, pool: Pool, plan: Plan, direction: Direction, indices: Indices
    ) -> None:
        layouts = [pool.layout]
        self._stream = device.new_stream()
        self._indices = indices
        self._pages = BurstPages(layouts, direction=direction, page_size=PAGE_SIZE)
        self._issuer = BurstIssuer(
            device, layouts, direction=direction, options=plan.options, memory=pool
        )
        self.copies = 0
        self.wall: list[float] = []

    def run(self) -> float:
        """GB/s on the GPU; those in wall-clock time are kept."""
        begin = time.perf_counter_ns()
        self._pages.append(
            device=index_view("device", self._indices.device),
            host=index_view("host", self._indices.host),
        )
        burst = self._issuer.submit(self._pages, [1], stream=self._stream)
        if burst is None:
            raise KVBurstError("a burst of no pages")
        burst.finish_event.synchronize()
        end = time.perf_counter_ns()
        if burst.error is not None:
            raise KVBurstError(burst.error)
        self.copies = burst.num_copies
        self.wall.append(burst.num_bytes / (end - begin))
        return burst.num_bytes / burst.start_event.elapsed_time(burst.finish_event) / 1e6

    def stop(self) -> None:
        self._issuer.stop(STOP_SECONDS)


def one_large_copy(
    device: CudaDevice, pool: Pool, direction: Direction, nbytes: int
) -> Callable[[], float]:
    """GB/s on the GPU."""
    stream = device.new_stream()
    begin, end = device.new_event(), device.new_event()
    ends = (pool.device.layers[0].data_ptr(), pool.host.tensor.data_ptr())
    dst, src = ends if direction == "load" else ends[::-1]

    def copy() -> float:
        begin.record(stream)
        device.transfer(stream, direction, [(dst, src, nbytes, 1, 0, 0)])
        end.record(stream)
        end.synchronize()
        return nbytes / begin.elapsed_time(end) / 1e6

    return copy


def run(bench: Bench) -> None:
    burst_bytes = bench.size(512 << 20, 8 << 20)
    for page_bytes in PAGE_BYTES[:1] if bench.small else PAGE_BYTES:
        _of_page_bytes(bench, page_bytes, max(2, burst_bytes // (page_bytes * LAYERS)))


def _of_page_bytes(bench: Bench, page_bytes: int, pages: int) -> None:
    grouped = bench.open()
    single_rows = bench.open(limits=CopyLimits(tall_copies=False))
    bursts = made_up("scattered", pages, PAGE_SIZE, torch.Generator().manual_seed(1))
    spec = PoolSpec("kv", page_bytes // PAGE_SIZE, tuple(range(LAYERS)))
    (pool,) = new_pools(grouped, [spec], bursts.tier_pages, PAGE_SIZE)
    (indices,) = bursts.each
    nbytes = pages * page_bytes * LAYERS
    for direction in DIRECTIONS:
        plans = PLANS[direction]
        ours = {
            plan: Burst(
                single_rows if plan.groups == "none" else grouped, pool, plan, direction, indices
            )
            for plan in plans
        }
        _fill(grouped, pool, direction)
        for burst in ours.values():
            _check(grouped, pool, burst, direction, indices)
        arms = {str(plan): burst.run for plan, burst in ours.items()}
        arms["one large copy"] = one_large_copy(grouped, pool, direction, nbytes)
        rounds = bench.size(9, 2)
        samples = take_turns(arms, rounds)
        for plan, burst in ours.items():
            burst.stop()
            scenario = {
                "direction": direction,
                "groups": plan.groups,
                "max_group": plan.max_group,
                "page_bytes": page_bytes,
                "pages": pages,
                "layers": LAYERS,
                "copies": burst.copies,
            }
            for metric, measured in (
                ("bandwidth_gbps", samples[str(plan)]),
                ("wall_bandwidth_gbps", burst.wall[-rounds:]),
            ):
                bench.results.add(
                    bench.row(
                        scenario,
                        metric,
                        "GB/s",
                        measured,
                        baseline=samples["one large copy"],
                        better="higher",
                    )
                )


def _tiers(pool: Pool, direction: Direction) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and target, every byte of both."""
    first = pool.device.layers[0]
    device = first.as_strided((LAYERS * first.numel(),), (1,))
    host = pool.host.tensor.view(-1)
    return (host, device) if direction == "load" else (device, host)


def _fill(device: CudaDevice, pool: Pool, direction: Direction) -> None:
    """Random bytes in the source."""
    source, _ = _tiers(pool, direction)
    source.view(torch.int64).random_(-(1 << 63), None)
    device.synchronize()


def _check(
    device: CudaDevice, pool: Pool, burst: Burst, direction: Direction, indices: Indices
) -> None:
    """What is in the source arrives in the target, or this raises."""
    _, target = _tiers(pool, direction)
    target.zero_()
    device.synchronize()
    burst.run()
    on_device, on_host = (each[::PAGE_SIZE] // PAGE_SIZE for each in (indices.device, indices.host))
    for number, layer in enumerate(pool.device.layers):
        pages = layer.view(pool.device.pages, -1)
        found = pages[on_device.to(layer.device)].cpu()
        if not torch.equal(found, pool.host.tensor[on_host, number]):
            raise KVBurstError(f"{direction}: layer {number} did not arrive as it left")
