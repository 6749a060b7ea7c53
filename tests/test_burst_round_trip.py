"""Bursts through the controller: the right bytes arrive, and nothing else changes."""

import pytest
import torch
from burst_helpers import (
    CANARY,
    LAYOUTS,
    SCRIBBLE,
    CanaryMemory,
    IndexForm,
    Tiers,
    device_bytes,
    fill_random,
    host_bytes,
    make_pools,
    make_tiers,
    others,
    page_slots,
    round_trip,
)
from devices import MakeDevice, to_device

from kvburst import ComputeDevice, CopyLimits, PageError, Pool, PoolTransfer
from kvburst.geometries import GEOMETRIES, Geometry, PoolSpec
from kvburst.pools import DevicePool, HostLayout, HostPool

PAGE = 4
KV_AND_INDEX_K = (
    PoolSpec("kv", 24, (0, 1, 2, 3)),
    PoolSpec("index_k", 12, (1, 3), paged=True),
)


def small_tiers(
    device: ComputeDevice,
    specs: tuple[PoolSpec, ...] = KV_AND_INDEX_K,
    *,
    device_pages: int = 24,
    host_pages: int = 24,
    **options: object,
) -> Tiers:
    memory = CanaryMemory(device)
    pools = make_pools(
        specs, memory, page_size=PAGE, device_pages=device_pages, host_pages=host_pages
    )
    return make_tiers(device, pools, memory, **options)


def fill_host(tiers: Tiers) -> None:
    for number, pool in enumerate(tiers.pools):
        fill_random(pool.host.tensor, seed=number)


def assert_loaded(tiers: Tiers, targets: list[int], sources: list[int]) -> None:
    """Every pool's layers hold the host's bytes in `targets`, and canaries in all other pages."""
    untouched = others(tiers.device_pages.pages, targets)
    for pool in tiers.pools:
        for layer in pool.layout.stored_layers:
            assert torch.equal(device_bytes(pool, layer, targets), host_bytes(pool, layer, sources))
            assert (device_bytes(pool, layer, untouched) == CANARY).all()
    assert tiers.memory.is_untouched_outside()


def assert_nothing_happened(tiers: Tiers) -> None:
    assert tiers.device.counters("load").calls == 0
    assert tiers.device.counters("backup").calls == 0
    assert not tiers.controller.has_inflight_device_transfers()
    assert tiers.controller.start_loading() == -1
    for pool in tiers.pools:
        assert all(bool((layer == CANARY).all()) for layer in pool.device.layers)
        assert (pool.host.tensor == CANARY).all()


# --- every geometry, layout and form of index ------------------------------------------------


def in_page_order(slots: torch.Tensor) -> torch.Tensor:
    return slots.sort().values


def last_page_first(slots: torch.Tensor) -> torch.Tensor:
    return slots.view(-1, PAGE).flip(0).reshape(-1)


def every_second_element(slots: torch.Tensor) -> torch.Tensor:
    padded = torch.full((2 * slots.numel(),), -1, dtype=slots.dtype)
    view = padded[::2]
    view.copy_(slots)
    assert view.stride() == (2,)
    return view


def as_allocated(slots: torch.Tensor) -> torch.Tensor:
    return slots


