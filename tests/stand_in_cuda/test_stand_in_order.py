"""The checker: a program without an order between two accesses is reported, the right one is not.

Each pair of tests is one program, once as it should be and once with something left out.
"""

from collections.abc import Callable
from ctypes import CFUNCTYPE, c_void_p
from threading import Event

import pytest
from cuda_calls import (
    ANY,
    BLOCKING,
    DURING_API_CALL,
    LEGACY,
    NON_BLOCKING,
    NOT_READY,
    SUCCESS,
    Cuda,
    pageable,
)
from stand_in import ORDERS, Order, StandIn

LoadStandIn = Callable[..., StandIn]
HostFunction = CFUNCTYPE(None, c_void_p)


@pytest.fixture(params=ORDERS)
def cuda(load_stand_in: LoadStandIn, request: pytest.FixtureRequest) -> Cuda:
    """The checker says the same, however the streams happen to run."""
    order: Order = request.param
    return Cuda(load_stand_in(order=order))


def produce_and_consume(cuda: Cuda, *, wait: bool) -> None:
    """One stream fills a page, another one copies it to the host."""
    producer, consumer, event = cuda.stream(), cuda.stream(), cuda.event()
    page, host = cuda.alloc(64), cuda.pinned(64)
    assert cuda.fill(page, 1, 64, producer) == SUCCESS
    assert cuda.record(event, producer) == SUCCESS
    if wait:
        assert cuda.wait(consumer, event) == SUCCESS
    assert cuda.to_host(host, page, 64, consumer) == SUCCESS
    assert cuda.synchronize(consumer) == SUCCESS
    assert cuda.synchronize(producer) == SUCCESS


def test_a_missing_event_wait_is_reported(cuda: Cuda) -> None:
    produce_and_consume(cuda, wait=False)
    (finding,) = cuda.driver.findings()
    assert "cuMemcpyDtoHAsync" in finding
    assert "cuMemsetD8Async" in finding
    assert "reads" in finding
    assert "writes" in finding


def test_a_program_with_its_event_wait_is_not(cuda: Cuda) -> None:
    produce_and_consume(cuda, wait=True)
    assert cuda.driver.findings() == []


def test_an_event_recorded_before_the_work_orders_nothing(cuda: Cuda) -> None:
    producer, consumer, event, page = cuda.stream(), cuda.stream(), cuda.event(), cuda.alloc(64)
    assert cuda.record(event, producer) == SUCCESS
    assert cuda.fill(page, 1, 64, producer) == SUCCESS
    assert cuda.wait(consumer, event) == SUCCESS
    assert cuda.fill(page, 2, 64, consumer) == SUCCESS
    assert len(cuda.driver.findings()) == 1


def test_a_wait_on_an_event_never_recorded_orders_nothing(cuda: Cuda) -> None:
    producer, consumer, event, page = cuda.stream(), cuda.stream(), cuda.event(), cuda.alloc(64)
    assert cuda.fill(page, 1, 64, producer) == SUCCESS
    assert cuda.wait(consumer, event) == SUCCESS
    assert cuda.record(event, producer) == SUCCESS
    assert cuda.fill(page, 2, 64, consumer) == SUCCESS
    assert len(cuda.driver.findings()) == 1


def test_orders_are_passed_on_from_stream_to_stream(cuda: Cuda) -> None:
    streams = [cuda.stream() for _ in range(4)]
    events = [cuda.event() for _ in range(4)]
    page = cuda.alloc(64)
    for i, stream in enumerate(streams):
        if i > 0:
            assert cuda.wait(stream, events[i - 1]) == SUCCESS
        if i in (0, 3):
            assert cuda.fill(page, i, 64, stream) == SUCCESS
        assert cuda.record(events[i], stream) == SUCCESS
    assert cuda.driver.findings() == []


def test_two_reads_need_no_order(cuda: Cuda) -> None:
    page = cuda.alloc(64)
    for _ in range(2):
        assert cuda.to_host(cuda.pinned(64), page, 64, cuda.stream()) == SUCCESS
    assert cuda.driver.findings() == []


def test_a_write_needs_an_order_after_every_read(cuda: Cuda) -> None:
    page = cuda.alloc(64)
    streams = [cuda.stream() for _ in range(3)]
    for stream in streams[:2]:
        assert cuda.to_host(cuda.pinned(64), page, 64, stream) == SUCCESS
    assert cuda.fill(page, 1, 64, streams[2]) == SUCCESS
    assert len(cuda.driver.findings()) == 2


def test_only_the_same_bytes_need_an_order(cuda: Cuda) -> None:
    page = cuda.alloc(64)
    assert cuda.fill(page, 1, 32, cuda.stream()) == SUCCESS
    assert cuda.fill(page + 32, 1, 32, cuda.stream()) == SUCCESS
    assert cuda.driver.findings() == []
    assert cuda.fill(page + 31, 1, 1, cuda.stream()) == SUCCESS
    assert len(cuda.driver.findings()) == 1


