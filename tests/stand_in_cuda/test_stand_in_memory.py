"""Allocations and registrations: what is known, what is refused, what is given back too early."""

from collections.abc import Callable
from ctypes import byref, c_size_t, c_uint, c_uint64

import pytest
from cuda_calls import (
    ALREADY_REGISTERED,
    DEVICE,
    HOST,
    INVALID_VALUE,
    NOT_FOUND,
    NOT_REGISTERED,
    OUT_OF_MEMORY,
    SUCCESS,
    Cuda,
    bytes_at,
    pageable,
)
from stand_in import StandIn, StandInError

LoadStandIn = Callable[..., StandIn]

MEMORY_TYPE, RANGE_START, RANGE_SIZE = 2, 11, 12


@pytest.fixture
def cuda(load_stand_in: LoadStandIn) -> Cuda:
    return Cuda(load_stand_in())


def memory_type(cuda: Cuda, address: int) -> tuple[int, int]:
    kind = c_uint()
    code = cuda.lib.cuPointerGetAttribute(byref(kind), MEMORY_TYPE, c_uint64(address))
    return code, kind.value


def test_device_allocations_lie_side_by_side_and_full_of_junk(cuda: Cuda) -> None:
    first, second = cuda.alloc(512), cuda.alloc(512)
    assert second == first + 512
    assert bytes_at(second, 512) == b"\xa5" * 512


def test_addresses_are_not_given_out_twice(cuda: Cuda) -> None:
    first = cuda.alloc(4096)
    assert cuda.free(first) == SUCCESS
    assert cuda.alloc(4096) != first


def test_allocating_nothing_or_more_than_there_is_is_refused(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(memory=1 << 16))
    assert cuda.try_alloc(0)[0] == INVALID_VALUE
    cuda.alloc(1 << 15)
    assert cuda.try_alloc((1 << 15) + 1)[0] == OUT_OF_MEMORY


def test_freeing_what_does_not_begin_there_is_refused(cuda: Cuda) -> None:
    device, host = cuda.alloc(64), cuda.pinned(64)
    assert cuda.free(device + 1) == INVALID_VALUE
    assert cuda.free(host) == INVALID_VALUE
    assert cuda.free_pinned(device) == INVALID_VALUE
    assert cuda.free(device) == SUCCESS
    assert cuda.free(device) == INVALID_VALUE
    assert cuda.free_pinned(host) == SUCCESS
    assert cuda.free_pinned(host) == INVALID_VALUE


def test_registering_what_is_registered_is_refused(cuda: Cuda) -> None:
    _buffer, address = pageable(300)
    assert cuda.register(address + 100, 100) == SUCCESS
    for begin, size in ((100, 100), (0, 300), (50, 51), (199, 1)):
        assert cuda.register(address + begin, size) == ALREADY_REGISTERED
    assert cuda.register(address, 100) == SUCCESS
    assert cuda.register(address + 200, 100) == SUCCESS


def test_unregistering_what_is_not_registered_is_refused(cuda: Cuda) -> None:
    _buffer, address = pageable(64)
    assert cuda.unregister(address) == NOT_REGISTERED
    assert cuda.register(address, 64) == SUCCESS
    assert cuda.unregister(address + 1) == NOT_REGISTERED
    assert cuda.unregister(address) == SUCCESS
    assert cuda.unregister(address) == NOT_REGISTERED
    assert cuda.unregister(cuda.pinned(64)) == NOT_REGISTERED


def test_registrations_are_counted_both_ways(cuda: Cuda) -> None:
    _buffer, address = pageable(64)
    assert cuda.register(address, 32) == SUCCESS
    assert cuda.register(address + 32, 32) == SUCCESS
    assert cuda.register(address, 64) == ALREADY_REGISTERED
    assert cuda.unregister(address) == SUCCESS
    counts = cuda.driver.counts()
    assert (counts.registered, counts.unregistered, counts.registrations) == (2, 1, 1)


def test_registered_memory_has_its_own_address_on_the_device(cuda: Cuda) -> None:
    _buffer, address = pageable(64)
    assert cuda.device_pointer(address)[0] == INVALID_VALUE
    assert cuda.register(address, 64) == SUCCESS
    assert cuda.device_pointer(address + 8) == (SUCCESS, address + 8)


