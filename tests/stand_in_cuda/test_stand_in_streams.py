"""Streams: when they run what is enqueued, what waits for what, and the queue that fills up."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, c_void_p

import pytest
from cuda_calls import (
    BLOCKING,
    INVALID_HANDLE,
    LEGACY,
    NOT_PERMITTED,
    NOT_READY,
    PER_THREAD,
    SUCCESS,
    Cuda,
    bytes_at,
)
from stand_in import StandIn

LoadStandIn = Callable[..., StandIn]
HostFunction = CFUNCTYPE(None, c_void_p)


@pytest.fixture
def cuda(load_stand_in: LoadStandIn) -> Cuda:
    return Cuda(load_stand_in())


@pytest.fixture
def late(load_stand_in: LoadStandIn) -> Cuda:
    """A driver whose streams run as late as they may."""
    return Cuda(load_stand_in(order="latest"))


def test_an_eager_stream_runs_without_being_asked(cuda: Cuda) -> None:
    device = cuda.alloc(4, b"....")
    assert cuda.fill(device, ord("x"), 4, cuda.stream()) == SUCCESS
    cuda.driver.settle()
    assert bytes_at(device, 4) == b"xxxx"


def test_a_late_stream_does_nothing_until_somebody_synchronizes(late: Cuda) -> None:
    stream, device = late.stream(), late.alloc(4, b"....")
    assert late.fill(device, ord("x"), 4, stream) == SUCCESS
    late.driver.settle()
    assert bytes_at(device, 4) == b"...."
    assert late.synchronize(stream) == SUCCESS
    assert bytes_at(device, 4) == b"xxxx"


def test_a_late_stream_runs_once_it_has_been_asked_how_far_it_is(late: Cuda) -> None:
    stream, device = late.stream(), late.alloc(4, b"....")
    assert late.fill(device, ord("x"), 4, stream) == SUCCESS
    assert late.query_stream(stream) == NOT_READY
    late.driver.settle()
    assert late.query_stream(stream) == SUCCESS
    assert bytes_at(device, 4) == b"xxxx"


def test_a_late_stream_runs_no_further_than_it_is_asked_to(late: Cuda) -> None:
    stream, event, device = late.stream(), late.event(), late.alloc(4, b"....")
    assert late.fill(device, ord("x"), 2, stream) == SUCCESS
    assert late.record(event, stream) == SUCCESS
    assert late.fill(device + 2, ord("y"), 2, stream) == SUCCESS
    assert late.synchronize_event(event) == SUCCESS
    late.driver.settle()
    assert bytes_at(device, 4) == b"xx.."


def test_waiting_for_a_late_stream_runs_the_streams_that_it_waits_for(late: Cuda) -> None:
    first, second, third = late.stream(), late.stream(), late.stream()
    event, device = late.event(), late.alloc(2, b"..")
    assert late.fill(device, ord("x"), 1, first) == SUCCESS
    assert late.record(event, first) == SUCCESS
    assert late.wait(second, event) == SUCCESS
    assert late.fill(device + 1, ord("z"), 1, third) == SUCCESS
    assert late.synchronize(second) == SUCCESS
    late.driver.settle()
    assert bytes_at(device, 2) == b"x."


def test_random_order_runs_some_operations_early_and_some_late(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(order="random", seed=3))
    device = cuda.alloc(64, b"." * 64)
    for i in range(64):
        assert cuda.fill(device + i, ord("x"), 1, cuda.stream()) == SUCCESS
    cuda.driver.settle()
    assert 8 < bytes_at(device, 64).count(b"x") < 56


def test_random_order_is_the_same_for_the_same_seed(load_stand_in: LoadStandIn) -> None:
    def run(seed: int) -> bytes:
        cuda = Cuda(load_stand_in(order="random", seed=seed))
        device = cuda.alloc(64, b"." * 64)
        for i in range(64):
            assert cuda.fill(device + i, ord("x"), 1, cuda.stream()) == SUCCESS
        cuda.driver.settle()
        return bytes_at(device, 64)

    assert run(1) == run(1) != run(2)


def test_work_on_one_stream_runs_in_its_order(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(order="random"))
    stream, device = cuda.stream(), cuda.alloc(1)
    for value in range(100):
        assert cuda.fill(device, value, 1, stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(device, 1) == bytes([99])


def test_a_stalled_stream_stands_until_it_is_released(cuda: Cuda) -> None:
    stream, device = cuda.stream(), cuda.alloc(1, b".")
    with cuda.driver.stall(stream):
        assert cuda.fill(device, ord("x"), 1, stream) == SUCCESS
        cuda.driver.settle()
        assert cuda.query_stream(stream) == NOT_READY
        assert bytes_at(device, 1) == b"."
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(device, 1) == b"x"


def test_a_full_queue_blocks_the_call_until_an_operation_retires(
    load_stand_in: LoadStandIn,
) -> None:
    cuda = Cuda(load_stand_in(queue_depth=4))
    stream, device = cuda.stream(), cuda.alloc(8, b"." * 8)

    def enqueue_another() -> int:
        assert cuda.set_current(cuda.context) == SUCCESS
        return cuda.fill(device + 3, ord("x"), 1, stream)

    with ThreadPoolExecutor(1) as pool, cuda.driver.stall(stream) as stall:
        for i in range(3):
            assert cuda.fill(device + i, ord("x"), 1, stream) == SUCCESS
        fifth = pool.submit(enqueue_another)
        deadline = time.monotonic() + 60
        while cuda.driver.count("cuMemsetD8Async") < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not fifth.done()
        stall.release()
        assert fifth.result(60) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(device, 8) == b"xxxx...."


def test_a_full_queue_lets_a_late_stream_run(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(order="latest", queue_depth=2))
    stream, device = cuda.stream(), cuda.alloc(8, b"." * 8)
    for i in range(5):
        assert cuda.fill(device + i, ord("x"), 1, stream) == SUCCESS
    cuda.driver.settle()
    assert bytes_at(device, 8) == b"xxx....."


def test_a_destroyed_stream_is_unknown_and_its_work_is_still_done(late: Cuda) -> None:
    stream, event, device = late.stream(), late.event(), late.alloc(1, b".")
    assert late.fill(device, ord("x"), 1, stream) == SUCCESS
    assert late.record(event, stream) == SUCCESS
    assert late.destroy_stream(stream) == SUCCESS
    assert late.fill(device, ord("y"), 1, stream) == INVALID_HANDLE
    assert late.synchronize(stream) == INVALID_HANDLE
    assert late.destroy_stream(stream) == INVALID_HANDLE
    assert late.synchronize_event(event) == SUCCESS
    assert bytes_at(device, 1) == b"x"


def test_the_legacy_stream_and_a_blocking_one_wait_for_each_other(late: Cuda) -> None:
    blocking, device = late.stream(BLOCKING), late.alloc(3, b"...")
    assert late.fill(device, ord("a"), 3, blocking) == SUCCESS
    assert late.fill(device, ord("b"), 2, LEGACY) == SUCCESS
    assert late.fill(device, ord("c"), 1, blocking) == SUCCESS
    assert late.synchronize(blocking) == SUCCESS
    assert bytes_at(device, 3) == b"cba"
    assert late.driver.findings() == []


def test_the_legacy_stream_waits_for_a_blocking_one_that_is_destroyed(late: Cuda) -> None:
    blocking, device = late.stream(BLOCKING), late.alloc(1, b".")
    assert late.fill(device, ord("a"), 1, blocking) == SUCCESS
    assert late.destroy_stream(blocking) == SUCCESS
    assert late.fill(device, ord("b"), 1, LEGACY) == SUCCESS
    assert late.synchronize(LEGACY) == SUCCESS
    assert bytes_at(device, 1) == b"b"
    assert late.driver.findings() == []


def test_the_legacy_stream_and_a_non_blocking_one_do_not(late: Cuda) -> None:
    stream, device = late.stream(), late.alloc(2, b"..")
    assert late.fill(device, ord("a"), 1, LEGACY) == SUCCESS
    assert late.fill(device + 1, ord("b"), 1, stream) == SUCCESS
    assert late.synchronize(stream) == SUCCESS
    late.driver.settle()
    assert bytes_at(device, 2) == b".b"


def test_synchronizing_the_legacy_stream_includes_the_blocking_ones(late: Cuda) -> None:
    blocking, device = late.stream(BLOCKING), late.alloc(1, b".")
    assert late.fill(device, ord("x"), 1, blocking) == SUCCESS
    assert late.synchronize(0) == SUCCESS
    assert bytes_at(device, 1) == b"x"


def test_each_thread_has_a_default_stream_of_its_own(cuda: Cuda) -> None:
    device = cuda.alloc(2, b"..")

    def fill_on_its_own() -> int:
        assert cuda.set_current(cuda.context) == SUCCESS
        assert cuda.fill(device + 1, ord("y"), 1, PER_THREAD) == SUCCESS
        return cuda.synchronize(PER_THREAD)

    with ThreadPoolExecutor(1) as pool, cuda.driver.stall(PER_THREAD):
        assert cuda.fill(device, ord("x"), 1, PER_THREAD) == SUCCESS
        assert pool.submit(fill_on_its_own).result(60) == SUCCESS
        assert bytes_at(device, 2) == b".y"


def test_a_host_function_runs_in_stream_order_and_may_not_call_the_driver(cuda: Cuda) -> None:
    stream, device = cuda.stream(), cuda.alloc(1, b".")
    seen: list[tuple[bytes, int]] = []

    @HostFunction
    def look(_: object) -> None:
        seen.append((bytes_at(device, 1), cuda.synchronize(stream)))

    assert cuda.fill(device, ord("x"), 1, stream) == SUCCESS
    assert cuda.lib.cuLaunchHostFunc(c_void_p(stream), look, None) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert seen == [(b"x", NOT_PERMITTED)]
