"""Bursts on a thread of their own: hand-over, the gate's flags and ids, index tensors, order."""

import gc
import logging
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from devices import MakeDevice, to_device
from rigs import LAYERS, Blocking, Rig, make_rig, page_slots, quiesce

from kvburst import CopyLimits, Event, LayoutError, Stream, StreamIndices


@pytest.fixture
def make(make_device: MakeDevice) -> Callable[..., Rig]:
    return lambda **options: make_rig(make_device(), "thread", **options)


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    return make()


@pytest.fixture
def stuck(make_device: MakeDevice) -> Callable[..., Rig]:
    """Makes rigs whose threads are stuck in a copy while the current stream is held up."""
    return lambda **options: make_rig(make_device(shallow=True), "thread", **options)


class Snapshot:
    """What a forward on a stream of its own finds in device pages, layer by layer."""

    def __init__(self, rig: Rig, slots: torch.Tensor) -> None:
        self.stream = rig.device.new_stream()
        self._rig = rig
        self._first = int(slots[0])
        self._layers = to_device(rig.device, torch.zeros(LAYERS, dtype=torch.uint8))

    def take(self, layer: int) -> None:
        kv = self._rig.pools[0].device.layers[layer]
        self._rig.device.copy(
            self.stream,
            dst=self._layers.data_ptr() + layer,
            src=kv[self._first].data_ptr(),
            width=1,
        )

    def seen(self) -> list[int]:
        self.stream.synchronize()
        return self._layers.tolist()


# --- hand-over -----------------------------------------------------------------------------------


def test_hand_over_returns_while_the_issuer_is_stuck(stuck: Callable[..., Rig]) -> None:
    rig = stuck(gate_slots=4)
    host = rig.on_host(0x21)
    with rig.held():
        loads = [rig.load(host) for _ in range(4)]
        quiesce()
        assert [burst for burst, _ in loads] == [0, 1, 2, 3]
        assert not any(ack.burst.settled for ack in rig.controller.ack_load_queue)
        assert rig.controller.poll() == []
    rig.settle()
    assert len(rig.controller.poll()) == 4
    for _, target in loads:
        assert rig.found_on_device(target) == {0x21}


def test_inline_issues_before_it_returns(make_device: MakeDevice) -> None:
    rig = make_rig(make_device(), "inline")
    with rig.held():
        rig.load(rig.on_host(0x21))
        (ack,) = rig.controller.ack_load_queue
        assert ack.burst.settled
        assert not ack.finish_event.query()
    rig.settle()


def test_write_back_evictions_are_issued_inline(make: Callable[..., Rig]) -> None:
    rig = make(write_policy="write_back")
    with rig.held():
        assert rig.controller.write(rig.take()) is not None
        (ack,) = rig.controller.ack_write_queue
        assert ack.burst.settled
    rig.settle()


def test_threads_are_named_and_run_where_they_are_told(make: Callable[..., Rig]) -> None:
    cpu = min(os.sched_getaffinity(0))
    rig = make(cpus=[cpu])
    tasks = Path("/proc/self/task")
    named = {
        name: {int(task.name) for task in tasks.iterdir() if comm(task) == name}
        for name in ("kvburst-load", "kvburst-backup")
    }
    assert all(named.values())
    # Others of earlier tests may be there as well, if nobody has collected them.
    assert all(any(os.sched_getaffinity(tid) == {cpu} for tid in tids) for tids in named.values())
    burst, target = rig.load(rig.on_host(0x22))
    rig.wait(burst, LAYERS - 1)
    rig.settle()
    assert rig.found_on_device(target) == {0x22}


