"""How much of a load hides behind a real forward: 78 layers of matrix products that wait for it.

Each layer waits for its pages, then computes for so long that the forward takes about three times
what the grouped copies do. ``step_ms`` is wall-clock time, from before ``load`` until the
forward has ended; its baseline is the forward alone. ``overlap_ratio`` is the controller's own: 1
less what held up the caller and the forward, by the time that the copies took. On the stand-in
driver the forward is time that passes on a stream.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from harness import Cores, Value, take_turns

from gpu_check.bench import Bench, new_pools
from kvburst import (
    BurstController,
    CopyLimits,
    CudaDevice,
    KVBurstError,
    PageAllocator,
    PlanOptions,
    Pool,
    Stream,
)
from kvburst.geometries import geometry

GEOMETRY = "mla-dsa-78-full"
FORWARD_TIMES_COPIES = 3.0
# Of a square matrix: 137 GFLOP a product, some tenths of a millisecond on a large GPU.
MATRIX = 4096
REHEARSED_PRODUCTS = 20


@dataclass(frozen=True)
class Way:
    groups: Literal["none", "ramp"]
    mode: Literal["inline", "thread"]


WAYS = (Way("ramp", "thread"), Way("ramp", "inline"), Way("none", "thread"), Way("none", "inline"))


class Products:
    """Matrix products in bfloat16, on torch's current stream."""

    def __init__(self) -> None:
        shape = (MATRIX, MATRIX)
        self._a, self._b = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
        self._out = torch.empty_like(self._a)
        torch.cuda.synchronize()  # they were filled on another stream than they are read on
        self._per_layer = 1

    def calibrate(self, layer_ms: float, stream: Stream, device: CudaDevice) -> None:
        """From now on a layer is as many products as take about ``layer_ms``."""
        begin, end = device.new_event(), device.new_event()
        with stream:
            torch.mm(self._a, self._b, out=self._out)
            begin.record()
            for _ in range(REHEARSED_PRODUCTS):
                torch.mm(self._a, self._b, out=self._out)
            end.record()
        end.synchronize()
        product_ms = begin.elapsed_time(end) / REHEARSED_PRODUCTS
        self._per_layer = max(1, round(layer_ms / product_ms))

    def layer(self) -> None:
        for _ in range(self._per_layer):
            torch.mm(self._a, self._b, out=self._out)


class Busy:
    """What stands for a forward where there is no GPU."""

    def calibrate(self, layer_ms: float, stream: Stream, device: CudaDevice) -> None:
        self._layer_ms, self._stream, self._device = layer_ms, stream, device

    def layer(self) -> None:
        self._device.busy(self._stream, 1000 * self._layer_ms)


class Loads:
    """Loads of the same pages through a controller of one way, under a forward."""

    def __init__(
        self, bench: Bench, pools: tuple[Pool, ...], pages: int, way: Way, cores: Cores
    ) -> None:
        self.device = bench.open(limits=CopyLimits(tall_copies=way.groups == "ramp"))
        total, size = pools[0].device.pages, pools[0].page_size
        self._device_pages = PageAllocator(name="device", pages=total, page_size=size, order="lifo")
        host_pages = PageAllocator(name="host", pages=total, page_size=size, order="fifo")
        for allocator, seed in ((self._device_pages, 1), (host_pages, 2)):
            _scatter(allocator, seed)
        host = host_pages.alloc(pages * size)
        if host is None:
            raise KVBurstError(f"host: {pages} pages are not free")
        self._host = host
        self.controller = BurstController(
            pools,
            self.device,
            device_allocator=self._device_pages,
            host_allocator=host_pages,
            options=PlanOptions(ramp=way.groups == "ramp", merge_neighbours=way.groups == "ramp"),
            mode=way.mode,
            cpus=[cores.issuer],
        )
        self.ratios: list[float] = []

    def load_alone(self) -> float:
        """Milliseconds that the copies take with nothing beside them."""
        self._finish(self._start()[1])
        return self.controller.stats().loads.recent[-1].copies_took_ms

    def step(self, forward: Stream, compute: Callable[[], None], layers: int) -> float:
        """Milliseconds of a step that begins with a load."""
        done = self.device.new_event()
        begin = time.perf_counter_ns()
        burst, slots = self._start()
        gate = self.controller.layer_done_counter
        gate.set_consumer(burst)
        with self.device.wrap_stream(forward.handle):
            for layer in range(layers):
                gate.wait_until(layer)
                compute()
            done.record()
        done.synchronize()
        milliseconds = (time.perf_counter_ns() - begin) / 1e6
        self._finish(slots)
        ratio = self.controller.stats().loads.recent[-1].overlap_ratio
        if ratio is not None:
            self.ratios.append(ratio)
        return milliseconds

    def _start(self) -> tuple[int, torch.Tensor]:
        slots = self.controller.load(self._host)
        burst = self.controller.start_loading()
        if slots is None:
            raise KVBurstError("device: no room for a load")
        return burst, slots

    def _finish(self, slots: torch.Tensor) -> None:
        ack = self.controller.ack_load_queue.pop(0)
        if ack.error is not None:
            raise KVBurstError(ack.error)
        self._device_pages.free(slots)


def _scatter(allocator: PageAllocator, seed: int) -> None:
    """Its free pages are handed out in random order."""
    everything = allocator.alloc(allocator.size)
    if everything is None:
        raise KVBurstError(f"{allocator.name}: its pages are not all free")
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(allocator.pages, generator=random)
    allocator.free(everything.view(allocator.pages, -1)[order].flatten())


def run(bench: Bench) -> None:
    device = bench.open()
    shape = geometry(GEOMETRY)
    pages = bench.size(512, 4)
    layers = shape.num_layers
    pools = new_pools(device, shape.pools, 2 * pages, shape.page_size)
    cores = Cores.of(sorted(os.sched_getaffinity(0)))
    loads = {way: Loads(bench, pools, pages, way, cores) for way in WAYS}
    copies_ms = [loads[WAYS[0]].load_alone() for _ in range(3)]
    forward = device.new_stream()
    compute = Busy() if bench.device_name == "stand-in" else Products()
    layer_ms = FORWARD_TIMES_COPIES * min(copies_ms) / layers
    compute.calibrate(layer_ms, forward, device)

    def alone() -> float:
        done = device.new_event()
        begin = time.perf_counter_ns()
        with forward:
            for _ in range(layers):
                compute.layer()
            done.record()
        done.synchronize()
        return (time.perf_counter_ns() - begin) / 1e6

    def under(way: Way) -> Callable[[], float]:
        return lambda: loads[way].step(forward, compute.layer, layers)

    rounds = bench.size(9, 2)
    samples = take_turns({"alone": alone, **{str(way): under(way) for way in WAYS}}, rounds)
    common: dict[str, Value] = {"geometry": GEOMETRY, "layers": layers, "pages": pages}
    alone_ms = samples.pop("alone")
    bench.results.add(
        bench.row(common | {"groups": "ramp", "mode": "thread"}, "copies_alone_ms", "ms", copies_ms)
    )
    for way, each in loads.items():
        each.controller.stop()
        scenario = common | {"groups": way.groups, "mode": way.mode}
        bench.results.add(
            bench.row(scenario, "step_ms", "ms", samples[str(way)], baseline=alone_ms)
        )
        if each.ratios:
            bench.results.add(
                bench.row(scenario, "overlap_ratio", "of 1", each.ratios[-rounds:], better="higher")
            )
