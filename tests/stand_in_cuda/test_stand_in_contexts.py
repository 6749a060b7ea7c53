"""Initialization, and the context that each thread has or has not."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int, c_void_p

import pytest
from cuda_calls import (
    CONTEXT_IS_DESTROYED,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    NO_DEVICE,
    NOT_INITIALIZED,
    SUCCESS,
    Cuda,
    pageable,
)
from stand_in import StandIn

LoadStandIn = Callable[..., StandIn]


@pytest.fixture
def cuda(load_stand_in: LoadStandIn) -> Cuda:
    return Cuda(load_stand_in())


def on_another_thread(call: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(60)


def test_nothing_works_before_initialization(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(), initialize=False)
    count = c_int()
    assert cuda.lib.cuDeviceGetCount(byref(count)) == NOT_INITIALIZED
    assert cuda.lib.cuInit(0) == SUCCESS
    assert cuda.lib.cuDeviceGetCount(byref(count)) == SUCCESS
    assert count.value == 1


def test_a_machine_without_devices_refuses_initialization(load_stand_in: LoadStandIn) -> None:
    assert load_stand_in(devices=0).control.cuInit(0) == NO_DEVICE


def test_a_device_that_is_not_there_is_refused(cuda: Cuda) -> None:
    assert cuda.lib.cuDevicePrimaryCtxRetain(byref(c_void_p()), 1) == INVALID_DEVICE


def test_a_thread_without_a_context_cannot_call(cuda: Cuda) -> None:
    stream = cuda.stream()
    assert cuda.synchronize(stream) == SUCCESS
    assert on_another_thread(lambda: cuda.synchronize(stream)) == INVALID_CONTEXT


def test_setting_a_context_on_one_thread_leaves_the_others_as_they_are(cuda: Cuda) -> None:
    stream = cuda.stream()

    def set_and_synchronize() -> int:
        assert cuda.set_current(cuda.context) == SUCCESS
        return cuda.synchronize(stream)

    assert cuda.set_current(None) == SUCCESS
    assert on_another_thread(set_and_synchronize) == SUCCESS
    assert cuda.synchronize(stream) == INVALID_CONTEXT


def test_a_context_is_destroyed_by_its_last_release(cuda: Cuda) -> None:
    assert cuda.retain() == cuda.context
    stream = cuda.stream()
    assert cuda.release() == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert cuda.release() == SUCCESS
    assert cuda.synchronize(stream) == CONTEXT_IS_DESTROYED
    assert cuda.set_current(cuda.context) == CONTEXT_IS_DESTROYED
    assert cuda.driver.counts().streams == 0


def test_a_release_too_many_is_refused(cuda: Cuda) -> None:
    assert cuda.release() == SUCCESS
    assert cuda.release() == INVALID_CONTEXT


def test_a_destroyed_context_takes_its_streams_events_and_memory_along(cuda: Cuda) -> None:
    stream, event = cuda.stream(), cuda.event()
    cuda.alloc(64)
    cuda.pinned(64)
    assert cuda.release() == SUCCESS
    counts = cuda.driver.counts()
    assert (counts.streams, counts.events, counts.allocations, counts.pinned) == (0, 0, 0, 0)
    assert cuda.retain() == cuda.context
    assert cuda.synchronize(stream) == INVALID_HANDLE
    assert cuda.query(event) == INVALID_HANDLE


def test_a_destroyed_context_lets_its_streams_finish(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(order="latest"))
    stream = cuda.stream()
    buffer, host = pageable(4)
    assert cuda.register(host, 4) == SUCCESS
    device = cuda.alloc(4, b"page")
    assert cuda.to_host(host, device, 4, stream) == SUCCESS
    assert cuda.release() == SUCCESS
    assert buffer.raw == b"page"


def test_a_stream_and_an_event_of_two_contexts_do_not_go_together(
    load_stand_in: LoadStandIn,
) -> None:
    cuda = Cuda(load_stand_in(devices=2))
    event = cuda.event()
    assert cuda.set_current(cuda.retain(1)) == SUCCESS
    stream = cuda.stream()
    assert cuda.record(event, stream) == INVALID_HANDLE
    assert cuda.wait(stream, event) == SUCCESS


def test_a_forked_child_has_no_driver(cuda: Cuda) -> None:
    stream = cuda.stream()
    child = os.fork()
    if child == 0:
        os._exit(cuda.synchronize(stream))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == NOT_INITIALIZED
