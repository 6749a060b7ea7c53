"""Rows gathered into packed memory and scattered out of it, by every device's own means."""

import ctypes
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from burst_helpers import fill_random
from devices import KERNEL_NAMES, kernel_image, to_device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stand_in import VERSIONS, LoadStandIn, StandIn

from kvburst import ComputeDevice, CudaDevice, DeviceError, HostDevice, RowMove, Stream
from kvburst._core import build_info

ROW_BYTES = (132, 528, 576, 656, 1152)
"""An index key with its scale, and latent KV in several formats."""
PIECE_BYTES = 4096

INVALID_IMAGE, NO_BINARY, NO_COMPILER, PTX_TOO_NEW, COMPILER_OFF = 200, 209, 221, 222, 223
OUT_OF_MEMORY, NOT_FOUND = 2, 500
CUDA_TOOLKIT = build_info().cuda_toolkit

# Linux's MAP_NORESERVE, which `mmap` has since Python 3.13: pages that nobody touches cost nothing.
NO_RESERVE = 0x4000


# --- one array and its packed rows ---------------------------------------------------------------


@dataclass(frozen=True)
class Array:
    """Rows and packed memory, each at some offset within bytes that must stay as they are."""

    rows: torch.Tensor
    packed: torch.Tensor
    ids: torch.Tensor
    row_bytes: int
    rows_offset: int
    packed_offset: int

    @property
    def move(self) -> RowMove:
        return RowMove(
            packed=self.packed.data_ptr() + self.packed_offset,
            rows=self.rows.data_ptr() + self.rows_offset,
            ids=self.ids.data_ptr(),
            count=len(self.ids),
            row_bytes=self.row_bytes,
        )

    def row(self, number: int) -> slice:
        begin = self.rows_offset + number * self.row_bytes
        return slice(begin, begin + self.row_bytes)

    def place(self, number: int) -> slice:
        begin = self.packed_offset + number * self.row_bytes
        return slice(begin, begin + self.row_bytes)


@dataclass(frozen=True)
class Shape:
    row_bytes: int
    rows: int
    ids: tuple[int, ...]
    rows_offset: int
    packed_offset: int


@st.composite
def shapes(draw: st.DrawFn, *, repeated: bool) -> Shape:
    row_bytes = draw(
        st.sampled_from(ROW_BYTES)
        | st.integers(1, 300)
        | st.integers(PIECE_BYTES - 20, 2 * PIECE_BYTES + 20)
    )
    rows = draw(st.integers(1, 12))
    ids = st.lists(st.integers(0, rows - 1), max_size=12, unique=not repeated)
    offsets = st.integers(0, 32)
    return Shape(row_bytes, rows, tuple(draw(ids)), draw(offsets), draw(offsets))


def make_array(device: ComputeDevice, shape: Shape, seed: int) -> Array:
    def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
        memory = torch.empty(nbytes + 64, dtype=torch.uint8)
        fill_random(memory, seed=seed)
        return to_device(device, memory)

    return Array(
        random_bytes(shape.rows * shape.row_bytes, seed),
        random_bytes(len(shape.ids) * shape.row_bytes, seed + 1),
        to_device(device, torch.tensor(shape.ids, dtype=torch.int64)),
        shape.row_bytes,
        shape.rows_offset,
        shape.packed_offset,
    )


EXAMPLES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@EXAMPLES
@given(st.lists(shapes(repeated=True), min_size=1, max_size=4))
def test_gathered_rows_are_those_of_the_ids_and_nothing_else_changes(
    moving: ComputeDevice, given_shapes: list[Shape]
) -> None:
    arrays = [make_array(moving, shape, 10 * n) for n, shape in enumerate(given_shapes)]
    before = [array.rows.cpu().numpy().copy() for array in arrays]
    wanted = [array.packed.cpu().numpy().copy() for array in arrays]
    for array, rows, packed in zip(arrays, before, wanted, strict=True):
        for place, number in enumerate(array.ids.tolist()):
            packed[array.place(place)] = rows[array.row(number)]
    stream = moving.new_stream()
    moving.gather_all(stream, [array.move for array in arrays])
    stream.synchronize()
    for array, rows, packed in zip(arrays, before, wanted, strict=True):
        assert (array.packed.cpu().numpy() == packed).all()
        assert (array.rows.cpu().numpy() == rows).all()


