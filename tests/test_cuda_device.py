"""The device "cuda" on a stand-in driver: what it asks the driver for, and what it never does."""

import ctypes
import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from burst_helpers import LAYOUTS, fill_random
from devices import NO_GPU
from rigs import LAYERS, Rig, is_reached, make_rig, quiesce
from stand_in import VERSIONS, LoadStandIn, StandIn

from kvburst import (
    BurstController,
    CopyLimits,
    CudaDevice,
    CudaDriver,
    DeviceError,
    DevicePool,
    HostPool,
    LayoutError,
    PageAllocator,
    Pool,
    Stream,
)
from kvburst._core import PinnedMemory
from kvburst.cuda import as_torch_stream
from kvburst.pools import HostLayout

SINGLE_CALLS = ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpy2DAsync")
BATCH_CALLS = ("cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync")

OUT_OF_MEMORY, DEINITIALIZED, CONTEXT_IS_DESTROYED = 2, 4, 709
LEGACY = 0
BLOCKING, NON_BLOCKING = 0, 1
GLOBAL = 0


@pytest.fixture
def driver(load_stand_in: LoadStandIn) -> StandIn:
    return load_stand_in()


@pytest.fixture
def cuda(driver: StandIn) -> CudaDevice:
    return CudaDevice(driver=str(driver.path))


@pytest.fixture
def rig(cuda: CudaDevice) -> Rig:
    return make_rig(cuda)


def make_stream(driver: StandIn, cuda: CudaDevice, flags: int = NON_BLOCKING) -> Stream:
    """A stream that somebody else has made: the tests, in the device's context."""
    handle = ctypes.c_void_p()
    with CurrentContext(driver):
        assert driver.control.cuStreamCreate(ctypes.byref(handle), flags) == 0
    assert handle.value is not None
    return cuda.wrap_stream(handle.value)


class CurrentContext:
    """The primary context of a GPU is the calling thread's for as long as this is entered."""

    def __init__(self, driver: StandIn, index: int = 0) -> None:
        self._control = driver.control
        self._index = index
        self.context = ctypes.c_void_p()

    def __enter__(self) -> "CurrentContext":
        assert self._control.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), self._index) == 0
        assert self._control.cuCtxSetCurrent(self.context) == 0
        return self

    def __exit__(self, *_: object) -> None:
        assert self._control.cuCtxSetCurrent(None) == 0
        assert self._control.cuDevicePrimaryCtxRelease_v2(self._index) == 0


def begin_capture(driver: StandIn, stream: Stream) -> None:
    with CurrentContext(driver):
        handle = ctypes.c_void_p(stream.handle)
        assert driver.control.cuStreamBeginCapture_v2(handle, GLOBAL) == 0


def end_capture(driver: StandIn, stream: Stream) -> int:
    """The driver's code: 0 if the capture was valid to its end."""
    graph = ctypes.c_void_p()
    with CurrentContext(driver):
        handle = ctypes.c_void_p(stream.handle)
        return int(driver.control.cuStreamEndCapture(handle, ctypes.byref(graph)))


def plain(dst: torch.Tensor, src: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    return (dst.data_ptr(), src.data_ptr(), src.nbytes, 1, 0, 0)


def pinned_zeros(cuda: CudaDevice, nbytes: int) -> tuple[torch.Tensor, PinnedMemory]:
    """Host memory; the second keeps it pinned."""
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    return tensor, cuda.pin(tensor, nbytes)


# --- a real one ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU is not None, reason=f"nothing runs on a GPU: {NO_GPU}")
def test_pages_go_out_and_come_back_on_the_gpu_of_this_machine() -> None:
    back_up_and_load(make_rig(CudaDevice()))


# --- the driver ----------------------------------------------------------------------------------


def test_missing_driver_is_named_together_with_the_loaders_reason() -> None:
    with pytest.raises(DeviceError, match=r"CUDA driver: cannot be loaded: libnot-here\.so"):
        CudaDevice(driver="libnot-here.so.1")


def test_library_without_the_drivers_functions_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"libc\.so\.6: has no cuDriverGetVersion"):
        CudaDriver("libc.so.6")


