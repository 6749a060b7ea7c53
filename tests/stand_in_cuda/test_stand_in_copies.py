"""Single copies: which ranges and pitches are refused, and when unpinned memory is read."""

from collections.abc import Callable

import pytest
from cuda_calls import (
    HOST,
    INVALID_HANDLE,
    INVALID_VALUE,
    SUCCESS,
    UNIFIED,
    CopyOf2D,
    Cuda,
    bytes_at,
    memory,
    pageable,
)
from stand_in import StandIn

LoadStandIn = Callable[..., StandIn]


@pytest.fixture
def cuda(load_stand_in: LoadStandIn) -> Cuda:
    return Cuda(load_stand_in())


@pytest.fixture
def late(load_stand_in: LoadStandIn) -> Cuda:
    return Cuda(load_stand_in(order="latest"))


def test_copies_move_bytes_both_ways_and_on_the_device(cuda: Cuda) -> None:
    stream, host = cuda.stream(), cuda.pinned(8, b"page....")
    first, second = cuda.alloc(4), cuda.alloc(4)
    assert cuda.to_device(first, host, 4, stream) == SUCCESS
    assert cuda.on_device(second, first, 4, stream) == SUCCESS
    assert cuda.to_host(host + 4, second, 4, stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(host, 8) == b"pagepage"
    assert cuda.copy(first, host + 2, 4, stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(first, 4) == b"gepa"


def test_a_copy_of_nothing_is_refused(cuda: Cuda) -> None:
    stream, host, device = cuda.stream(), cuda.pinned(8), cuda.alloc(8)
    assert cuda.to_device(device, host, 0, stream) == INVALID_VALUE
    assert cuda.load_2d(device, host, 0, 1, 4, 4, stream) == INVALID_VALUE
    assert cuda.load_2d(device, host, 4, 0, 4, 4, stream) == INVALID_VALUE


def test_a_copy_across_two_allocations_is_refused(cuda: Cuda) -> None:
    stream, host = cuda.stream(), cuda.pinned(1024)
    first, second = cuda.alloc(512), cuda.alloc(512)
    assert second == first + 512
    assert cuda.to_device(first, host, 512, stream) == SUCCESS
    assert cuda.to_device(first, host, 513, stream) == INVALID_VALUE
    assert cuda.to_host(host, first + 500, 24, stream) == INVALID_VALUE
    assert cuda.on_device(second, first + 1, 512, stream) == INVALID_VALUE
    assert cuda.fill(first + 511, 0, 2, stream) == INVALID_VALUE


def test_a_copy_across_two_registrations_is_refused(cuda: Cuda) -> None:
    stream, device = cuda.stream(), cuda.alloc(64)
    _buffer, host = pageable(64)
    assert cuda.register(host, 32) == SUCCESS
    assert cuda.register(host + 32, 32) == SUCCESS
    assert cuda.to_device(device, host, 32, stream) == SUCCESS
    assert cuda.to_device(device, host + 16, 32, stream) == INVALID_VALUE
    assert cuda.to_host(host + 31, device, 2, stream) == INVALID_VALUE
    cuda.driver.finish()


def test_a_copy_partly_outside_a_registration_is_refused(cuda: Cuda) -> None:
    stream, device = cuda.stream(), cuda.alloc(64)
    _buffer, host = pageable(64)
    assert cuda.register(host + 16, 32) == SUCCESS
    for begin, size in ((0, 17), (15, 2), (47, 2), (40, 24), (0, 64)):
        assert cuda.to_device(device, host + begin, size, stream) == INVALID_VALUE
    assert cuda.to_device(device, host, 16, stream) == SUCCESS
    cuda.driver.finish()


def test_host_memory_is_no_device_memory_and_the_other_way_round(cuda: Cuda) -> None:
    stream, host, device = cuda.stream(), cuda.pinned(8), cuda.alloc(8)
    assert cuda.to_device(host, device, 8, stream) == INVALID_VALUE
    assert cuda.to_host(device, device, 8, stream) == INVALID_VALUE
    assert cuda.on_device(device, host, 8, stream) == INVALID_VALUE


def test_a_copy_on_a_stream_that_is_not_there_is_refused(cuda: Cuda) -> None:
    host, device = cuda.pinned(8), cuda.alloc(8)
    assert cuda.to_device(device, host, 8, 12345) == INVALID_HANDLE


def test_rows_are_copied_with_a_pitch_on_either_side(cuda: Cuda) -> None:
    stream, host = cuda.stream(), cuda.pinned(12, b"aa..bb..cc..")
    device = cuda.alloc(9, b"." * 9)
    assert cuda.load_2d(device, host, 2, 3, 3, 4, stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(device, 9) == b"aa.bb.cc."


def test_offsets_of_a_2d_copy_count_bytes_and_rows(cuda: Cuda) -> None:
    stream, host, device = cuda.stream(), cuda.pinned(9, b"012345678"), cuda.alloc(4, b"....")
    copy = CopyOf2D(srcMemoryType=HOST, srcHost=host, srcPitch=3, srcXInBytes=1, srcY=1)
    copy.dstMemoryType, copy.dstDevice, copy.dstPitch = UNIFIED, device, 2
    copy.WidthInBytes, copy.Height = 2, 2
    assert cuda.copy_2d(copy, stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(device, 4) == b"4578"


def test_a_pitch_above_the_maximum_is_refused_on_either_side(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(max_pitch=64))
    stream, host, device = cuda.stream(), cuda.pinned(256), cuda.alloc(256)
    assert cuda.load_2d(device, host, 8, 3, 64, 64, stream) == SUCCESS
    assert cuda.load_2d(device, host, 8, 3, 65, 64, stream) == INVALID_VALUE
    assert cuda.load_2d(device, host, 8, 3, 64, 65, stream) == INVALID_VALUE
    assert cuda.load_2d(device, host, 8, 1, 64, 65, stream) == INVALID_VALUE


def test_a_pitch_below_the_width_is_refused_on_either_side(cuda: Cuda) -> None:
    stream, host, device = cuda.stream(), cuda.pinned(256), cuda.alloc(256)
    assert cuda.load_2d(device, host, 8, 3, 7, 8, stream) == INVALID_VALUE
    assert cuda.load_2d(device, host, 8, 3, 8, 7, stream) == INVALID_VALUE
    assert cuda.load_2d(device, host, 8, 3, 0, 8, stream) == INVALID_VALUE
    assert cuda.load_2d(device, host, 8, 1, 0, 0, stream) == SUCCESS


def test_rows_across_allocations_or_registrations_are_refused(cuda: Cuda) -> None:
    stream, pinned = cuda.stream(), cuda.pinned(1024)
    first, _second = cuda.alloc(512), cuda.alloc(512)
    assert cuda.load_2d(first, pinned, 8, 2, 504, 8, stream) == SUCCESS
    assert cuda.load_2d(first, pinned, 8, 2, 512, 8, stream) == INVALID_VALUE
    _buffer, host = pageable(64)
    assert cuda.register(host, 32) == SUCCESS
    assert cuda.register(host + 32, 32) == SUCCESS
    assert cuda.load_2d(first, host, 8, 2, 8, 24, stream) == SUCCESS
    assert cuda.load_2d(first, host, 8, 2, 8, 32, stream) == INVALID_VALUE
    cuda.driver.finish()


def test_pinned_memory_is_read_when_the_stream_gets_there(late: Cuda) -> None:
    stream, host, device = late.stream(), late.pinned(4, b"old!"), late.alloc(4)
    assert late.to_device(device, host, 4, stream) == SUCCESS
    memory(host, 4)[:] = b"new!"
    assert late.synchronize(stream) == SUCCESS
    assert bytes_at(device, 4) == b"new!"


def test_unpinned_memory_is_read_at_the_call(late: Cuda) -> None:
    stream, device = late.stream(), late.alloc(4)
    buffer, host = pageable(4, b"old!")
    assert late.to_device(device, host, 4, stream) == SUCCESS
    buffer.raw = b"new!"
    assert late.synchronize(stream) == SUCCESS
    assert bytes_at(device, 4) == b"old!"


def test_a_copy_to_unpinned_memory_waits_until_it_is_done(late: Cuda) -> None:
    stream, device = late.stream(), late.alloc(4, b"page")
    buffer, host = pageable(4)
    assert late.to_host(host, device, 4, stream) == SUCCESS
    assert buffer.raw == b"page"
    late.driver.host_read(host, 4)
    assert late.driver.findings() == []


def test_copies_and_their_bytes_are_counted(cuda: Cuda) -> None:
    stream, host, device = cuda.stream(), cuda.pinned(64), cuda.alloc(64)
    assert cuda.to_device(device, host, 10, stream) == SUCCESS
    assert cuda.load_2d(device, host, 4, 3, 8, 8, stream) == SUCCESS
    assert cuda.batch([(device, host, 1), (device + 1, host + 1, 2)], stream) == SUCCESS
    counts = cuda.driver.counts()
    assert (counts.copies, counts.copied_bytes) == (4, 10 + 12 + 3)