@EXAMPLES
@given(st.lists(shapes(repeated=False), min_size=1, max_size=4))
def test_scattered_rows_land_at_their_ids_and_nothing_else_changes(
    moving: ComputeDevice, given_shapes: list[Shape]
) -> None:
    arrays = [make_array(moving, shape, 10 * n) for n, shape in enumerate(given_shapes)]
    before = [array.packed.cpu().numpy().copy() for array in arrays]
    wanted = [array.rows.cpu().numpy().copy() for array in arrays]
    for array, packed, rows in zip(arrays, before, wanted, strict=True):
        for place, number in enumerate(array.ids.tolist()):
            rows[array.row(number)] = packed[array.place(place)]
    stream = moving.new_stream()
    moving.scatter_all(stream, [array.move for array in arrays])
    stream.synchronize()
    for array, packed, rows in zip(arrays, before, wanted, strict=True):
        assert (array.rows.cpu().numpy() == rows).all()
        assert (array.packed.cpu().numpy() == packed).all()


def gather(device: ComputeDevice, stream: Stream, array: Array) -> None:
    move = array.move
    device.gather(stream, move.packed, move.rows, move.ids, move.count, move.row_bytes)


def scatter(device: ComputeDevice, stream: Stream, array: Array) -> None:
    move = array.move
    device.scatter(stream, move.rows, move.packed, move.ids, move.count, move.row_bytes)


@pytest.mark.parametrize("row_bytes", [*ROW_BYTES, 64 * 576, 64 * 132])
def test_what_is_gathered_and_scattered_again_is_what_it_was(
    moving: ComputeDevice, row_bytes: int
) -> None:
    ids = (7, 2, 5, 0)
    array = make_array(moving, Shape(row_bytes, 8, ids, 0, 0), 1)
    before = array.rows.clone()
    stream = moving.new_stream()
    gather(moving, stream, array)
    for number in ids:
        moving.fill(stream, array.rows.data_ptr() + number * row_bytes, 0xEE, row_bytes)
    scatter(moving, stream, array)
    stream.synchronize()
    assert torch.equal(array.rows, before)


def test_nothing_is_moved_for_no_rows(moving: ComputeDevice) -> None:
    stream = moving.new_stream()
    moving.gather(stream, 0, 0, 0, 0, 132)
    moving.scatter_all(stream, [])
    stream.synchronize()
    if isinstance(moving, CudaDevice) and moving.driver.stand_in:
        array = make_array(moving, Shape(132, 2, (1,), 0, 0), 1)
        empty = RowMove(packed=0, rows=0, ids=0, count=0, row_bytes=1)
        moving.gather_all(stream, [empty, array.move, empty])
        stream.synchronize()
        assert (array.packed[:132] == array.rows[132:264]).all()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"row_bytes": 0}, "row_bytes: 0 must be from 1"),
        ({"row_bytes": -132}, "row_bytes: -132 must be from 1"),
        ({"count": -1}, "count: -1 must be from 0"),
        ({"count": 1 << 60}, r"count: \d+ rows of 132 bytes are more than"),
        ({"packed": 0}, "packed: 0 is no address"),
        ({"rows": 0}, "rows: 0 is no address"),
        ({"ids": 0}, "ids: 0 is no address"),
        ({"ids": 12}, "ids: address 0xc must be a multiple of 8"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    moving: ComputeDevice, changed: dict[str, int], words: str
) -> None:
    array = make_array(moving, Shape(132, 4, (1, 2), 0, 0), 1)
    before = array.packed.clone()
    fields = ("packed", "rows", "ids", "count", "row_bytes")
    values = {field: getattr(array.move, field) for field in fields} | changed
    stream = moving.new_stream()
    with pytest.raises(DeviceError, match=words):
        moving.gather(stream, **values)
    with pytest.raises(DeviceError, match=words):
        moving.scatter_all(stream, [array.move, RowMove(**values)])
    stream.synchronize()
    assert torch.equal(array.packed, before)


def test_id_below_zero_is_refused_where_ids_are_in_host_memory() -> None:
    device = HostDevice()
    array = make_array(device, Shape(132, 4, (1, -2), 0, 0), 1)
    with pytest.raises(DeviceError, match="ids: -2 at 1 is below the minimum 0"):
        gather(device, device.new_stream(), array)


