"""Bursts that are issued, ours and the peer's, and the rows that say what it took."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

from harness import Cores, Row, take_turns
from issuing_devices import DEVICES, Ground, Layout, Wanted, shapes_of
from page_patterns import Bursts, Direction, Pattern
from peers_way import PeersWay
from sgl_kernel_way import SglKernelWay

from kvburst import CopyLimits, KVBurstError, PlanOptions
from kvburst._core import BurstIssuer, BurstPages, LayerGate
from kvburst._indices import index_view
from kvburst.geometries import geometry
from kvburst.links import LinkName

Groups = Literal["none", "neighbours", "ramp"]
Mode = Literal["inline", "thread"]

BATCH = CopyLimits().copies_per_call
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Setting:
    """Where bursts are issued and which: all that a scenario has but for who shares a copy and who
    issues it. ``pages`` counts those of a made-up burst."""

    device: str
    link: LinkName
    geometry: str = "mla-dsa-78-full"
    pages: int = 1024
    pattern: Pattern = "scattered"
    direction: Direction = "load"
    layout: Layout = "one-allocation"
    chunk_pages: int = 0


@dataclass(frozen=True)
class Way:
    """Who shares a copy, who issues it, and how many are handed over in a call at most."""

    groups: Groups
    mode: Mode
    copies_per_call: int = BATCH


@dataclass(frozen=True)
class Issued:
    """One burst; times in microseconds."""

    copies: int
    one_per_page_and_layer: int
    issue_us: float
    caller_us: float


class Ours:
    """Bursts of one setting, issued in one way."""

    def __init__(
        self, setting: Setting, way: Way, bursts: Bursts, cores: Cores, ground: Ground
    ) -> None:
        limits = CopyLimits(tall_copies=way.groups != "none", copies_per_call=way.copies_per_call)
        self._bursts = bursts
        self._next = 0
        self._device = device = ground.device(limits)
        layouts = ground.layouts
        page_size = geometry(setting.geometry).page_size
        self._pages = BurstPages(layouts, direction=setting.direction, page_size=page_size)
        self._issuer = BurstIssuer(
            device,
            layouts,
            direction=setting.direction,
            gate=LayerGate(device, layouts) if setting.direction == "load" else None,
            options=PlanOptions(
                ramp=way.groups == "ramp",
                merge_neighbours=way.groups != "none",
                chunk_pages=setting.chunk_pages,
            ),
            mode=way.mode,
            cpus=[cores.issuer],
            memory=ground,
        )
        self.issued: list[Issued] = []

    def issue(self) -> float:
        """The next burst; microseconds of the calling thread. Returns when its bytes are there."""
        indices = self._bursts.each[self._next % len(self._bursts.each)]
        self._next += 1
        stream = self._device.current_stream()
        begin = time.perf_counter_ns()
        self._pages.append(
            device=index_view("device_indices", indices.device),
            host=index_view("host_indices", indices.host),
        )
        collected = time.perf_counter_ns()
        burst = self._issuer.submit(self._pages, [1], stream=stream)
        caller_us = (time.perf_counter_ns() - begin) / 1000
        if burst is None:
            raise KVBurstError("a burst of no pages")
        burst.finish_event.synchronize()
        if burst.error is not None:
            raise KVBurstError(burst.error)
        self.issued.append(
            Issued(
                copies=burst.num_copies,
                one_per_page_and_layer=burst.one_per_page_and_layer,
                issue_us=(collected - begin) / 1000 + burst.queue_us + burst.issue_us,
                caller_us=caller_us,
            )
        )
        return caller_us

    def stop(self) -> None:
        self._issuer.stop(STOP_SECONDS)


class Theirs:
    """The baseline, charged ``copy_us`` for every copy."""

    def __init__(self, setting: Setting, bursts: Bursts, copy_us: float) -> None:
        self._way = PeersWay(
            shapes_of(geometry(setting.geometry), bursts.tier_pages), setting.direction
        )
        self._bursts = bursts
        self._copy_us = copy_us
        self._next = 0
        self.issued: list[Issued] = []
        self.built_ns: list[float] = []

    def issue(self) -> float:
        """The next burst; microseconds of the calling thread."""
        indices = self._bursts.each[self._next % len(self._bursts.each)]
        self._next += 1
        built = self._way.issue(indices)
        microseconds = built.ns / 1000 + built.copies * self._copy_us
        self.issued.append(Issued(built.copies, built.copies, microseconds, microseconds))
        self.built_ns.append(built.ns_per_copy)
        return microseconds


class SglKernel:
    """The baseline of a GPU: the copies that SGLang makes today, from the calling thread."""

    def __init__(self, way: SglKernelWay, setting: Setting, bursts: Bursts) -> None:
        self._way = way
        self._direction = setting.direction
        self._bursts = bursts
        self._next = 0
        self.issued: list[Issued] = []

    def issue(self) -> float:
        """The next burst; microseconds of the calling thread."""
        indices = self._bursts.each[self._next % len(self._bursts.each)]
        self._next += 1
        copies, microseconds = self._way.issue(indices, self._direction)
        self.issued.append(Issued(copies, copies, microseconds, microseconds))
        return microseconds


def ground_of(setting: Setting, bursts: Bursts) -> Ground:
    """Memory that all ways of issuing its bursts share: they take turns."""
    wanted = Wanted(geometry(setting.geometry), bursts.tier_pages, setting.layout, setting.link)
    return DEVICES[setting.device].ground(wanted)


@contextmanager
def issuers(
    setting: Setting, ways: Sequence[Way], bursts: Bursts, ground: Ground
) -> Iterator[dict[Way, Ours]]:
    """One for each way; the caller on a core of its own where there are two."""
    cores = Cores.of(sorted(os.sched_getaffinity(0)))
    # Before the caller is pinned: what they start inherits its cores.
    ours = {way: Ours(setting, way, bursts, cores, ground) for way in ways}
    try:
        with cores.caller_pinned():
            yield ours
    finally:
        for each in ours.values():
            each.stop()


def measure(
    benchmark: str, setting: Setting, ways: Sequence[Way], bursts: Bursts, rounds: int
) -> tuple[list[Row], list[float]]:
    """The rows of one setting, every way against the baseline; and what a copy cost the peer's way,
    in nanoseconds and without the device's price."""
    ground = ground_of(setting, bursts)
    theirs = None if ground.copy_us is None else Theirs(setting, bursts, ground.copy_us)
    baseline: Theirs | SglKernel | None = theirs
    if ground.sgl_kernel is not None:
        baseline = SglKernel(ground.sgl_kernel, setting, bursts)
    with issuers(setting, ways, bursts, ground) as ours:
        arms: dict[str, Callable[[], float]] = {str(way): each.issue for way, each in ours.items()}
        if baseline is not None:
            arms["baseline"] = baseline.issue
        take_turns(arms, rounds)
        compared = [] if baseline is None else baseline.issued[-rounds:]
        rows: list[Row] = []
        for way, each in ours.items():
            rows += _rows(benchmark, setting, way, bursts, each.issued[-rounds:], compared)
    return rows, [] if theirs is None else theirs.built_ns[-rounds:]


