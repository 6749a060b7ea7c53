"""What a load costs the scheduler thread, and how soon its first copy is issued.

``caller_us`` is the time of ``load`` and ``start_loading`` on the thread that calls them, less what
the allocator took, which is ``alloc_us``; ``first_copy_us`` is from submission until the device was
handed the first copy. Mode ``thread`` hands the burst over, ``inline`` issues it. The baseline
issues it inline too, the peer's way (see ``peers_way``).

The device is ``null``, which takes every copy and moves nothing, so that no side counts a driver;
or ``host``, whose streams are threads. Index tensors are the host's. The caller runs on one core
and the issuing thread on another, if there are two. ``busy``: a second Python thread never stops to
compute, and hands the interpreter's lock over only when it must; the caller sleeps before each
burst, which lets it have the lock.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Annotated, Literal

import torch
import typer
from harness import (
    Cores,
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
from peers_way import PAGE_SIZE, Indices, Issued, PeersWay, like_the_peers, pools_of

from kvburst import BurstController, DevicePool, HostDevice, HostPool, PageAllocator, Pool
from kvburst._core import Device, KVBurstError, NullDevice
from kvburst.geometries import PoolSpec
from kvburst.stats import BurstStats

Mode = Literal["thread", "inline"]
DeviceName = Literal["null", "host"]

BENCHMARK = "handoff"
MODES: tuple[Mode, ...] = ("thread", "inline")
POOLS = ("kv", "index_k")
PAUSE_SECONDS = 0.002
BURSTS_A_TURN = 5
FEWEST_ROUNDS_FOR_P99 = 100

# The budgets.
BUDGET_PAGES, BUDGET_LAYERS = 1024, 78
BUDGET_RATIO = 50.0
BUDGET_GROWTH = 4.0
BUDGET_BUSY_P99_US = 1000.0


class Ours:
    """Loads through the controller of one mode; pages of the pools are a byte a slot."""

    def __init__(
        self,
        device: Device,
        pools: tuple[Pool, ...],
        pages: int,
        mode: Mode,
        cores: Cores,
    ) -> None:
        self._device_pages = PageAllocator(
            name="device", pages=pages, page_size=PAGE_SIZE, order="lifo"
        )
        self._host_pages = PageAllocator(
            name="host", pages=pages, page_size=PAGE_SIZE, order="fifo"
        )
        self._controller = BurstController(
            pools,
            device,
            device_allocator=self._device_pages,
            host_allocator=self._host_pages,
            mode=mode,
            cpus=[cores.issuer],
        )
        self._bursts: list[BurstStats] = []

    def prepare(self, host_indices: torch.Tensor) -> None:
        """The free pages of the device in random order, the given ones of the host taken."""
        self._host_pages.clear()
        if self._host_pages.alloc(self._host_pages.size) is None:
            raise KVBurstError("host: its pages are not all free")
        self._host_indices = host_indices
        everything = self._device_pages.alloc(self._device_pages.size)
        if everything is None:
            raise KVBurstError("device: its pages are not all free")
        random = torch.Generator().manual_seed(1)
        order = torch.randperm(self._device_pages.pages, generator=random)
        self._device_pages.free(everything.view(-1, PAGE_SIZE)[order].flatten())

    def load(self) -> float:
        """Microseconds of the calling thread, the allocator's not counted."""
        controller = self._controller
        begin = time.perf_counter_ns()
        slots = controller.load(self._host_indices)
        controller.start_loading()
        microseconds = (time.perf_counter_ns() - begin) / 1000
        if slots is None:
            raise KVBurstError("device: no room for a burst")
        ack = controller.ack_load_queue.pop(0)
        if ack.error is not None:
            raise KVBurstError(ack.error)
        self._device_pages.free(slots)
        stats = controller.stats().loads.recent[-1]
        self._bursts.append(stats)
        return microseconds - stats.alloc_us

    def load_after_a_pause(self) -> float:
        """The same for a caller that slept, and had let go of the interpreter's lock."""
        time.sleep(PAUSE_SECONDS)
        return self.load()

    def bursts(self, rounds: int, every: int) -> list[BurstStats]:
        """The last ``rounds`` of every second, third ... of them."""
        return self._bursts[::-every][:rounds]

    def stop(self) -> None:
        self._controller.stop()


