"""The planner against a naive copy, on random pools; and how many copies it needs."""

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import pytest
import torch
from burst_helpers import LAYOUTS, CanaryMemory, make_pools, make_tiers, page_slots, round_trip
from devices import MakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from kvburst import ComputeDevice, CopyLimits, PageError, PlanOptions, Pool
from kvburst._core import (
    BurstPages,
    CopyPlan,
    CopyPlanner,
    DeviceTier,
    HostTier,
    IndexView,
    LayoutError,
    PoolLayout,
)
from kvburst._indices import index_view
from kvburst.geometries import PoolSpec, geometry
from kvburst.pools import HostLayout, HostPool

Direction = Literal["load", "backup"]
Pages = list[tuple[int, int]]

# (dst, src, width, height, dst_pitch, src_pitch)
Copy = tuple[int, int, int, int, int, int]


UNLIMITED = CopyLimits()

# Where no memory is: plans may be made of it, since nothing reads it before a burst runs.
DEVICE_BASE = 1 << 44
HOST_BASE = 1 << 45


# --- random pools in real memory -------------------------------------------------------------


class Memory:
    """Random bytes, with as many canaries on either side as a copy could stray over."""

    MARGIN = 512

    def __init__(self, size: int, chance: random.Random) -> None:
        margin = b"\xc7" * self.MARGIN
        self.bytes = bytearray(margin + chance.randbytes(size) + margin)
        whole = (ctypes.c_char * len(self.bytes)).from_buffer(self.bytes)
        self.address = ctypes.addressof(whole) + self.MARGIN
        self.size = size

    def holds(self, address: int, size: int) -> bool:
        return self.address <= address and address + size <= self.address + self.size

    def moved(self, placed: Iterator[tuple[int, bytes]]) -> bytes:
        """What all of it would be with those bytes at those offsets."""
        copy = bytearray(self.bytes)
        for offset, data in placed:
            start = self.MARGIN + offset
            copy[start : start + len(data)] = data
        return bytes(copy)

    def at(self, offset: int, size: int) -> bytes:
        start = self.MARGIN + offset
        return bytes(self.bytes[start : start + size])


@dataclass(frozen=True)
class PoolShape:
    """A pool as drawn. All sizes in bytes; offsets into the memory of a tier."""

    layer_ids: list[int]
    page_bytes: int
    device_pages: int
    layer_offsets: list[int]
    device_bytes: int
    allocations: list[tuple[int, int]]
    host_pages: int
    host_page_bytes: int
    page_stride: int
    layer_stride: int
    rows: list[int | None]
    host_bytes: int
    registrations: list[tuple[int, int]]

    @property
    def stored(self) -> list[tuple[int, int, int]]:
        """(layer, offset on the device, row on the host)."""
        together = zip(self.layer_ids, self.layer_offsets, self.rows, strict=True)
        return [(layer, offset, row) for layer, offset, row in together if row is not None]

    def device_offset(self, layer_offset: int, page: int) -> int:
        return layer_offset + page * self.page_bytes

    def host_offset(self, row: int, page: int) -> int:
        return page * self.page_stride + row * self.layer_stride


