"""Batches: no order inside, strict attributes, and the streams that refuse them."""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_size_t, c_uint64, c_void_p

import pytest
from cuda_calls import (
    ANY,
    DURING_API_CALL,
    INVALID_VALUE,
    LEGACY,
    STREAM_ORDER,
    SUCCESS,
    Attributes,
    Copy3D,
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


def test_a_batch_copies_all_its_entries(cuda: Cuda) -> None:
    stream, host, device = cuda.stream(), cuda.pinned(6, b"abcdef"), cuda.alloc(6, b"......")
    assert cuda.batch([(device + 4, host, 2), (device, host + 3, 3)], stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(device, 6) == b"def.ab"


def test_copies_in_a_batch_run_in_an_order_of_their_own(cuda: Cuda) -> None:
    stream, host, device = cuda.stream(), cuda.pinned(64, bytes(range(64))), cuda.alloc(1)
    last = set()
    for _ in range(20):
        assert cuda.batch([(device, host + i, 1) for i in range(64)], stream) == SUCCESS
        assert cuda.synchronize(stream) == SUCCESS
        last.add(bytes_at(device, 1))
    assert len(last) > 5


def test_the_legacy_stream_refuses_batches(cuda: Cuda) -> None:
    host, device = cuda.pinned(4), cuda.alloc(4)
    for stream in (0, LEGACY):
        assert cuda.batch([(device, host, 4)], stream) == INVALID_VALUE
        assert cuda.batch_3d([Copy3D(device, host, 4)], stream) == INVALID_VALUE


def test_an_empty_batch_and_an_empty_copy_are_refused(cuda: Cuda) -> None:
    stream, host, device = cuda.stream(), cuda.pinned(4), cuda.alloc(4)
    assert cuda.batch([], stream) == INVALID_VALUE
    assert cuda.batch([(device, host, 0)], stream) == INVALID_VALUE


def test_a_batch_above_the_cap_is_refused(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(batch_cap=8))
    stream, host, device = cuda.stream(), cuda.pinned(16), cuda.alloc(16)
    copies = [(device + i, host + i, 1) for i in range(9)]
    assert cuda.batch(copies[:8], stream) == SUCCESS
    assert cuda.batch(copies, stream) == INVALID_VALUE
    rows = [Copy3D(device + i, host + i, 1) for i in range(9)]
    assert cuda.batch_3d(rows[:8], stream) == SUCCESS
    assert cuda.batch_3d(rows, stream) == INVALID_VALUE


@pytest.mark.parametrize(
    ("orders", "first_copies"),
    [
        ([], []),
        ([STREAM_ORDER], [1]),
        ([STREAM_ORDER, STREAM_ORDER], [0, 0]),
        ([STREAM_ORDER, STREAM_ORDER, STREAM_ORDER], [0, 2, 1]),
        ([STREAM_ORDER, STREAM_ORDER], [0, 3]),
        ([STREAM_ORDER] * 4, [0, 1, 2, 3]),
        ([0], [0]),
        ([4], [0]),
    ],
)
def test_attributes_that_do_not_fit_the_copies_are_refused(
    cuda: Cuda, orders: list[int], first_copies: list[int]
) -> None:
    stream, host, device = cuda.stream(), cuda.pinned(3), cuda.alloc(3)
    copies = [(device + i, host + i, 1) for i in range(3)]
    assert cuda.batch(copies, stream, orders=orders, first_copies=first_copies) == INVALID_VALUE
    assert cuda.driver.counts().copies == 0


def test_each_attribute_is_for_the_copies_from_its_index_on(late: Cuda) -> None:
    stream, host, device = late.stream(), late.pinned(3, b"abc"), late.alloc(3)
    copies = [(device + i, host + i, 1) for i in range(3)]
    orders = [STREAM_ORDER, ANY]
    assert late.batch(copies, stream, orders=orders, first_copies=[0, 1]) == SUCCESS
    memory(host, 3)[:] = b"ABC"
    assert late.synchronize(stream) == SUCCESS
    assert bytes_at(device, 3) == b"Abc"


@pytest.mark.parametrize("order", [ANY, DURING_API_CALL])
def test_a_source_of_any_order_is_read_before_earlier_work_on_the_stream(
    late: Cuda, order: int
) -> None:
    stream, first, second = late.stream(), late.alloc(4, b"old!"), late.alloc(4)
    assert late.fill(first, ord("n"), 4, stream) == SUCCESS
    assert late.batch([(second, first, 4)], stream, orders=[order]) == SUCCESS
    assert late.synchronize(stream) == SUCCESS
    assert bytes_at(second, 4) == b"old!"


def test_a_source_in_stream_order_is_read_after_earlier_work_on_the_stream(late: Cuda) -> None:
    stream, first, second = late.stream(), late.alloc(4, b"old!"), late.alloc(4)
    assert late.fill(first, ord("n"), 4, stream) == SUCCESS
    assert late.batch([(second, first, 4)], stream) == SUCCESS
    assert late.synchronize(stream) == SUCCESS
    assert bytes_at(second, 4) == b"nnnn"


def test_unpinned_memory_in_a_batch_is_read_late(late: Cuda) -> None:
    stream, device = late.stream(), late.alloc(4)
    buffer, host = pageable(4, b"old!")
    assert late.batch([(device, host, 4)], stream) == SUCCESS
    buffer.raw = b"new!"
    assert late.synchronize(stream) == SUCCESS
    assert bytes_at(device, 4) == b"new!"


def test_a_straddled_registration_or_allocation_refuses_the_whole_batch(cuda: Cuda) -> None:
    stream, device, next_to_it = cuda.stream(), cuda.alloc(512, b"." * 512), cuda.alloc(512)
    _buffer, host = pageable(64, b"x" * 64)
    assert cuda.register(host, 32) == SUCCESS
    assert cuda.register(host + 32, 32) == SUCCESS
    good = (device, host, 8)
    assert cuda.batch([good, (device + 8, host + 28, 8)], stream) == INVALID_VALUE
    assert cuda.batch([good, (next_to_it - 4, host, 8)], stream) == INVALID_VALUE
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(device, 512) == b"." * 512


def test_the_form_of_12_8_says_which_copy_failed(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(12080))
    stream, host, device = cuda.stream(), cuda.pinned(4), cuda.alloc(4)
    failed = c_size_t(99)

    def call(sizes: list[int]) -> int:
        count = len(sizes)
        return cuda.lib.cuMemcpyBatchAsync(
            (c_uint64 * count)(*[device] * count),
            (c_uint64 * count)(*[host] * count),
            (c_size_t * count)(*sizes),
            c_size_t(count),
            byref(Attributes(order=STREAM_ORDER)),
            (c_size_t * 1)(0),
            c_size_t(1),
            byref(failed),
            c_void_p(stream),
        )

    assert call([4, 4, 5]) == INVALID_VALUE
    assert failed.value == 2
    assert call([4]) == SUCCESS
    assert failed.value == ctypes.c_size_t(-1).value


def test_a_3d_entry_of_one_layer_is_a_strided_copy(cuda: Cuda) -> None:
    stream, host = cuda.stream(), cuda.pinned(12, b"aa..bb..cc..")
    device = cuda.alloc(9, b"." * 9)
    entry = Copy3D(device, host, 2, 3, dst_row=3, src_row=4)
    assert cuda.batch_3d([entry], stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(device, 9) == b"aa.bb.cc."


def test_layers_of_a_3d_entry_are_row_length_times_layer_height_apart(cuda: Cuda) -> None:
    stream, host = cuda.stream(), cuda.pinned(24, b"abcdefghijklmnopqrstuvwx")
    device = cuda.alloc(8, b"." * 8)
    entry = Copy3D(device, host, 2, 2, 2, src_row=4, src_layer=3)
    assert cuda.batch_3d([entry], stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(device, 8) == b"abefmnqr"


@pytest.mark.parametrize(("width", "height", "depth"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_3d_entry_without_extent_is_refused(
    cuda: Cuda, width: int, height: int, depth: int
) -> None:
    stream, host, device = cuda.stream(), cuda.pinned(8), cuda.alloc(8)
    assert cuda.batch_3d([Copy3D(device, host, width, height, depth)], stream) == INVALID_VALUE


def test_a_3d_entry_with_a_bad_pitch_range_or_order_is_refused(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(max_pitch=64))
    stream, host, device = cuda.stream(), cuda.pinned(512), cuda.alloc(512)
    for entry in (
        Copy3D(device, host, 8, 2, dst_row=7),
        Copy3D(device, host, 8, 2, src_row=65),
        Copy3D(device, host, 8, 2, 2, dst_layer=1),
        Copy3D(device, host, 8, 8, 9),
        Copy3D(device, host, 8, 2, order=0),
    ):
        assert cuda.batch_3d([entry], stream) == INVALID_VALUE, entry
    assert cuda.batch_3d([Copy3D(device, host, 8, 2, dst_row=64)], stream) == SUCCESS


def test_rows_of_a_3d_entry_across_allocations_are_refused(cuda: Cuda) -> None:
    stream, host = cuda.stream(), cuda.pinned(1024)
    first, _second = cuda.alloc(512), cuda.alloc(512)
    assert cuda.batch_3d([Copy3D(first, host, 8, 2, dst_row=504)], stream) == SUCCESS
    assert cuda.batch_3d([Copy3D(first, host, 8, 2, dst_row=512)], stream) == INVALID_VALUE