def test_environment_names_the_library(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBURST_LIBCUDA", str(driver.path))
    assert CudaDevice().driver.library == str(driver.path)


def test_gpu_that_is_not_there_is_refused(driver: StandIn) -> None:
    with pytest.raises(DeviceError, match="index: 3 is not one of the 1 GPUs of "):
        CudaDevice(3, driver=str(driver.path))


def test_driver_that_does_not_start_says_why(driver: StandIn) -> None:
    driver.fail("cuInit", 100)
    with pytest.raises(DeviceError, match=r"cuInit: CUDA_ERROR_NO_DEVICE \(100\): \w+"):
        CudaDevice(driver=str(driver.path))


@pytest.mark.parametrize("version", VERSIONS)
def test_copies_are_made_with_the_calls_that_the_driver_has(
    load_stand_in: LoadStandIn, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    driver = load_stand_in(version)
    has_batches = version >= 12080
    cuda = CudaDevice(driver=str(driver.path))
    assert cuda.driver.version == version
    assert cuda.driver.batch_version == (version if has_batches else 0)
    back_up_and_load(make_rig(cuda))
    said = [record.getMessage() for record in caplog.records]
    assert said == ([] if has_batches else [f"{cuda.gpu_name}: {cuda.copy_calls}"])
    limits = CopyLimits(tall_copies=False)
    back_up_and_load(make_rig(CudaDevice(driver=cuda.driver, limits=limits)))
    used, unused = (BATCH_CALLS, SINGLE_CALLS) if has_batches else (SINGLE_CALLS, BATCH_CALLS)
    assert all(driver.count(name) > 0 for name in used)
    assert all(driver.count(name) == 0 for name in unused)
    words = "cuMemcpyBatchAsync" if has_batches else "the batch calls came with 12.8"
    assert words in cuda.copy_calls


def back_up_and_load(rig: Rig) -> None:
    """Neighbouring pages, which are rows of one copy, and one page alone."""
    pages = rig.take(3)
    rig.write_device(pages, 0x5A)
    host = rig.controller.write(pages)
    assert host is not None
    rig.settle()
    assert rig.found_on_host(host) == {0x5A}
    burst, target = rig.load(host)
    rig.wait(burst, LAYERS - 1)
    rig.settle()
    assert rig.found_on_device(target) == {0x5A}
    assert [ack.error for ack in rig.controller.poll()] == [None, None]


def test_single_copies_are_made_on_request(driver: StandIn) -> None:
    cuda = CudaDevice(driver=str(driver.path), single_copies=True)
    back_up_and_load(make_rig(cuda))
    assert all(driver.count(name) == 0 for name in BATCH_CALLS)
    assert "so it was asked for" in cuda.copy_calls


# NVIDIA/cudf#20800 and others fall back to single copies here
@pytest.mark.parametrize("version", VERSIONS)
def test_copy_that_the_driver_refuses_is_an_error_that_names_it(
    load_stand_in: LoadStandIn, version: int
) -> None:
    driver = load_stand_in(version)
    cuda = CudaDevice(driver=str(driver.path))
    device = cuda.tensor(64)
    host, _pinned = pinned_zeros(cuda, 64)
    outside = (device.data_ptr() + 60, host.data_ptr(), 8, 1, 0, 0)
    # From 13.0 on a driver no longer says which it was.
    which = "2 of 2 copies, the first of them 64 bytes" if version == 13000 else "8 bytes"
    with pytest.raises(DeviceError, match=rf"{which} x 1 rows, from 0x.*INVALID_VALUE \(1\)"):
        cuda.transfer(cuda.new_stream(), "load", [plain(device, host), outside])


def test_context_is_retained_once_and_released_with_the_last_of_the_device(
    driver: StandIn,
) -> None:
    cuda = CudaDevice(driver=str(driver.path))
    stream, event = cuda.new_stream(), cuda.new_event()
    assert driver.counts().retained == 1
    del cuda
    gc.collect()
    assert driver.counts().retained == 1
    del stream, event
    gc.collect()
    counts = driver.counts()
    assert (counts.retained, counts.streams, counts.events) == (0, 0, 0)


def test_context_of_the_calling_thread_stays_as_it_was(load_stand_in: LoadStandIn) -> None:
    driver = load_stand_in(devices=2)
    cuda = CudaDevice(0, driver=str(driver.path))
    with CurrentContext(driver, 1) as theirs:
        back_up_and_load(make_rig(cuda, "inline"))
        now = ctypes.c_void_p()
        assert driver.control.cuCtxGetCurrent(ctypes.byref(now)) == 0
        assert now.value == theirs.context.value


@pytest.mark.parametrize("mode", ["thread", "inline"])
def test_any_thread_may_submit_though_it_has_no_context(cuda: CudaDevice, mode: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: back_up_and_load(make_rig(cuda, mode))).result(60)  # type: ignore[arg-type]


# --- streams and events of others ----------------------------------------------------------------


def test_burst_is_ordered_behind_a_stream_that_a_framework_made(
    driver: StandIn, cuda: CudaDevice, rig: Rig
) -> None:
    theirs = make_stream(driver, cuda)
    pages = rig.take()
    with rig.held(theirs):
        rig.forward_writes(theirs, pages, 0x77)
        with theirs:
            host = rig.controller.write(pages)
        assert not is_reached(rig.controller.ack_write_queue[0].finish_event)
    assert host is not None
    rig.settle()
    assert rig.found_on_host(host) == {0x77}
    assert driver.findings() == []


def test_event_that_was_never_recorded_holds_nobody_up(cuda: CudaDevice) -> None:
    event = cuda.wrap_event(0)  # torch makes its events when it first records them
    assert event.query()
    event.synchronize()
    event.wait(cuda.new_stream())
    with pytest.raises(DeviceError, match="elapsed time: an event that was never recorded"):
        event.elapsed_time(cuda.new_event())


def test_event_recorded_in_a_capture_cannot_be_asked_and_says_so(
    driver: StandIn, cuda: CudaDevice
) -> None:
    stream, event = make_stream(driver, cuda), cuda.new_event()
    begin_capture(driver, stream)
    with CurrentContext(driver):
        handles = ctypes.c_void_p(event.handle), ctypes.c_void_p(stream.handle)
        assert driver.control.cuEventRecord(*handles) == 0
    with pytest.raises(DeviceError, match=r"cuEventQuery: CUDA_ERROR_CAPTURED_EVENT \(907\)"):
        event.query()


def test_elapsed_time_of_events_that_are_not_reached_is_refused(cuda: CudaDevice) -> None:
    stream = cuda.new_stream()
    start, end = stream.record_event(), cuda.new_event()
    stall = cuda.stall(stream)
    end.record(stream)
    with pytest.raises(DeviceError, match="elapsed time: an event that is not reached yet"):
        start.elapsed_time(end)
    stall.release()
    end.synchronize()
    assert start.elapsed_time(end) >= 0


# --- beside a forward ----------------------------------------------------------------------------


# sgl-project/sglang#20611, sgl-project/sglang#21631
@pytest.mark.parametrize("order", ["random", "latest"])
@pytest.mark.parametrize("version", VERSIONS)
def test_backups_beside_a_long_forward_leave_its_pages_alone(
    load_stand_in: LoadStandIn, version: int, order: str
) -> None:
    driver = load_stand_in(version, order=order)
    rig = make_rig(CudaDevice(driver=str(driver.path)))
    forward = rig.device.new_stream()
    live, idle = rig.take(8), rig.take(1)
    rig.write_device(idle, 0x61)
    with rig.held(forward):
        for value in range(10):
            rig.forward_writes(forward, live, value)
        for _ in range(500):
            host = rig.controller.write(idle)
            assert host is not None
            rig.controller.drain()
            assert rig.found_on_host(host) == {0x61}
            assert [ack.error for ack in rig.controller.poll()] == [None]
            rig.host_pages.free(host)
    rig.settle()
    assert rig.found_on_device(live) == {9}
    assert rig.found_on_device(idle) == {0x61}
    assert driver.findings() == []


@pytest.mark.parametrize("waits", [True, False])
def test_forward_that_waits_for_a_backup_starts_behind_its_finish(
    driver: StandIn, rig: Rig, waits: bool
) -> None:
    forward, current = rig.device.new_stream(), rig.device.new_stream()
    pages = rig.take(4)
    rig.write_device(pages, 0x62)
    with rig.held(current):
        with current:
            host = rig.controller.write(pages)
        assert host is not None
        if waits:
            rig.controller.ack_write_queue[0].finish_event.wait(forward)
        rig.forward_writes(forward, pages, 0x63)
        quiesce()
        assert forward.query() == (not waits)
    rig.settle()
    assert rig.found_on_host(host) == ({0x62} if waits else {0x63})
    assert (driver.findings() == []) == waits


# --- the legacy default stream -------------------------------------------------------------------


# vllm-project/vllm#46379
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("order", ["random", "latest"])
def test_copies_on_the_legacy_stream_keep_their_place_in_it(
    load_stand_in: LoadStandIn, version: int, order: str
) -> None:
    driver = load_stand_in(version, order=order)
    cuda = CudaDevice(driver=str(driver.path))
    legacy = cuda.wrap_stream(LEGACY)
    source, target = cuda.tensor(64), cuda.tensor(64)
    host, _pinned = pinned_zeros(cuda, 64)
    stall = cuda.stall(legacy)
    cuda.fill(legacy, source.data_ptr(), 0x11, 64)
    cuda.transfer(legacy, "backup", [plain(host, source)])  # reads what was filled before
    cuda.fill(legacy, source.data_ptr(), 0x22, 64)  # and not what is filled afterwards
    cuda.transfer(legacy, "load", [plain(target, host)])
    stall.release()
    legacy.synchronize()
    assert set(host.tolist()) == {0x11}
    assert set(target.tolist()) == {0x11}
    assert set(source.tolist()) == {0x22}
    assert driver.findings() == []
    assert not any(call.stream in (0, 1) for name in BATCH_CALLS for call in driver.calls(name))


@pytest.mark.parametrize("mode", ["thread", "inline"])
def test_burst_submitted_from_the_legacy_stream_is_ordered_behind_it(
    driver: StandIn, cuda: CudaDevice, mode: str
) -> None:
    rig = make_rig(cuda, mode)  # type: ignore[arg-type]
    legacy = cuda.wrap_stream(LEGACY)
    pages = rig.take()
    with rig.held(legacy), legacy:
        rig.forward_writes(legacy, pages, 0x33)
        host = rig.controller.write(pages)
        assert not is_reached(rig.controller.ack_write_queue[0].finish_event)
    assert host is not None
    rig.settle()
    assert rig.found_on_host(host) == {0x33}
    assert driver.findings() == []


def test_streams_of_the_device_do_not_wait_for_the_legacy_stream(
    cuda: CudaDevice, rig: Rig
) -> None:
    with rig.held(cuda.wrap_stream(LEGACY)):
        back_up_and_load_on(rig, cuda.new_stream())


def back_up_and_load_on(rig: Rig, stream: Stream) -> None:
    with stream:
        burst, target = rig.load(rig.on_host(0x44))
        rig.wait(burst, LAYERS - 1)
    stream.synchronize()
    assert rig.found_on_device(target) == {0x44}


# --- captures ------------------------------------------------------------------------------------


# rapidsai/rmm#2518: a batch call fails on a capturing stream, and the capture goes on without it
@pytest.mark.parametrize("version", VERSIONS)
def test_capturing_stream_is_refused_before_anything_is_enqueued(
    load_stand_in: LoadStandIn, version: int
) -> None:
    driver = load_stand_in(version)
    cuda = CudaDevice(driver=str(driver.path))
    device = cuda.tensor(64)
    host, _pinned = pinned_zeros(cuda, 64)
    stream, other = make_stream(driver, cuda), cuda.new_stream()
    event = other.record_event()
    begin_capture(driver, stream)
    for use in (
        lambda: cuda.transfer(stream, "load", [plain(device, host)]),
        lambda: cuda.fill(stream, device.data_ptr(), 1, 64),
        lambda: cuda.copy(stream, device.data_ptr(), device.data_ptr() + 32, 32),
        lambda: cuda.new_event().record(stream),
        lambda: event.wait(stream),
        lambda: cuda.stall(stream),
    ):
        with pytest.raises(DeviceError, match=r"stream: handle \d+ is being captured"):
            use()
    assert end_capture(driver, stream) == 0
    assert all(driver.count(name) == 0 for name in (*BATCH_CALLS, *SINGLE_CALLS))


def test_burst_from_a_capturing_stream_is_refused_and_leaves_nothing_behind(
    driver: StandIn, cuda: CudaDevice, rig: Rig
) -> None:
    stream = make_stream(driver, cuda)
    host = rig.on_host(0x46)
    target = rig.controller.load(host)
    assert target is not None
    begin_capture(driver, stream)
    with stream, pytest.raises(DeviceError, match="is being captured into a graph"):
        rig.controller.start_loading()
    assert end_capture(driver, stream) == 0
    burst = rig.controller.start_loading()
    rig.wait(burst, LAYERS - 1)
    rig.settle()
    assert rig.found_on_device(target) == {0x46}


def test_legacy_stream_is_left_alone_while_a_blocking_stream_is_captured(
    driver: StandIn, cuda: CudaDevice
) -> None:
    device = cuda.tensor(64)
    host, _pinned = pinned_zeros(cuda, 64)
    stream = make_stream(driver, cuda, BLOCKING)
    begin_capture(driver, stream)
    legacy = cuda.wrap_stream(LEGACY)
    with pytest.raises(DeviceError, match="the legacy default stream cannot be used while"):
        cuda.transfer(legacy, "load", [plain(device, host)])
    assert end_capture(driver, stream) == 0


@pytest.mark.parametrize("mode", ["thread", "inline"])
def test_bursts_go_on_while_another_thread_captures_and_its_graph_stays_valid(
    driver: StandIn, cuda: CudaDevice, mode: str
) -> None:
    rig = make_rig(cuda, mode)  # type: ignore[arg-type]
    stream = make_stream(driver, cuda)
    begun, over = threading.Event(), threading.Event()

    def capture() -> int:
        begin_capture(driver, stream)
        begun.set()
        assert over.wait(60)
        return end_capture(driver, stream)

    with ThreadPoolExecutor(1) as pool:
        capturing = pool.submit(capture)
        assert begun.wait(60)
        back_up_and_load(rig)
        over.set()
        assert capturing.result(60) == 0


# --- what a call takes ---------------------------------------------------------------------------


def test_largest_pitch_is_the_gpus_or_less(load_stand_in: LoadStandIn) -> None:
    driver = str(load_stand_in(max_pitch=1000).path)
    assert CudaDevice(driver=driver).limits.max_pitch == 1000
    assert CudaDevice(driver=driver, limits=CopyLimits(max_pitch=999)).limits.max_pitch == 999
    assert CudaDevice(driver=driver, limits=CopyLimits(max_pitch=1001)).limits.max_pitch == 1000


@pytest.mark.parametrize("version", VERSIONS)
def test_pitch_above_the_gpus_is_refused_before_the_driver_is_asked(
    load_stand_in: LoadStandIn, version: int
) -> None:
    driver = load_stand_in(version, max_pitch=1000)
    cuda = CudaDevice(driver=str(driver.path))
    device = cuda.tensor(4000)
    host, _pinned = pinned_zeros(cuda, 4000)
    tall = [(device.data_ptr(), host.data_ptr(), 8, 2, 8, pitch) for pitch in (1000, 1001)]
    stream = cuda.new_stream()
    cuda.transfer(stream, "load", tall[:1])
    with pytest.raises(DeviceError, match="pitch 1001 must be from the width 8 to the maximum"):
        cuda.transfer(stream, "load", tall)
    stream.synchronize()
    assert cuda.counters("load").calls == 1
    assert sum(driver.count(name) for name in (*BATCH_CALLS, *SINGLE_CALLS)) == 1


# vllm-project/vllm#49276: a driver crashed on a batch of 51,828
@pytest.mark.parametrize("copies", [1, 2, 4095, 4096, 4097, 60_000, 200_000])
@pytest.mark.parametrize("version", [12080, 13000])
def test_burst_of_many_copies_is_split_at_the_cap(
    load_stand_in: LoadStandIn, version: int, copies: int
) -> None:
    driver = load_stand_in(version)
    cuda = CudaDevice(driver=str(driver.path), limits=CopyLimits(tall_copies=False))
    pages = 2 * copies
    device = DevicePool.from_layers("kv", cuda.tensor(pages * 16).view(1, pages, 16), page_size=1)
    pool = Pool.pair(device, HostPool.allocate(device, pages=copies, pin=cuda.pin))
    tiers = [
        PageAllocator(name=name, pages=count, page_size=1, order="fifo")
        for name, count in (("device", pages), ("host", copies))
    ]
    controller = BurstController(
        [pool], cuda, device_allocator=tiers[0], host_allocator=tiers[1], mode="inline"
    )
    fill_random(device.layers[0], seed=copies)
    every_second = tiers[0].alloc(pages)
    assert every_second is not None
    host = controller.write(every_second[::2].clone())
    assert host is not None
    controller.drain()
    assert torch.equal(pool.host.tensor.view(copies, 16), device.layers[0][::2])
    assert [ack.error for ack in controller.poll()] == [None]
    sizes = [call.copies for call in driver.calls("cuMemcpyBatchAsync")]
    assert sum(sizes) == copies
    assert len(sizes) == -(-copies // 4096)
    assert max(sizes) <= 4096


def test_more_copies_than_a_call_takes_are_refused_whole(driver: StandIn, cuda: CudaDevice) -> None:
    device = cuda.tensor(64)
    host, _pinned = pinned_zeros(cuda, 64)
    with pytest.raises(DeviceError, match="4097 copies in a call, must be from 1 to 4096"):
        cuda.transfer(cuda.new_stream(), "load", 4097 * [plain(device, host)])
    assert driver.count("cuMemcpyBatchAsync") == 0


# --- pinned memory -------------------------------------------------------------------------------


def test_host_pool_that_is_not_pinned_is_refused(cuda: CudaDevice) -> None:
    device = DevicePool.from_layers("kv", cuda.tensor(3 * 64).view(3, 4, 16), page_size=1)
    pool = Pool.pair(device, HostPool.allocate(device, pages=4))
    tiers = [
        PageAllocator(name=name, pages=4, page_size=1, order="fifo") for name in ("device", "host")
    ]
    with pytest.raises(LayoutError, match="pool 'kv': its host buffer is not pinned"):
        BurstController([pool], cuda, device_allocator=tiers[0], host_allocator=tiers[1])


def registered(driver: StandIn) -> list[tuple[int, int]]:
    return [(call.address, call.bytes) for call in driver.calls("cuMemHostRegister")]


def unregistered(driver: StandIn) -> list[int]:
    return [call.address for call in driver.calls("cuMemHostUnregister")]


def test_memory_is_registered_in_chunks_of_whole_units_and_unregistered_last_first(
    driver: StandIn, cuda: CudaDevice
) -> None:
    tensor = torch.zeros(1000, dtype=torch.uint8)
    pinned = cuda.pin(tensor, 96, largest_chunk=300)
    begin = tensor.data_ptr()
    chunks = [(begin, 288), (begin + 288, 288), (begin + 576, 288), (begin + 864, 136)]
    assert pinned.ranges == registered(driver) == chunks
    del pinned
    assert unregistered(driver) == [address for address, _ in reversed(chunks)]
    assert driver.counts().registrations == 0


def test_refused_registration_takes_back_those_before_it(driver: StandIn, cuda: CudaDevice) -> None:
    tensor = torch.zeros(1000, dtype=torch.uint8)
    driver.fail("cuMemHostRegister", OUT_OF_MEMORY, nth=3)
    message = r"cuMemHostRegister of 100 bytes at 0x\w+: CUDA_ERROR_OUT_OF_MEMORY \(2\)"
    with pytest.raises(DeviceError, match=message):
        cuda.pin(tensor, 100, largest_chunk=100)
    begin = tensor.data_ptr()
    assert unregistered(driver) == [begin + 100, begin]
    assert driver.counts().registrations == 0


def test_memory_that_is_registered_already_is_adopted_and_left_so(
    driver: StandIn, cuda: CudaDevice
) -> None:
    tensor = torch.zeros(300, dtype=torch.uint8)
    theirs = cuda.pin(tensor[100:200], 100)
    ours = cuda.pin(tensor, 100, largest_chunk=100)
    begin = tensor.data_ptr()
    assert ours.ranges == [(begin, 100), (begin + 100, 100), (begin + 200, 100)]
    del ours
    assert unregistered(driver) == [begin + 200, begin]
    assert driver.counts().registrations == 1
    del theirs
    assert driver.counts().registrations == 0


def test_memory_of_several_registrations_is_adopted_with_their_borders(cuda: CudaDevice) -> None:
    tensor = torch.zeros(300, dtype=torch.uint8)
    theirs = cuda.pin(tensor, 150, largest_chunk=150)
    ours = cuda.pin(tensor, 300)
    assert (
        ours.ranges
        == theirs.ranges
        == [
            (tensor.data_ptr(), 150),
            (tensor.data_ptr() + 150, 150),
        ]
    )


def test_memory_that_is_registered_in_part_is_refused(driver: StandIn, cuda: CudaDevice) -> None:
    tensor = torch.zeros(300, dtype=torch.uint8)
    theirs = cuda.pin(tensor[:100], 100)
    with pytest.raises(DeviceError, match=f"but 0x{tensor.data_ptr() + 100:x} is not"):
        cuda.pin(tensor, 300)
    assert driver.counts().registrations == 1
    assert theirs.ranges == [(tensor.data_ptr(), 100)]


def test_registration_outlives_every_name_of_the_tensor(driver: StandIn, cuda: CudaDevice) -> None:
    tensor = torch.zeros(300, dtype=torch.uint8)
    pinned = cuda.pin(tensor, 100)
    storage = tensor.untyped_storage()
    del tensor
    gc.collect()
    assert driver.counts().registrations == 1
    assert storage.nbytes() == 300
    del pinned


# sgl-project/sglang#36798
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("page_kib", [192, 320])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_on_both_sides_of_every_chunk_border_come_back(
    load_stand_in: LoadStandIn, layout: HostLayout, page_kib: int, version: int
) -> None:
    driver = load_stand_in(version)
    cuda = CudaDevice(driver=str(driver.path))
    layers, pages, nbytes = 3, 8, page_kib << 10
    device = DevicePool.from_layers(
        "kv", cuda.tensor(layers * pages * nbytes).view(layers, pages, nbytes), page_size=1
    )
    pin = partial(cuda.pin, largest_chunk=1 << 20)
    pool = Pool.pair(device, HostPool.allocate(device, pages=pages, layout=layout, pin=pin))
    assert len(pool.host.registrations) > 4
    tiers = [
        PageAllocator(name=name, pages=pages, page_size=1, order="fifo")
        for name in ("device", "host")
    ]
    controller = BurstController(
        [pool], cuda, device_allocator=tiers[0], host_allocator=tiers[1], check="slots"
    )
    for position, layer in enumerate(device.layers):
        fill_random(layer, seed=position)
    before = [layer.clone() for layer in device.layers]
    slots = tiers[0].alloc(pages)
    assert slots is not None
    host = controller.write(slots)
    assert host is not None
    controller.drain()
    tiers[0].free(slots)
    assert [ack.error for ack in controller.poll()] == [None]
    for layer in device.layers:
        layer.zero_()
    loaded = controller.load(host)
    assert loaded is not None
    controller.start_loading()
    controller.drain()
    assert [ack.error for ack in controller.poll()] == [None]
    for layer, was in zip(device.layers, before, strict=True):
        assert torch.equal(layer[loaded], was[slots])
    assert driver.findings() == []


def test_page_larger_than_a_chunk_is_refused(cuda: CudaDevice) -> None:
    device = DevicePool.from_layers("kv", cuda.tensor(4096).view(1, 2, 2048), page_size=1)
    with pytest.raises(LayoutError, match="unit: 2048 bytes must be from 1 to 1024"):
        HostPool.allocate(device, pages=2, pin=partial(cuda.pin, largest_chunk=1024))


@pytest.mark.parametrize("version", VERSIONS)
def test_gpu_that_sees_host_memory_elsewhere_is_given_that_address(
    load_stand_in: LoadStandIn, version: int
) -> None:
    driver = load_stand_in(version, host_pointers=0)
    back_up_and_load(make_rig(CudaDevice(driver=str(driver.path))))
    assert driver.findings() == []


# --- the end -------------------------------------------------------------------------------------


# sgl-project/sglang#40312, sgl-project/sglang#27501
def test_every_registration_is_taken_back_when_the_pools_are_dropped_under_a_load(
    driver: StandIn, cuda: CudaDevice
) -> None:
    rig = make_rig(cuda)
    stall = cuda.stall(cuda.current_stream())
    rig.load(rig.on_host(0x51))
    release = threading.Timer(0.1, stall.release)
    release.start()
    del rig  # waits for the load
    gc.collect()
    release.join()
    counts = driver.counts()
    assert counts.registered == counts.unregistered > 0
    assert driver.findings() == []


@pytest.mark.parametrize("code", [DEINITIALIZED, CONTEXT_IS_DESTROYED])
def test_driver_that_is_gone_is_no_error_to_whoever_gives_something_back(
    driver: StandIn, code: int
) -> None:
    cuda = CudaDevice(driver=str(driver.path))
    held = [
        cuda.new_stream(),
        cuda.new_event(),
        cuda.tensor(64),
        pinned_zeros(cuda, 64),
        make_rig(cuda, "inline"),
    ]
    driver.fail("*", code)
    with pytest.raises(DeviceError, match=rf"\({code}\)"):
        cuda.new_stream()  # work is refused
    del held, cuda
    gc.collect()
    driver.stop_failing()


def test_forked_child_leaves_the_parents_driver_alone(driver: StandIn, cuda: CudaDevice) -> None:
    held = [make_rig(cuda), cuda.new_stream(), cuda.new_event(), pinned_zeros(cuda, 64)]
    child = os.fork()
    if child == 0:
        before = driver.count()
        held.clear()
        del cuda
        gc.collect()
        os._exit(0 if driver.count() == before else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    back_up_and_load(held[0])  # type: ignore[arg-type]


EXIT = """
import sys
from kvburst import CudaDevice
from rigs import make_rig

rig = make_rig(CudaDevice())
host = rig.on_host(0x52)
{how}
"""


@pytest.mark.parametrize(
    "how",
    [
        "rig.load(host)",
        "stall = rig.device.stall(rig.device.current_stream()); rig.load(host); stall.release()",
        "rig.load(host); sys.exit(3)",
        "rig.load(host); rig.controller.stop(); raise ValueError('end')",
    ],
    ids=["copying", "released", "exit", "error"],
)
def test_process_that_exits_under_a_load_is_gone_and_has_taken_its_registrations_back(
    driver: StandIn, how: str
) -> None:
    result = run_python(driver, EXIT.format(how=how), settings="report=1")
    assert result.returncode in (0, 3, 1), result.stderr  # 86: accesses without an order
    found = re.search(r"registered (\d+), unregistered (\d+)", result.stderr)
    assert found is not None, result.stderr
    assert int(found[1]) == int(found[2]) > 0


def run_python(
    driver: StandIn, script: str, *, settings: str = ""
) -> subprocess.CompletedProcess[str]:
    """In a process of its own whose driver is of the same kind."""
    return run_command([sys.executable, "-c", textwrap.dedent(script)], driver, settings)


def run_command(
    command: list[str], driver: StandIn, settings: str = ""
) -> subprocess.CompletedProcess[str]:
    stand_in = f"version={driver.version},strict=1" + (f",{settings}" if settings else "")
    environment = {
        **os.environ,
        "KVBURST_LIBCUDA": str(driver.path),
        "KVBURST_STAND_IN": stand_in,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


# --- the command line ----------------------------------------------------------------------------

KVBURST = [sys.executable, "-c", "from kvburst.cli import main; main()"]


@pytest.mark.parametrize("version", [11080, 13000])
def test_demo_on_a_stand_in_is_bit_exact_and_orders_every_access(
    load_stand_in: LoadStandIn, version: int
) -> None:
    driver = load_stand_in(version)
    command = [*KVBURST, "demo", "--device", "cuda", "--geometry", "mla-dsa-78", "--pages", "1"]
    result = run_command(command, driver, "order=random,seed=7")
    assert result.returncode == 0, result.stdout + result.stderr  # 86: accesses without an order
    assert "bit-exact" in result.stdout
    assert "a stand-in plays the driver" in result.stdout
    assert "(simulated)" in result.stdout


def test_demo_without_a_driver_says_what_is_missing_in_one_line() -> None:
    environment = {
        **os.environ,
        "KVBURST_LIBCUDA": "libnot-here.so.1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    result = subprocess.run(
        [*KVBURST, "demo", "--device", "cuda"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode != 0
    (line,) = result.stderr.strip().splitlines()
    assert "libnot-here.so.1" in line


def test_handle_of_the_default_stream_is_torchs_default_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pytorch/pytorch#182960: an external stream of handle 0 is another stream, without order."""
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: ("default", index))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    assert as_torch_stream(0, 1) == ("default", 1)
    assert as_torch_stream(0x5000, 1) == (0x5000, 1)