class RandomPool:
    """A pool's memory on both tiers, its layout, and what a naive copy would make of it."""

    def __init__(self, name: str, shape: PoolShape, chance: random.Random) -> None:
        self.shape = shape
        self.device = Memory(shape.device_bytes, chance)
        self.host = Memory(shape.host_bytes, chance)
        self.layout = PoolLayout(
            name=name,
            layer_ids=shape.layer_ids,
            device=DeviceTier(
                layers=[self.device.address + offset for offset in shape.layer_offsets],
                pages=shape.device_pages,
                page_bytes=shape.page_bytes,
                allocations=self.allocations,
            ),
            host=HostTier(
                address=self.host.address,
                size=shape.host_bytes,
                pages=shape.host_pages,
                page_bytes=shape.host_page_bytes,
                page_stride=shape.page_stride,
                layer_stride=shape.layer_stride,
                rows=shape.rows,
                registrations=[
                    (self.host.address + offset, size) for offset, size in shape.registrations
                ],
            ),
        )

    @property
    def allocations(self) -> list[tuple[int, int]]:
        return [(self.device.address + offset, size) for offset, size in self.shape.allocations]

    @property
    def registrations(self) -> list[tuple[int, int]]:
        """The ranges that a copy must not cross out of: the whole buffer if nothing is pinned."""
        pinned = [(self.host.address + offset, size) for offset, size in self.shape.registrations]
        return pinned or [(self.host.address, self.host.size)]

    def destination(self, direction: Direction) -> Memory:
        return self.device if direction == "load" else self.host

    def naive(self, direction: Direction, pages: Pages) -> bytes:
        """The destination after one copy for every page and layer."""
        return self.destination(direction).moved(self._placed(direction, pages))

    def _placed(self, direction: Direction, pages: Pages) -> Iterator[tuple[int, bytes]]:
        for _, layer_offset, row in self.shape.stored:
            for device_page, host_page in pages:
                on_device = self.shape.device_offset(layer_offset, device_page)
                on_host = self.shape.host_offset(row, host_page)
                if direction == "load":
                    yield on_device, self.host.at(on_host, self.shape.page_bytes)
                else:
                    yield on_host, self.device.at(on_device, self.shape.page_bytes)

    def targets(self, direction: Direction, pages: Pages) -> Iterator[tuple[int, int]]:
        """(start, end) of each destination, as addresses."""
        start = self.destination(direction).address
        for offset, data in self._placed(direction, pages):
            yield start + offset, start + offset + len(data)

    def is_in_place(self, direction: Direction, layer: int, pages: Pages) -> bool:
        for stored, layer_offset, row in self.shape.stored:
            if stored != layer:
                continue
            for device_page, host_page in pages:
                on_device = self.shape.device_offset(layer_offset, device_page)
                on_host = self.shape.host_offset(row, host_page)
                if self.device.at(on_device, self.shape.page_bytes) != self.host.at(
                    on_host, self.shape.page_bytes
                ):
                    return False
        return True

    def device_pages_of(self, address: int, size: int) -> set[int]:
        """The device pages of some layer that a row of a copy touches."""
        offset = address - self.device.address
        layer_bytes = self.shape.device_pages * self.shape.page_bytes
        for layer_offset in self.shape.layer_offsets:
            if layer_offset <= offset < layer_offset + layer_bytes:
                first = (offset - layer_offset) // self.shape.page_bytes
                last = (offset + size - 1 - layer_offset) // self.shape.page_bytes
                return set(range(first, last + 1))
        raise AssertionError(f"{size} bytes at device offset {offset} are in no layer")


@dataclass(frozen=True)
class Case:
    """A burst as drawn, and its plan."""

    direction: Direction
    pools: list[RandomPool]
    pages: list[Pages]
    limits: CopyLimits
    options: PlanOptions
    planner: CopyPlanner
    plan: CopyPlan

    def batches(self) -> Iterator[tuple[RandomPool, list[Copy]]]:
        for number, group in enumerate(self.planner.groups):
            for batch in self.plan.batches(number):
                yield self.pools[group.pool], batch

    def copies(self) -> Iterator[tuple[RandomPool, Copy]]:
        for pool, batch in self.batches():
            for copy in batch:
                yield pool, copy

    def run(self, copy: Copy, pool: RandomPool) -> None:
        for dst, src, width in rows_of(copy):
            device, host = self.ends(dst, src)
            assert pool.device.holds(device, width)
            assert pool.host.holds(host, width)
            ctypes.memmove(dst, src, width)

    def ends(self, dst: int, src: int) -> tuple[int, int]:
        """(on the device, on the host)."""
        return (dst, src) if self.direction == "load" else (src, dst)


def rows_of(copy: Copy) -> Iterator[tuple[int, int, int]]:
    """(dst, src, width) of each row."""
    dst, src, width, height, dst_pitch, src_pitch = copy
    for row in range(height):
        yield dst + row * dst_pitch, src + row * src_pitch, width


def runs_of(case: Case, pages: Pages) -> list[int]:
    """Lengths of the runs of pages that are neighbours on both tiers and in the same chunk."""
    chunk = case.options.chunk_pages if case.direction == "backup" else 0
    runs: list[int] = []
    last: tuple[int, int] | None = None
    for position, (device, host) in enumerate(sorted(pages)):
        same_chunk = not chunk or position % chunk != 0
        if case.options.merge_neighbours and same_chunk and last == (device - 1, host - 1):
            runs[-1] += 1
        else:
            runs.append(1)
        last = (device, host)
    return runs


