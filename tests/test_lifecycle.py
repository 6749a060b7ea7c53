"""Reset, stop, exit, fork: everything ends in bounded time, and says what happened."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from devices import MakeDevice
from rigs import LAYERS, PAGE, Blocking, Mode, Rig, make_rig, quiesce, thread_state

from kvburst import BurstError, LayoutError

MODES: tuple[Mode, ...] = ("thread", "inline")

EXIT_SECONDS = 10.0


@pytest.fixture(params=MODES)
def rig(request: pytest.FixtureRequest, make_device: MakeDevice) -> Rig:
    return make_rig(make_device(), request.param)


@pytest.fixture
def stuck(make_device: MakeDevice) -> Callable[..., Rig]:
    """Makes rigs whose threads are stuck in a copy while the current stream is held up."""
    return lambda **options: make_rig(make_device(shallow=True), "thread", **options)


# --- reset ---------------------------------------------------------------------------------------


def test_reset_retires_bursts_in_every_state_and_none_reappears(rig: Rig) -> None:
    host = rig.on_host(0x61)
    counter = rig.controller.layer_done_counter
    rig.load(host)
    rig.settle()  # 0: done, its ack not retired
    rig.device.fail_copy_call(2)
    rig.load(host)
    rig.settle()  # 1: failed
    with rig.held():
        newest, _ = rig.load(host)  # 2: under way
        assert rig.controller.write(rig.take()) is not None  # a backup under way
        queued = rig.controller.load(host)  # never submitted
        assert queued is not None
        resetting = Blocking(rig.controller.reset)
        assert resetting.blocks()
        assert [ack.burst.id for ack in rig.controller.ack_load_queue] == [0, 1, 2]
    resetting.join()
    assert not rig.controller.has_inflight_device_transfers()
    assert rig.controller.poll() == []
    assert (counter.producer_index, counter.consumer_index) == (-1, -1)
    assert rig.controller.start_loading() == -1
    assert rig.controller.stats().loads.failures == 1

    # Ids go on, and every page is free once its owner says so.
    rig.device_pages.clear()
    rig.host_pages.clear()
    assert rig.device_pages.available_pages == rig.host_pages.available_pages == 32
    burst, target = rig.load(rig.on_host(0x62))
    assert burst == newest + 1
    rig.settle()
    assert rig.found_on_device(target) == {0x62}
    assert [ack.burst.id for ack in rig.controller.poll()] == [burst]


def test_reset_waits_for_a_burst_that_is_queued_behind_a_stuck_one(
    stuck: Callable[..., Rig],
) -> None:
    rig = stuck()
    host = rig.on_host(0x63)
    with rig.held():
        rig.load(host)
        _, target = rig.load(host)
        resetting = Blocking(rig.controller.reset)
        assert resetting.blocks()
        assert len(rig.controller.ack_load_queue) == 2
    resetting.join()
    assert rig.found_on_device(target) == {0x63}
    assert len(rig.controller.ack_load_queue) == 0


# --- stop ----------------------------------------------------------------------------------------


def test_after_a_clean_stop_bursts_are_issued_inline(rig: Rig) -> None:
    host = rig.on_host(0x64)
    rig.load(host)
    rig.controller.stop()
    rig.controller.stop(timeout=float("inf"))
    for _ in range(3):
        burst, target = rig.load(host)
        assert rig.controller.ack_load_queue[-1].burst.settled
        for layer in range(LAYERS):
            rig.wait(burst, layer)
        rig.settle()
        assert rig.found_on_device(target) == {0x64}
        rig.controller.poll()
    backup = rig.controller.write(target)
    assert backup is not None
    rig.settle()
    assert rig.found_on_host(backup) == {0x64}


def test_stop_waits_for_what_is_submitted(stuck: Callable[..., Rig]) -> None:
    rig = stuck()
    host = rig.on_host(0x65)
    with rig.held():
        targets = [rig.load(host)[1] for _ in range(3)]
        stopping = Blocking(rig.controller.stop)
        assert stopping.blocks()
    stopping.join()
    rig.settle()
    assert [ack.error for ack in rig.controller.poll()] == [None, None, None]
    for target in targets:
        assert rig.found_on_device(target) == {0x65}


# sgl-project/sglang#40312
def test_stop_of_an_issuer_that_is_stuck_in_a_copy_is_bounded_and_final(
    stuck: Callable[..., Rig],
) -> None:
    rig = stuck()
    host = rig.on_host(0x66, pages=2)
    with rig.held():
        current, current_target = rig.load(host[:PAGE], node_id=1)
        queued, queued_target = rig.load(host[PAGE:], node_id=2)
        waiters = [
            Blocking(lambda: rig.wait(current, LAYERS - 1)),
            Blocking(lambda: rig.wait(queued, 0, rig.device.new_stream())),
            Blocking(rig.controller.drain),
        ]
        assert all(waiter.blocks() for waiter in waiters)

        begin = time.monotonic()
        with pytest.raises(BurstError, match="an issuer is still stuck in the driver after 2 s"):
            rig.controller.stop(2)
        assert time.monotonic() - begin < 3

        for waiter, message in zip(
            waiters,
            (
                r"load 0 failed in the driver, node_ids \[1\]: issuer: stuck in load 0",
                r"load 1 failed in the queue, node_ids \[2\]: issuer: stuck in load 0",
                r"stuck in load 0 when it was stopped after \d+ ms, nothing more is issued",
            ),
            strict=True,
        ):
            with pytest.raises(BurstError, match=message):
                waiter.join()
        for submission in (lambda: rig.load(host), lambda: rig.wait(current, 0)):
            with pytest.raises(BurstError, match="stuck in load 0"):
                submission()
        with pytest.raises(BurstError, match="still stuck"):
            rig.controller.stop(10)

        # Nothing says when the copies of the burst that is stuck end: its pages stay reserved.
        acks = rig.controller.poll()
        assert [ack.burst.id for ack in acks] == [0, 1]
        assert all(ack.error is not None and ack.num_tokens == 0 for ack in acks)
        rig.device_pages.free(current_target)
        rig.device_pages.free(queued_target)
        rest = rig.device_pages.alloc(rig.device_pages.available_size())
        assert rest is not None
        assert not set(current_target.tolist()) & set(rest.tolist())
        assert set(queued_target.tolist()) <= set(rest.tolist())
    rig.device.synchronize()


@pytest.mark.parametrize("stuck", ["issuer", "stream"])
def test_dropped_controller_leaves_what_is_stuck_its_memory(
    make_device: MakeDevice, stuck: str
) -> None:
    device = make_device(shallow=True) if stuck == "issuer" else make_device()
    rig = make_rig(device)
    stall = device.stall(device.current_stream())
    rig.load(rig.on_host(0x67))
    if stuck == "issuer":
        with pytest.raises(BurstError, match="still stuck"):
            rig.controller.stop(0.1)
    pool = weakref.ref(rig.pools[0])
    begin = time.monotonic()
    del rig
    assert time.monotonic() - begin < EXIT_SECONDS
    assert pool() is not None  # the copies still use its tensors
    stall.release()
    device.synchronize()

    other = make_rig(device)
    burst, target = other.load(other.on_host(0x68))
    other.wait(burst, LAYERS - 1)
    other.settle()
    assert other.found_on_device(target) == {0x68}
    pool = weakref.ref(other.pools[0])
    del other
    assert pool() is None


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_timeout_below_zero_is_refused(rig: Rig, timeout: float) -> None:
    with pytest.raises(LayoutError, match=rf"timeout: {timeout} seconds must be at least 0"):
        rig.controller.stop(timeout)
    burst, _ = rig.load(rig.on_host(1))
    rig.wait(burst, 0)


# --- others in the process -----------------------------------------------------------------------


def test_controllers_of_one_process_do_not_hold_each_other_up(make_device: MakeDevice) -> None:
    stuck = make_rig(make_device(shallow=True))
    other = make_rig(make_device())
    with stuck.held():
        stuck.load(stuck.on_host(0x71))
        quiesce()
        for value in (0x72, 0x73):
            burst, target = other.load(other.on_host(value))
            other.wait(burst, LAYERS - 1)
            other.settle()
            assert other.found_on_device(target) == {value}
        other.controller.stop()
    stuck.settle()
    assert [ack.error for ack in stuck.controller.poll()] == [None]


def test_controllers_come_and_go_and_leave_no_thread(make_device: MakeDevice) -> None:
    device = make_device()
    device.busy(device.current_stream(), 0)  # the threads that the device itself has
    device.synchronize()
    before = threads()
    for value in range(1, 11):
        rig = make_rig(device)
        burst, target = rig.load(rig.on_host(value))
        rig.wait(burst, LAYERS - 1)
        rig.settle()
        assert rig.found_on_device(target) == {value}
        del rig
    deadline = time.monotonic() + 30
    while threads() != before:  # a driver's end when they please
        assert time.monotonic() < deadline, f"{threads()} threads, {before} before"
        time.sleep(0.01)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


# --- exit ----------------------------------------------------------------------------------------


SCRIPT = """
import os, signal, sys, threading
from kvburst import BurstError, HostDevice, LinkModel, PlanOptions
from devices import SHALLOW
from rigs import LAYERS, Blocking, make_rig