def test_a_device_may_know_registered_memory_by_an_alias_only(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(host_pointers=0))
    stream, device = cuda.stream(), cuda.alloc(4)
    _buffer, address = pageable(64, b"page")
    assert cuda.register(address, 64) == SUCCESS
    code, alias = cuda.device_pointer(address)
    assert code == SUCCESS
    assert alias != address
    assert cuda.batch([(device, address, 4)], stream) == INVALID_VALUE
    assert cuda.to_device(device, alias, 4, stream) == INVALID_VALUE
    assert cuda.batch([(device, alias, 4)], stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(device, 4) == b"page"
    assert cuda.to_device(device, address, 4, stream) == SUCCESS
    cuda.driver.finish()


def test_pointers_say_what_they_point_to(cuda: Cuda) -> None:
    device = cuda.alloc(64)
    _buffer, address = pageable(64)
    assert memory_type(cuda, device + 63) == (SUCCESS, DEVICE)
    assert memory_type(cuda, cuda.pinned(64)) == (SUCCESS, HOST)
    assert memory_type(cuda, address)[0] == INVALID_VALUE
    start, size = c_uint64(), c_size_t()
    assert cuda.lib.cuPointerGetAttribute(byref(start), RANGE_START, c_uint64(device + 9)) == 0
    assert cuda.lib.cuPointerGetAttribute(byref(size), RANGE_SIZE, c_uint64(device + 9)) == 0
    assert (start.value, size.value) == (device, 64)


def test_the_range_of_an_allocation_is_told_and_of_nothing_else(cuda: Cuda) -> None:
    device = cuda.alloc(64)
    base, size = c_uint64(), c_size_t()
    lookup = cuda.lib.cuMemGetAddressRange_v2
    assert lookup(byref(base), byref(size), c_uint64(device + 5)) == SUCCESS
    assert (base.value, size.value) == (device, 64)
    assert lookup(byref(base), byref(size), c_uint64(cuda.pinned(8))) == NOT_FOUND


def test_memory_of_a_test_can_stand_for_device_memory(cuda: Cuda) -> None:
    _buffer, address = pageable(64)
    assert cuda.fill(address, 1, 64, cuda.stream()) == INVALID_VALUE
    cuda.driver.adopt(address, 64)
    stream = cuda.stream()
    assert cuda.fill(address, 1, 64, stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    with pytest.raises(StandInError, match="knows a byte of"):
        cuda.driver.adopt(address + 63, 1)
    assert cuda.free(address) == INVALID_VALUE
    cuda.driver.disown(address)
    assert cuda.fill(address, 1, 64, stream) == INVALID_VALUE
    assert cuda.driver.findings() == []


def test_freeing_memory_that_may_still_be_written_is_found(cuda: Cuda) -> None:
    stream, device = cuda.stream(), cuda.alloc(64)
    assert cuda.fill(device, 1, 64, stream) == SUCCESS
    assert cuda.free(device) == SUCCESS
    (finding,) = cuda.driver.findings()
    assert "cuMemFree" in finding
    assert "cuMemsetD8Async" in finding


def test_unregistering_memory_that_may_still_be_read_is_found(cuda: Cuda) -> None:
    stream, device = cuda.stream(), cuda.alloc(64)
    _buffer, address = pageable(64)
    assert cuda.register(address, 64) == SUCCESS
    assert cuda.to_device(device, address, 64, stream) == SUCCESS
    assert cuda.unregister(address) == SUCCESS
    (finding,) = cuda.driver.findings()
    assert "cuMemHostUnregister" in finding
    cuda.driver.finish()


def test_giving_memory_back_after_synchronizing_is_right(cuda: Cuda) -> None:
    stream, device = cuda.stream(), cuda.alloc(64)
    _buffer, address = pageable(64)
    assert cuda.register(address, 64) == SUCCESS
    assert cuda.to_device(device, address, 64, stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert cuda.unregister(address) == SUCCESS
    assert cuda.free(device) == SUCCESS
    assert cuda.driver.findings() == []


def test_work_on_memory_freed_too_early_still_finds_it(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(order="latest"))
    stream, first, second = cuda.stream(), cuda.alloc(8192), cuda.alloc(8192)
    assert cuda.on_device(second, first, 8192, stream) == SUCCESS
    assert cuda.free(first) == SUCCESS
    assert cuda.free(second) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert len(cuda.driver.findings()) == 2