def _rows(
    benchmark: str,
    setting: Setting,
    way: Way,
    bursts: Bursts,
    ours: Sequence[Issued],
    theirs: Sequence[Issued],
) -> list[Row]:
    shape = geometry(setting.geometry)
    layers = sum(len(pool.layer_ids) for pool in shape.pools)
    device = DEVICES[setting.device]
    scenario = asdict(setting) | {
        "link": setting.link if device.link else "none",
        "layers": shape.num_layers,
        "pools": len(shape.pools),
        "pages": bursts.median_pages,
    }

    def of(value: Callable[[Issued], float]) -> list[float] | None:
        """Of the baseline's bursts, if there is one."""
        return [value(burst) for burst in theirs] or None

    row = partial(Row.of, benchmark, scenario | asdict(way), simulated=device.simulated)
    return [
        # Of what is issued alone, so never simulated.
        Row.of(
            benchmark,
            scenario | asdict(way),
            "copies",
            "copies",
            [each.copies for each in ours],
            baseline=[each.one_per_page_and_layer for each in ours],
        ),
        row("issue_us", "us", [each.issue_us for each in ours], baseline=of(lambda b: b.issue_us)),
        row(
            "issue_us_per_layer",
            "us",
            [each.issue_us / layers for each in ours],
            baseline=of(lambda burst: burst.issue_us / layers),
        ),
        row(
            "issue_us_per_copy",
            "us",
            [each.issue_us / each.copies for each in ours],
            baseline=of(lambda burst: burst.issue_us / burst.copies),
        ),
        row(
            "caller_us", "us", [each.caller_us for each in ours], baseline=of(lambda b: b.caller_us)
        ),
    ]