class Theirs:
    """The baseline."""

    def __init__(self, way: PeersWay, indices: Indices) -> None:
        self._way = way
        self._indices = indices
        self._bursts: list[Issued] = []

    def load(self) -> float:
        """Microseconds of the calling thread."""
        self._bursts.append(self._way.issue(self._indices))
        return self._bursts[-1].ns / 1000

    def first_copies_us(self, rounds: int) -> list[float]:
        """Of the last ``rounds`` that were counted."""
        return [burst.first_copy_ns / 1000 for burst in self._bursts[::-BURSTS_A_TURN][:rounds]]


def last_of_a_turn(load: Callable[[], float]) -> float:
    """An arm that follows another finds its caches full of that one's data, and the one that has
    more of it would slow the other down: so only the last burst of a turn is counted."""
    for _ in range(BURSTS_A_TURN - 1):
        load()
    return load()


@contextmanager
def busy_thread() -> Iterator[None]:
    """Beside the caller a thread that computes in Python for as long as this lasts."""
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def new_pools(layers: int, pages: int) -> tuple[Pool, ...]:
    """Of a byte a slot: their copies cost what larger ones cost the caller."""
    pools = []
    for name in POOLS:
        spec = PoolSpec(name, 1, tuple(range(layers)))
        device = DevicePool.allocate(spec, pages=pages, page_size=PAGE_SIZE)
        pools.append(Pool.pair(device, HostPool.allocate(device, pages=pages)))
    return tuple(pools)


def measure(
    scenario: dict[str, Value],
    modes: dict[Mode, Ours],
    theirs: Theirs | None,
    rounds: int,
    tick: partial[None],
) -> list[Row]:
    """The rows of every mode; without a baseline where there is none."""
    arms: dict[str, Callable[[], float]] = {}
    if theirs is not None:
        arms["peer's way"] = partial(last_of_a_turn, theirs.load)
    for mode, ours in modes.items():
        arms[mode] = (
            ours.load_after_a_pause if scenario["busy"] else partial(last_of_a_turn, ours.load)
        )
    samples = take_turns(arms, rounds, tick=tick)
    first_copies = None if theirs is None else theirs.first_copies_us(rounds)
    rows = []
    for mode, ours in modes.items():
        row = partial(Row.of, BENCHMARK, scenario | {"mode": mode})
        bursts = ours.bursts(rounds, every=1 if scenario["busy"] else BURSTS_A_TURN)
        rows += [
            row("caller_us", "us", samples[mode], baseline=samples.get("peer's way")),
            row("alloc_us", "us", [burst.alloc_us for burst in bursts]),
            row(
                "first_copy_us",
                "us",
                [burst.first_copy_us for burst in bursts],
                baseline=first_copies,
            ),
        ]
    return rows


app = new_app("What a load costs the scheduler thread, and how soon its first copy is issued.")