def test_only_the_rows_of_a_2d_copy_are_touched(cuda: Cuda) -> None:
    host, page = cuda.pinned(64), cuda.alloc(64)
    assert cuda.load_2d(page, host, 8, 4, 16, 8, cuda.stream()) == SUCCESS
    assert cuda.load_2d(page + 8, host, 8, 3, 16, 8, cuda.stream()) == SUCCESS
    assert cuda.driver.findings() == []
    assert cuda.fill(page + 16, 1, 1, cuda.stream()) == SUCCESS
    assert len(cuda.driver.findings()) == 1


def test_synchronizing_orders_what_is_enqueued_afterwards(cuda: Cuda) -> None:
    first, second, page = cuda.stream(), cuda.stream(), cuda.alloc(64)
    assert cuda.fill(page, 1, 64, first) == SUCCESS
    assert cuda.synchronize(first) == SUCCESS
    assert cuda.fill(page, 2, 64, second) == SUCCESS
    assert cuda.driver.findings() == []


def test_an_event_that_is_seen_to_be_done_orders_and_one_not_ready_does_not(cuda: Cuda) -> None:
    first, second, event, page = cuda.stream(), cuda.stream(), cuda.event(), cuda.alloc(64)
    with cuda.driver.stall(first):
        assert cuda.fill(page, 1, 64, first) == SUCCESS
        assert cuda.record(event, first) == SUCCESS
        assert cuda.query(event) == NOT_READY
        assert cuda.fill(page, 2, 1, second) == SUCCESS
    assert len(cuda.driver.findings()) == 1
    cuda.driver.settle()
    assert cuda.query(event) == SUCCESS
    assert cuda.fill(page + 1, 2, 63, second) == SUCCESS
    assert len(cuda.driver.findings()) == 1


def test_copies_of_one_batch_have_no_order_among_themselves(cuda: Cuda) -> None:
    stream, host, page = cuda.stream(), cuda.pinned(64), cuda.alloc(64)
    assert cuda.batch([(page, host, 8), (page + 8, host, 8)], stream) == SUCCESS
    assert cuda.driver.findings() == []
    assert cuda.batch([(page, host, 8), (page + 7, host + 8, 8)], stream) == SUCCESS
    (finding,) = cuda.driver.findings()
    assert "more than once" in finding


def test_two_batches_of_one_stream_are_in_order(cuda: Cuda) -> None:
    stream, host, page = cuda.stream(), cuda.pinned(64), cuda.alloc(64)
    for _ in range(2):
        assert cuda.batch([(page, host, 8), (page + 8, host, 8)], stream) == SUCCESS
    assert cuda.driver.findings() == []


@pytest.mark.parametrize("order", [ANY, DURING_API_CALL])
def test_a_source_of_any_order_is_not_behind_earlier_work_on_its_stream(
    cuda: Cuda, order: int
) -> None:
    stream, first, second = cuda.stream(), cuda.alloc(64), cuda.alloc(64)
    assert cuda.fill(first, 1, 64, stream) == SUCCESS
    assert cuda.batch([(second, first, 64)], stream, orders=[order]) == SUCCESS
    assert len(cuda.driver.findings()) == 1


def test_a_source_read_during_the_call_may_change_after_it_and_one_of_any_order_may_not(
    cuda: Cuda,
) -> None:
    stream, page = cuda.stream(), cuda.alloc(64)
    _buffer, host = pageable(64)
    assert cuda.batch([(page, host, 64)], stream, orders=[DURING_API_CALL]) == SUCCESS
    cuda.driver.host_write(host, 64)
    assert cuda.driver.findings() == []
    assert cuda.batch([(page, host, 64)], stream, orders=[ANY]) == SUCCESS
    cuda.driver.host_write(host, 64)
    assert len(cuda.driver.findings()) == 1
    cuda.driver.finish()


def test_unpinned_memory_is_not_the_hosts_before_its_copy_is_done(cuda: Cuda) -> None:
    stream, page = cuda.stream(), cuda.alloc(64)
    _buffer, host = pageable(64)
    assert cuda.to_device(page, host, 64, stream) == SUCCESS
    cuda.driver.host_write(host, 64)
    assert len(cuda.driver.findings()) == 1
    cuda.driver.finish()


def test_the_host_may_read_only_what_it_has_waited_for(cuda: Cuda) -> None:
    stream, host, page = cuda.stream(), cuda.pinned(64), cuda.alloc(64)
    assert cuda.to_host(host, page, 64, stream) == SUCCESS
    cuda.driver.host_read(host, 64)
    assert len(cuda.driver.findings()) == 1
    assert cuda.synchronize(stream) == SUCCESS
    cuda.driver.host_read(host, 64)
    assert len(cuda.driver.findings()) == 1


