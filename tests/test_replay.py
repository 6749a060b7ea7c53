"""`kvburst replay` as a whole: bytes, counts, recordings, and how the command ends."""

import json
import signal
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_helpers import conversations, line, write_trace
from rich.console import Console
from typer.testing import CliRunner

from kvburst import KVBurstError
from kvburst._core import CopyPlanner
from kvburst.cli import app
from kvburst.geometries import Geometry, PoolSpec
from kvburst.replay import report
from kvburst.replay.burst_log import BurstLog, BurstRecord, percentile
from kvburst.replay.interrupt import noting_interrupts
from kvburst.replay.options import ReplayOptions
from kvburst.replay.page_bytes import RealBytes
from kvburst.replay.recording import Recording, RecordingError, load_recording, save_recording
from kvburst.replay.replay import Replay, ReplayResult
from kvburst.replay.server import ServerCounts
from kvburst.replay.tiers import TierSizes, absent_layouts, real_pools


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl", conversations(seed=1, requests=80))


def options(trace: Path, **changes: Any) -> ReplayOptions:
    return ReplayOptions(trace, device_pages=96, host_pages=400, **changes)


def kvburst(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    result = CliRunner().invoke(app, ["replay", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


# --- bytes ---------------------------------------------------------------------------------


def test_every_page_holds_its_bytes(trace: Path) -> None:
    result = Replay(options(trace)).run()
    assert result.server.requests == 80
    assert not result.interrupted
    assert result.loads.pages > 0
    assert result.mismatched_pages == 0
    # What hit, and what the cache held in the end.
    hit = result.server.tokens_hit_on_device + result.server.tokens_hit_on_host
    assert result.server.pages_checked > hit // 64


def spoil(tensor: torch.Tensor) -> Callable[[ServerCounts], None]:
    """After the fortieth request one bit of one word of every page turns."""
    spoiled = []

    def on_step(counts: ServerCounts) -> None:
        if counts.requests >= 40 and not spoiled:
            spoiled.append(True)
            tensor[..., 17] ^= 1

    return on_step


def test_wrong_bit_on_the_host_is_found_where_the_page_is_loaded(trace: Path) -> None:
    replay = Replay(options(trace))
    result = replay.run(spoil(replay.pools[0].host.tensor[:, 3]))
    assert result.mismatched_pages
    assert any("its cached prefix" in where for where in result.mismatches)
    assert any("host, at the end" in where for where in result.mismatches)


def test_wrong_bit_on_the_device_is_found_where_the_page_is_hit(trace: Path) -> None:
    replay = Replay(options(trace))
    layer = replay.pools[0].device.layers[3]
    result = replay.run(spoil(layer.view(96, -1)))
    assert result.mismatched_pages
    assert any("its cached prefix" in where for where in result.mismatches)


def test_bytes_of_two_pages_differ_in_every_word_and_layer() -> None:
    sizes = TierSizes(device_pages=4, host_pages=1, page_size=64)
    pools = real_pools(SMALL, sizes)
    words = RealBytes(pools)
    words.write([0, 1, 2], [5, 6, -5])
    assert words.wrong_on_device([0, 1, 2], [5, 6, -5]) == 0
    assert words.wrong_on_device([0, 1, 2, 3], [6, 6, 5, 5]) == 3
    seen: list[torch.Tensor] = []
    for pool in pools:
        for layer in pool.device.layers:
            pages = layer.view(4, -1).view(torch.int64)
            assert all(bool((pages[0] != pages[other]).all()) for other in (1, 2, 3))
            seen.append(pages[0])
    assert len(torch.cat(seen).unique()) == sum(len(each) for each in seen)


# --- counts --------------------------------------------------------------------------------

SMALL = Geometry(
    name="small",
    page_size=64,
    pools=(
        PoolSpec("kv", 2, tuple(range(9)), own_allocation=(8,)),
        PoolSpec("index", 1, (0, 3, 7), paged=True),
        PoolSpec("draft", 1, (8,), own_allocation=(8,)),
    ),
    source="made up",
)


def test_plan_only_moves_the_same_pages_in_the_same_copies(trace: Path) -> None:
    moved = Replay(options(trace)).run()
    planned = Replay(options(trace, plan_only=True)).run()
    assert planned.recording == moved.recording
    assert planned.loads == moved.loads
    assert planned.backups == moved.backups
    # Of the one the device counted what it copied, of the other the planner what it would.
    assert planned.copies_issued == moved.copies_issued
    assert planned.mismatched_pages is None


def test_memory_that_is_not_there_is_planned_for_as_if_it_were() -> None:
    sizes = TierSizes(device_pages=50, host_pages=70, page_size=64)
    real = [pool.layout for pool in real_pools(SMALL, sizes)]
    absent = absent_layouts(SMALL, sizes)
    assert [each.stored_layers for each in absent] == [each.stored_layers for each in real]
    logs = [BurstLog(layouts) for layouts in (real, absent)]
    for log in logs:
        log.add("load", [4, 5, 9, 30], [8, 9, 1, 60])
        log.add("backup", [4, 6, 9], [8, 9, 1])
    assert logs[0].counts("load") == logs[1].counts("load")
    assert logs[0].counts("backup") == logs[1].counts("backup")
    # A span that breaks, at the layer with an allocation of its own, is one in both.
    assert logs[0].counts("backup").copies.groups_with_ramp == 3 * 2 + 3 + 3
    groups = [CopyPlanner(layouts, direction="load").groups for layouts in (real, absent)]
    assert [each.layers for each in groups[0]] == [each.layers for each in groups[1]]


def test_copies_of_a_real_geometry_are_counted(trace: Path) -> None:
    result = Replay(options(trace, plan_only=True, geometry="mla-dsa-78")).run()
    loads, backups = result.loads, result.backups
    assert backups.copies.one_per_page_and_layer == backups.pages * (78 + 21)
    # A page of each pool is one copy, neighbours save a few.
    assert backups.pages < backups.copies.groups_with_ramp <= 2 * backups.pages
    assert loads.copies.one_per_page_and_layer == loads.pages * (78 + 21)
    # 78 layers ramp in 8 groups and 21 in 5.
    assert loads.copies.groups_with_ramp <= 13 * loads.pages
    assert loads.copies.groups_without_ramp == loads.copies.neighbours_merged


def test_later_half_counts_the_later_bursts() -> None:
    log = BurstLog(absent_layouts(SMALL, TierSizes(8, 8, 64)))
    log.add("load", [0], [0])
    log.add("backup", [0, 1], [2, 3])
    log.add("load", [0, 1, 2], [0, 1, 2])
    log.add("load", [0, 1, 2, 3], [0, 1, 2, 3])
    later = log.counts("load", later_half=True)
    assert (later.bursts, later.pages) == (2, 7)
    assert log.counts("backup", later_half=True).bursts == 0


def test_percentile_is_the_smallest_value_that_enough_do_not_exceed() -> None:
    assert [percentile(range(1, 101), percent) for percent in (50, 90, 99)] == [50, 90, 99]
    assert percentile([7], 99) == 7
    assert percentile([1, 9], 50) == 1
    assert percentile([], 50) == 0


# --- recordings ----------------------------------------------------------------------------


def test_recording_is_read_as_it_was_written(trace: Path, tmp_path: Path) -> None:
    recording = Replay(options(trace, plan_only=True)).run().recording
    path = tmp_path / "bursts.kvb"
    save_recording(path, recording)
    assert load_recording(path) == recording
    assert {burst.direction for burst in recording.bursts} == {"load", "backup"}


def test_recording_without_bursts_is_one(tmp_path: Path) -> None:
    recording = Recording(64, 1, 1, ())
    save_recording(tmp_path / "empty", recording)
    assert load_recording(tmp_path / "empty") == recording


def test_recorded_bursts_of_a_real_trace_are_scattered() -> None:
    """What tests and benchmarks take for real bursts: 400 in a row from the later half of a replay
    of Mooncake's conversation trace with the defaults."""
    recording = load_recording(Path(__file__).parent / "data" / "scattered_bursts.kvb")
    assert (recording.device_pages, recording.host_pages) == (4096, 32768)
    log = BurstLog(absent_layouts(SMALL, TierSizes(4096, 32768, 64)))
    for burst in recording.bursts:
        log.add(burst.direction, burst.device, burst.host)
    for counts in (log.counts("load"), log.counts("backup")):
        assert counts.pages > 1000
        merged = counts.copies.neighbours_merged / counts.copies.one_per_page_and_layer
        assert merged > 0.99


def two_bursts() -> Recording:
    return Recording(
        64,
        9,
        9,
        (
            BurstRecord("load", array("i", [1, 8]), array("i", [0, 3])),
            BurstRecord("backup", array("i", [5]), array("i", [2])),
        ),
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "is not a recording of bursts"),
        (lambda data: b"GIF89a\n", "is not a recording of bursts"),
        (lambda data: b"[1]\n", "is not a recording of bursts"),
        (lambda data: b"\xff\xff\n", "is not a recording of bursts"),
        (lambda data: data.replace(b'"version": 1', b'"version": 2'), "version: 2 is not 1"),
        (lambda data: data.replace(b'"bursts": 2', b'"bursts": -1'), "bursts: -1 is not a whole"),
        (lambda data: data.replace(b'"page_size": 64, ', b""), "page_size: None is not a whole"),
        (lambda data: data.replace(b'"bursts": 2', b'"bursts": 3'), "is damaged: 8 numbers"),
        (lambda data: data.replace(b'"device_pages": 9', b'"device_pages": 8'), "is damaged: page"),
        (lambda data: data[:-4], "is damaged: "),
    ],
)
def test_damaged_recording_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "bursts.kvb"
    save_recording(path, two_bursts())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RecordingError) as caught:
        load_recording(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_recording_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="nowhere: cannot be read: No such file"):
        load_recording(tmp_path / "nowhere")