@st.composite
def pool_shapes(draw: st.DrawFn, device_pages: int, host_pages: int) -> PoolShape:
    """Layers with holes, in one allocation, several or one each; any strides, rows, pinning."""
    rarely = st.sampled_from([False, False, False, True])
    layer_ids = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=7)))
    page_bytes = draw(st.integers(1, 20))
    device_pages += draw(st.integers(0, 2))
    host_pages += draw(st.integers(0, 2))

    # The device: layers one after the other, perhaps with gaps, perhaps in another order.
    layers = range(len(layer_ids))
    layer_bytes = device_pages * page_bytes
    gap = draw(st.sampled_from([0, 0, 5]))
    gaps = [draw(st.integers(0, 9)) if draw(rarely) else gap for _ in layers]
    places = draw(st.permutations(layers)) if draw(rarely) else list(layers)
    starts = [sum(gaps[: place + 1]) + place * layer_bytes for place in layers]
    ends = [start + layer_bytes for start in starts]
    # Allocations may adjoin: then nothing but their declaration separates the layers.
    cuts = draw(
        st.one_of(st.just(set()), st.just(set(layers)), st.sets(st.sampled_from(layers)))
    ) | {0}
    firsts = sorted(cuts)
    lasts = [first - 1 for first in firsts[1:]] + [len(layer_ids) - 1]
    allocations = [
        (starts[first], ends[last] - starts[first])
        for first, last in zip(firsts, lasts, strict=True)
    ]

    # The host: page-first or layer-first, pages perhaps wider, strides perhaps longer.
    num_rows = len(layer_ids) + (draw(st.integers(1, 2)) if draw(rarely) else 0)
    order = draw(st.permutations(range(num_rows))) if draw(rarely) else list(range(num_rows))
    rows = [None if draw(rarely) else order[layer] for layer in layers]
    host_page_bytes = page_bytes + (draw(st.integers(1, 6)) if draw(rarely) else 0)
    inner = host_page_bytes + (draw(st.integers(1, 6)) if draw(rarely) else 0)
    padding = draw(st.integers(1, 6)) if draw(rarely) else 0
    if draw(st.booleans()):
        layer_stride, page_stride = inner, num_rows * inner + padding
    else:
        layer_stride, page_stride = host_pages * inner + padding, inner
    host_bytes = (host_pages - 1) * page_stride + (num_rows - 1) * layer_stride + host_page_bytes

    # Registrations meet anywhere, but one must hold a page, or the layout would be refused.
    registrations = []
    if draw(st.booleans()):
        whole = draw(st.integers(0, host_bytes - host_page_bytes))
        bounds = draw(st.sets(st.integers(1, host_bytes - 1), max_size=6)) if host_bytes > 1 else ()
        edges = sorted(
            {-draw(st.integers(0, 9)), host_bytes + draw(st.integers(0, 9))}
            | {edge for edge in bounds if not whole < edge < whole + host_page_bytes}
        )
        registrations = [(start, end - start) for start, end in pairwise(edges)]

    return PoolShape(
        layer_ids=layer_ids,
        page_bytes=page_bytes,
        device_pages=device_pages,
        layer_offsets=[starts[places[layer]] for layer in layers],
        device_bytes=ends[-1],
        allocations=allocations,
        host_pages=host_pages,
        host_page_bytes=host_page_bytes,
        page_stride=page_stride,
        layer_stride=layer_stride,
        rows=rows,
        host_bytes=host_bytes,
        registrations=registrations,
    )


@st.composite
def page_lists(draw: st.DrawFn, direction: Direction, count: int, tier: dict[str, int]) -> Pages:
    """Destinations once each, in any order; sources that follow them, or any, again and again."""
    into, of = ("device", "host") if direction == "load" else ("host", "device")
    targets = draw(
        st.lists(st.integers(0, tier[into] - 1), min_size=count, max_size=count, unique=True)
    )
    if draw(st.booleans()):
        shift = draw(st.integers(0, tier[of] - 1))
        sources = [(target + shift) % tier[of] for target in targets]
    else:
        anything = st.integers(0, tier[of] - 1)
        sources = draw(st.lists(anything, min_size=count, max_size=count))
    if direction == "load":
        return list(zip(targets, sources, strict=True))
    return list(zip(sources, targets, strict=True))


ANY_LIMITS = st.builds(
    CopyLimits,
    max_pitch=st.one_of(st.just(2_147_483_647), st.integers(1, 300)),
    copies_per_call=st.one_of(st.just(4096), st.integers(1, 7)),
    tall_copies=st.sampled_from([True, True, True, False]),
)
ANY_OPTIONS = st.builds(
    PlanOptions,
    max_group=st.integers(1, 5),
    ramp=st.sampled_from([True, True, False]),
    merge_neighbours=st.sampled_from([True, True, False]),
    chunk_pages=st.one_of(st.just(0), st.integers(1, 4)),
)