def test_what_the_host_wrote_before_a_call_is_ordered_before_its_work(cuda: Cuda) -> None:
    stream, host, page = cuda.stream(), cuda.pinned(64), cuda.alloc(64)
    cuda.driver.host_write(host, 64)
    assert cuda.to_device(page, host, 64, stream) == SUCCESS
    assert cuda.driver.findings() == []
    cuda.driver.host_read(host, 64)
    assert cuda.driver.findings() == []
    cuda.driver.host_write(host, 64)
    assert len(cuda.driver.findings()) == 1


@pytest.mark.parametrize(("flags", "findings"), [(BLOCKING, 0), (NON_BLOCKING, 2)])
def test_the_legacy_stream_orders_blocking_streams_and_no_others(
    cuda: Cuda, flags: int, findings: int
) -> None:
    stream, page = cuda.stream(flags), cuda.alloc(64)
    assert cuda.fill(page, 1, 64, stream) == SUCCESS
    assert cuda.fill(page, 2, 64, LEGACY) == SUCCESS
    assert cuda.fill(page, 3, 64, stream) == SUCCESS
    assert len(cuda.driver.findings()) == findings


def test_a_host_function_knows_what_its_stream_has_done(cuda: Cuda) -> None:
    stream, host, page = cuda.stream(), cuda.pinned(64), cuda.alloc(64)

    @HostFunction
    def read(_: object) -> None:
        cuda.driver.host_read(host, 64)

    assert cuda.to_host(host, page, 64, stream) == SUCCESS
    assert cuda.lib.cuLaunchHostFunc(c_void_p(stream), read, None) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert cuda.driver.findings() == []


def test_the_rest_of_the_host_learns_nothing_from_a_host_function(cuda: Cuda) -> None:
    stream, page = cuda.stream(), cuda.alloc(64)
    done = Event()

    @HostFunction
    def tell(_: object) -> None:
        done.set()

    assert cuda.fill(page, 1, 64, stream) == SUCCESS
    assert cuda.lib.cuLaunchHostFunc(c_void_p(stream), tell, None) == SUCCESS
    cuda.driver.finish()
    assert done.is_set()
    assert cuda.fill(page, 2, 64, cuda.stream()) == SUCCESS
    assert len(cuda.driver.findings()) == 1


def test_a_kernel_of_the_test_is_work_like_any_other(cuda: Cuda) -> None:
    transfer, forward, event = cuda.stream(), cuda.stream(), cuda.event()
    host, page = cuda.pinned(64), cuda.alloc(64)
    cuda.driver.touch(forward, page, 64, write=False)
    assert cuda.to_device(page, host, 64, transfer) == SUCCESS
    assert len(cuda.driver.findings()) == 1
    assert cuda.record(event, transfer) == SUCCESS
    assert cuda.wait(forward, event) == SUCCESS
    cuda.driver.touch(forward, page, 64, write=True)
    assert len(cuda.driver.findings()) == 1


def test_memory_given_back_and_taken_again_has_no_past(cuda: Cuda) -> None:
    _buffer, address = pageable(64)
    cuda.driver.adopt(address, 64)
    stream = cuda.stream()
    assert cuda.fill(address, 1, 64, stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    cuda.driver.disown(address)
    cuda.driver.adopt(address, 64)
    assert cuda.fill(address, 1, 64, cuda.stream()) == SUCCESS
    assert cuda.driver.findings() == []
    cuda.driver.finish()


def test_a_new_stream_is_not_taken_for_a_destroyed_one(cuda: Cuda) -> None:
    page, another = cuda.alloc(64), cuda.alloc(64)
    first = cuda.stream()
    assert cuda.fill(page, 1, 64, first) == SUCCESS
    assert cuda.destroy_stream(first) == SUCCESS
    second = cuda.stream()
    assert cuda.fill(another, 2, 64, second) == SUCCESS
    assert cuda.fill(page, 2, 64, second) == SUCCESS
    assert len(cuda.driver.findings()) == 1


def test_a_pair_of_calls_is_reported_once(cuda: Cuda) -> None:
    host, page = cuda.pinned(64), cuda.alloc(64)
    copies = [(page + i, host + i, 1) for i in range(64)]
    assert cuda.batch(copies, cuda.stream()) == SUCCESS
    assert cuda.batch(copies, cuda.stream()) == SUCCESS
    assert len(cuda.driver.findings()) == 1


def test_the_checker_can_be_switched_off(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(checker=0))
    produce_and_consume(cuda, wait=False)
    assert cuda.driver.findings() == []