# sgl-project/sglang#24121, sgl-project/sglang#22863, sgl-project/sglang#23225,
# sgl-project/sglang#36799
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(
    "form", [in_page_order, as_allocated, last_page_first, every_second_element]
)
@pytest.mark.parametrize("one_allocation", [True, False], ids=["one_allocation", "separate"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_pages_come_back_bit_exact_whatever_the_indices_look_like(
    device: ComputeDevice,
    geometry: Geometry,
    layout: HostLayout,
    one_allocation: bool,
    form: IndexForm,
    dtype: torch.dtype,
) -> None:
    memory = CanaryMemory(device)
    pools = make_pools(
        geometry.pools,
        memory,
        page_size=PAGE,
        device_pages=7,
        host_pages=5,
        layout=layout,
        one_allocation=one_allocation,
    )
    tiers = make_tiers(device, pools, memory)
    round_trip(tiers, pages=3, form=lambda slots: form(slots.to(dtype)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_pages_of_full_size_come_back_bit_exact(
    device: ComputeDevice, geometry: Geometry, layout: HostLayout
) -> None:
    memory = CanaryMemory(device)
    pools = make_pools(
        geometry.pools,
        memory,
        page_size=geometry.page_size,
        device_pages=2,
        host_pages=1,
        layout=layout,
    )
    round_trip(make_tiers(device, pools, memory), pages=1)


# sgl-project/sglang#37534, sgl-project/sglang#13431, sgl-project/sglang#40304
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("row_bytes", [132, 528, 576, 656, 1152])
def test_rows_come_back_exact_to_the_last_byte(
    device: ComputeDevice, row_bytes: int, page_size: int, layout: HostLayout
) -> None:
    memory = CanaryMemory(device)
    pools = make_pools(
        [PoolSpec("kv", row_bytes, tuple(range(5)))],
        memory,
        page_size=page_size,
        device_pages=9,
        host_pages=6,
        layout=layout,
    )
    tiers = make_tiers(device, pools, memory)
    round_trip(tiers, pages=4)


def test_device_that_takes_few_copies_a_call_is_given_more_calls(
    make_device: MakeDevice,
) -> None:
    device = make_device(limits=CopyLimits(copies_per_call=3, tall_copies=False))
    tiers = small_tiers(device)
    backup, load = round_trip(tiers, pages=7)
    pages_and_layers = 7 * (4 + 2)
    assert (backup.num_copies, load.num_copies) == (pages_and_layers, pages_and_layers)
    # A load's groups are 1, 2 and 1 layers of kv, 1 and 1 of index_k; a backup's are 4 and 2.
    assert device.counters("load").calls == (3 + 5 + 3) + (3 + 3)
    assert device.counters("backup").calls == 10 + 5


def test_burst_after_burst_comes_back_bit_exact(device: ComputeDevice) -> None:
    tiers = small_tiers(device)
    for pages in (1, 5, 2, 8, 8, 1):
        tiers.device_pages.clear()
        tiers.host_pages.clear()
        for pool in tiers.pools:
            pool.host.tensor.fill_(CANARY)
        round_trip(tiers, pages)


# --- indices that are not whole pages --------------------------------------------------------


# sgl-project/sglang#24121
@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([8, 10, 9, 11], r"device_indices\[1\]: slot 10 must be 9"),
        ([11, 10, 9, 8], r"device_indices\[0\]: slot 11 does not start a page"),
    ],
)
def test_page_whose_slots_do_not_follow_each_other_is_refused(
    device: ComputeDevice, slots: list[int], message: str
) -> None:
    tiers = small_tiers(device)
    tiers.take_device(24)
    with pytest.raises(PageError, match=message):
        tiers.controller.write(torch.tensor(slots))
    assert tiers.host_pages.available_pages == 24
    assert_nothing_happened(tiers)


# vllm-project/vllm#50653, vllm-project/vllm#42348, vllm-project/vllm#39617,
# NVIDIA/TensorRT-LLM#17380
@pytest.mark.parametrize("check", ["pages", "slots"])
@pytest.mark.parametrize("call", ["write", "load"])
@pytest.mark.parametrize("position", [0, 617, 999])
@pytest.mark.parametrize("bad_page", [-1, 1500, 1 << 40])
def test_one_bad_page_among_a_thousand_good_ones_refuses_them_all(
    device: ComputeDevice, bad_page: int, position: int, call: str, check: str
) -> None:
    tiers = small_tiers(device, device_pages=1500, host_pages=1500, check=check)
    pages = tiers.page_ids(tiers.take_device(1001) if call == "write" else tiers.take_host(1001))
    pages[position] = bad_page
    free = tiers.device_pages.available_pages, tiers.host_pages.available_pages
    slot = bad_page * PAGE
    with pytest.raises(PageError, match=rf"\[{position * PAGE}\]: slot {slot} is out of range"):
        getattr(tiers.controller, call)(page_slots(pages, PAGE))
    assert (tiers.device_pages.available_pages, tiers.host_pages.available_pages) == free
    assert_nothing_happened(tiers)


# sgl-project/sglang#31108, sgl-project/sglang#30057
@pytest.mark.parametrize("call", ["write", "load"])
@pytest.mark.parametrize("sidecar_pages", [0, 7, 11])
def test_sidecar_of_another_length_is_refused_whole(
    device: ComputeDevice, sidecar_pages: int, call: str
) -> None:
    tiers = small_tiers(device)
    on_device, on_host = tiers.take_device(11), tiers.take_host(11)
    free = tiers.device_pages.available_pages, tiers.host_pages.available_pages
    sidecar = PoolTransfer(
        "index_k",
        host_indices=on_host[: sidecar_pages * PAGE],
        device_indices=on_device[: sidecar_pages * PAGE],
    )
    indices = (on_device if call == "write" else on_host)[: 10 * PAGE]
    with pytest.raises(
        PageError,
        match=rf"index_k device_indices: {sidecar_pages} pages, but device_indices has 10",
    ):
        getattr(tiers.controller, call)(indices, extra_pools=[sidecar])
    assert (tiers.device_pages.available_pages, tiers.host_pages.available_pages) == free
    assert len(tiers.controller.ack_write_queue) == len(tiers.controller.ack_load_queue) == 0
    assert_nothing_happened(tiers)


# --- one source, several destinations --------------------------------------------------------


# kvcache-ai/Mooncake#3876, kvcache-ai/Mooncake#3929
def test_host_page_loaded_to_two_device_pages_fills_both(device: ComputeDevice) -> None:
    tiers = small_tiers(device)
    fill_host(tiers)
    (page,) = tiers.page_ids(tiers.take_host(1))
    targets = tiers.controller.load(page_slots([page, page], PAGE))
    assert targets is not None
    tiers.controller.start_loading()
    (ack,) = tiers.controller.ack_load_queue
    tiers.settle()
    assert ack.num_tokens == 2 * PAGE
    assert ack.num_tokens_by_pool == {"kv": 2 * PAGE, "index_k": 2 * PAGE}
    assert len(set(tiers.page_ids(targets))) == 2
    assert_loaded(tiers, tiers.page_ids(targets), [page, page])
    # Each destination once: 2 pages x (4 layers x 96 bytes + 2 layers x 48 bytes).
    assert device.counters("load").bytes == 2 * (4 * 96 + 2 * 48)


def test_page_named_twice_as_destination_is_refused_across_calls_too(device: ComputeDevice) -> None:
    tiers = small_tiers(device)
    host = tiers.take_host(2)
    own = tiers.take_device(1)
    sidecar = PoolTransfer("index_k", host_indices=host[:PAGE], device_indices=own)
    tiers.controller.load(host[:PAGE], extra_pools=[sidecar])
    free = tiers.device_pages.available_pages
    with pytest.raises(PageError, match=r"index_k device_indices\[0\]: page \d+ is already a"):
        tiers.controller.load(host[PAGE:], extra_pools=[sidecar])
    assert tiers.device_pages.available_pages == free
    assert tiers.device.counters("load").calls == 0
    tiers.controller.start_loading()
    (ack,) = tiers.controller.ack_load_queue
    assert ack.num_tokens == PAGE
    tiers.settle()


# --- no pages --------------------------------------------------------------------------------


NO_SLOTS = torch.empty(0, dtype=torch.int64)


# sgl-project/sglang#11005
def test_operations_on_no_pages_make_no_call_and_no_ack(device: ComputeDevice) -> None:
    tiers = small_tiers(device)
    sidecar = PoolTransfer("index_k", host_indices=NO_SLOTS, device_indices=NO_SLOTS)
    for extra in ((), (sidecar,)):
        for call in (tiers.controller.write, tiers.controller.load):
            indices = call(NO_SLOTS, node_id=3, extra_pools=extra)
            assert indices is not None
            assert indices.numel() == 0
    tiers.controller.start_writing()
    tiers.device_pages.free(NO_SLOTS)
    tiers.host_pages.free(NO_SLOTS)
    assert tiers.controller.poll() == []
    assert tiers.device_pages.available_pages == tiers.host_pages.available_pages == 24
    assert_nothing_happened(tiers)


# sgl-project/sglang#11005
def test_loading_nothing_takes_no_gate_slot(device: ComputeDevice) -> None:
    tiers = small_tiers(device, gate_slots=1)
    fill_host(tiers)
    stall = device.stall(device.current_stream())
    tiers.controller.load(tiers.take_host(1))
    first = tiers.controller.start_loading()
    # The one slot is taken by a load that cannot begin: this would never return if it needed one.
    for _ in range(5):
        tiers.controller.load(NO_SLOTS)
        assert tiers.controller.start_loading() == -1
    assert tiers.controller.layer_done_counter.producer_index == first
    stall.release()
    tiers.settle()
    tiers.controller.load(tiers.take_host(1))
    assert tiers.controller.start_loading() == first + 1
    tiers.settle()


# sgl-project/sglang#11005
def test_loads_of_no_pages_between_others_leave_no_trace_in_the_burst(
    device: ComputeDevice,
) -> None:
    tiers = small_tiers(device)
    fill_host(tiers)
    host = tiers.take_host(3)
    parts = [
        tiers.controller.load(slots, node_id=node)
        for node, slots in enumerate([host[:0], host, host[:0]])
    ]
    assert [part.numel() for part in parts if part is not None] == [0, 3 * PAGE, 0]
    tiers.controller.start_loading()
    (ack,) = tiers.controller.ack_load_queue
    tiers.settle()
    assert ack.node_ids == [1]
    assert ack.num_tokens == 3 * PAGE
    assert parts[1] is not None
    assert_loaded(tiers, tiers.page_ids(parts[1]), tiers.page_ids(host))


# --- layers with holes -----------------------------------------------------------------------


# sgl-project/sglang#37870, sgl-project/sglang#31745, sgl-project/sglang#39876
def test_layers_with_holes_are_copied_and_the_holes_hold_nobody_up(device: ComputeDevice) -> None:
    tiers = small_tiers(device, (PoolSpec("kv", 24, (0, 2, 6)),))
    (pool,) = tiers.pools
    fill_host(tiers)
    host = tiers.take_host(2)
    stall = device.stall(device.current_stream())
    targets = tiers.controller.load(host)
    assert targets is not None
    load = tiers.controller.start_loading()
    events = tiers.controller.layer_done_counter.events[load]
    assert tiers.controller.layer_done_counter.num_layers == 7

    forward = device.new_stream()
    for hole in (1, 3, 4, 5):
        events.wait(hole, forward)
    forward.synchronize()  # the load has not begun
    waiting = [device.new_stream() for _ in range(7)]
    for layer, stream in enumerate(waiting):
        events.wait(layer, stream)
    assert [layer for layer, stream in enumerate(waiting) if not stream.query()] == [0, 2, 6]
    assert not events.finish_event.query()
    assert (pool.device.layers[2] == CANARY).all()

    stall.release()
    events.finish_event.synchronize()  # behind layer 6
    assert_loaded(tiers, tiers.page_ids(targets), tiers.page_ids(host))
    for stream in waiting:
        stream.synchronize()
    assert device.counters("load").bytes == 2 * 3 * 24 * PAGE
    tiers.settle()


def test_layer_that_one_pool_lacks_is_in_place_with_the_other_pools_part(
    device: ComputeDevice,
) -> None:
    tiers = small_tiers(device)
    kv, index_k = tiers.pools
    fill_host(tiers)
    host = tiers.take_host(3)
    targets = tiers.controller.load(host)
    assert targets is not None
    load = tiers.controller.start_loading()
    for layer in range(4):
        tiers.controller.layer_done_counter.events[load].wait(layer)
        device.current_stream().synchronize()
        for pool in (kv, index_k) if layer in (1, 3) else (kv,):
            assert torch.equal(
                device_bytes(pool, layer, tiers.page_ids(targets)),
                host_bytes(pool, layer, tiers.page_ids(host)),
            )
    tiers.settle()


# --- views -----------------------------------------------------------------------------------


# LMCache/LMCache#2374, LMCache/LMCache#3821, vllm-project/vllm#46888
@pytest.mark.parametrize("layout", LAYOUTS)
def test_view_with_a_storage_offset_moves_and_the_bytes_around_it_stay(
    device: ComputeDevice, layout: HostLayout
) -> None:
    memory = CanaryMemory(device)
    whole = memory.device(3 * (12 * PAGE + 10) * 24).view(3, 12 * PAGE + 10, 24)
    view = whole.narrow(1, 7, 12 * PAGE)
    on_device = DevicePool.from_layers("kv", view, page_size=PAGE)
    on_host = HostPool.allocate(
        on_device, pages=8, layout=layout, memory=memory.host, pin=memory.pin
    )
    pool = Pool.pair(on_device, on_host)
    backup, load = round_trip(make_tiers(device, [pool], memory), pages=4)
    assert view.storage_offset() != 0
    assert not view.is_contiguous()
    assert (whole[:, :7] == CANARY).all()
    assert (whole[:, 7 + 12 * PAGE :] == CANARY).all()
    assert backup.num_copies == 4  # a view's layers are as evenly spaced as its tensor's
    assert load.num_copies == 2 * 4


# LMCache/LMCache#3821
def test_every_second_page_and_some_rows_of_a_host_buffer_move_by_their_strides(
    device: ComputeDevice,
) -> None:
    memory = CanaryMemory(device)
    (like,) = make_pools(
        [PoolSpec("kv", 24, (0, 1, 2))], memory, page_size=PAGE, device_pages=12, host_pages=1
    )
    whole = memory.host(16 * 5 * 24 * PAGE).view(16, 5, 24 * PAGE)
    host = HostPool.from_tensor(
        like.device,
        whole[::2, 1:4],
        layout="page_first_direct",
        registrations=memory.registrations(whole),
    )
    tiers = make_tiers(device, [Pool.pair(like.device, host)], memory)
    round_trip(tiers, pages=4)
    assert (whole[1::2] == CANARY).all()
    assert (whole[:, :1] == CANARY).all()
    assert (whole[:, 4:] == CANARY).all()


def test_bytes_of_a_wider_host_page_beyond_the_device_page_stay(device: ComputeDevice) -> None:
    memory = CanaryMemory(device)
    (like,) = make_pools(
        [PoolSpec("kv", 24, (0, 1, 2))], memory, page_size=PAGE, device_pages=12, host_pages=1
    )
    wide = memory.host(8 * 3 * 100).view(8, 3, 100)
    host = HostPool.from_tensor(
        like.device,
        wide,
        layout="page_first_direct",
        registrations=memory.registrations(wide),
    )
    tiers = make_tiers(device, [Pool.pair(like.device, host)], memory)
    fill_random(like.device.layers[0], seed=1)
    sources = tiers.take_device(2)
    held = tiers.controller.write(sources)
    assert held is not None
    tiers.settle()
    for layer in range(3):
        on_host = wide[tiers.page_ids(held), layer]
        assert torch.equal(on_host[:, :96], device_bytes(like, layer, tiers.page_ids(sources)))
        assert (on_host[:, 96:] == CANARY).all()


# --- a forward sees its own burst ------------------------------------------------------------


class Forward:
    """Waits for each layer of a load on a stream of its own and copies the layer right after.

    With `waits=False` it copies without waiting: the control that shows that there is a race.
    """

    def __init__(self, tiers: Tiers, load: int, targets: torch.Tensor, waits: bool = True) -> None:
        self._stream = tiers.device.new_stream()
        self._pages = tiers.page_ids(targets)
        self._seen: list[tuple[Pool, int, torch.Tensor]] = []
        for layer in range(tiers.controller.layer_done_counter.num_layers):
            if waits:
                tiers.controller.layer_done_counter.events[load].wait(layer, self._stream)
            for pool in tiers.pools:
                if layer in pool.layout.stored_layers:
                    self._copy(tiers.device, pool, layer)

    def _copy(self, device: ComputeDevice, pool: Pool, layer: int) -> None:
        width = pool.layout.page_bytes
        copied = to_device(device, torch.zeros(len(self._pages), width, dtype=torch.uint8))
        for row, page in zip(copied, self._pages, strict=True):
            source = pool.layout.device_address(layer, page)
            device.copy(self._stream, row.data_ptr(), source, width)
        self._seen.append((pool, layer, copied))

    def is_done(self) -> bool:
        return self._stream.query()

    def saw(self, host_pages: list[int]) -> bool:
        """Whether every layer that it copied held what these host pages hold."""
        self._stream.synchronize()
        return all(
            torch.equal(copied.cpu(), host_bytes(pool, layer, host_pages))
            for pool, layer, copied in self._seen
        )

    def saw_only_canaries(self) -> bool:
        self._stream.synchronize()
        return all(bool((copied == CANARY).all()) for _, _, copied in self._seen)


@pytest.mark.races
def test_forward_that_waits_sees_the_bytes_of_its_own_burst_with_two_in_flight(
    device: ComputeDevice,
) -> None:
    tiers = small_tiers(device)
    fill_host(tiers)
    stall = device.stall(device.current_stream())
    sources, forwards, controls = [], [], []
    for _ in range(2):
        host = tiers.take_host(5)
        targets = tiers.controller.load(host)
        assert targets is not None
        load = tiers.controller.start_loading()
        sources.append(tiers.page_ids(host))
        forwards.append(Forward(tiers, load, targets))
        controls.append(Forward(tiers, load, targets, waits=False))
    # Nothing has been copied yet: whoever does not wait sees what was there before.
    assert all(control.saw_only_canaries() for control in controls)
    assert not any(forward.is_done() for forward in forwards)
    stall.release()
    assert forwards[0].saw(sources[0])
    assert forwards[1].saw(sources[1])
    assert not forwards[0].saw(sources[1])
    tiers.settle()


def test_forward_sees_a_new_burst_and_not_the_old_one_in_the_same_pages(
    device: ComputeDevice,
) -> None:
    tiers = small_tiers(device, device_pages=5, gate_slots=1)
    fill_host(tiers)
    for _ in range(3):
        host = tiers.take_host(5)
        targets = tiers.controller.load(host)
        assert targets is not None
        assert not Forward(tiers, -1, targets, waits=False).saw(tiers.page_ids(host))
        load = tiers.controller.start_loading()
        assert Forward(tiers, load, targets).saw(tiers.page_ids(host))
        tiers.settle()
        tiers.device_pages.free(targets)


@pytest.mark.races
def test_backup_holds_the_bytes_written_before_it_on_its_stream(device: ComputeDevice) -> None:
    tiers = small_tiers(device)
    stream = device.new_stream()
    late = device.new_stream()
    sources = tiers.take_device(3)
    with stream:
        stall = device.stall(stream)
        for pool in tiers.pools:
            for layer in pool.device.layers:
                size = layer.numel() * layer.element_size()
                device.fill(stream, layer.data_ptr(), SCRIBBLE, size)
        host = tiers.controller.write(sources)
    assert host is not None
    # The control: a copy that is not behind the write finds what was there before it.
    seen = to_device(device, torch.zeros(1, dtype=torch.uint8))
    device.copy(late, seen.data_ptr(), tiers.pools[0].device.layers[0].data_ptr(), 1)
    late.synchronize()
    assert seen.item() == CANARY
    stall.release()
    tiers.settle()
    for pool in tiers.pools:
        for layer in pool.layout.stored_layers:
            assert (host_bytes(pool, layer, tiers.page_ids(host)) == SCRIBBLE).all()