@st.composite
def cases(
    draw: st.DrawFn,
    directions: Sequence[Direction] = ("load", "backup"),
    limits: st.SearchStrategy[CopyLimits] = ANY_LIMITS,
    options: st.SearchStrategy[PlanOptions] = ANY_OPTIONS,
) -> Case:
    direction = draw(st.sampled_from(directions))
    tier = {"device": draw(st.integers(1, 8)), "host": draw(st.integers(1, 8))}
    count = draw(st.integers(0, tier["device" if direction == "load" else "host"]))
    number = draw(st.integers(1, 3))
    shapes = [draw(pool_shapes(tier["device"], tier["host"])) for _ in range(number)]
    chance = random.Random(draw(st.integers(0, 2**32)))
    pools = [RandomPool(f"pool {i}", shape, chance) for i, shape in enumerate(shapes)]
    layouts = [pool.layout for pool in pools]

    page_size = draw(st.integers(1, 3))
    common = draw(page_lists(direction, count, tier))
    own = {
        i: draw(page_lists(direction, count, tier)) for i in range(1, number) if draw(st.booleans())
    }
    pages = [own.get(i, common) for i in range(number)]
    collected = BurstPages(layouts, direction=direction, page_size=page_size, check="slots")
    cut = draw(st.integers(0, count))
    for part in (slice(None, cut), slice(cut, None)):
        append(collected, common[part], {f"pool {i}": own[i][part] for i in own}, page_size)
    assert [collected.pairs(i) for i in range(number)] == pages

    chosen_limits, chosen_options = draw(limits), draw(options)
    planner = CopyPlanner(
        layouts, direction=direction, limits=chosen_limits, options=chosen_options
    )
    plan = planner.plan(collected)
    return Case(direction, pools, pages, chosen_limits, chosen_options, planner, plan)


def append(collected: BurstPages, pages: Pages, own: dict[str, Pages], page_size: int) -> None:
    kept_alive: list[torch.Tensor] = []

    def view(name: str, ids: list[int]) -> IndexView:
        kept_alive.append(page_slots(ids, page_size))
        return index_view(name, kept_alive[-1])

    def both(pairs: Pages) -> tuple[IndexView, IndexView]:
        return view("device", [pair[0] for pair in pairs]), view("host", [p[1] for p in pairs])

    device, host = both(pages)
    assert collected.append(
        device=device, host=host, own=[(name, *both(pairs)) for name, pairs in own.items()]
    ) == len(pages)


# --- what holds for every plan ---------------------------------------------------------------


EXAMPLES = settings(max_examples=250, deadline=None)


@settings(max_examples=500, deadline=None)
@given(case=cases())
def test_every_byte_lands_where_a_naive_copy_puts_it_and_nowhere_else(case: Case) -> None:
    expected = [
        (pool.naive(case.direction, pages), bytes(source.bytes))
        for pool, pages in zip(case.pools, case.pages, strict=True)
        for source in [pool.host if case.direction == "load" else pool.device]
    ]
    for pool, copy in case.copies():
        case.run(copy, pool)
    for pool, (destination, source) in zip(case.pools, expected, strict=True):
        into, of = pool.device, pool.host
        if case.direction == "backup":
            into, of = of, into
        assert into.bytes == destination
        assert of.bytes == source


# kvcache-ai/Mooncake#3876, kvcache-ai/Mooncake#3929
@EXAMPLES
@given(case=cases())
def test_every_byte_of_every_destination_is_written_exactly_once(case: Case) -> None:
    written = sorted(
        (dst, dst + width) for _, copy in case.copies() for dst, _, width in rows_of(copy)
    )
    wanted = sorted(
        target
        for pool, pages in zip(case.pools, case.pages, strict=True)
        for target in pool.targets(case.direction, pages)
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(written))
    assert joined(written) == joined(wanted)


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for start, end in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], end)
        else:
            result.append((start, end))
    return result


def lies_in_one(ranges: list[tuple[int, int]], first: int, end: int) -> bool:
    return any(start <= first and end <= start + size for start, size in ranges)


# sgl-project/sglang#36798, sgl-project/sglang#37596
@EXAMPLES
@given(case=cases())
def test_every_copy_lies_in_one_registration_and_one_allocation(case: Case) -> None:
    for pool, (dst, src, width, height, dst_pitch, src_pitch) in case.copies():
        device, host = case.ends(dst, src)
        device_pitch, host_pitch = case.ends(dst_pitch, src_pitch)
        rows = height - 1
        assert lies_in_one(pool.allocations, device, device + rows * device_pitch + width)
        assert lies_in_one(pool.registrations, host, host + rows * host_pitch + width)


@EXAMPLES
@given(case=cases())
def test_every_copy_is_one_that_the_device_takes(case: Case) -> None:
    for _, (_, _, width, height, dst_pitch, src_pitch) in case.copies():
        assert width >= 1
        assert height >= 1
        if height > 1:
            assert case.limits.tall_copies
            assert width <= dst_pitch <= case.limits.max_pitch
            assert width <= src_pitch <= case.limits.max_pitch


