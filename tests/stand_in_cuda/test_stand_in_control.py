"""The control interface: settings, errors on demand, the record, and several drivers at once."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_void_p
from pathlib import Path
from threading import Event

import pytest
from cuda_calls import (
    CONTEXT_IS_DESTROYED,
    DEINITIALIZED,
    INVALID_HANDLE,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    SUCCESS,
    Cuda,
    bytes_at,
)
from stand_in import Library, StandIn, StandInError

LoadStandIn = Callable[..., StandIn]
HostFunction = CFUNCTYPE(None, c_void_p)
UNKNOWN = 999


@pytest.fixture
def cuda(load_stand_in: LoadStandIn) -> Cuda:
    return Cuda(load_stand_in())


def test_the_nth_call_of_a_function_fails_on_demand_and_does_nothing(cuda: Cuda) -> None:
    stream, device = cuda.stream(), cuda.alloc(3, b"...")
    cuda.driver.fail("cuMemsetD8Async", OUT_OF_MEMORY, nth=2)
    codes = [cuda.fill(device + i, ord("x"), 1, stream) for i in range(3)]
    assert codes == [SUCCESS, OUT_OF_MEMORY, SUCCESS]
    assert cuda.synchronize(stream) == SUCCESS
    assert bytes_at(device, 3) == b"x.x"


def test_other_functions_go_on_while_one_fails(cuda: Cuda) -> None:
    stream = cuda.stream()
    cuda.driver.fail("cuStreamQuery", UNKNOWN)
    assert cuda.synchronize(stream) == SUCCESS
    assert cuda.query_stream(stream) == UNKNOWN
    assert cuda.query_stream(stream) == SUCCESS


@pytest.mark.parametrize("code", [DEINITIALIZED, CONTEXT_IS_DESTROYED])
def test_a_driver_that_shuts_down_refuses_every_call(cuda: Cuda, code: int) -> None:
    stream, event = cuda.stream(), cuda.event()
    cuda.driver.fail("*", code)
    for answer in (cuda.synchronize(stream), cuda.destroy_event(event), cuda.release()):
        assert answer == code
    cuda.driver.stop_failing()
    assert cuda.synchronize(stream) == SUCCESS


def test_every_call_is_recorded_with_its_thread_and_result(cuda: Cuda) -> None:
    stream, event = cuda.stream(), cuda.event()
    host, device = cuda.pinned(64), cuda.alloc(64)
    assert cuda.batch([(device, host, 8), (device + 8, host, 8)], stream) == SUCCESS
    assert cuda.record(event, stream) == SUCCESS
    assert cuda.to_device(device, host, 65, stream) == INVALID_VALUE
    batch, record, copy = cuda.driver.calls()[-3:]
    assert (batch.function, batch.stream, batch.copies, batch.bytes) == (
        "cuMemcpyBatchAsync",
        stream,
        2,
        16,
    )
    assert (record.function, record.stream, record.event) == ("cuEventRecord", stream, event)
    assert (copy.function, copy.result) == ("cuMemcpyHtoDAsync", INVALID_VALUE)
    assert {call.thread for call in cuda.driver.calls()} == {1}


def test_calls_are_counted_by_function(cuda: Cuda) -> None:
    before = cuda.driver.count()
    for _ in range(3):
        cuda.event()
    assert cuda.driver.count("cuEventCreate") == 3
    assert cuda.driver.count() == before + 3
    assert len(cuda.driver.calls("cuEventCreate")) == 3


def test_what_is_open_is_counted(cuda: Cuda) -> None:
    stream, event = cuda.stream(), cuda.event()
    device, host = cuda.alloc(64), cuda.pinned(64)
    counts = cuda.driver.counts()
    assert (counts.streams, counts.events, counts.allocations, counts.pinned) == (1, 1, 1, 1)
    assert counts.retained == 1
    for code in (
        cuda.destroy_stream(stream),
        cuda.destroy_event(event),
        cuda.free(device),
        cuda.free_pinned(host),
        cuda.release(),
    ):
        assert code == SUCCESS
    counts = cuda.driver.counts()
    assert (counts.streams, counts.events, counts.allocations, counts.pinned) == (0, 0, 0, 0)
    assert counts.retained == 0


def test_drivers_in_one_process_do_not_know_of_each_other(load_stand_in: LoadStandIn) -> None:
    first, second = Cuda(load_stand_in(12080)), Cuda(load_stand_in(13000))
    stream = first.stream()
    assert second.synchronize(stream + 1) == INVALID_HANDLE
    assert first.driver.counts().streams == 1
    assert second.driver.counts().streams == 0


def test_a_reset_driver_begins_anew_and_knows_no_old_handle(cuda: Cuda) -> None:
    stream, device = cuda.stream(), cuda.alloc(64)
    for _ in range(2):
        assert cuda.fill(device, 1, 64, cuda.stream()) == SUCCESS
    cuda.driver.stall(stream)
    assert len(cuda.driver.findings()) == 1
    cuda.driver.reset()
    assert cuda.driver.findings() == []
    assert cuda.driver.count() == 0
    again = Cuda(cuda.driver)
    assert again.synchronize(stream) == INVALID_HANDLE
    assert again.fill(device, 1, 64, again.stream()) == INVALID_VALUE


def test_a_host_function_that_does_not_return_is_not_waited_for_without_end(cuda: Cuda) -> None:
    stream, go_on = cuda.stream(), Event()

    @HostFunction
    def wait(_: object) -> None:
        go_on.wait(60)

    assert cuda.lib.cuLaunchHostFunc(c_void_p(stream), wait, None) == SUCCESS
    try:
        with pytest.raises(StandInError, match="a host function does not return"):
            cuda.driver.finish(0.01)
        with pytest.raises(StandInError, match="a host function does not return"):
            cuda.driver.reset(0.01)
    finally:
        go_on.set()
    cuda.driver.finish()
    assert cuda.query_stream(stream) == SUCCESS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("order=sideways", "order: 'sideways' is not eager, latest or random"),
        ("seed=x", "seed: 'x' is not a whole number of at least 0"),
        ("queue_depth=0", "queue_depth: '0' is not a whole number of at least 1"),
        ("colour=blue", "setting: 'colour' is not one of version"),
        ("seed", "setting: 'seed' is not of the form key=value"),
        ("checker=2", "checker: '2' is not 0 or 1"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(cuda: Cuda, settings: str, message: str) -> None:
    assert cuda.lib.stand_in_configure(f"queue_depth=7,{settings}".encode()) == 1
    assert message in cuda.lib.stand_in_error().decode()


def test_a_stream_that_is_not_there_cannot_be_stalled(cuda: Cuda) -> None:
    with pytest.raises(StandInError, match="there is no stream"):
        cuda.driver.stall(12345)


PROGRAM = """
    import sys
    sys.path[:0] = sys.argv[3:]
    from pathlib import Path
    from cuda_calls import Cuda
    from stand_in import Library, StandIn

    cuda = Cuda(StandIn(Library(Path(sys.argv[1]), Path(sys.argv[1])), Path(sys.argv[2])))
    page = cuda.alloc(64)
    for _ in range(2):
        cuda.fill(page, 1, 64, cuda.stream())
    cuda.driver.finish()
"""


@pytest.mark.parametrize(
    ("settings", "status", "printed"),
    [
        ("report=1", 0, "1 findings"),
        ("report=1,strict=1", 86, "unordered: cuMemsetD8Async"),
        ("strict=1", 86, ""),
        ("report=1,strict=1,checker=0", 0, "0 findings"),
        ("order=backwards", -6, "KVBURST_STAND_IN: order: 'backwards' is not"),
    ],
)
def test_the_environment_sets_it_up_and_the_end_reports(
    stand_in_library: Library, tmp_path: Path, settings: str, status: int, printed: str
) -> None:
    here = Path(__file__).parent
    paths = [str(tmp_path), str(here), str(here.parent)]
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(stand_in_library.current), *paths],
        env={"KVBURST_STAND_IN": settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == status, result.stderr
    assert printed in result.stderr