@app.command()
def handoff(
    pages: Annotated[str, typer.Option(metavar="N,N,...", help="Pages of a burst.")] = (
        "64,1024,4096"
    ),
    layers: Annotated[
        str, typer.Option(metavar="N,N,...", help="Layers of each of the two pools.")
    ] = "1,78",
    device_name: Annotated[
        DeviceName,
        typer.Option(
            "--device", help="null: takes every copy, moves nothing; host: streams are threads."
        ),
    ] = "null",
    rounds: Annotated[
        int, typer.Option(parser=whole_number(1, 100_000), metavar="N", help="Bursts a scenario.")
    ] = 100,
    quick: Quick = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Load bursts through the controller, against arrays rebuilt in Python for every layer.

    \b
    No driver is counted. The budgets, mode thread: 50 times less than the baseline at 1,024 pages
    of 78 layers, 4,096 pages at most 4 times 64, and below 1 ms in 99 of 100 beside a busy thread.

    \b
    Examples:
      python benchmarks/handoff.py
      python benchmarks/handoff.py --pages 1024 --layers 78 --json handoff.json
    """
    burst_pages = whole_numbers("--pages", pages, least=1, most=65536)
    burst_layers = whole_numbers("--layers", layers, least=1, most=1000)
    outputs = Outputs(json_file, plot_file)
    rounds = 3 if quick else rounds
    available = 2 * max(burst_pages)
    cores = Cores.of(sorted(os.sched_getaffinity(0)))
    random = torch.Generator().manual_seed(0)
    indices = {count: Indices.of(count, available, "scattered", random) for count in burst_pages}
    rows: list[Row] = []
    ticks = 2 * len(burst_pages) * len(burst_layers) * (rounds + 1)
    with one_line_errors(), progress(ticks) as tick:
        for layer_count in burst_layers:
            device = NullDevice() if device_name == "null" else HostDevice()
            pools = new_pools(layer_count, available)
            # Before the caller is pinned: what they start inherits its cores.
            modes = {mode: Ours(device, pools, available, mode, cores) for mode in MODES}
            way = PeersWay(pools_of(layer_count, available), "load")
            with cores.caller_pinned():
                for count in burst_pages:
                    for busy in (0, 1):
                        scenario: dict[str, Value] = {
                            "device": device_name,
                            "pools": len(pools),
                            "layers": layer_count,
                            "pages": count,
                            "busy": busy,
                        }
                        for ours in modes.values():
                            ours.prepare(indices[count].host)
                        with busy_thread() if busy else nullcontext():
                            rows += measure(
                                scenario,
                                {"thread": modes["thread"]} if busy else modes,
                                None if busy else Theirs(way, indices[count]),
                                rounds,
                                partial(tick, f"{layer_count} layers, {count} pages, busy {busy}"),
                            )
            for ours in modes.values():
                ours.stop()
    report(rows, outputs, title="Handing a load over, no driver counted", notes=_notes(rows, cores))


def _notes(rows: list[Row], cores: Cores) -> list[str]:
    callers = {
        tuple(row.scenario[key] for key in ("mode", "busy", "pages", "layers")): row
        for row in rows
        if row.metric == "caller_us"
    }
    notes = [f"{cores}; baseline: three arrays rebuilt for every layer and pool, from Python"]

    def verdict(kept: bool, words: str) -> None:
        notes.append(f"budget {'kept' if kept else 'missed'}: {words}")

    judged = callers.get(("thread", 0, BUDGET_PAGES, BUDGET_LAYERS))
    if judged is not None and judged.baseline_median is not None and judged.ratio is not None:
        copies = BUDGET_PAGES * BUDGET_LAYERS * len(POOLS)
        notes.append(like_the_peers(1000 * judged.baseline_median / copies))
        verdict(
            judged.ratio >= BUDGET_RATIO,
            f"{BUDGET_PAGES:,} pages, {BUDGET_LAYERS} layers: {judged.ratio:.0f} times less than"
            f" the baseline (budget: at least {BUDGET_RATIO:g})",
        )
    few, many = (callers.get(("thread", 0, pages, BUDGET_LAYERS)) for pages in (64, 4096))
    if few is not None and many is not None:
        verdict(
            many.median <= BUDGET_GROWTH * few.median,
            f"4,096 pages take {many.median / few.median:.1f} times as long as 64 (budget: at most"
            f" {BUDGET_GROWTH:g})",
        )
    shallow = callers.get(("thread", 0, BUDGET_PAGES, 1))
    if judged is not None and shallow is not None:
        notes.append(
            f"{BUDGET_LAYERS} layers take {judged.median / shallow.median:.2f} times as long as 1,"
            f" at {BUDGET_PAGES:,} pages"
        )
    for (mode, busy, pages, layers), row in callers.items():
        if mode == "thread" and busy and row.n >= FEWEST_ROUNDS_FOR_P99:
            verdict(
                row.p99 < BUDGET_BUSY_P99_US,
                f"{pages:,} pages, {layers} layers, busy thread: p99 {row.p99:,.0f} us"
                f" (budget: below {BUDGET_BUSY_P99_US:,.0f})",
            )
    return notes


if __name__ == "__main__":
    app()
