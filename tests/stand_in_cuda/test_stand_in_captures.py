"""Captures: what is swallowed, what is refused, and what takes a capture down with it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from cuda_calls import (
    BLOCKING,
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_MERGE,
    CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    GLOBAL,
    LEGACY,
    RELAXED,
    SUCCESS,
    THREAD_LOCAL,
    WRONG_THREAD,
    Copy3D,
    Cuda,
    bytes_at,
)
from stand_in import StandIn

LoadStandIn = Callable[..., StandIn]

NONE, ACTIVE, INVALIDATED = range(3)


@pytest.fixture
def cuda(load_stand_in: LoadStandIn) -> Cuda:
    return Cuda(load_stand_in())


@pytest.fixture
def capturing(cuda: Cuda) -> int:
    """A stream that is capturing, in the global mode."""
    stream = cuda.stream()
    assert cuda.begin_capture(stream) == SUCCESS
    return stream


def on_another_thread(cuda: Cuda, call: Callable[[], int], mode: int = GLOBAL) -> int:
    def body() -> int:
        assert cuda.set_current(cuda.context) == SUCCESS
        cuda.exchange_mode(mode)
        return call()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(body).result(60)


def test_a_capture_takes_operations_without_running_them(cuda: Cuda) -> None:
    stream, device = cuda.stream(), cuda.alloc(1, b".")
    assert cuda.begin_capture(stream) == SUCCESS
    assert cuda.capture_status(stream) == (SUCCESS, ACTIVE)
    assert cuda.fill(device, ord("x"), 1, stream) == SUCCESS
    code, graph = cuda.end_capture(stream)
    assert code == SUCCESS
    assert graph is not None
    assert cuda.capture_status(stream) == (SUCCESS, NONE)
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(device, 1) == b"."


def test_a_batch_on_a_capturing_stream_is_refused_and_the_capture_goes_on_without_it(
    cuda: Cuda,
) -> None:
    stream, host, device = cuda.stream(), cuda.pinned(4, b"page"), cuda.alloc(4, b"....")
    assert cuda.begin_capture(stream) == SUCCESS
    assert cuda.batch([(device, host, 4)], stream) == CAPTURE_UNSUPPORTED
    assert cuda.batch_3d([Copy3D(device, host, 4)], stream) == CAPTURE_UNSUPPORTED
    assert cuda.capture_status(stream) == (SUCCESS, ACTIVE)
    assert cuda.end_capture(stream)[0] == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(device, 4) == b"...."


def test_asking_a_capturing_stream_how_far_it_is_invalidates_the_capture(cuda: Cuda) -> None:
    for ask in (cuda.synchronize, cuda.query_stream):
        stream = cuda.stream()
        assert cuda.begin_capture(stream) == SUCCESS
        assert ask(stream) == CAPTURE_UNSUPPORTED
        assert cuda.capture_status(stream) == (SUCCESS, INVALIDATED)
        assert cuda.end_capture(stream) == (CAPTURE_INVALIDATED, None)


def test_nothing_more_is_taken_once_a_capture_is_invalid(cuda: Cuda, capturing: int) -> None:
    assert cuda.query_stream(capturing) == CAPTURE_UNSUPPORTED
    code = cuda.record(cuda.event(), capturing)
    assert code == CAPTURE_INVALIDATED


def test_an_event_recorded_in_a_capture_cannot_be_asked_then_or_later(
    cuda: Cuda, capturing: int
) -> None:
    event = cuda.event()
    assert cuda.record(event, capturing) == SUCCESS
    assert cuda.end_capture(capturing)[0] == SUCCESS
    assert cuda.query(event) == CAPTURED_EVENT
    assert cuda.synchronize_event(event) == CAPTURED_EVENT
    assert cuda.elapsed(event, event)[0] == CAPTURED_EVENT
    assert cuda.record(event, capturing) == SUCCESS
    assert cuda.synchronize_event(event) == SUCCESS


def test_asking_a_captured_event_during_the_capture_invalidates_it(
    cuda: Cuda, capturing: int
) -> None:
    event = cuda.event()
    assert cuda.record(event, capturing) == SUCCESS
    cuda.exchange_mode(RELAXED)
    assert cuda.query(event) == CAPTURED_EVENT
    assert cuda.end_capture(capturing)[0] == CAPTURE_INVALIDATED


def test_touching_the_legacy_stream_during_a_capture_invalidates_it(cuda: Cuda) -> None:
    device, event = cuda.alloc(1), cuda.event()
    for touch in (
        lambda: cuda.fill(device, 0, 1, LEGACY),
        lambda: cuda.record(event, 0),
        lambda: cuda.wait(LEGACY, event),
        lambda: cuda.synchronize(LEGACY),
        lambda: cuda.query_stream(0),
    ):
        stream = cuda.stream(BLOCKING)
        assert cuda.begin_capture(stream) == SUCCESS
        assert touch() == CAPTURE_IMPLICIT
        assert cuda.end_capture(stream)[0] == CAPTURE_INVALIDATED


def test_even_a_relaxed_thread_may_not_touch_the_legacy_stream(cuda: Cuda, capturing: int) -> None:
    code = on_another_thread(cuda, lambda: cuda.query_stream(LEGACY), RELAXED)
    assert code == CAPTURE_IMPLICIT
    assert cuda.end_capture(capturing)[0] == CAPTURE_INVALIDATED


def test_asking_whether_the_legacy_stream_captures_says_so_and_does_no_harm(
    cuda: Cuda, capturing: int
) -> None:
    assert cuda.capture_status(LEGACY)[0] == CAPTURE_IMPLICIT
    assert cuda.end_capture(capturing)[0] == SUCCESS
    assert cuda.capture_status(LEGACY) == (SUCCESS, NONE)


def test_synchronizing_the_context_during_a_capture_invalidates_it(
    cuda: Cuda, capturing: int
) -> None:
    assert cuda.lib.cuCtxSynchronize() == CAPTURE_UNSUPPORTED
    assert cuda.end_capture(capturing)[0] == CAPTURE_INVALIDATED


def test_an_unrelated_event_asked_by_another_thread_invalidates_a_global_capture(
    cuda: Cuda,
) -> None:
    event, stream = cuda.event(), cuda.stream()
    assert cuda.begin_capture(stream) == SUCCESS
    assert on_another_thread(cuda, lambda: cuda.query(event)) == CAPTURE_UNSUPPORTED
    assert cuda.end_capture(stream)[0] == CAPTURE_INVALIDATED


@pytest.mark.parametrize("mode", [THREAD_LOCAL, RELAXED])
def test_another_thread_of_a_weaker_mode_may_ask_allocate_and_pin(cuda: Cuda, mode: int) -> None:
    event, other, stream = cuda.event(), cuda.stream(), cuda.stream()
    assert cuda.begin_capture(stream) == SUCCESS

    def work() -> int:
        assert cuda.query(event) == SUCCESS
        assert cuda.synchronize(other) == SUCCESS
        assert cuda.free(cuda.alloc(64)) == SUCCESS
        return cuda.free_pinned(cuda.pinned(64))

    assert on_another_thread(cuda, work, mode) == SUCCESS
    assert cuda.end_capture(stream)[0] == SUCCESS


def test_a_capture_that_is_not_global_leaves_other_threads_alone(cuda: Cuda) -> None:
    event, stream = cuda.event(), cuda.stream()
    assert cuda.begin_capture(stream, THREAD_LOCAL) == SUCCESS
    assert on_another_thread(cuda, lambda: cuda.query(event)) == SUCCESS
    assert cuda.query(event) == CAPTURE_UNSUPPORTED
    assert cuda.end_capture(stream)[0] == CAPTURE_INVALIDATED


def test_a_relaxed_capture_leaves_its_own_thread_alone(cuda: Cuda) -> None:
    event, stream = cuda.event(), cuda.stream()
    assert cuda.begin_capture(stream, RELAXED) == SUCCESS
    assert cuda.query(event) == SUCCESS
    cuda.alloc(64)
    assert cuda.end_capture(stream)[0] == SUCCESS


def test_a_thread_in_relaxed_mode_may_ask_during_a_capture_of_its_own(cuda: Cuda) -> None:
    event, stream = cuda.event(), cuda.stream()
    assert cuda.begin_capture(stream) == SUCCESS
    former = cuda.exchange_mode(RELAXED)
    assert cuda.query(event) == SUCCESS
    cuda.exchange_mode(former)
    assert cuda.query(event) == CAPTURE_UNSUPPORTED
    assert cuda.end_capture(stream)[0] == CAPTURE_INVALIDATED


def test_the_mode_of_a_thread_is_exchanged_for_its_former_one(cuda: Cuda) -> None:
    assert cuda.exchange_mode(RELAXED) == GLOBAL
    assert cuda.exchange_mode(THREAD_LOCAL) == RELAXED
    assert on_another_thread(cuda, lambda: cuda.exchange_mode(RELAXED)) == GLOBAL


def test_a_stream_that_waits_for_a_captured_event_joins_the_capture(
    cuda: Cuda, capturing: int
) -> None:
    side, event = cuda.stream(), cuda.event()
    assert cuda.record(event, capturing) == SUCCESS
    assert cuda.wait(side, event) == SUCCESS
    assert cuda.capture_status(side) == (SUCCESS, ACTIVE)
    assert cuda.end_capture(side)[0] == CAPTURE_UNMATCHED
    assert cuda.record(event, side) == SUCCESS
    assert cuda.wait(capturing, event) == SUCCESS
    assert cuda.end_capture(capturing)[0] == SUCCESS
    assert cuda.capture_status(side) == (SUCCESS, NONE)


def test_a_capture_that_leaves_a_stream_behind_is_lost(cuda: Cuda, capturing: int) -> None:
    side, event = cuda.stream(), cuda.event()
    assert cuda.record(event, capturing) == SUCCESS
    assert cuda.wait(side, event) == SUCCESS
    assert cuda.end_capture(capturing) == (CAPTURE_UNJOINED, None)
    assert cuda.capture_status(side) == (SUCCESS, NONE)


def test_a_capture_may_not_wait_for_work_outside(cuda: Cuda, capturing: int) -> None:
    outside, event = cuda.stream(), cuda.event()
    assert cuda.record(event, outside) == SUCCESS
    assert cuda.wait(capturing, event) == CAPTURE_ISOLATION
    assert cuda.end_capture(capturing)[0] == CAPTURE_INVALIDATED


def test_two_captures_do_not_merge(cuda: Cuda) -> None:
    first, second, event = cuda.stream(), cuda.stream(), cuda.event()
    assert cuda.begin_capture(first) == SUCCESS
    assert cuda.begin_capture(second) == SUCCESS
    assert cuda.record(event, first) == SUCCESS
    assert cuda.wait(second, event) == CAPTURE_MERGE
    assert cuda.end_capture(first)[0] == CAPTURE_INVALIDATED
    assert cuda.end_capture(second)[0] == CAPTURE_INVALIDATED


def test_a_capture_ends_on_the_thread_that_began_it_unless_it_is_relaxed(
    cuda: Cuda, capturing: int
) -> None:
    relaxed = cuda.stream()
    assert cuda.begin_capture(relaxed, RELAXED) == SUCCESS
    assert on_another_thread(cuda, lambda: cuda.end_capture(capturing)[0]) == WRONG_THREAD
    assert on_another_thread(cuda, lambda: cuda.end_capture(relaxed)[0]) == SUCCESS


def test_the_legacy_stream_cannot_be_captured(cuda: Cuda) -> None:
    assert cuda.begin_capture(LEGACY) == CAPTURE_UNSUPPORTED
