"""A burst that fails: who is told, what is counted, and that the next one is served."""

import logging
import re
from collections.abc import Callable

import pytest
import torch
from devices import MakeDevice, to_device
from rigs import LAYERS, PAGE, Blocking, Mode, Rig, make_rig, page_slots, quiesce

from kvburst import BurstError, PlanOptions, StreamIndices

MODES: tuple[Mode, ...] = ("thread", "inline")

# Copies in these tests: one call a group, and a group is one layer of one pool.
PLAIN = PlanOptions(ramp=False)
GROUPS = 11  # 8 layers of "kv", 3 of "index_k"

# The nth group of a load: its pool and layer, in the order in which model layers come.
FAILING_GROUPS = [
    pytest.param(1, "kv", 0, id="first"),
    pytest.param(6, "index_k", 3, id="middle"),
    pytest.param(GROUPS, "kv", 7, id="last"),
]


@pytest.fixture(params=MODES)
def rig(request: pytest.FixtureRequest, make_device: MakeDevice) -> Rig:
    return make_rig(make_device(), request.param, options=PLAIN)


@pytest.fixture
def stuck(make_device: MakeDevice) -> Callable[..., Rig]:
    """Makes rigs whose threads are stuck in a copy while the current stream is held up."""
    return lambda **options: make_rig(make_device(shallow=True), "thread", **options)


# --- who is told ---------------------------------------------------------------------------------


# ai-dynamo/dynamo#15079
@pytest.mark.parametrize(("nth", "pool", "layer"), FAILING_GROUPS)
def test_failed_load_names_itself_in_its_ack_and_to_every_waiter(
    rig: Rig, caplog: pytest.LogCaptureFixture, nth: int, pool: str, layer: int
) -> None:
    host = rig.on_host(0x55, pages=2)
    assert rig.controller.load(host[:PAGE], node_id=41) is not None
    assert rig.controller.load(host[PAGE:], node_id=42) is not None
    rig.device.fail_copy_call(nth)
    burst = rig.controller.start_loading()
    rig.settle()

    message = (
        f"load 0 failed in group {nth} of {GROUPS} (pool '{pool}', layers {layer} to {layer}), "
        "node_ids [41, 42]: copy: failed, as it was told to"
    )
    for waited in range(LAYERS):
        for stream in (None, rig.device.new_stream()):
            with pytest.raises(BurstError) as raised:
                rig.wait(burst, waited, stream)
            assert str(raised.value) == message
    with pytest.raises(BurstError, match="load 0 failed"):
        rig.controller.is_load_back_event_done(burst)

    (ack,) = rig.controller.ack_load_queue
    assert ack.finish_event.query()
    assert ack.error == message
    assert ack.num_tokens == 0
    assert ack.num_burst_tokens == 2 * PAGE
    assert ack.node_ids == [41, 42]
    assert ack.burst.num_copies == nth - 1  # what had been issued did move

    assert rig.controller.poll() == [ack]
    assert rig.controller.poll() == []
    stats = rig.controller.stats().loads
    assert (stats.bursts, stats.failures, stats.last_error) == (1, 1, message)
    assert stats.recent == ()
    logged = [record for record in caplog.records if record.name == "kvburst"]
    assert [(record.levelno, record.getMessage()) for record in logged] == [
        (logging.ERROR, message)
    ]


def test_burst_after_a_failed_one_is_served(rig: Rig) -> None:
    host = rig.on_host(0x56)
    for nth in (1, 6, GROUPS):
        rig.device.fail_copy_call(nth)
        failed, _ = rig.load(host)
        rig.settle()
        served, target = rig.load(host)
        for layer in range(LAYERS):
            rig.wait(served, layer)
        rig.settle()
        assert rig.found_on_device(target) == {0x56}
        acks = rig.controller.poll()
        assert [ack.burst.id for ack in acks] == [failed, served]
        assert [ack.num_tokens for ack in acks] == [0, PAGE]
    stats = rig.controller.stats().loads
    assert (stats.bursts, stats.failures) == (6, 3)
    assert stats.last_error is not None  # latched, although the newest burst did not fail
    assert stats.last_error.startswith("load 4 failed")


@pytest.mark.parametrize("nth", [1, 2])
def test_failed_backup_names_itself_in_its_ack(rig: Rig, nth: int) -> None:
    pages = rig.take()
    rig.write_device(pages, 0x57)
    rig.device.fail_copy_call(nth)
    assert rig.controller.write(pages, node_id=7) is not None
    rig.settle()
    (ack,) = rig.controller.poll()
    assert ack.error is not None
    assert ack.error.startswith(f"backup 0 failed in group {nth} of 2 (pool ")
    assert "node_ids [7]" in ack.error
    assert ack.num_tokens == 0
    host = rig.controller.write(pages, node_id=8)
    assert host is not None
    rig.settle()
    assert rig.found_on_host(host) == {0x57}
    assert rig.controller.stats().backups.failures == 1
    assert rig.controller.stats().loads.failures == 0


