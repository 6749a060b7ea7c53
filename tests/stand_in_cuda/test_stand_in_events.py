"""Events: before their first record, when recorded again, and after they are destroyed."""

from collections.abc import Callable

import pytest
from cuda_calls import (
    DISABLE_TIMING,
    INVALID_HANDLE,
    NOT_READY,
    SUCCESS,
    Cuda,
    bytes_at,
)
from stand_in import StandIn

LoadStandIn = Callable[..., StandIn]


@pytest.fixture
def cuda(load_stand_in: LoadStandIn) -> Cuda:
    return Cuda(load_stand_in())


@pytest.fixture
def late(load_stand_in: LoadStandIn) -> Cuda:
    return Cuda(load_stand_in(order="latest"))


def test_an_event_never_recorded_is_done_and_holds_nobody_up(cuda: Cuda) -> None:
    event, stream = cuda.event(), cuda.stream()
    assert cuda.query(event) == SUCCESS
    assert cuda.synchronize_event(event) == SUCCESS
    assert cuda.wait(stream, event) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS


def test_an_event_is_not_ready_until_the_stream_gets_there(cuda: Cuda) -> None:
    event, stream = cuda.event(), cuda.stream()
    with cuda.driver.stall(stream):
        assert cuda.record(event, stream) == SUCCESS
        assert cuda.query(event) == NOT_READY
    assert cuda.synchronize_event(event) == SUCCESS
    assert cuda.query(event) == SUCCESS


def test_a_late_event_is_reached_only_after_somebody_asked(late: Cuda) -> None:
    event, stream = late.event(), late.stream()
    assert late.record(event, stream) == SUCCESS
    late.driver.settle()
    assert late.query(event) == NOT_READY
    late.driver.settle()
    assert late.query(event) == SUCCESS


def test_recording_again_does_not_move_an_earlier_wait(cuda: Cuda) -> None:
    producer, consumer, device = cuda.stream(), cuda.stream(), cuda.alloc(1, b".")
    event = cuda.event()
    assert cuda.record(event, producer) == SUCCESS
    assert cuda.wait(consumer, event) == SUCCESS
    with cuda.driver.stall(producer):
        assert cuda.record(event, producer) == SUCCESS
        assert cuda.fill(device, ord("x"), 1, consumer) == SUCCESS
        assert cuda.synchronize(consumer) == SUCCESS
        assert bytes_at(device, 1) == b"x"
        assert cuda.query(event) == NOT_READY


def test_a_wait_holds_its_stream_until_the_event_is_reached(cuda: Cuda) -> None:
    producer, consumer, device = cuda.stream(), cuda.stream(), cuda.alloc(1, b".")
    event = cuda.event()
    with cuda.driver.stall(producer):
        assert cuda.record(event, producer) == SUCCESS
        assert cuda.wait(consumer, event) == SUCCESS
        assert cuda.fill(device, ord("x"), 1, consumer) == SUCCESS
        cuda.driver.settle()
        assert bytes_at(device, 1) == b"."
    assert cuda.synchronize(consumer) == SUCCESS
    assert bytes_at(device, 1) == b"x"


def test_elapsed_time_grows_with_the_work_between(cuda: Cuda) -> None:
    start, end, stream = cuda.event(), cuda.event(), cuda.stream()
    assert cuda.record(start, stream) == SUCCESS
    cuda.driver.busy(stream, 2000)
    assert cuda.record(end, stream) == SUCCESS
    assert cuda.synchronize_event(end) == SUCCESS
    code, milliseconds = cuda.elapsed(start, end)
    assert code == SUCCESS
    assert milliseconds >= 2


def test_elapsed_time_needs_two_recorded_reached_and_timed_events(cuda: Cuda) -> None:
    start, end, untimed, stream = (
        cuda.event(),
        cuda.event(),
        cuda.event(DISABLE_TIMING),
        cuda.stream(),
    )
    assert cuda.record(start, stream) == SUCCESS
    assert cuda.record(untimed, stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert cuda.elapsed(start, end)[0] == INVALID_HANDLE
    assert cuda.elapsed(start, untimed)[0] == INVALID_HANDLE
    with cuda.driver.stall(stream):
        assert cuda.record(end, stream) == SUCCESS
        assert cuda.elapsed(start, end)[0] == NOT_READY


def test_a_destroyed_event_is_unknown_and_earlier_waits_stay(cuda: Cuda) -> None:
    producer, consumer, device = cuda.stream(), cuda.stream(), cuda.alloc(1, b".")
    event = cuda.event()
    with cuda.driver.stall(producer):
        assert cuda.record(event, producer) == SUCCESS
        assert cuda.wait(consumer, event) == SUCCESS
        assert cuda.destroy_event(event) == SUCCESS
        for code in (
            cuda.query(event),
            cuda.record(event, producer),
            cuda.wait(consumer, event),
            cuda.synchronize_event(event),
            cuda.destroy_event(event),
        ):
            assert code == INVALID_HANDLE
        assert cuda.fill(device, ord("x"), 1, consumer) == SUCCESS
        cuda.driver.settle()
        assert bytes_at(device, 1) == b"."


def test_a_stream_is_no_event_and_an_event_no_stream(cuda: Cuda) -> None:
    event, stream = cuda.event(), cuda.stream()
    assert cuda.query(stream) == INVALID_HANDLE
    assert cuda.synchronize(event) == INVALID_HANDLE