@EXAMPLES
@given(case=cases())
def test_every_call_keeps_to_the_devices_cap_and_to_the_pages_of_a_chunk(case: Case) -> None:
    for pool, batch in case.batches():
        assert 1 <= len(batch) <= case.limits.copies_per_call
        if case.direction == "backup" and case.options.chunk_pages:
            touched = set()
            for copy in batch:
                for dst, src, width in rows_of(copy):
                    touched |= pool.device_pages_of(case.ends(dst, src)[0], width)
            assert len(touched) <= case.options.chunk_pages


@EXAMPLES
@given(case=cases())
def test_announced_layers_are_in_place_in_every_pool(case: Case) -> None:
    announced: list[int] = []
    for number, group in enumerate(case.planner.groups):
        for batch in case.plan.batches(number):
            for copy in batch:
                case.run(copy, case.pools[group.pool])
        announced += group.completes
        for layer in announced:
            for pool, pages in zip(case.pools, case.pages, strict=True):
                assert pool.is_in_place(case.direction, layer, pages)
    stored = {layer for pool in case.pools for layer, _, _ in pool.shape.stored}
    assert sorted(announced) == sorted(stored)


@EXAMPLES
@given(case=cases(directions=["load"]))
def test_load_brings_its_lowest_layer_first_and_ramps_from_there(case: Case) -> None:
    groups = case.planner.groups
    firsts = [group.layers[0] for group in groups]
    assert firsts == sorted(firsts)
    if groups:
        lowest = firsts[0]
        holders = firsts.count(lowest)
        assert [group.layers for group in groups[:holders]] == [[lowest]] * holders
        assert groups[holders - 1].completes == [lowest]
    for number, pool in enumerate(case.pools):
        sizes = [len(group.layers) for group in groups if group.pool == number]
        ramp, size = [], 1
        while sum(ramp) < len(pool.shape.stored):
            ramp.append(min(size, len(pool.shape.stored) - sum(ramp)))
            size = min(2 * size, case.options.max_group) if case.options.ramp else 1
        assert sizes == ramp


@EXAMPLES
@given(case=cases(directions=["backup"]))
def test_backup_is_one_group_a_pool(case: Case) -> None:
    stored = [[layer for layer, _, _ in pool.shape.stored] for pool in case.pools]
    found = sorted((group.pool, group.layers) for group in case.planner.groups)
    assert found == [(number, layers) for number, layers in enumerate(stored) if layers]


@EXAMPLES
@given(case=cases())
def test_counts_of_a_plan_are_those_of_its_copies(case: Case) -> None:
    copies = [copy for _, copy in case.copies()]
    stored = [len(pool.shape.stored) for pool in case.pools]
    counts = list(zip(stored, case.pages, strict=True))
    assert case.plan.num_copies == len(copies)
    assert case.plan.num_bytes == sum(width * height for _, _, width, height, _, _ in copies)
    assert case.plan.one_per_page_and_layer == sum(layers * len(pages) for layers, pages in counts)
    assert case.plan.neighbours_merged == sum(
        layers * len(runs_of(case, pages)) for layers, pages in counts
    )


def fewest_copies(case: Case) -> int:
    """One a run and group where rows adjoin, else as many as pages or layers, whichever is less."""
    total = 0
    for group in case.planner.groups:
        shape = case.pools[group.pool].shape
        for pages in runs_of(case, case.pages[group.pool]):
            adjoin = pages == 1 or shape.page_stride == shape.page_bytes
            total += 1 if adjoin else min(pages, len(group.layers))
    return total


@EXAMPLES
@given(case=cases())
def test_copies_beyond_the_fewest_are_all_explained(case: Case) -> None:
    explained = sum(case.plan.fallbacks.values())
    assert case.plan.num_copies == fewest_copies(case) + explained
    assert all(count > 0 for count in case.plan.fallbacks.values())


# --- how many copies -------------------------------------------------------------------------


PAGES = 16
KV = PoolSpec("kv", 656, tuple(range(78)))
INDEX_K = geometry("mla-dsa-78").pools[1]


def scattered_pools(
    device: ComputeDevice,
    *specs: PoolSpec,
    layout: HostLayout = "page_first_direct",
    one_allocation: bool = True,
    pinned: bool = True,
) -> tuple[list[Pool], CanaryMemory]:
    """Room for two bursts of `PAGES` pages without two neighbours among them."""
    memory = CanaryMemory(device)
    pools = make_pools(
        specs,
        memory,
        page_size=2,
        device_pages=4 * PAGES,
        host_pages=PAGES + 3,
        layout=layout,
        one_allocation=one_allocation,
        pinned=pinned,
    )
    return pools, memory


