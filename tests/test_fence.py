"""Loads stay behind forwards, backups behind writes; each with a control that shows why."""

from collections.abc import Callable

import pytest
from devices import MakeDevice
from rigs import PAGE, Mode, Rig, is_reached, make_rig

from kvburst import DeviceError, HostDevice, PlanOptions

REPEATS = 20

MODES: tuple[Mode, ...] = ("thread", "inline")


@pytest.fixture(params=MODES)
def make(request: pytest.FixtureRequest, make_device: MakeDevice) -> Callable[..., Rig]:
    def build(**options: object) -> Rig:
        return make_rig(make_device(), request.param, **options)

    return build


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    return make()


# --- loads ---------------------------------------------------------------------------------------


def load_under_a_forward(rig: Rig, *, fenced: bool) -> set[int]:
    """Load 0x55 into pages that a launched forward still writes 0xAA to; what is there in the end.

    The forward is held up until the load, if it can, is over.
    """
    host = rig.on_host(0x55, pages=4)
    forward = rig.device.new_stream()
    rig.controller.load_fence_stream = forward if fenced else None
    target = rig.controller.load(host)
    assert target is not None
    with rig.held(forward):
        rig.forward_writes(forward, target, 0xAA)
        burst = rig.controller.start_loading()
        if fenced:
            assert not is_reached(rig.controller.ack_load_queue[-1].finish_event)
            assert not rig.controller.is_load_back_event_done(burst)
        else:
            rig.controller.drain()
    rig.settle()
    rig.controller.poll()
    rig.device_pages.free(target)
    rig.host_pages.free(host)
    return rig.found_on_device(target)


# sgl-project/sglang#36738
def test_load_waits_for_the_forward_that_still_writes_its_pages(rig: Rig) -> None:
    for _ in range(REPEATS):
        assert load_under_a_forward(rig, fenced=True) == {0x55}


@pytest.mark.races
def test_load_without_a_fence_is_overwritten_by_that_forward(rig: Rig) -> None:
    for _ in range(REPEATS):
        assert load_under_a_forward(rig, fenced=False) == {0xAA}


def test_fence_is_captured_at_submission_and_later_forwards_do_not_hold_a_load_up(
    rig: Rig,
) -> None:
    forward = rig.device.new_stream()
    rig.controller.load_fence_stream = forward
    burst, target = rig.load(rig.on_host(0x55))
    with rig.held(forward):
        rig.wait(burst, 0)
        rig.controller.drain()
        assert rig.controller.is_load_back_event_done(burst)
    assert rig.found_on_device(target) == {0x55}


@pytest.mark.races  # with what comes too late to be waited for
def test_load_waits_for_the_current_stream_as_well_as_for_the_fence(rig: Rig) -> None:
    rig.controller.load_fence_stream = rig.device.new_stream()
    current = rig.device.new_stream()
    with rig.held(current):
        with current:
            burst, target = rig.load(rig.on_host(0x55))
        rig.forward_writes(current, target, 0xAA)  # too late to be waited for
        assert not is_reached(rig.controller.ack_load_queue[0].finish_event)
        assert not rig.controller.is_load_back_event_done(burst)
    rig.settle()


def test_fence_of_another_device_is_refused_and_uses_up_no_id(rig: Rig) -> None:
    others = HostDevice()
    streams = [others.new_stream() for _ in range(64)]
    host = rig.on_host(0x55)
    target = rig.controller.load(host)
    assert target is not None
    rig.controller.load_fence_stream = streams[-1]
    with pytest.raises(DeviceError, match="is of another device"):
        rig.controller.start_loading()
    assert rig.controller.layer_done_counter.producer_index == -1
    rig.controller.load_fence_stream = None
    assert rig.controller.start_loading() == 0
    assert rig.controller.layer_done_counter.producer_index == 0
    rig.settle()
    assert rig.found_on_device(target) == {0x55}


# --- backups -------------------------------------------------------------------------------------


# vllm-project/vllm#45704
@pytest.mark.parametrize("chunk_pages", [0, 1, 7, 256])
@pytest.mark.parametrize(
    "ordered_by", ["current stream", "fence", pytest.param("nothing", marks=pytest.mark.races)]
)
def test_backup_reads_after_the_write_it_is_ordered_behind(
    make: Callable[..., Rig], ordered_by: str, chunk_pages: int
) -> None:
    rig = make(pages=256, options=PlanOptions(chunk_pages=chunk_pages))
    pages = rig.take(256)
    rig.write_device(pages, 0x11)
    forward = rig.device.new_stream()
    if ordered_by == "fence":
        rig.controller.write_fence_stream = forward
    with rig.held(forward):
        rig.forward_writes(forward, pages, 0x22)
        if ordered_by == "current stream":
            with forward:
                host = rig.controller.write(pages)
        else:
            host = rig.controller.write(pages)
        # Without an order the backup is over before the write.
        (ack,) = rig.controller.ack_write_queue
        assert is_reached(ack.finish_event) == (ordered_by == "nothing")
    rig.settle()
    assert host is not None
    assert rig.found_on_host(host) == ({0x11} if ordered_by == "nothing" else {0x22})


# --- host pages ----------------------------------------------------------------------------------


# sgl-project/sglang#27444
@pytest.mark.parametrize("evicted", ["through the allocator", "behind its back"])
def test_host_pages_under_a_load_keep_their_bytes_until_its_ack_is_retired(
    rig: Rig, evicted: str
) -> None:
    host = rig.on_host(0x33, pages=2)
    with rig.held():
        burst, target = rig.load(host)
        if evicted == "through the allocator":
            rig.host_pages.free(host)
            rest = rig.host_pages.alloc(rig.host_pages.available_size())
            assert rest is not None
            assert not set(rest.tolist()) & set(host.tolist())
            rig.write_host(rest, 0xEE)
        else:
            rig.write_host(host, 0xEE)
    rig.settle()
    assert rig.controller.is_load_back_event_done(burst)
    assert rig.host_pages.alloc(PAGE) is None or evicted == "behind its back"
    assert rig.found_on_device(target) == ({0x33} if evicted == "through the allocator" else {0xEE})
    rig.controller.poll()
    assert rig.host_pages.alloc(2 * PAGE) is not None
