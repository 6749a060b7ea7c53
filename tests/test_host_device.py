"""The device as Python sees it: streams, events and stalls."""

import gc
import threading

import pytest
import torch

from kvburst import (
    BurstController,
    CopyLimits,
    DeviceError,
    DevicePool,
    HostDevice,
    HostPool,
    LayoutError,
    LinkModel,
    PageAllocator,
    PlanOptions,
    Pool,
)
from kvburst._core import MeetingPoint


@pytest.fixture
def device() -> HostDevice:
    """Of this kind alone, whatever else there is."""
    return HostDevice()


def test_with_makes_a_stream_this_threads_current_one() -> None:
    device = HostDevice()
    default = device.current_stream().handle
    inner, outer = device.new_stream(), device.new_stream()
    seen = []
    with outer:
        with inner, inner:
            assert device.current_stream().handle == inner.handle
        assert device.current_stream().handle == outer.handle
        thread = threading.Thread(target=lambda: seen.append(device.current_stream().handle))
        thread.start()
        thread.join()
    assert device.current_stream().handle == default
    assert seen == [default]


def test_leaving_a_stream_that_was_never_entered_is_refused() -> None:
    with pytest.raises(DeviceError, match="this thread has set none"):
        HostDevice().new_stream().__exit__(None, None, None)


def test_streams_and_events_of_another_device_are_refused() -> None:
    device, other = HostDevice(), HostDevice()
    stream, event = other.new_stream(), other.new_event()
    mine = device.new_event()
    for use in (
        lambda: mine.record(stream),
        lambda: mine.wait(stream),
        lambda: device.current_stream().wait_event(event),
        lambda: device.current_stream().wait_stream(stream),
        lambda: device.current_stream().record_event(event),
        lambda: mine.elapsed_time(event),
        lambda: device.busy(stream, 1),
        lambda: device.stall(stream),
        lambda: device.fill(stream, 0, 0, 0),
    ):
        with pytest.raises(DeviceError, match=r"handle \d+ is of another device"):
            use()


def test_gate_and_issuer_refuse_a_stream_of_another_device() -> None:
    device = HostDevice()
    tensor = torch.zeros(2, 8, 4, dtype=torch.uint8)
    on_device = DevicePool.from_layers("kv", tensor, page_size=4)
    pool = Pool.pair(on_device, HostPool.allocate(on_device, pages=2))
    tiers = [
        PageAllocator(name=name, pages=2, page_size=4, order="fifo") for name in ("device", "host")
    ]
    controller = BurstController([pool], device, device_allocator=tiers[0], host_allocator=tiers[1])
    pages = tiers[0].alloc(4)
    assert pages is not None
    host = controller.write(pages)
    assert host is not None
    controller.load(host)
    burst = controller.start_loading()
    with pytest.raises(DeviceError, match="is of another device"):
        controller.layer_done_counter.events[burst].wait(0, HostDevice().new_stream())


def test_transfer_says_how_long_the_device_held_its_caller() -> None:
    """Of a link whose price for a copy is 2 ms: three of them, and one that is free."""
    link = LinkModel(gigabytes_per_second=1000, issue_us=2000)
    target, source = torch.zeros(3, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)
    copies = [(target.data_ptr() + i, source.data_ptr() + i, 1, 1, 0, 0) for i in range(3)]
    priced, free = HostDevice(link=link), HostDevice()
    for device in (priced, free):
        stream = device.new_stream()
        microseconds = device.transfer(stream, "load", copies)
        stream.synchronize()
        assert microseconds > 0
        if device is priced:
            assert microseconds >= 3 * 2000
    assert target.tolist() == [1, 1, 1]


def test_forgotten_stall_lets_its_stream_go() -> None:
    device = HostDevice()
    stream = device.new_stream()
    stall = device.stall(stream)
    # In the order in which an interpreter drops a function's locals.
    del device, stream, stall
    gc.collect()


@pytest.mark.parametrize("microseconds", [-1.0, 1e300, float("nan"), float("inf")])
def test_busy_refuses_times_that_no_forward_takes(microseconds: float) -> None:
    device = HostDevice()
    with pytest.raises(DeviceError, match="microseconds must be from 0 to"):
        device.busy(device.current_stream(), microseconds)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gigabytes_per_second", 0.0),
        ("gigabytes_per_second", float("nan")),
        ("issue_us", -1.0),
        ("tall_issue_us", 1e300),
        ("queue_depth", -1),
        ("byte_scale", 0.0),
    ],
)
def test_link_model_names_the_field_and_its_bounds(field: str, value: float) -> None:
    with pytest.raises(LayoutError, match=rf"{field}: \S+ must be from"):
        LinkModel(**{"gigabytes_per_second": 50.0, field: value})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (CopyLimits, "max_pitch", 0),
        (CopyLimits, "copies_per_call", -1),
        (PlanOptions, "max_group", 0),
        (PlanOptions, "max_group", 2**40),
        (PlanOptions, "chunk_pages", -1),
    ],
)
def test_limits_and_options_name_the_field_and_its_bound(
    kind: type, field: str, value: int
) -> None:
    with pytest.raises(LayoutError, match=rf"{field}: {value}"):
        kind(**{field: value})


def test_meeting_point_holds_a_stream_that_came_first_until_the_other_reaches_it(
    device: HostDevice,
) -> None:
    first, other = device.new_stream(), device.new_stream()
    stall = device.stall(other)
    point = MeetingPoint()
    point.wait(first)
    point.reach(other)
    assert not first.query()
    stall.release()
    first.synchronize()
    point.wait(first)  # It was reached: it holds nobody.
    first.synchronize()


def test_streams_of_two_devices_meet() -> None:
    here, there = HostDevice(), HostDevice()
    stream = here.new_stream()
    point = MeetingPoint()
    point.wait(stream)
    point.reach(there.current_stream())
    stream.synchronize()


def test_forgotten_meeting_point_holds_nobody_and_one_that_will_be_reached_still_does(
    device: HostDevice,
) -> None:
    first, other = device.new_stream(), device.new_stream()
    forgotten = MeetingPoint()
    forgotten.wait(first)
    del forgotten
    first.synchronize()

    stall = device.stall(other)
    promised = MeetingPoint()
    promised.reach(other)
    promised.wait(first)
    del promised
    assert not first.query()
    stall.release()
    first.synchronize()


def test_meeting_point_serves_once(device: HostDevice) -> None:
    point = MeetingPoint()
    point.reach(device.current_stream())
    with pytest.raises(DeviceError, match="reached before, it serves once"):
        point.reach(device.current_stream())