def test_backup_is_one_copy_a_page_and_pool(device: ComputeDevice) -> None:
    pools, memory = scattered_pools(device, KV, INDEX_K)
    backup, _ = round_trip(make_tiers(device, pools, memory), PAGES)
    assert backup.one_per_page_and_layer == backup.neighbours_merged == PAGES * (78 + 21)
    assert backup.num_copies == 2 * PAGES
    assert backup.fallbacks == {}
    assert device.counters("backup").copies == 2 * PAGES
    assert device.counters("backup").bytes == backup.num_bytes == PAGES * 2 * (78 * 656 + 21 * 132)


@pytest.mark.parametrize(("spec", "layers", "at_least"), [(KV, 78, 9), (INDEX_K, 21, 4)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_takes_a_small_part_of_one_copy_a_page_and_layer(
    device: ComputeDevice, spec: PoolSpec, layers: int, at_least: int, layout: HostLayout
) -> None:
    pools, memory = scattered_pools(device, spec, layout=layout)
    _, load = round_trip(make_tiers(device, pools, memory), PAGES)
    assert load.one_per_page_and_layer == load.neighbours_merged == PAGES * layers
    assert load.num_copies * at_least <= load.one_per_page_and_layer
    assert load.fallbacks == {}
    assert device.counters("load").copies == load.num_copies
    assert device.counters("load").bytes == load.num_bytes == PAGES * 2 * layers * spec.row_bytes


def test_without_a_ramp_a_load_is_one_copy_a_page_and_layer(device: ComputeDevice) -> None:
    pools, memory = scattered_pools(device, KV)
    tiers = make_tiers(device, pools, memory, options=PlanOptions(ramp=False))
    _, load = round_trip(tiers, PAGES)
    assert load.num_copies == load.one_per_page_and_layer == PAGES * 78


def groups_of_78_layers() -> int:
    return len([1, 2, 4, 8, 16, 16, 16, 15])


def test_layers_in_separate_allocations_move_one_by_one(device: ComputeDevice) -> None:
    pools, memory = scattered_pools(device, KV, one_allocation=False)
    backup, load = round_trip(make_tiers(device, pools, memory), PAGES)
    reason = "layers in separate allocations"
    assert device.counters("backup").copies == device.counters("load").copies == PAGES * 78
    assert backup.fallbacks == {reason: PAGES * (78 - 1)}
    assert load.fallbacks == {reason: PAGES * (78 - groups_of_78_layers())}


# sgl-project/sglang#30393
def test_packed_draft_layer_costs_one_copy_more_a_page(device: ComputeDevice) -> None:
    pools, memory = scattered_pools(device, *geometry("deepseek-v3-mtp").pools)
    backup, _ = round_trip(make_tiers(device, pools, memory), PAGES)
    assert device.counters("backup").copies == backup.num_copies == 2 * PAGES
    assert backup.fallbacks == {"layers in separate allocations": PAGES}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        # One layer of the device tier is 4 x 16 pages of 2 rows of 656 bytes.
        (CopyLimits(max_pitch=4 * PAGES * 2 * 656 - 1), "pitch above the device's maximum"),
        (CopyLimits(tall_copies=False), "tall copies switched off"),
    ],
    ids=["pitch", "tall_copies"],
)
def test_layers_that_the_device_cannot_take_in_one_copy_move_one_by_one(
    make_device: MakeDevice, limits: CopyLimits, reason: str
) -> None:
    device = make_device(limits=limits)
    pools, memory = scattered_pools(device, KV)
    backup, load = round_trip(make_tiers(device, pools, memory), PAGES)
    assert device.counters("backup").copies == device.counters("load").copies == PAGES * 78
    assert backup.fallbacks == {reason: PAGES * (78 - 1)}
    assert load.fallbacks == {reason: PAGES * (78 - groups_of_78_layers())}