def comm(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # It has ended meanwhile.


@pytest.mark.parametrize("cpu", [-1, 4000])
def test_processor_that_is_not_there_is_refused(make: Callable[..., Rig], cpu: int) -> None:
    with pytest.raises(LayoutError, match=f"cpus: processor {cpu} is none of the"):
        make(cpus=[cpu])


# --- the issued flag -----------------------------------------------------------------------------


def test_forward_that_comes_before_the_issuer_waits_for_it(stuck: Callable[..., Rig]) -> None:
    rig = stuck()
    other, host = rig.on_host(0x11), rig.on_host(0x55)
    with rig.held():
        rig.load(other)  # the thread is stuck in this one
        burst, target = rig.load(host)
        rig.write_device(target, 0xAA)
        forward = Snapshot(rig, target)

        def run() -> None:
            for layer in range(LAYERS):
                rig.wait(burst, layer, forward.stream)
                forward.take(layer)

        waiter = Blocking(run)
        assert waiter.blocks()
    waiter.join()
    assert forward.seen() == [0x55] * LAYERS


def test_forward_that_orders_itself_by_an_event_alone_sees_a_stale_layer(
    stuck: Callable[..., Rig],
) -> None:
    rig = stuck()
    other, host = rig.on_host(0x11), rig.on_host(0x55)
    with rig.held():
        rig.load(other)
        burst, target = rig.load(host)
        rig.write_device(target, 0xAA)
        forward = Snapshot(rig, target)
        # What a gate without flags would do: the event is not recorded yet, so this is no wait.
        layer_event = rig.device.new_event()
        transfer = rig.device.new_stream()
        recorder = Blocking(lambda: record_behind(rig, burst, layer_event, transfer))
        assert recorder.blocks()
        forward.stream.wait_event(layer_event)
        forward.take(0)
        assert forward.seen()[0] == 0xAA
    recorder.join()
    forward.stream.wait_event(layer_event)
    forward.take(0)
    assert forward.seen()[0] == 0x55


def record_behind(rig: Rig, burst: int, event: Event, stream: Stream) -> None:
    """Record `event` behind layer 0 of `burst`, once that is issued."""
    rig.wait(burst, 0, stream)
    stream.record_event(event)


# sgl-project/sglang#36743
def test_consumer_that_waits_for_all_layers_sees_all_of_them_new(rig: Rig) -> None:
    host = rig.on_host(0x55)
    with rig.held():
        burst, target = rig.load(host)
        rig.write_device(target, 0xAA)
        forward = Snapshot(rig, target)
        for layer in range(LAYERS):
            rig.wait(burst, layer, forward.stream)
        for layer in range(LAYERS):
            forward.take(layer)
    assert forward.seen() == [0x55] * LAYERS


# --- the burst id --------------------------------------------------------------------------------


def test_old_id_never_waits_for_the_newer_burst_in_its_slot(stuck: Callable[..., Rig]) -> None:
    rig = stuck(gate_slots=1)
    host = rig.on_host(0x31)
    old, _ = rig.load(host)
    rig.settle()
    stream = rig.device.new_stream()
    with rig.held():
        new, _ = rig.load(host)
        for layer in range(LAYERS):
            rig.wait(old, layer, stream)
        stream.synchronize()
        assert rig.controller.is_load_back_event_done(old)
        assert not rig.controller.is_load_back_event_done(new)
    rig.settle()


def test_slot_that_is_indexed_directly_gives_the_newer_bursts_event(
    make: Callable[..., Rig],
) -> None:
    rig = make(gate_slots=1)
    host = rig.on_host(0x31)
    slots = [rig.device.new_event()]
    transfer = rig.device.new_stream()

    def load_and_record() -> int:
        burst, _ = rig.load(host)
        record_behind(rig, burst, slots[burst % len(slots)], transfer)
        return burst

    old = load_and_record()
    rig.settle()
    stream = rig.device.new_stream()
    with rig.held():
        load_and_record()
        stream.wait_event(slots[old % len(slots)])
        quiesce()
        assert not stream.query()  # held up by a burst that it does not consume
    rig.settle()


def test_slot_of_a_burst_that_is_not_issued_is_not_handed_out(stuck: Callable[..., Rig]) -> None:
    rig = stuck(gate_slots=2)
    host = rig.on_host(0x32)
    with rig.held():
        rig.load(host)  # the thread is stuck in this one
        rig.load(host)  # queued
        # All that an event says of a burst that is not issued is that it is over.
        assert rig.device.new_event().query()
        third = Blocking(lambda: rig.load(host))
        assert third.blocks()
        assert not rig.controller.is_load_back_event_done(0)
        assert not rig.controller.is_load_back_event_done(1)
    third.join()
    rig.settle()
    assert rig.controller.is_load_back_event_done(2)


# --- index tensors -------------------------------------------------------------------------------


# NVIDIA/TensorRT-LLM#15546, lightseekorg/tokenspeed#1450
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_overwritten_and_freed_right_after_submission_are_those_of_submission(
    stuck: Callable[..., Rig], dtype: torch.dtype
) -> None:
    rig = stuck()
    sources = [rig.on_host(value) for value in (0x41, 0x42)]
    with rig.held():
        indices = sources[0].to(dtype)
        _, first = rig.load(indices)
        indices.copy_(sources[1])
        _, second = rig.load(indices)
        indices.fill_(10_000)
        del indices
        gc.collect()
    rig.settle()
    assert rig.found_on_device(first) == {0x41}
    assert rig.found_on_device(second) == {0x42}


def test_backup_indices_overwritten_right_after_submission_are_those_of_submission(
    rig: Rig,
) -> None:
    pages = [rig.take(), rig.take()]
    for page, value in zip(pages, (0x43, 0x44), strict=True):
        rig.write_device(page, value)
    with rig.held():
        indices = pages[0].clone()
        first = rig.controller.write(indices)
        indices.copy_(pages[1])
        second = rig.controller.write(indices)
        indices.fill_(10_000)
    rig.settle()
    assert first is not None
    assert second is not None
    assert rig.found_on_host(first) == {0x43}
    assert rig.found_on_host(second) == {0x44}


def test_indices_that_the_stream_still_writes_are_read_behind_it(rig: Rig) -> None:
    page, wanted = late_indices(rig)
    late = to_device(rig.device, torch.zeros_like(wanted))
    with rig.held():
        produce(rig, wanted, into=late)
        host = rig.controller.write(StreamIndices(late))
        del late
        gc.collect()
    rig.settle()
    assert host is not None
    assert rig.found_on_host(host) == {0x45}
    assert rig.controller.poll()[0].error is None
    assert rig.found_on_device(page) == {0x45}


def test_indices_that_are_read_at_once_are_those_before_the_stream_wrote_them(rig: Rig) -> None:
    _, wanted = late_indices(rig)
    late = to_device(rig.device, page_slots(0))  # a valid page, and the wrong one
    if late.device.type != "cpu":
        pytest.skip("indices on a GPU are never read at once")
    with rig.held():
        produce(rig, wanted, into=late)
        host = rig.controller.write(late)
    rig.settle()
    assert host is not None
    assert rig.found_on_host(host) == {0x00}


@pytest.mark.parametrize("stride", [1, 2])
def test_late_indices_are_read_where_tall_copies_are_switched_off(
    make_device: MakeDevice, stride: int
) -> None:
    rig = make_rig(make_device(limits=CopyLimits(tall_copies=False)), "thread")
    page, wanted = late_indices(rig)
    late = to_device(rig.device, wanted.repeat_interleave(stride))[::stride]
    host = rig.controller.write(StreamIndices(late))
    rig.settle()
    assert host is not None
    assert rig.controller.poll()[0].error is None
    assert rig.found_on_host(host) == {0x45}
    assert rig.found_on_device(page) == {0x45}


def late_indices(rig: Rig) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of a device page of 0x45, which is not page 0, of zeros; and the same on the
    device."""
    assert rig.take().tolist() == page_slots(0).tolist()
    page = rig.take()
    rig.write_device(page, 0x45)
    return page, to_device(rig.device, page)


def produce(rig: Rig, values: torch.Tensor, *, into: torch.Tensor) -> None:
    """The current stream writes `values` to `into`."""
    rig.device.copy(
        rig.device.current_stream(),
        dst=into.data_ptr(),
        src=values.data_ptr(),
        width=values.numel() * values.element_size(),
    )


def test_late_indices_are_not_stuck_behind_the_copies_of_earlier_bursts(rig: Rig) -> None:
    page, wanted = late_indices(rig)
    busy = rig.device.new_stream()
    with rig.held(busy):
        with busy:
            first = rig.controller.write(page)
        second = rig.controller.write(StreamIndices(wanted))
        quiesce()
        # Read, planned and issued, although the stream that both bursts copy on is held up.
        issued = [ack.burst.settled for ack in rig.controller.ack_write_queue]
        done = [ack.finish_event.query() for ack in rig.controller.ack_write_queue]
    assert (issued, done) == ([True, True], [False, False])
    rig.settle()
    assert first is not None
    assert second is not None
    assert rig.found_on_host(first) == rig.found_on_host(second) == {0x45}


# --- order ---------------------------------------------------------------------------------------


def test_acks_of_twenty_bursts_retire_in_order_whatever_ends_first(
    make: Callable[..., Rig],
) -> None:
    rig = make(gate_slots=20)
    host = rig.on_host(0x51)
    streams = [rig.device.new_stream() for _ in range(20)]
    stalls = [rig.device.stall(stream) for stream in streams]
    for node, stream in enumerate(streams, start=1):
        with stream:
            rig.load(host, node_id=node)
    random.Random(5).shuffle(stalls)
    retired: list[int] = []
    for stall in stalls:
        stall.release()
        quiesce()
        retired += [node for ack in rig.controller.poll() for node in ack.node_ids]
        assert retired == list(range(1, len(retired) + 1))
    rig.settle()
    retired += [node for ack in rig.controller.poll() for node in ack.node_ids]
    assert retired == list(range(1, 21))


# --- a wait that lasts ---------------------------------------------------------------------------


@pytest.mark.slow  # the half minute is real
@pytest.mark.parametrize("make_device", ["host"], indirect=True)
def test_wait_that_lasts_says_so_every_half_minute(
    stuck: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    said = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.set()

    rig = stuck()
    logger, listener = logging.getLogger("kvburst"), Listener()
    logger.addHandler(listener)
    try:
        with rig.held():
            burst, _ = rig.load(rig.on_host(0x61))
            waiter = Blocking(lambda: rig.wait(burst, LAYERS - 1))
            assert said.wait(45)
        waiter.join()
    finally:
        logger.removeHandler(listener)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "load 0: layer 7 is still not issued after 30 s"