def say(*words):
    print(*words, flush=True)

"""


class Program:
    """A Python program that runs beside the test."""

    def __init__(self, body: str) -> None:
        path = [str(Path(__file__).parent), *sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", SCRIPT + textwrap.dedent(body)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_for(self, line: str) -> None:
        """Return when it has printed `line`."""
        assert self._process.stdout is not None
        for found in self._process.stdout:
            if found.strip() == line:
                return
        raise AssertionError(f"ended without {line!r}: {self._process.stderr.read()}")

    def wait_until_asleep(self) -> None:
        """Return when its main thread blocks."""
        main = Path(f"/proc/{self._process.pid}/task/{self._process.pid}")
        quiet = 0
        while quiet < 200:
            quiet = quiet + 1 if thread_state(main) == "S" else 0
            os.sched_yield()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ended(self) -> tuple[int, str, str]:
        """Exit status, the rest of its output, and its errors; it ends in time."""
        begin = time.monotonic()
        output, errors = self._process.communicate(timeout=60)
        assert time.monotonic() - begin < EXIT_SECONDS
        return self._process.returncode, output, errors


IN_FLIGHT = """
# A link on which the copies take a third of a second, so that the exit overtakes them.
rig = make_rig(HostDevice(link=LinkModel(gigabytes_per_second=0.00005)))
host = rig.on_host(0x55, pages=8)
for _ in range(3):
    rig.load(host)