# --- the command ---------------------------------------------------------------------------

SIZES = ("--device-pages", "96", "--host-pages", "400")


def test_command_reports_and_writes_json_and_recording(trace: Path, tmp_path: Path) -> None:
    file, record = tmp_path / "f.json", tmp_path / "bursts.kvb"
    status, out, err = kvburst(
        str(trace), *SIZES, "--limit", "60", "--json", str(file), "--record", str(record)
    )
    assert status == 0, err
    for words in ("60 requests", "found on the host", "neighbours merged", "p99", "bit-exact: "):
        assert words in out
    content = json.loads(file.read_text())
    assert content["requests"] == 60
    assert content["mismatched_pages"] == 0
    assert content["seconds"] > 0
    bursts = load_recording(record).bursts
    loads = [len(each.device) for each in bursts if each.direction == "load"]
    assert content["load_bursts"] == len(loads)
    assert content["pages_loaded"] == sum(loads) > 0
    assert content["backup_bursts"] == len(bursts) - len(loads)
    assert content["pages_backed_up"] == sum(len(each.device) for each in bursts) - sum(loads)
    assert content["copies_one_per_page_and_layer"] == 8 * (
        content["pages_loaded"] + content["pages_backed_up"]
    )
    assert content["copies_issued"] < content["copies_neighbours_merged"]
    assert content["tokens_prefilled"] > 0


