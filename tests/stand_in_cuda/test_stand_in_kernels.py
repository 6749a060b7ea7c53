"""Kernels: what is refused when they are loaded and launched, and what a launch touches."""

import ctypes
import struct
from collections.abc import Callable

import pytest
from cuda_calls import (
    CAPTURE_INVALIDATED,
    ILLEGAL_ADDRESS,
    INVALID_HANDLE,
    INVALID_IMAGE,
    INVALID_VALUE,
    LAUNCH_OUT_OF_RESOURCES,
    LEGACY,
    NOT_FOUND,
    SUCCESS,
    Cuda,
    bytes_at,
    memory,
    pageable,
)
from devices import kernel_image
from stand_in import ORDERS, Order, StandIn

LoadStandIn = Callable[..., StandIn]

GATHER, SCATTER = "kvburst_gather_rows", "kvburst_scatter_rows"
ROWS = b"aaaabbbbccccdddd"


@pytest.fixture(params=ORDERS)
def cuda(load_stand_in: LoadStandIn, request: pytest.FixtureRequest) -> Cuda:
    order: Order = request.param
    return Cuda(load_stand_in(order=order))


def ids_of(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}q", *ids)


class Scene:
    """An array of four rows of four bytes, packed memory for three, and their ids."""

    def __init__(self, cuda: Cuda, *ids: int) -> None:
        self.cuda = cuda
        self.count = len(ids)
        self.rows = cuda.alloc(16, ROWS)
        self.packed = cuda.alloc(4 * self.count, b"." * 4 * self.count)
        self.ids = cuda.alloc(8 * self.count, ids_of(*ids))

    def launch(self, name: str, stream: int, **changed: int) -> int:
        move = {
            "packed": self.packed,
            "rows": self.rows,
            "ids": self.ids,
            "count": self.count,
            "row_bytes": 4,
        }
        function = self.cuda.function(kernel_image(), name)
        return self.cuda.launch(function, stream, **{**move, **changed})


def test_an_image_that_is_no_fat_binary_is_refused(cuda: Cuda) -> None:
    assert cuda.load_library(b"\x7fELF" + bytes(60))[0] == INVALID_IMAGE
    assert cuda.load_library(kernel_image())[0] == SUCCESS


def test_a_kernel_that_is_not_in_the_image_is_not_found(cuda: Cuda) -> None:
    code, library = cuda.load_library(kernel_image((GATHER,)))
    assert code == SUCCESS
    assert cuda.get_kernel(library, GATHER)[0] == SUCCESS
    assert cuda.get_kernel(library, SCATTER)[0] == NOT_FOUND
    assert cuda.get_kernel(library, GATHER[:-1])[0] == NOT_FOUND
    assert cuda.get_kernel(12345, GATHER)[0] == INVALID_HANDLE
    assert cuda.get_function(library)[0] == INVALID_HANDLE


def test_a_launch_that_cannot_be_is_refused(cuda: Cuda) -> None:
    scene, stream = Scene(cuda, 2, 0), cuda.stream()
    function = cuda.function(kernel_image(), GATHER)
    parameters = (ctypes.c_void_p * 1)(scene.packed)
    assert cuda.launch_with(parameters, function + 16, stream, 1, 64) == INVALID_HANDLE
    assert cuda.launch_with(parameters, function, stream + 16, 1, 64) == INVALID_HANDLE
    assert cuda.launch_with(parameters, function, stream, 0, 64) == INVALID_VALUE
    assert cuda.launch_with(parameters, function, stream, 1, 0) == INVALID_VALUE
    assert cuda.launch_with(None, function, stream, 1, 64) == INVALID_VALUE
    assert cuda.launch_with((ctypes.c_void_p * 1)(), function, stream, 1, 64) == INVALID_VALUE
    assert cuda.launch_with(parameters, function, stream, 1, 513) == LAUNCH_OUT_OF_RESOURCES
    assert bytes_at(scene.packed, 8) == b"." * 8