def test_pitch_just_at_the_maximum_still_takes_one_copy_a_page(
    make_device: MakeDevice,
) -> None:
    device = make_device(limits=CopyLimits(max_pitch=4 * PAGES * 2 * 656))
    pools, memory = scattered_pools(device, KV)
    backup, _ = round_trip(make_tiers(device, pools, memory), PAGES)
    assert backup.num_copies == PAGES
    assert backup.fallbacks == {}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        # A page of three rows of 8 bytes, and the next one 24 bytes further on.
        (CopyLimits(max_pitch=23), "pitch above the device's maximum"),
        (CopyLimits(tall_copies=False), "tall copies switched off"),
    ],
    ids=["pitch", "tall_copies"],
)
def test_neighbouring_pages_that_cannot_be_rows_of_one_copy_are_explained(
    limits: CopyLimits, reason: str
) -> None:
    layout = PoolLayout(
        name="kv",
        layer_ids=[0],
        device=DeviceTier(
            layers=[DEVICE_BASE], pages=9, page_bytes=8, allocations=[(DEVICE_BASE, 72)]
        ),
        host=HostTier(
            address=HOST_BASE,
            size=9 * 24,
            pages=9,
            page_bytes=8,
            page_stride=24,
            layer_stride=8,
            rows=[0],
        ),
    )
    neighbours = torch.tensor([3, 4, 5, 6])
    assert plan_of(layout, "load", neighbours, neighbours).num_copies == 1
    plan = plan_of(layout, "load", neighbours, neighbours, limits)
    assert plan.num_copies == 4
    assert plan.fallbacks == {reason: 3}


def pinned_in_parts(pool: Pool, memory: CanaryMemory, bounds: Sequence[int]) -> Pool:
    """The same pool, its host buffer registered in parts that meet at these offsets."""
    tensor = pool.host.tensor
    edges = [0, *bounds, tensor.numel()]
    parts = [tensor.view(-1)[start:end] for start, end in pairwise(edges)]
    host = HostPool.from_tensor(
        pool.device,
        tensor,
        layout=pool.host.layout,
        registrations=memory.registrations(*parts),
    )
    return Pool.pair(pool.device, host)


# sgl-project/sglang#36798, sgl-project/sglang#37596
@pytest.mark.parametrize("layout", LAYOUTS)
def test_registration_boundary_through_a_page_costs_only_that_page(
    device: ComputeDevice, layout: HostLayout
) -> None:
    (pool,), memory = scattered_pools(device, KV, layout=layout, pinned=False)
    third = pool.host.tensor.numel() // 3
    pinned = pinned_in_parts(pool, memory, [third, 2 * third])
    plain_backup = {"page_first_direct": PAGES, "layer_first": PAGES}[layout]
    backup, load = round_trip(make_tiers(device, [pinned], memory), PAGES)
    for burst in (backup, load):
        assert list(burst.fallbacks) == ["registration boundary"]
    assert backup.num_copies == plain_backup + backup.fallbacks["registration boundary"]
    assert device.counters("backup").copies == backup.num_copies
    assert device.counters("load").copies == load.num_copies


def test_registrations_that_meet_between_pages_cost_nothing(device: ComputeDevice) -> None:
    (pool,), memory = scattered_pools(device, KV, pinned=False)
    page = pool.host.tensor.numel() // pool.host.pages
    pinned = pinned_in_parts(pool, memory, [5 * page, 6 * page, 11 * page])
    backup, load = round_trip(make_tiers(device, [pinned], memory), PAGES)
    assert backup.num_copies == PAGES
    assert load.num_copies == PAGES * groups_of_78_layers()
    assert backup.fallbacks == load.fallbacks == {}


# --- addresses beyond 32 bits, in memory that is not there -----------------------------------


def layout_of(stride: int, *, device_pages: int, host_pages: int) -> PoolLayout:
    """Two layers whose pages of `stride` bytes follow each other on both tiers."""
    layer = device_pages * stride
    row = host_pages * stride
    return PoolLayout(
        name="kv",
        layer_ids=[0, 1],
        device=DeviceTier(
            layers=[DEVICE_BASE, DEVICE_BASE + layer],
            pages=device_pages,
            page_bytes=stride,
            allocations=[(DEVICE_BASE, 2 * layer)],
        ),
        host=HostTier(
            address=HOST_BASE,
            size=2 * row,
            pages=host_pages,
            page_bytes=stride,
            page_stride=stride,
            layer_stride=row,
            rows=[0, 1],
        ),
    )


def plan_of(
    layout: PoolLayout,
    direction: Direction,
    device: torch.Tensor,
    host: torch.Tensor,
    limits: CopyLimits = UNLIMITED,
) -> CopyPlan:
    collected = BurstPages([layout], direction=direction, page_size=1, check="slots")
    collected.append(device=index_view("device", device), host=index_view("host", host))
    return CopyPlanner([layout], direction=direction, limits=limits).plan(collected)