def test_plan_only_says_that_nothing_was_checked(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    status, out, _ = kvburst(
        str(trace), *SIZES, "--plan-only", "--geometry", "llama-3.1-70b", "--json", str(file)
    )
    assert status == 0
    assert "plan only: no bytes moved" in out
    assert json.loads(file.read_text())["mismatched_pages"] is None


def test_quiet_prints_nothing(trace: Path) -> None:
    assert kvburst(str(trace), *SIZES, "--limit", "5", "--quiet") == (0, "", "")


def test_wrong_bytes_end_with_status_1_even_when_quiet(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Replay.run

    def spoiled(self: Replay, *_: object) -> ReplayResult:
        return run(self, spoil(self.pools[0].host.tensor[:, 0]))

    monkeypatch.setattr(Replay, "run", spoiled)
    status, out, err = kvburst(str(trace), *SIZES, "--quiet")
    assert status == 1
    assert out == ""
    assert "NOT bit-exact" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit: 0 is below 1"),
        (["--device-pages", "0"], "--device-pages: 0 is below 1"),
        (["--host-pages", "-1"], "--host-pages: -1 is below 1"),
        (["--device-pages", "99999999"], "--device-pages: 99999999 is above 16777216"),
        (["--layers", "0"], "--layers: 0 is below 1"),
        (["--layers", "9999"], "--layers: 9999 is above 1024"),
        (["--page-bytes", "100"], "--page-bytes: 100 is not a multiple of the 64 slots of a page"),
        (["--geometry", "none"], "geometry: 'none' is unknown; known are deepseek-v3, "),
        (["--geometry", "deepseek-v3", "--layers", "2"], "--geometry: 'deepseek-v3' has layers"),
        (["--json", "/nowhere/f"], "--json: '/nowhere' is not a folder"),
        (["--record", "/nowhere/f"], "--record: '/nowhere' is not a folder"),
    ],
)
def test_bad_option_is_one_line(trace: Path, arguments: list[str], message: str) -> None:
    status, out, err = kvburst(str(trace), *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith(f"kvburst replay: {message}")
    assert err.count("\n") == 1


def test_broken_trace_is_one_line(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace", [{**line([1]), "input_length": -3}])
    expected = f"kvburst replay: {path}:1: input_length: -3 is below 1\n"
    assert kvburst(str(path)) == (2, "", expected)


def test_request_too_big_for_the_device_is_said_before_starting(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace", [line([1]), line([1, 2, 3], output=65)])
    status, out, err = kvburst(str(path), "--device-pages", "25")
    assert (status, out) == (2, "")
    assert err == (
        f"kvburst replay: --device-pages: 25 is too small for line 2 of {path}, whose 1,601 tokens"
        " need 26 pages\n"
    )
    assert kvburst(str(path), "--device-pages", "26", "--quiet")[0] == 0


def test_pools_too_big_for_the_machine_are_refused_before_they_are_made(trace: Path) -> None:
    with pytest.raises(KVBurstError, match=r"above the budget of .*; take fewer, or --plan-only"):
        Replay(ReplayOptions(trace, device_pages=1 << 24, page_bytes=1 << 24))


# --- Ctrl-C --------------------------------------------------------------------------------


def test_ctrl_c_ends_with_the_report_so_far(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def impatient(console: Console, total: int) -> Iterator[Callable[[ServerCounts], None]]:
        def on_step(counts: ServerCounts) -> None:
            if counts.requests >= 20:
                signal.raise_signal(signal.SIGINT)

        yield on_step

    monkeypatch.setattr(report, "progress", impatient)
    file, record = tmp_path / "f.json", tmp_path / "bursts.kvb"
    status, out, _ = kvburst(str(trace), *SIZES, "--json", str(file), "--record", str(record))
    assert status == 130
    content = json.loads(file.read_text())
    assert content["interrupted"] is True
    assert 20 <= content["requests"] < 80
    assert content["mismatched_pages"] == 0
    assert f"interrupted: {content['requests']} of 80 requests were served" in out
    assert load_recording(record).bursts


def test_second_ctrl_c_interrupts_as_usual() -> None:
    with noting_interrupts() as noted:
        assert not noted()
        signal.raise_signal(signal.SIGINT)
        assert noted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_as_before_when_the_replay_is_over() -> None:
    before = signal.getsignal(signal.SIGINT)
    with noting_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_json_has_the_counts_of_each_direction(trace: Path) -> None:
    result = Replay(options(trace, plan_only=True)).run()
    content = report.as_json(result)
    assert content["loads"] == asdict(result.loads)
    assert content["later_backups"] == asdict(result.later_backups)
    json.dumps(content)
