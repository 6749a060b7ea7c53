"""The flight recorder: its files are what trace viewers read, and its clock is the machine's."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import MakeDevice
from rigs import Mode, Rig, make_rig
from trace_events import faults
from typer.testing import CliRunner

from kvburst import BurstController, KVBurstError
from kvburst.agreement import AckReducer, AgreementError, LonePeers, Pipelined, QueueCounter
from kvburst.cli import app
from kvburst.demo import Demo
from kvburst.demo_options import DemoOptions
from kvburst.timeline import (
    AGREEMENT,
    FORWARD,
    GATE,
    ISSUERS,
    SCHEDULER,
    STREAMS,
    Flight,
    FlightRecorder,
    Span,
    as_trace_events,
    now_us,
    save,
)

MODES: tuple[Mode, ...] = ("thread", "inline")
# What two clocks that are read one after the other may differ by, on a machine that does other
# things meanwhile.
CLOCK_US = 20_000.0


def spans(flight: Flight, track: str) -> list[Span]:
    return [span for span in flight.spans if span.track == track]


def watched(rig: Rig) -> FlightRecorder:
    recorder = FlightRecorder(rig.device)
    recorder.watch(rig.controller)
    return recorder


@pytest.fixture(params=MODES)
def rig(request: pytest.FixtureRequest, make_device: MakeDevice) -> Rig:
    return make_rig(make_device(), request.param)


# --- what a burst leaves -------------------------------------------------------------------------


def test_each_retired_burst_is_on_the_scheduler_the_issuer_and_the_stream(rig: Rig) -> None:
    recorder = watched(rig)
    begin = now_us()
    written = rig.controller.write(rig.take(2))
    assert written is not None
    rig.settle()
    rig.load(written)
    rig.settle()
    rig.controller.poll()
    end = now_us()

    flight = recorder.flight()
    for direction in ("backup", "load"):
        (issued,) = spans(flight, ISSUERS[direction])
        (copied,) = spans(flight, STREAMS[direction])
        (submitted,) = (
            span for span in spans(flight, SCHEDULER) if span.name == f"submit {direction} 0"
        )
        assert submitted.flow == issued.flow == copied.flow
        assert issued.details["pages"] == 2
        assert begin <= submitted.start_us <= issued.start_us
        for span in (submitted, issued, copied):
            assert span.end_us is not None
            assert span.start_us <= span.end_us
            assert begin - CLOCK_US <= span.start_us <= span.end_us <= end + CLOCK_US
    assert list(faults(as_trace_events([flight]))) == []


def test_burst_that_is_not_retired_leaves_nothing_yet(rig: Rig) -> None:
    recorder = watched(rig)
    rig.controller.write(rig.take())
    rig.settle()
    assert recorder.flight().spans == ()
    rig.controller.poll()
    assert len(recorder.flight().spans) == 3


def test_copies_of_a_load_that_was_held_up_start_when_it_is_let_go(rig: Rig) -> None:
    """Where a span of a stream lies is the device's word, put on the machine's clock."""
    recorder = watched(rig)
    held_us = 10 * CLOCK_US
    host = rig.on_host(1)
    with rig.held():
        rig.load(host)
        time.sleep(held_us / 1e6)
        released_us = now_us()
    rig.settle()
    rig.load(rig.on_host(2))
    rig.settle()
    rig.controller.poll()
    held, free = spans(recorder.flight(), STREAMS["load"])
    free_submitted = spans(recorder.flight(), SCHEDULER)[-1]
    assert held.start_us > released_us - CLOCK_US
    # The control: one that nobody held up does not start that late.
    assert free.start_us < free_submitted.start_us + held_us - CLOCK_US


def test_failed_burst_is_a_mark_with_its_error(rig: Rig) -> None:
    recorder = watched(rig)
    rig.device.fail_copy_call(1)
    rig.load(rig.on_host(1))
    rig.settle()
    rig.controller.poll()
    (mark,) = spans(recorder.flight(), ISSUERS["load"])
    assert mark.end_us is None
    assert "told to" in str(mark.details["error"])
    assert list(faults(as_trace_events([recorder.flight()]))) == []


def test_controller_that_nobody_watches_tells_nobody(rig: Rig) -> None:
    recorder = FlightRecorder(rig.device)
    rig.load(rig.on_host(1))
    rig.settle()
    rig.controller.poll()
    assert recorder.flight().spans == ()


def test_oldest_spans_make_room_and_are_counted(make_device: MakeDevice) -> None:
    recorder = FlightRecorder(make_device(), limit=2)
    for number in range(5):
        recorder.add(Span(SCHEDULER, f"step {number}", number, number + 0.5))
    flight = recorder.flight()
    assert [span.name for span in flight.spans] == ["step 3", "step 4"]
    assert flight.dropped == 3
    assert as_trace_events([flight])["otherData"]["dropped_spans"] == 3
    with pytest.raises(KVBurstError, match=r"limit: 0 spans is below 1"):
        FlightRecorder(make_device(), limit=0)


def test_span_of_a_thread_is_kept_although_its_block_raises(make_device: MakeDevice) -> None:
    recorder = FlightRecorder(make_device())
    with pytest.raises(ZeroDivisionError), recorder.on_thread(SCHEDULER, "step", batch=3):
        raise ZeroDivisionError
    (span,) = recorder.flight().spans
    assert (span.track, span.name, span.details) == (SCHEDULER, "step", {"batch": 3})


# --- ranks that agree ----------------------------------------------------------------------------


class Alone:
    """A collective of one rank."""

    def start(self, values: torch.Tensor) -> "Alone":
        return self

    def wait(self) -> None:
        pass


def test_calls_of_an_agreement_that_take_part_in_a_round_are_spans(
    make_device: MakeDevice,
) -> None:
    recorder = FlightRecorder(make_device())
    outstanding = True
    reducer = AckReducer(
        [QueueCounter("loads", lambda: 2)],
        Pipelined(Alone()),
        LonePeers(),
        idle=lambda: not outstanding,
        tell=recorder.agreed,
    )
    begin = now_us()
    reducer.collect()  # there is no round yet
    reducer.issue()
    reducer.collect()
    outstanding = False
    reducer.issue()  # nothing is outstanding: no round
    reducer.collect()
    issued, collected = spans(recorder.flight(), AGREEMENT)
    assert (issued.name, collected.name) == ("issue 1", "collect 2")
    assert collected.details == {"taken": "2"}
    assert issued.end_us is not None
    assert begin <= issued.start_us <= issued.end_us <= collected.start_us
    assert list(faults(as_trace_events([recorder.flight()]))) == []


def test_round_that_ends_in_an_error_is_a_span_too(make_device: MakeDevice) -> None:
    recorder = FlightRecorder(make_device())
    left = 2
    reducer = AckReducer(
        [QueueCounter("loads", lambda: left)], Pipelined(Alone()), LonePeers(), tell=recorder.agreed
    )
    reducer.issue()
    left = 1
    with pytest.raises(AgreementError):
        reducer.collect()
    assert [span.name for span in spans(recorder.flight(), AGREEMENT)] == ["issue 0", "collect 1"]


def test_flight_begins_where_it_is_cleared(make_device: MakeDevice) -> None:
    recorder = FlightRecorder(make_device(), limit=1)
    for number in range(3):
        recorder.add(Span(SCHEDULER, f"step {number}", number, number + 0.5))
    recorder.clear()
    recorder.add(Span(SCHEDULER, "step 3", 3, 3.5))
    flight = recorder.flight()
    assert ([span.name for span in flight.spans], flight.dropped) == (["step 3"], 0)


# --- files ---------------------------------------------------------------------------------------


def two_ranks() -> list[Flight]:
    return [
        Flight(
            "demo",
            (
                Span(AGREEMENT, "step 4", 1000.0 + rank, 1002.0 + rank),
                Span(FORWARD, "layer 0", 1010.0, 1020.0, {"layer": 0}),
                Span("something else", "mark", 1005.0, None),
            ),
            rank=rank,
        )
        for rank in (1, 0)
    ]


def test_ranks_are_processes_on_one_clock_and_tracks_their_threads(tmp_path: Path) -> None:
    save(tmp_path / "flight.json", two_ranks())
    content = json.loads((tmp_path / "flight.json").read_text())
    assert list(faults(content)) == []
    events = content["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "rank 1: demo", 2: "rank 0: demo"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert order == {1: 1, 2: 0}
    assert [e["ts"] for e in events if e["name"] == "step 4"] == [1, 0]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1] == [
        AGREEMENT,
        FORWARD,
        "something else",
    ]


def test_runs_that_are_compared_begin_together() -> None:
    shifted = [flight.from_zero() for flight in two_ranks()]
    assert [flight.start_us for flight in shifted] == [0, 0]
    assert shifted[0].spans[0].end_us == 2.0
    assert shifted[0].spans[2].end_us is None


def test_span_that_begins_where_another_ends_does_not_overlap_it_by_a_rounding() -> None:
    """A begin and a length that are rounded each end at 1.002, and the next begins at 1.001."""
    touching = (Span(FORWARD, "layer 0", 0.0006, 1.0012), Span(FORWARD, "layer 1", 1.0012, 2.0))
    zero = Span(FORWARD, "embedding", 0.0, 0.0)
    assert list(faults(as_trace_events([Flight("demo", (zero, *touching))]))) == []


def test_no_spans_are_a_file_too() -> None:
    assert list(faults(as_trace_events([Flight("idle", ())]))) == []
    assert as_trace_events([])["traceEvents"] == []


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda e: [x for x in e if x["name"] != "thread_name"], "without a name"),
        (lambda e: [{k: v for k, v in x.items() if k != "dur"} for x in e], "no duration"),
        (lambda e: [x | {"ts": -1.0} if "ts" in x else x for x in e], "bad time"),
        (lambda e: [x for x in e if x["ph"] != "f"], "phases s"),
        (lambda e: [x | {"dur": 5.0} if "dur" in x else x for x in e], "ends after the span"),
    ],
)
def test_check_of_the_format_finds_what_is_wrong(spoil: Any, fault: str) -> None:
    """The control of all tests that find no fault."""
    flight = Flight(
        "demo",
        (
            Span(SCHEDULER, "a", 0.0, 4.0, flow=1),
            Span(SCHEDULER, "b", 1.0, 2.0),
            Span(GATE, "c", 5.0, 6.0, flow=1),
        ),
    )
    content = as_trace_events([flight])
    assert list(faults(content)) == []
    assert any(fault in each for each in faults({"traceEvents": spoil(content["traceEvents"])}))


# --- what a person runs --------------------------------------------------------------------------


def recorded_demo(**options: Any) -> Flight:
    flight = Demo(DemoOptions(**options), record=True).run().flight
    assert flight is not None
    return flight


def test_demo_shows_that_layers_run_while_the_rest_is_copied() -> None:
    flight = recorded_demo(pages=128, link="h100")
    (copying,) = spans(flight, STREAMS["load"])[:1]
    assert copying.end_us is not None
    layers = spans(flight, FORWARD)
    assert [span.name for span in layers] == [f"layer {number}" for number in range(61)]
    assert layers[0].start_us < copying.end_us < (layers[-1].end_us or 0)
    there = [span for span in spans(flight, STREAMS["load"]) if span.end_us is None]
    assert len(there) == 61
    for landed, layer in zip(there, layers, strict=True):
        assert landed.start_us <= layer.start_us + CLOCK_US
    assert len(spans(flight, GATE)) == 61
    assert flight.simulated == "link h100"
    assert list(faults(as_trace_events([flight]))) == []


def test_inline_copies_are_over_before_the_forward_is_launched() -> None:
    """The control of the test above: without a thread and groups nothing overlaps."""
    flight = recorded_demo(pages=16, link="h100", mode="inline", groups="none")
    launch = next(span for span in flight.spans if span.name == "launch the forward")
    (issued,) = spans(flight, ISSUERS["load"])
    assert issued.end_us is not None
    assert issued.end_us <= launch.start_us
    assert list(faults(as_trace_events([flight]))) == []


def test_demo_without_a_recorder_has_no_flight() -> None:
    assert Demo(DemoOptions(pages=1)).run().flight is None


def test_demo_command_writes_both_runs_of_a_comparison(tmp_path: Path) -> None:
    written = tmp_path / "flight.json"
    options = ["demo", "--pages", "2", "--link", "h100", "--compare", "--quiet"]
    result = CliRunner().invoke(app, [*options, "--timeline", str(written)])
    assert result.exit_code == 0, result.output
    content = json.loads(written.read_text())
    assert list(faults(content)) == []
    processes = [e for e in content["traceEvents"] if e["name"] == "process_name"]
    assert ["mode inline, groups none" in processes[0]["args"]["name"], len(processes)] == [True, 2]
    assert content["otherData"]["simulated"] == ["link h100"]


def test_replay_command_writes_every_burst(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    request = {"timestamp": 0, "input_length": 1024, "output_length": 64, "hash_ids": [0, 1]}
    trace.write_text(f"{json.dumps(request)}\n" * 3)
    written, numbers = tmp_path / "flight.json", tmp_path / "replay.json"
    files = ["--timeline", str(written), "--json", str(numbers)]
    result = CliRunner().invoke(app, ["replay", str(trace), "--quiet", *files])
    assert result.exit_code == 0, result.output
    content = json.loads(written.read_text())
    assert list(faults(content)) == []
    submitted = [e for e in content["traceEvents"] if e["name"].startswith("submit ")]
    bursts = json.loads(numbers.read_text())
    assert len(submitted) == bursts["loads"]["bursts"] + bursts["backups"]["bursts"] > 0


def test_replay_that_moves_nothing_has_no_flight_to_write(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [0]}\n')
    options = ["replay", str(trace), "--plan-only", "--timeline", str(tmp_path / "flight.json")]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2
    assert "--timeline: nothing moves with --plan-only" in result.output


def test_timeline_that_cannot_be_written_is_refused_before_anything_runs() -> None:
    result = CliRunner().invoke(app, ["demo", "--timeline", "/nowhere/flight.json"])
    assert result.exit_code == 2
    assert "--timeline: '/nowhere' is not a folder" in result.output


def test_recorder_watches_any_controller(rig: Rig) -> None:
    """Its only tie is to the acks: two controllers may be watched by one recorder."""
    assert isinstance(rig.controller, BurstController)
    recorder = watched(rig)
    other = make_rig(rig.device, "inline")
    recorder.watch(other.controller)
    for each in (rig, other):
        each.load(each.on_host(1))
        each.settle()
        each.controller.poll()
    assert len({span.flow for span in recorder.flight().spans}) == 2