def test_pages_of_a_failed_burst_come_back_once_with_its_ack(rig: Rig) -> None:
    host = rig.on_host(0x58)
    rig.device.fail_copy_call(3)
    _, target = rig.load(host)
    rig.settle()
    free = (rig.device_pages.available_pages, rig.host_pages.available_pages)
    rig.device_pages.free(target)
    rig.host_pages.free(host)
    assert (rig.device_pages.available_pages, rig.host_pages.available_pages) == free
    rig.controller.poll()
    assert (rig.device_pages.available_pages, rig.host_pages.available_pages) == (32, 32)


def test_failed_burst_is_done_only_when_what_it_had_issued_is(rig: Rig) -> None:
    with rig.held():
        rig.device.fail_copy_call(4)
        rig.load(rig.on_host(0x59))
        quiesce()
        (ack,) = rig.controller.ack_load_queue
        assert ack.error is not None
        assert not ack.finish_event.query()
        assert rig.controller.poll() == []
    ack.finish_event.synchronize()
    assert rig.controller.poll() == [ack]


def test_forward_that_comes_after_the_slot_has_moved_on_is_still_told(rig: Rig) -> None:
    host = rig.on_host(0x5A)
    rig.device.fail_copy_call(2)
    failed, _ = rig.load(host)
    rig.settle()
    for _ in range(3):  # gate slots
        rig.load(host)
        rig.settle()
    with pytest.raises(BurstError, match="load 0 failed"):
        rig.wait(failed, LAYERS - 1)
    with pytest.raises(BurstError, match="load 0 failed"):
        rig.controller.is_load_back_event_done(failed)


# --- while somebody waits ------------------------------------------------------------------------


@pytest.mark.parametrize(("nth", "pool", "layer"), FAILING_GROUPS)
def test_failure_wakes_whoever_waits_for_the_issuer(
    stuck: Callable[..., Rig], nth: int, pool: str, layer: int
) -> None:
    rig = stuck(options=PLAIN)
    host = rig.on_host(0x5B)
    with rig.held():
        rig.load(host)  # the thread is stuck in this one
        quiesce()
        begun = 1 + rig.device.counters("load").calls  # the one it is stuck in is not counted yet
        rig.device.fail_copy_call(GROUPS - begun + nth)
        failed, _ = rig.load(host)
        waiters = [
            Blocking(lambda: rig.wait(failed, LAYERS - 1)),
            Blocking(lambda: rig.wait(failed, LAYERS - 1, rig.device.new_stream())),
            Blocking(lambda: rig.controller.ack_load_queue[1].finish_event.synchronize()),
        ]
        assert all(waiter.blocks() for waiter in waiters)
        served, target = rig.load(host)
    for waiter in waiters[:2]:
        with pytest.raises(BurstError, match=rf"group {nth} of {GROUPS} \(pool '{pool}'"):
            waiter.join()
    waiters[2].join()
    rig.wait(0, LAYERS - 1)
    rig.wait(served, LAYERS - 1)
    rig.settle()
    assert rig.found_on_device(target) == {0x5B}
    assert [ack.error is None for ack in rig.controller.poll()] == [True, False, True]


# --- indices that turn out bad -------------------------------------------------------------------


BAD_VALUES = [
    (torch.arange(1, 1 + PAGE), r"device_indices\[0\]: slot 1 does not start a page"),
    (page_slots(3, 99), r"device_indices\[4\]: slot 396 is out of range, the tier has 32 pages"),
    (torch.arange(-PAGE, 0), r"device_indices\[0\]: slot -4 is out of range"),
    (torch.tensor([0, 1, 9, 3]), r"device_indices\[2\]: slot 9 must be 2"),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES)
def test_late_indices_that_turn_out_bad_fail_their_burst_before_anything_moves(
    rig: Rig, values: torch.Tensor, message: str
) -> None:
    host = rig.controller.write(StreamIndices(to_device(rig.device, values)), node_id=9)
    assert host is not None
    rig.settle()
    (ack,) = rig.controller.poll()
    assert ack.error is not None
    assert re.match(rf"backup 0 failed in its start, node_ids \[9\]: {message}", ack.error)
    assert rig.device.counters("backup").copies == 0
    pages = rig.take()
    rig.write_device(pages, 0x5C)
    served = rig.controller.write(StreamIndices(to_device(rig.device, pages)))
    assert served is not None
    rig.settle()
    assert rig.found_on_host(served) == {0x5C}


# --- nobody but poll -----------------------------------------------------------------------------


# sgl-project/sglang#29701
def test_poll_alone_retires_nineteen_acks_of_which_some_failed(rig: Rig) -> None:
    pages = rig.take(19)
    for node in range(19):
        if node % 5 == 3:
            rig.settle()
            rig.device.fail_copy_call(2)
        rig.controller.write(pages[node * PAGE : (node + 1) * PAGE], node_id=node)
    rig.settle()
    retired = rig.controller.poll()
    assert [ack.node_ids for ack in retired] == [[node] for node in range(19)]
    assert [node for node, ack in enumerate(retired) if ack.error] == [3, 8, 13, 18]
    assert not rig.controller.has_inflight_device_transfers()