# sgl-project/sglang#34025, sgl-project/sglang#34027, ROCm/aiter#2608
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("edge", [2**31, 2**32, 2**33 + 1], ids=["2^31", "2^32", "2^33+1"])
@pytest.mark.parametrize("stride", [132, 37440, 149760, 276480])
@pytest.mark.parametrize(("direction", "large"), [("load", "host"), ("backup", "device")])
def test_addresses_are_exact_below_at_and_above_32_bits(
    direction: Direction, large: str, stride: int, edge: int, dtype: torch.dtype
) -> None:
    far = edge // stride
    pages = far + 3
    ids = [far - 1, far + 2, far, far + 1]
    assert ids[0] * stride < edge < ids[1] * stride
    near = [9, 3, 7, 1]
    tiers = {"device": (near, 10), "host": (near, 10)} | {large: (ids, pages)}
    (device_ids, device_pages), (host_ids, host_pages) = tiers["device"], tiers["host"]
    layout = layout_of(stride, device_pages=device_pages, host_pages=host_pages)

    plan = plan_of(
        layout,
        direction,
        torch.tensor(device_ids, dtype=dtype),
        torch.tensor(host_ids, dtype=dtype),
        CopyLimits(tall_copies=False),
    )
    groups = 1 if direction == "backup" else 2
    copies = [copy for group in range(groups) for batch in plan.batches(group) for copy in batch]

    expected = set()
    for layer in (0, 1):
        for device_id, host_id in zip(device_ids, host_ids, strict=True):
            on_device = DEVICE_BASE + layer * device_pages * stride + device_id * stride
            on_host = HOST_BASE + layer * host_pages * stride + host_id * stride
            assert layout.device_address(layer, device_id) == on_device
            assert layout.host_address(layer, host_id) == on_host
            ends = (on_device, on_host) if direction == "load" else (on_host, on_device)
            expected.add((*ends, stride))
    assert len(copies) == len(expected)
    assert {copy[:3] for copy in copies} == expected


# sgl-project/sglang#34027
def test_totals_of_bytes_tokens_and_chunks_are_exact_beyond_32_bits() -> None:
    page_bytes, page_size = 2**33 + 1, 2**31 + 8
    layout = layout_of(page_bytes, device_pages=4, host_pages=4)
    collected = BurstPages([layout], direction="backup", page_size=page_size)
    for page in (1, 2, 3):
        # Only the first slot of each page is read.
        first = torch.tensor([page * page_size])
        view = IndexView(
            name="slots", address=first.data_ptr(), count=page_size, stride=1, itemsize=8
        )
        assert collected.append(device=view, host=view) == 1
    assert collected.pairs() == [(1, 1), (2, 2), (3, 3)]

    options = PlanOptions(chunk_pages=2**33)
    planner = CopyPlanner([layout], direction="backup", options=options)
    plan = planner.plan(collected)

    assert plan.num_bytes == 3 * 2 * page_bytes
    ((batch,),) = [plan.batches(group) for group in range(len(planner.groups))]
    assert sum(width * height for _, _, width, height, _, _ in batch) == plan.num_bytes
    assert max(width for _, _, width, _, _, _ in batch) == 3 * page_bytes


# --- planning what was not collected for it --------------------------------------------------


def test_pages_of_another_set_of_pools_are_refused() -> None:
    layout = layout_of(8, device_pages=4, host_pages=4)
    collected = BurstPages([layout, layout], direction="load", page_size=1)
    with pytest.raises(PageError, match="collected for 2 pools, this planner has 1"):
        CopyPlanner([layout], direction="load").plan(collected)


def test_no_pages_are_no_copies_and_no_call() -> None:
    layout = layout_of(8, device_pages=4, host_pages=4)
    planner = CopyPlanner([layout], direction="load")
    plan = planner.plan(BurstPages([layout], direction="load", page_size=1))
    assert plan.num_copies == plan.num_bytes == plan.one_per_page_and_layer == 0
    assert [plan.batches(group) for group in range(len(planner.groups))] == [[], []]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PlanOptions(max_group=0), "max_group: 0 must be from 1 to"),
        (lambda: PlanOptions(chunk_pages=-1), "chunk_pages: -1 must be from 0 to"),
        (lambda: CopyLimits(max_pitch=0), "max_pitch: 0"),
        (lambda: CopyLimits(copies_per_call=0), "copies_per_call: 0"),
    ],
    ids=["max_group", "chunk_pages", "max_pitch", "copies_per_call"],
)
def test_options_out_of_their_bounds_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


def test_group_that_the_plan_does_not_have_is_refused() -> None:
    layout = layout_of(8, device_pages=4, host_pages=4)
    planner = CopyPlanner([layout], direction="load")
    plan = planner.plan(BurstPages([layout], direction="load", page_size=1))
    with pytest.raises(LayoutError, match="group: 2 is out of range, the plan has 2 groups"):
        plan.batches(2)