rig.controller.write(rig.take(8))
assert not rig.controller.ack_load_queue[0].finish_event.query()
"""

TWENTY_TIMES = """
import time
for _ in range(20):
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        break  # goes on below, and ends as every program does
    assert os.waitpid(child, 0)[1] == 0
    assert time.monotonic() - begin < 10
else:
    say("twenty times")
    sys.exit()
"""


@pytest.mark.slow
def test_process_with_copies_in_flight_exits_cleanly_twenty_times() -> None:
    with Program(TWENTY_TIMES + IN_FLIGHT) as program:
        program.wait_for("twenty times")
        assert program.ended() == (0, "", "")


ENDS = {
    "copies in flight": IN_FLIGHT,
    "a stream that is never released": """
        rig = make_rig(HostDevice())
        stall = rig.device.stall(rig.device.current_stream())
        rig.load(rig.on_host(1)); rig.controller.write(rig.take())
        """,
    "the same inline": """
        rig = make_rig(HostDevice(), "inline")
        stall = rig.device.stall(rig.device.current_stream())
        rig.load(rig.on_host(1)); rig.controller.write(rig.take())
        """,
    "threads that are stuck": """
        rig = make_rig(HostDevice(link=SHALLOW))
        stall = rig.device.stall(rig.device.current_stream())
        rig.load(rig.on_host(1)); rig.load(rig.on_host(1)); rig.controller.write(rig.take())
        """,
    "threads that are stuck and a daemon that waits": """
        rig = make_rig(HostDevice(link=SHALLOW))
        stall = rig.device.stall(rig.device.current_stream())
        burst, _ = rig.load(rig.on_host(1))
        waiters = [
            Blocking(lambda: rig.wait(burst, LAYERS - 1)),
            Blocking(lambda: rig.controller.ack_load_queue[0].finish_event.synchronize()),
            Blocking(rig.controller.drain),
        ]
        assert all(waiter.blocks() for waiter in waiters)
        """,
    "a stop that timed out": """
        rig = make_rig(HostDevice(link=SHALLOW))
        stall = rig.device.stall(rig.device.current_stream())
        rig.load(rig.on_host(1))
        try:
            rig.controller.stop(0.1)
        except BurstError:
            pass
        """,
    "a failed load": """
        rig = make_rig(HostDevice())
        rig.device.fail_copy_call(2)
        rig.load(rig.on_host(1))
        """,
    "a device that goes first": """
        rig = make_rig(HostDevice())
        rig.load(rig.on_host(1))
        keep = rig.controller
        del rig
        """,
}


@pytest.mark.slow
@pytest.mark.parametrize("state", ENDS)
def test_process_exits_cleanly_with(state: str) -> None:
    with Program(textwrap.dedent(ENDS[state]) + 'say("ending")\n') as program:
        program.wait_for("ending")
        assert program.ended() == (0, "", "")


WAITING_FOR_STUCK = """
rig = make_rig(HostDevice(link=SHALLOW))
stall = rig.device.stall(rig.device.current_stream())
burst, _ = rig.load(rig.on_host(1))
say("waiting")
"""


@pytest.mark.slow
def test_interrupt_ends_a_wait_at_the_gate() -> None:
    body = """
        try:
            rig.wait(burst, LAYERS - 1)
        except KeyboardInterrupt:
            say("interrupted")
        """
    with Program(WAITING_FOR_STUCK + textwrap.dedent(body)) as program:
        program.wait_for("waiting")
        program.wait_until_asleep()
        program.send(signal.SIGINT)
        program.wait_for("interrupted")
        assert program.ended() == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("handled", [True, False])
def test_sigterm_ends_a_process_that_waits_at_the_gate(handled: bool) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n" if handled else ""
    with Program(handler + WAITING_FOR_STUCK + "rig.wait(burst, LAYERS - 1)\n") as program:
        program.wait_for("waiting")
        program.wait_until_asleep()
        program.send(signal.SIGTERM)
        assert program.ended() == (5 if handled else -signal.SIGTERM, "", "")


# --- fork ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stalled", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_forked_child_is_refused_and_leaves_and_the_parent_goes_on(
    mode: Mode, stalled: bool
) -> None:
    body = f"""
        rig = make_rig(HostDevice(), {mode!r})
        forward = rig.device.new_stream()
        host = rig.on_host(0x55)
        stall = rig.device.stall(rig.device.current_stream()) if {stalled} else None
        first, target = rig.load(host)
        child = os.fork()
        if child == 0:
            for call in (lambda: rig.load(host), rig.controller.drain):
                try:
                    call()
                except BurstError as error:
                    say("child:", error)
            rig.controller.stop()
            own = make_rig(HostDevice(), {mode!r})
            burst, target = own.load(own.on_host(0x66))
            own.wait(burst, LAYERS - 1)
            own.settle()
            assert own.found_on_device(target) == {{0x66}}
            say("child: a controller of its own works")
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        if stall is not None:
            stall.release()
        rig.wait(first, LAYERS - 1)
        rig.load(host)
        rig.settle()
        assert [ack.error for ack in rig.controller.poll()] == [None, None]
        assert rig.found_on_device(target) == {{0x55}}
        say("parent: done")
        """
    with Program(body) as program:
        status, output, errors = program.ended()
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    assert len(lines) == 4
    for line in lines[:2]:
        assert "a forked child needs a device and a controller of its own" in line
    assert lines[2:] == ["child: a controller of its own works", "parent: done"]