def test_stream_of_another_device_is_refused(moving: ComputeDevice) -> None:
    array = make_array(moving, Shape(132, 4, (1,), 0, 0), 1)
    with pytest.raises(DeviceError, match=r"stream: handle \d+ is of another device"):
        gather(moving, HostDevice().new_stream(), array)


# sgl-project/sglang#34025: an id times a stride in 32 bits
def test_row_beyond_4_gib_is_that_row() -> None:
    row_bytes, rows = 276480, (5 << 30) // 276480
    memory = mmap.mmap(-1, rows * row_bytes, flags=mmap.MAP_PRIVATE | NO_RESERVE)
    whole = torch.frombuffer(memory, dtype=torch.uint8).view(rows, row_bytes)
    ids = torch.tensor([rows - 1, 0, (1 << 32) // row_bytes])
    for number, row in enumerate(ids.tolist()):
        fill_random(whole[row], seed=number)
    device = HostDevice()
    stream = device.new_stream()
    packed = torch.zeros(len(ids), row_bytes, dtype=torch.uint8)
    device.gather(stream, packed.data_ptr(), whole.data_ptr(), ids.data_ptr(), len(ids), row_bytes)
    stream.synchronize()
    assert torch.equal(packed, whole[ids])


# --- order ---------------------------------------------------------------------------------------


def test_rows_are_those_that_the_stream_has_written_so_far(moving: ComputeDevice) -> None:
    array = make_array(moving, Shape(576, 4, (2, 0), 0, 0), 1)
    stream = moving.new_stream()
    stall = moving.stall(stream)
    moving.fill(stream, array.rows.data_ptr(), 0x11, 4 * 576)
    gather(moving, stream, array)
    moving.fill(stream, array.rows.data_ptr(), 0x22, 4 * 576)
    stall.release()
    stream.synchronize()
    assert set(array.packed[: 2 * 576].tolist()) == {0x11}
    assert set(array.rows[: 4 * 576].tolist()) == {0x22}


def scatter_beside_a_forward(device: ComputeDevice, *, wait: bool) -> Array:
    """A forward writes the pages; a scatter into them is to come behind it."""
    array = make_array(device, Shape(576, 4, (2, 0), 0, 0), 1)
    device.synchronize()
    forward, stream = device.new_stream(), device.new_stream()
    stall = device.stall(forward)
    device.fill(forward, array.rows.data_ptr(), 0x33, 4 * 576)
    if wait:
        stream.wait_stream(forward)
    scatter(device, stream, array)
    if not wait:
        stream.synchronize()
    stall.release()
    forward.synchronize()
    stream.synchronize()
    return array


def test_scatter_that_waits_for_the_forward_comes_behind_it(moving: ComputeDevice) -> None:
    array = scatter_beside_a_forward(moving, wait=True)
    assert torch.equal(array.rows[2 * 576 : 3 * 576], array.packed[:576])
    assert set(array.rows[576 : 2 * 576].tolist()) == {0x33}


def test_scatter_that_does_not_wait_is_overwritten() -> None:
    """The control of the test above."""
    array = scatter_beside_a_forward(HostDevice(), wait=False)
    assert set(array.rows[: 4 * 576].tolist()) == {0x33}


# --- on a driver ---------------------------------------------------------------------------------


@pytest.fixture
def driver(load_stand_in: LoadStandIn) -> StandIn:
    return load_stand_in(order="latest")


@pytest.fixture
def cuda(driver: StandIn) -> CudaDevice:
    return CudaDevice(driver=str(driver.path), kernels=kernel_image())


def test_scatter_that_does_not_wait_is_reported(driver: StandIn, cuda: CudaDevice) -> None:
    """The same control, on a driver that sees it in whatever order things run."""
    array = scatter_beside_a_forward(cuda, wait=False)
    assert set(array.rows[: 4 * 576].tolist()) == {0x33}
    (finding,) = driver.findings()
    assert "cuLaunchKernel" in finding
    assert "cuMemsetD8Async" in finding


def test_ids_are_read_when_the_stream_comes_to_them(driver: StandIn, cuda: CudaDevice) -> None:
    array = make_array(cuda, Shape(528, 8, (0, 0, 0), 0, 0), 1)
    host = torch.tensor([6, 1, 3])
    pinned = cuda.pin(host, 8)
    stream = cuda.new_stream()
    cuda.transfer(stream, "load", [(array.ids.data_ptr(), host.data_ptr(), 24, 1, 0, 0)])
    gather(cuda, stream, array)
    stream.synchronize()
    for place, number in enumerate([6, 1, 3]):
        assert torch.equal(array.packed[array.place(place)], array.rows[array.row(number)])
    assert driver.findings() == []
    del pinned


@pytest.mark.parametrize(
    ("moves", "launches"), [(1, 1), (2, 1), (64, 1), (65, 2), (128, 2), (129, 3)]
)
def test_moves_go_in_one_launch_for_every_64(
    driver: StandIn, cuda: CudaDevice, moves: int, launches: int
) -> None:
    arrays = [make_array(cuda, Shape(132, 4, (n % 4, 3), 0, 0), n) for n in range(moves)]
    stream = cuda.new_stream()
    cuda.gather_all(stream, [array.move for array in arrays])
    stream.synchronize()
    assert driver.count("cuLaunchKernel") == launches
    for n, array in enumerate(arrays):
        assert torch.equal(array.packed[array.place(0)], array.rows[array.row(n % 4)])
        assert torch.equal(array.packed[array.place(1)], array.rows[array.row(3)])


@pytest.mark.parametrize(
    ("rows", "row_bytes", "blocks"), [(1, 132, 1), (16, 132, 1), (17, 132, 2), (1, 1 << 20, 3)]
)
def test_blocks_are_as_many_as_there_is_work_for_and_an_eighth_of_the_processors_at_most(
    driver: StandIn, cuda: CudaDevice, rows: int, row_bytes: int, blocks: int
) -> None:
    array = make_array(cuda, Shape(row_bytes, rows, tuple(range(rows)), 0, 0), 1)
    stream = cuda.new_stream()
    gather(cuda, stream, array)
    stream.synchronize()
    assert [call.copies for call in driver.calls("cuLaunchKernel")] == [blocks]
    assert "in 3 blocks of 512 threads at most" in cuda.kernels


def test_rows_on_the_legacy_stream_keep_their_place_in_it(
    driver: StandIn, cuda: CudaDevice
) -> None:
    array = make_array(cuda, Shape(132, 4, (2, 0), 0, 0), 1)
    legacy = cuda.wrap_stream(0)
    stall = cuda.stall(legacy)
    cuda.fill(legacy, array.rows.data_ptr(), 0x11, 4 * 132)
    gather(cuda, legacy, array)
    cuda.fill(legacy, array.rows.data_ptr(), 0x22, 4 * 132)
    stall.release()
    legacy.synchronize()
    assert set(array.packed[: 2 * 132].tolist()) == {0x11}
    assert driver.findings() == []
    assert [call.stream for call in driver.calls("cuLaunchKernel")] == [1]


def test_capturing_stream_and_unknown_stream_are_refused(driver: StandIn, cuda: CudaDevice) -> None:
    array = make_array(cuda, Shape(132, 4, (2, 0), 0, 0), 1)
    stream = cuda.new_stream()
    with stream, current_context(driver):
        handle = ctypes.c_void_p(stream.handle)
        assert driver.control.cuStreamBeginCapture_v2(handle, 0) == 0
        for move in (gather, scatter):
            with pytest.raises(DeviceError, match=r"stream: handle \d+ is being captured"):
                move(cuda, stream, array)
        graph = ctypes.c_void_p()
        assert driver.control.cuStreamEndCapture(handle, ctypes.byref(graph)) == 0
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_HANDLE"):
        gather(cuda, cuda.wrap_stream(0x1234560), array)
    assert driver.count("cuLaunchKernel") == 0


@contextmanager
def current_context(driver: StandIn) -> Iterator[None]:
    """The device's context is the calling thread's."""
    context = ctypes.c_void_p()
    assert driver.control.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.control.cuCtxSetCurrent(context) == 0
    try:
        yield
    finally:
        assert driver.control.cuCtxSetCurrent(None) == 0
        assert driver.control.cuDevicePrimaryCtxRelease_v2(0) == 0


def test_refused_launch_is_an_error_that_names_the_kernel(
    driver: StandIn, cuda: CudaDevice
) -> None:
    array = make_array(cuda, Shape(132, 4, (2, 0), 0, 0), 1)
    driver.fail("cuLaunchKernel", 1)
    words = r"cuLaunchKernel, kvburst_scatter_rows of 1 moves: CUDA_ERROR_INVALID_VALUE \(1\)"
    with pytest.raises(DeviceError, match=words):
        scatter(cuda, cuda.new_stream(), array)


# --- loading -------------------------------------------------------------------------------------


@pytest.mark.skipif(CUDA_TOOLKIT is None, reason=f"no kernels: {build_info().cuda_reason}")
def test_kernels_of_the_build_are_loaded_and_say_which_they_are(driver: StandIn) -> None:
    cuda = CudaDevice(driver=str(driver.path))
    assert cuda.moves_rows
    assert cuda.kernels.startswith(f"those of this build, by CUDA toolkit {CUDA_TOOLKIT}, on ")
    assert "compute capability 9.0" in cuda.kernels
    array = make_array(cuda, Shape(132, 4, (2, 0), 0, 0), 1)
    stream = cuda.new_stream()
    gather(cuda, stream, array)
    stream.synchronize()
    assert torch.equal(array.packed[array.place(0)], array.rows[array.row(2)])


@pytest.mark.skipif(CUDA_TOOLKIT is not None, reason="the build has kernels")
def test_build_without_kernels_says_why(driver: StandIn) -> None:
    cuda = CudaDevice(driver=str(driver.path))
    assert cuda.kernels == f"none: this build has none: {build_info().cuda_reason}"
    assert not cuda.moves_rows


@pytest.mark.parametrize("version", VERSIONS)
def test_driver_before_12_has_no_kernels_and_says_why(
    load_stand_in: LoadStandIn, version: int
) -> None:
    driver = load_stand_in(version)
    cuda = CudaDevice(driver=str(driver.path), kernels=kernel_image())
    assert cuda.moves_rows == (version >= 12000)
    assert cuda.kernels.startswith("none: ") != cuda.moves_rows
    if not cuda.moves_rows:
        why = "cuLibraryLoadData came with 12.0, the driver is 11.8"
        assert cuda.kernels == f"none: {why}"
        array = make_array(cuda, Shape(132, 4, (2, 0), 0, 0), 1)
        for move in (gather, scatter):
            with pytest.raises(DeviceError, match=f"staging kernels: none: {why}"):
                move(cuda, cuda.new_stream(), array)


CALLS = ("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", [INVALID_IMAGE, NO_BINARY, NO_COMPILER, PTX_TOO_NEW, COMPILER_OFF])
def test_kernels_that_driver_or_gpu_do_not_take_are_none_and_the_reason_is_kept(
    driver: StandIn, call: str, code: int
) -> None:
    driver.fail(call, code)
    cuda = CudaDevice(driver=str(driver.path), kernels=kernel_image())
    assert not cuda.moves_rows
    assert re.match(rf"none: {call}: CUDA_ERROR_\w+ \({code}\): [\w .]+, of those", cuda.kernels)
    assert cuda.kernels.endswith("by driver 13.0")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, NOT_FOUND])
def test_any_other_failure_to_load_is_an_error(driver: StandIn, call: str, code: int) -> None:
    driver.fail(call, code)
    with pytest.raises(DeviceError, match=rf"{call}, staging kernels: CUDA_ERROR_\w+ \({code}\)"):
        CudaDevice(driver=str(driver.path), kernels=kernel_image())
    assert driver.counts().retained == 0


def test_image_that_is_none_and_one_that_lacks_a_kernel(driver: StandIn) -> None:
    cuda = CudaDevice(driver=str(driver.path), kernels=b"no image at all" * 10)
    assert "CUDA_ERROR_INVALID_IMAGE (200)" in cuda.kernels
    with pytest.raises(DeviceError, match=r"cuLibraryGetKernel, staging kernels: .*NOT_FOUND"):
        CudaDevice(driver=str(driver.path), kernels=kernel_image(KERNEL_NAMES[:1]))