def test_a_launch_moves_rows_in_stream_order(cuda: Cuda) -> None:
    scene, stream = Scene(cuda, 2, 0), cuda.stream()
    with cuda.driver.stall(stream):
        assert cuda.fill(scene.rows, ord("A"), 4, stream) == SUCCESS
        assert scene.launch(GATHER, stream) == SUCCESS
        assert cuda.fill(scene.rows, ord("-"), 16, stream) == SUCCESS
        assert scene.launch(SCATTER, stream) == SUCCESS
        cuda.driver.settle()
        assert bytes_at(scene.packed, 8) == b"." * 8
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(scene.packed, 8) == b"ccccAAAA"
    assert bytes_at(scene.rows, 16) == b"AAAA----cccc----"
    assert cuda.driver.findings() == []


@pytest.mark.parametrize("threads", [32, 64, 512])
def test_every_thread_of_every_block_takes_part(cuda: Cuda, threads: int) -> None:
    rows = bytes(range(256)) * 64
    scene, stream = Scene(cuda, 1, 0), cuda.stream()
    changed = {
        "rows": cuda.alloc(len(rows), rows),
        "packed": cuda.alloc(len(rows), b""),
        "row_bytes": len(rows) // 2,
    }
    function = cuda.function(kernel_image(), GATHER)
    code = cuda.launch(
        function, stream, ids=scene.ids, count=2, blocks=3, threads=threads, **changed
    )
    assert code == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(changed["packed"], len(rows)) == rows[len(rows) // 2 :] + rows[: len(rows) // 2]


def test_a_launch_on_the_legacy_stream_waits_for_blocking_ones(cuda: Cuda) -> None:
    scene, blocking = Scene(cuda, 1, 2), cuda.stream(0)
    assert cuda.fill(scene.rows, ord("z"), 16, blocking) == SUCCESS
    assert scene.launch(GATHER, 0) == SUCCESS
    assert cuda.synchronize(LEGACY) == SUCCESS
    assert bytes_at(scene.packed, 8) == b"zzzzzzzz"
    assert cuda.driver.findings() == []


def test_a_captured_launch_does_not_run(cuda: Cuda) -> None:
    scene, stream = Scene(cuda, 1, 2), cuda.stream()
    assert cuda.begin_capture(stream) == SUCCESS
    assert scene.launch(GATHER, stream) == SUCCESS
    assert cuda.end_capture(stream)[0] == SUCCESS
    cuda.driver.settle()
    assert bytes_at(scene.packed, 8) == b"." * 8
    assert cuda.begin_capture(stream) == SUCCESS
    assert cuda.synchronize(stream) != SUCCESS
    assert scene.launch(GATHER, stream) == CAPTURE_INVALIDATED
    assert cuda.end_capture(stream)[0] == CAPTURE_INVALIDATED


# --- order ---------------------------------------------------------------------------------------


def fill_and_launch(cuda: Cuda, name: str, where: str, row: int, *, wait: bool) -> list[str]:
    """One stream fills a row of what another stream's launch, of rows 2 and 0, touches."""
    scene, ahead, stream, event = Scene(cuda, 2, 0), cuda.stream(), cuda.stream(), cuda.event()
    address = {"rows": scene.rows, "packed": scene.packed, "ids": scene.ids}[where] + 4 * row
    if where == "ids":
        assert cuda.fill(address, 3, 1, ahead) == SUCCESS  # of row 2 it makes row 3
    else:
        assert cuda.fill(address, ord("x"), 4, ahead) == SUCCESS
    assert cuda.record(event, ahead) == SUCCESS
    if wait:
        assert cuda.wait(stream, event) == SUCCESS
    assert scene.launch(name, stream) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert cuda.synchronize(ahead) == SUCCESS
    return cuda.driver.findings()


@pytest.mark.parametrize("where", ["rows", "packed", "ids"])
@pytest.mark.parametrize("name", [GATHER, SCATTER])
def test_a_launch_that_does_not_wait_is_reported(cuda: Cuda, name: str, where: str) -> None:
    (finding,) = fill_and_launch(cuda, name, where, 0, wait=False)
    assert "cuLaunchKernel" in finding
    assert "cuMemsetD8Async" in finding
    writes = {GATHER: "packed", SCATTER: "rows"}[name] == where
    assert f"{'writes' if writes else 'reads'} 0x" in finding


@pytest.mark.parametrize("where", ["rows", "packed", "ids"])
@pytest.mark.parametrize("name", [GATHER, SCATTER])
def test_a_launch_that_waits_is_not(cuda: Cuda, name: str, where: str) -> None:
    assert fill_and_launch(cuda, name, where, 0, wait=True) == []


@pytest.mark.parametrize("name", [GATHER, SCATTER])
def test_rows_that_no_id_names_are_not_touched(cuda: Cuda, name: str) -> None:
    assert fill_and_launch(cuda, name, "rows", 1, wait=False) == []
    assert len(fill_and_launch(cuda, name, "rows", 2, wait=False)) == 1


def test_a_row_scattered_to_twice_is_reported_and_one_gathered_twice_is_not(cuda: Cuda) -> None:
    scene, stream = Scene(cuda, 3, 3), cuda.stream()
    assert scene.launch(GATHER, stream) == SUCCESS
    assert cuda.driver.findings() == []
    assert scene.launch(SCATTER, stream) == SUCCESS
    (finding,) = cuda.driver.findings()
    assert "more than once" in finding


def launch_with_late_ids(cuda: Cuda, *, wait: bool) -> Scene:
    """The stream itself brings the ids, behind a stall; another stream fills row 1. If the launch
    waits for that, all rows are filled behind it."""
    scene, ahead, stream, event = Scene(cuda, 2, 0), cuda.stream(), cuda.stream(), cuda.event()
    host = cuda.pinned(16, ids_of(3, 1))
    assert cuda.fill(scene.rows + 4, ord("x"), 4, ahead) == SUCCESS
    assert cuda.record(event, ahead) == SUCCESS
    if wait:
        assert cuda.wait(stream, event) == SUCCESS
    with cuda.driver.stall(stream):
        assert cuda.to_device(scene.ids, host, 16, stream) == SUCCESS
        assert scene.launch(GATHER, stream) == SUCCESS
        if wait:
            assert cuda.fill(scene.rows, ord("y"), 16, stream) == SUCCESS
    assert cuda.synchronize(ahead) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    return scene


def test_ids_are_those_that_are_there_when_the_stream_comes_to_the_launch(cuda: Cuda) -> None:
    scene = launch_with_late_ids(cuda, wait=True)
    assert bytes_at(scene.packed, 8) == b"ddddxxxx"
    assert bytes_at(scene.rows, 16) == b"y" * 16
    assert cuda.driver.findings() == []


def test_rows_of_ids_that_come_late_are_judged_too(cuda: Cuda) -> None:
    launch_with_late_ids(cuda, wait=False)
    (finding,) = cuda.driver.findings()
    assert "cuLaunchKernel" in finding
    assert "which cuMemsetD8Async" in finding


def test_memory_freed_under_a_launch_is_reported(cuda: Cuda) -> None:
    scene, stream = Scene(cuda, 3, 1), cuda.stream()
    assert scene.launch(GATHER, stream) == SUCCESS
    assert cuda.free(scene.rows) == SUCCESS
    (finding,) = cuda.driver.findings()
    assert "cuMemFree" in finding


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [4, -1, 1 << 62])
def test_an_id_outside_the_memory_ends_the_context(cuda: Cuda, bad: int) -> None:
    scene, stream = Scene(cuda, 2, bad), cuda.stream()
    scene.launch(GATHER, stream)
    cuda.synchronize(stream)
    assert cuda.synchronize(stream) == ILLEGAL_ADDRESS
    assert bytes_at(scene.packed, 8) == b"." * 8
    cuda.driver.stop_failing()


def test_host_memory_that_is_not_pinned_is_out_of_reach(cuda: Cuda) -> None:
    scene, stream = Scene(cuda, 2, 0), cuda.stream()
    _buffer, host = pageable(16, ROWS)
    scene.launch(GATHER, stream, rows=host)
    cuda.synchronize(stream)
    assert cuda.synchronize(stream) == ILLEGAL_ADDRESS
    cuda.driver.stop_failing()


def test_host_memory_that_is_pinned_is_not(cuda: Cuda) -> None:
    scene, stream = Scene(cuda, 2, 0), cuda.stream()
    host = cuda.pinned(16, ROWS)
    memory(host, 4)[:] = b"AAAA"
    assert scene.launch(GATHER, stream, rows=host) == SUCCESS
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(scene.packed, 8) == b"ccccAAAA"
