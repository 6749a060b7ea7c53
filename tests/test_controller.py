"""The controller: pages reserved until their ack is retired, acks in order, bad input refused."""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from devices import MakeDevice

from kvburst import (
    BurstController,
    BurstError,
    ComputeDevice,
    DeviceError,
    DevicePool,
    HostDevice,
    HostPool,
    LayoutError,
    PageAllocator,
    PageError,
    Pool,
    PoolTransfer,
    StreamIndices,
)
from kvburst.cuda import tier_memory

PAGE = 4
LAYERS = 3
ROW = 16


@dataclass
class Rig:
    """Two pools of the same pages on a device, with the allocators of both tiers."""

    device: ComputeDevice
    controller: BurstController
    pools: list[Pool]
    device_pages: PageAllocator
    host_pages: PageAllocator

    def fill(self, page: int, value: int) -> None:
        for pool in self.pools:
            for layer in pool.device.layers:
                layer[page * PAGE : (page + 1) * PAGE].fill_(value)

    def values(self, page: int) -> set[int]:
        """Every byte value found in a device page, all pools and layers."""
        found: set[int] = set()
        for pool in self.pools:
            for layer in pool.device.layers:
                found |= set(layer[page * PAGE : (page + 1) * PAGE].unique().tolist())
        return found

    def settle(self) -> None:
        """Everything submitted is in place, and the forward's stream is idle."""
        self.controller.drain()
        self.device.synchronize()

    def backed_up(self, value: int) -> torch.Tensor:
        """Host slots of one page that holds `value`; its device page is free again."""
        page = self.device_pages.alloc(PAGE)
        assert page is not None
        self.fill(int(page[0]) // PAGE, value)
        host = self.controller.write(page)
        assert host is not None
        self.settle()
        self.controller.poll()
        self.device_pages.free(page)
        return host


@pytest.fixture(params=["thread", "inline"])
def make(request: pytest.FixtureRequest, make_device: MakeDevice) -> Callable[..., Rig]:
    def build(device_pages: int = 8, host_pages: int = 8, **options: object) -> Rig:
        device = make_device()
        memory = tier_memory(device)
        pools = []
        for name in ("kv", "index_k"):
            layers = memory.device(LAYERS * device_pages * PAGE * ROW)
            on_device = DevicePool.from_layers(
                name, layers.view(LAYERS, device_pages * PAGE, ROW), page_size=PAGE
            )
            on_host = HostPool.allocate(on_device, pages=host_pages, pin=memory.pin)
            pools.append(Pool.pair(on_device, on_host))
        tier = {
            name: PageAllocator(name=name, pages=pages, page_size=PAGE, order=order)
            for name, pages, order in (
                ("device tier", device_pages, "lifo"),
                ("host tier", host_pages, "fifo"),
            )
        }
        controller = BurstController(
            pools,
            device,
            device_allocator=tier["device tier"],
            host_allocator=tier["host tier"],
            check="slots",
            mode=request.param,
            **options,
        )
        return Rig(device, controller, pools, tier["device tier"], tier["host tier"])

    return build


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    return make()


def page_slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


# --- pages stay reserved -------------------------------------------------------------------


# sgl-project/sglang#27444
def test_host_page_is_not_handed_out_while_a_load_still_reads_it(make: Callable[..., Rig]) -> None:
    rig = make(host_pages=2)
    host = rig.backed_up(0x55)
    stall = rig.device.stall(rig.device.current_stream())
    target = rig.controller.load(host)
    assert target is not None
    load = rig.controller.start_loading()

    rig.host_pages.free(host)
    assert rig.host_pages.available_pages == 1  # the other one
    other = rig.host_pages.alloc(PAGE)
    assert other is not None
    assert other.tolist() != host.tolist()
    assert rig.host_pages.alloc(PAGE) is None

    stall.release()
    rig.settle()
    assert rig.controller.is_load_back_event_done(load)
    assert rig.host_pages.available_pages == 0  # done, but its ack is not retired
    rig.controller.poll()
    assert rig.host_pages.available_pages == 1
    assert rig.values(int(target[0]) // PAGE) == {0x55}


def test_device_page_is_not_handed_out_while_a_backup_still_reads_it(
    make: Callable[..., Rig],
) -> None:
    rig = make(device_pages=1)
    page = rig.device_pages.alloc(PAGE)
    assert page is not None
    rig.fill(0, 0x11)
    stall = rig.device.stall(rig.device.current_stream())
    assert rig.controller.write(page) is not None
    rig.device_pages.free(page)
    assert rig.device_pages.alloc(PAGE) is None
    stall.release()
    rig.settle()
    assert rig.device_pages.alloc(PAGE) is None
    assert len(rig.controller.poll()) == 1
    assert rig.device_pages.alloc(PAGE) is not None


def test_queued_load_already_reserves_its_pages(rig: Rig) -> None:
    host = rig.backed_up(0x22)
    rig.controller.load(host)
    free = rig.host_pages.available_pages
    rig.host_pages.free(host)
    assert rig.host_pages.available_pages == free


def test_page_that_two_bursts_use_comes_back_after_both(rig: Rig) -> None:
    host = rig.backed_up(0x33)
    free = rig.host_pages.available_pages
    for _ in range(2):
        assert rig.controller.load(host) is not None
        rig.controller.start_loading()
    rig.host_pages.free(host)
    rig.settle()
    rig.controller.ack_load_queue.pop(0)
    assert rig.host_pages.available_pages == free
    rig.controller.ack_load_queue.pop(0)
    assert rig.host_pages.available_pages == free + 1


# sgl-project/sglang#29310
def test_deferred_frees_and_reset_leave_every_page_free_once(rig: Rig) -> None:
    host = rig.backed_up(0x44)
    rig.controller.load(host)
    rig.controller.start_loading()
    rig.host_pages.free(host)
    rig.controller.reset()
    rig.device_pages.clear()
    rig.host_pages.clear()
    rig.controller.poll()
    for tier in (rig.device_pages, rig.host_pages):
        everything = tier.alloc(tier.size)
        assert everything is not None
        assert sorted(everything.tolist()) == list(range(tier.size))


def test_allocator_reset_before_the_ack_retires_returns_no_page_twice(rig: Rig) -> None:
    host = rig.backed_up(0x44)
    rig.controller.load(host)
    rig.controller.start_loading()
    rig.settle()
    rig.host_pages.free(host)
    rig.host_pages.clear()
    rig.controller.poll()
    assert rig.host_pages.available_pages == rig.host_pages.pages


# --- acks ----------------------------------------------------------------------------------


def test_ack_exists_from_submission_and_completes_with_the_burst(rig: Rig) -> None:
    host = rig.backed_up(0x66)
    stall = rig.device.stall(rig.device.current_stream())
    rig.controller.load(host, node_id=41)
    rig.controller.load(host, node_id=42)
    burst = rig.controller.start_loading()
    (ack,) = rig.controller.ack_load_queue
    assert ack.node_ids == [41, 42]
    assert ack.num_tokens == 2 * PAGE
    assert ack.num_tokens_by_pool == {"kv": 2 * PAGE, "index_k": 2 * PAGE}
    assert not ack.finish_event.query()
    assert not rig.controller.is_load_back_event_done(burst)
    assert rig.controller.poll() == []
    assert rig.controller.has_inflight_device_transfers()
    stall.release()
    ack.finish_event.synchronize()
    assert ack.finish_event.query()
    assert ack.error is None
    assert ack.num_bytes == 2 * 2 * LAYERS * PAGE * ROW
    assert ack.start_event.elapsed_time(ack.finish_event) >= 0
    assert rig.controller.poll() == [ack]
    assert not rig.controller.has_inflight_device_transfers()


def test_acks_retire_in_the_order_of_submission(rig: Rig) -> None:
    host = rig.backed_up(0x77)
    ids = []
    for node in range(20):
        target = rig.controller.load(host, node_id=node)
        assert target is not None
        ids.append(rig.controller.start_loading())
        rig.device_pages.free(target)
        rig.settle()
        if node % 3 == 2:
            assert [a.node_ids for a in rig.controller.poll()] == [
                [n] for n in range(node - 2, node + 1)
            ]
    assert ids == list(range(20))


# sgl-project/sglang#29701
def test_poll_alone_drains_outstanding_acks(make: Callable[..., Rig]) -> None:
    rig = make(device_pages=32, host_pages=32)
    pages = rig.device_pages.alloc(19 * PAGE)
    assert pages is not None
    for i in range(19):
        rig.controller.write(pages[i * PAGE : (i + 1) * PAGE], node_id=i)
    rig.settle()
    retired = rig.controller.poll()
    assert [ack.node_ids for ack in retired] == [[i] for i in range(19)]
    assert len(rig.controller.ack_write_queue) == 0


def test_ack_can_only_be_taken_from_the_head(rig: Rig) -> None:
    with pytest.raises(IndexError, match="the queue is empty"):
        rig.controller.ack_load_queue.pop(0)
    with pytest.raises(IndexError, match="index: 1 must be 0"):
        rig.controller.ack_load_queue.pop(1)


def test_pop_waits_for_a_burst_that_still_copies(rig: Rig) -> None:
    host = rig.backed_up(0x10)
    rig.controller.load(host)
    rig.controller.start_loading()
    assert rig.controller.ack_load_queue.pop(0).finish_event.query()


def test_free_load_back_slots_are_counted_by_acks(rig: Rig) -> None:
    host = rig.backed_up(0x12)
    for _ in range(3):
        assert rig.controller.has_free_load_back_slot()
        rig.controller.load(host)
        rig.controller.start_loading()
    rig.settle()  # all done here, but perhaps not on another rank
    assert not rig.controller.has_free_load_back_slot()
    rig.controller.poll()
    assert rig.controller.has_free_load_back_slot()


# --- the gate ------------------------------------------------------------------------------


def test_slot_still_copying_is_never_handed_out_again(make: Callable[..., Rig]) -> None:
    rig = make(gate_slots=1)
    host = rig.backed_up(0x13)
    counter = rig.controller.layer_done_counter
    first = rig.controller.load(host)
    rig.controller.start_loading()
    rig.controller.load(host)
    second = rig.controller.start_loading()  # waits: there is one slot
    assert second == 1
    assert counter.events[0].finish_event.query()
    assert first is not None
    assert rig.values(int(first[0]) // PAGE) == {0x13}


def test_old_burst_id_never_sees_a_newer_bursts_events(make: Callable[..., Rig]) -> None:
    rig = make(gate_slots=1)
    host = rig.backed_up(0x14)
    events = rig.controller.layer_done_counter.events
    rig.controller.load(host)
    old = rig.controller.start_loading()
    rig.settle()
    stall = rig.device.stall(rig.device.current_stream())
    rig.controller.load(host)
    new = rig.controller.start_loading()
    waiting = rig.device.new_stream()
    events[old].wait(0, waiting)
    waiting.synchronize()  # returns although the newer burst has not begun
    assert events[old].finish_event.query()
    assert not events[new].finish_event.query()
    stall.release()


def test_wait_until_follows_the_consumer(rig: Rig) -> None:
    host = rig.backed_up(0x15)
    counter = rig.controller.layer_done_counter
    counter.wait_until(0)  # no consumer: nothing to wait for
    target = rig.controller.load(host)
    assert target is not None
    counter.set_consumer(rig.controller.start_loading())
    seen = []
    for layer in range(counter.num_layers):
        counter.wait_until(layer)
        rig.device.current_stream().synchronize()
        page = int(target[0]) // PAGE
        for pool in rig.pools:
            seen.append(pool.device.layers[layer][page * PAGE : (page + 1) * PAGE].unique())
    assert all(values.tolist() == [0x15] for values in seen)


@pytest.mark.parametrize("burst", [0, 5])
def test_burst_that_was_never_submitted_is_refused(rig: Rig, burst: int) -> None:
    with pytest.raises(BurstError, match=f"burst: {burst} was never submitted"):
        rig.controller.layer_done_counter.events[burst].wait(0)


def test_layer_out_of_range_is_refused(rig: Rig) -> None:
    rig.controller.load(rig.backed_up(1))
    burst = rig.controller.start_loading()
    with pytest.raises(LayoutError, match="layer: 3 is out of range, the gate has 3 layers"):
        rig.controller.layer_done_counter.events[burst].wait(3)


# --- bad input -----------------------------------------------------------------------------


BAD_INDICES = [
    (page_slots(0).to(torch.float32), "dtype torch.float32 must be torch.int32 or torch.int64"),
    (page_slots(0).to(torch.int16), "dtype torch.int16 must be"),
    (page_slots(0).reshape(2, 2), "2 dimensions, must be 1"),
    (torch.arange(PAGE + 1), "5 slots is not a multiple of page_size 4"),
    (torch.arange(1, 1 + PAGE), r"\[0\]: slot 1 does not start a page"),
    (page_slots(8), r"\[0\]: slot 32 is out of range, the tier has 8 pages of 4 slots"),
    (torch.arange(-PAGE, 0), r"\[0\]: slot -4 is out of range"),
    (torch.tensor([0, 2, 1, 3]), r"\[1\]: slot 2 must be 1"),
]


@pytest.mark.parametrize(("indices", "message"), BAD_INDICES)
@pytest.mark.parametrize("call", ["write", "load"])
def test_bad_indices_are_refused_before_anything_moves(
    rig: Rig, call: str, indices: torch.Tensor, message: str
) -> None:
    rig.device_pages.alloc(4 * PAGE)
    rig.host_pages.alloc(4 * PAGE)
    free = (rig.device_pages.available_pages, rig.host_pages.available_pages)
    name = "device_indices" if call == "write" else "host_indices"
    with pytest.raises(PageError, match=name + ".*" + message):
        getattr(rig.controller, call)(indices)
    assert (rig.device_pages.available_pages, rig.host_pages.available_pages) == free
    assert not rig.controller.has_inflight_device_transfers()
    assert rig.device.counters("load").copies == rig.device.counters("backup").copies == 0


def test_pages_that_are_not_allocated_are_refused(rig: Rig) -> None:
    with pytest.raises(PageError, match="device tier: page 2 is not allocated"):
        rig.controller.write(page_slots(2))
    with pytest.raises(PageError, match="host tier: page 5 is not allocated"):
        rig.controller.load(page_slots(5))
    assert rig.device_pages.available_pages == rig.host_pages.available_pages == 8


def test_refused_load_leaves_earlier_queued_ones_alone(rig: Rig) -> None:
    host = rig.backed_up(0x16)
    target = rig.controller.load(host, node_id=1)
    assert target is not None
    with pytest.raises(PageError, match="host tier: page 5 is not allocated"):
        rig.controller.load(torch.cat([host, page_slots(5)]), node_id=2)
    rig.controller.start_loading()
    rig.settle()
    (ack,) = rig.controller.poll()
    assert ack.node_ids == [1]
    assert rig.values(int(target[0]) // PAGE) == {0x16}


def test_full_tier_is_none_and_queues_nothing(make: Callable[..., Rig]) -> None:
    rig = make(device_pages=2, host_pages=1)
    pages = rig.device_pages.alloc(2 * PAGE)
    assert pages is not None
    assert rig.controller.write(pages) is None
    host = rig.controller.write(pages[:PAGE])
    assert host is not None
    assert rig.controller.load(host) is None
    assert rig.controller.start_loading() == -1


def test_unknown_or_first_pool_cannot_bring_its_own_pages(rig: Rig) -> None:
    host = rig.backed_up(0x17)
    for name, message in (("v", "pool: 'v' is none of the pools"), ("kv", "pool 0 cannot have")):
        with pytest.raises(PageError, match=message):
            rig.controller.load(host, extra_pools=[PoolTransfer(name, host, page_slots(7))])


def test_refused_call_leaves_the_order_of_free_pages_as_it_was(rig: Rig) -> None:
    pages = rig.device_pages.alloc(2 * PAGE)
    assert pages is not None
    for bad in (
        lambda: rig.controller.write(page_slots(5)),
        lambda: rig.controller.write(pages, extra_pools=[PoolTransfer("v", pages, pages)]),
        lambda: rig.controller.write(pages.to_sparse()),
        lambda: rig.controller.write(pages, extra_pools=[object()]),
        lambda: rig.controller.write(pages, node_id="seven"),
        lambda: rig.controller.write(pages, node_id=1 << 63),
        lambda: rig.controller.write(pages.to("meta")),
        lambda: rig.controller.write(StreamIndices(pages.to("meta"))),
    ):
        with pytest.raises((PageError, TypeError, AttributeError)):
            bad()
    host = rig.controller.write(pages)
    assert host is not None
    assert host.tolist() == page_slots(0, 1).tolist()


def test_submission_that_is_refused_leaves_nothing_behind(rig: Rig) -> None:
    pages = rig.device_pages.alloc(PAGE)
    assert pages is not None
    rig.controller.write_fence_stream = HostDevice().current_stream()
    for refused in (pages, StreamIndices(pages)):
        with pytest.raises(DeviceError, match="is of another device"):
            rig.controller.write(refused, node_id=1)
    assert not rig.controller.has_inflight_device_transfers()
    rig.controller.write_fence_stream = None
    host = rig.controller.write(pages, node_id=2)
    assert host is not None
    assert host.tolist() == page_slots(0).tolist()
    rig.settle()
    (ack,) = rig.controller.poll()
    assert ack.node_ids == [2]
    assert ack.kept == ()


def test_load_reads_its_indices_at_once(rig: Rig) -> None:
    with pytest.raises(PageError, match="host_indices: are read at once"):
        rig.controller.load(StreamIndices(rig.backed_up(1)))  # type: ignore[arg-type]


def test_tier_cleared_under_queued_loads_is_noticed(rig: Rig) -> None:
    host = rig.backed_up(0x1C)
    rig.controller.load(host)
    rig.device_pages.clear()
    rig.device_pages.alloc(PAGE)
    with pytest.raises(PageError, match="was cleared while 1 pages are queued"):
        rig.controller.load(host)
    rig.controller.reset()
    assert rig.controller.load(host) is not None
    rig.controller.start_loading()
    rig.settle()
    assert len(rig.controller.poll()) == 1


def test_pools_of_one_name_or_of_other_memory_are_refused(rig: Rig) -> None:
    tiers = {"device_allocator": rig.device_pages, "host_allocator": rig.host_pages}
    with pytest.raises(LayoutError, match="pools: 2 pools are named 'kv'"):
        BurstController([rig.pools[0], rig.pools[0]], rig.device, **tiers)
    elsewhere = torch.zeros(LAYERS, 8 * PAGE, ROW, dtype=torch.uint8, device="meta")
    on_device = DevicePool.from_layers("kv", elsewhere, page_size=PAGE)
    with pytest.raises(LayoutError):
        BurstController(
            [Pool.pair(on_device, HostPool.allocate(on_device, pages=8))], rig.device, **tiers
        )


def test_pool_with_its_own_pages_moves_those(rig: Rig) -> None:
    kv, index_k = rig.pools
    host = rig.backed_up(0x18)
    target = rig.controller.load(
        host, extra_pools=[PoolTransfer("index_k", host_indices=host, device_indices=page_slots(7))]
    )
    assert target is not None
    rig.controller.start_loading()
    rig.settle()
    start = int(target[0])
    assert kv.device.layers[0][start : start + PAGE].unique().tolist() == [0x18]
    assert index_k.device.layers[0][7 * PAGE :].unique().tolist() == [0x18]
    assert kv.device.layers[0][7 * PAGE :].unique().tolist() == [0]


def test_allocator_larger_than_a_pool_is_refused(rig: Rig) -> None:
    too_large = PageAllocator(name="host tier", pages=9, page_size=PAGE, order="fifo")
    with pytest.raises(LayoutError, match="host tier: 9 pages, but pool 'kv' has 8"):
        BurstController(
            rig.pools, rig.device, device_allocator=rig.device_pages, host_allocator=too_large
        )


def test_differing_page_sizes_are_refused(rig: Rig) -> None:
    other = PageAllocator(name="device tier", pages=2, page_size=2 * PAGE, order="lifo")
    with pytest.raises(LayoutError, match="device tier: page_size 8 must be 4"):
        BurstController(
            rig.pools, rig.device, device_allocator=other, host_allocator=rig.host_pages
        )
    with pytest.raises(LayoutError, match="pools: 0 pools"):
        BurstController(
            [], rig.device, device_allocator=rig.device_pages, host_allocator=rig.host_pages
        )


# --- lifecycle -----------------------------------------------------------------------------


def test_reset_forgets_what_is_queued_and_retires_what_is_under_way(rig: Rig) -> None:
    host = rig.backed_up(0x19)
    rig.controller.load(host)
    rig.controller.start_loading()
    queued = rig.controller.load(host)
    assert queued is not None
    rig.controller.reset()
    assert not rig.controller.has_inflight_device_transfers()
    assert rig.controller.start_loading() == -1
    rig.host_pages.free(host)
    rig.device_pages.free(queued)
    assert rig.host_pages.available_pages == 8
    assert rig.device_pages.available_pages == 7


def test_stop_may_be_called_again(rig: Rig) -> None:
    rig.controller.load(rig.backed_up(0x1A))
    rig.controller.start_loading()
    rig.controller.stop()
    rig.controller.stop()
    rig.settle()
    assert len(rig.controller.poll()) == 1


def test_dropped_controller_waits_for_its_copies(rig: Rig) -> None:
    host = rig.backed_up(0x1B)
    stall = rig.device.stall(rig.device.current_stream())
    target = rig.controller.load(host)
    assert target is not None
    rig.controller.start_loading()
    alive = weakref.ref(rig.controller)

    def release_once_it_is_being_dropped() -> None:
        while alive() is not None:
            time.sleep(0)
        stall.release()

    helper = threading.Thread(target=release_once_it_is_being_dropped)
    helper.start()
    del rig.controller
    assert rig.values(int(target[0]) // PAGE) == {0x1B}
    helper.join()


def test_two_controllers_share_a_device(make: Callable[..., Rig]) -> None:
    one, other = make(), make()
    for rig, value in ((one, 1), (other, 2)):
        host = rig.backed_up(value)
        target = rig.controller.load(host)
        assert target is not None
        rig.controller.start_loading()
        rig.settle()
        assert rig.values(int(target[0]) // PAGE) == {value}
