"""The benchmark of issue latencies runs, counts what it must, and draws it. Nothing here judges how
fast anything is."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import issue_latency  # noqa: E402
import issuing  # noqa: E402
import page_patterns  # noqa: E402
from harness import Cores  # noqa: E402

from kvburst.replay.recording import load_recording  # noqa: E402

PAGES, SMALL_PAGES = 64, 16
LAYERS, POOLS = 78, 2
METRICS = {"copies", "issue_us", "issue_us_per_layer", "issue_us_per_copy", "caller_us"}
SCENARIO_KEYS = {
    "pages",
    "layers",
    "pools",
    "layout",
    "direction",
    "pattern",
    "groups",
    "mode",
    "device",
}


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    result = CliRunner().invoke(issue_latency.app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """What it printed, its JSON, its picture; with small bursts."""
    folder = tmp_path_factory.mktemp("issue_latency")
    written, picture = folder / "rows.json", folder / "issue_latency.png"
    script = str(BENCHMARKS / "issue_latency.py")
    sizes = ["--quick", "--pages", f"{SMALL_PAGES},{PAGES}", "--chunk-pages", "0,8"]
    files = ["--json", str(written), "--plot", str(picture)]
    done = subprocess.run(
        [sys.executable, script, *sizes, *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout, json.loads(written.read_text()), picture


Quick = tuple[str, dict[str, Any], Path]


def medians(content: dict[str, Any], metric: str, **scenario: object) -> set[float]:
    """Of all rows of that metric whose scenario has these values."""
    return {
        row["median"]
        for row in content["rows"]
        if row["metric"] == metric
        and all(row["scenario"][key] == value for key, value in scenario.items())
    }


def test_every_scenario_has_every_metric_once_a_section(quick_run: Quick) -> None:
    _, content, _ = quick_run
    measured: dict[str, list[str]] = {}
    for row in content["rows"]:
        assert row["benchmark"] == "issue_latency"
        assert row["scenario"].keys() >= SCENARIO_KEYS
        assert min(row["median"], row["p90"], row["p99"], row["baseline_median"]) > 0
        measured.setdefault(json.dumps(row["scenario"]), []).append(row["metric"])
    for metrics in measured.values():
        assert {metric: metrics.count(metric) for metric in METRICS} == dict.fromkeys(
            METRICS, len(metrics) // len(METRICS)
        )


@pytest.mark.parametrize(
    ("scenario", "copies"),
    [
        ({"groups": "none", "direction": "load"}, PAGES * LAYERS * POOLS),
        ({"groups": "none", "direction": "backup"}, PAGES * LAYERS * POOLS),
        # Groups of 1, 2, 4, 8, 16, 16, 16 and 15 layers.
        ({"groups": "ramp", "direction": "load"}, PAGES * 8 * POOLS),
        ({"groups": "ramp", "direction": "backup"}, PAGES * POOLS),
        ({"groups": "ramp", "direction": "load", "mode": "thread"}, PAGES * 8 * POOLS),
    ],
)
def test_scattered_bursts_take_as_many_copies_as_their_groups_say(
    quick_run: Quick, scenario: dict[str, object], copies: int
) -> None:
    for device in issue_latency.DEVICES:
        found = medians(
            quick_run[1],
            "copies",
            device=device,
            geometry="mla-dsa-78-full",
            pattern="scattered",
            layout="one-allocation",
            pages=PAGES,
            chunk_pages=0,
            **scenario,
        )
        assert found == {copies}


def test_layers_with_an_allocation_each_gain_nothing_from_groups(quick_run: Quick) -> None:
    found = medians(
        quick_run[1], "copies", layout="per-layer", groups="ramp", pages=PAGES, pattern="scattered"
    )
    assert found == {PAGES * LAYERS * POOLS}


def test_neighbours_are_merged_where_there_are_any(quick_run: Quick) -> None:
    base = {"groups": "neighbours", "pages": PAGES, "layout": "one-allocation"}
    assert medians(quick_run[1], "copies", pattern="contiguous", **base) == {LAYERS * POOLS}
    (runs,) = medians(quick_run[1], "copies", pattern="runs", direction="load", **base)
    # Eight device pages in a row, and eight host pages: a few of them lie behind one another.
    assert PAGES / 8 * LAYERS * POOLS / 2 < runs <= PAGES / 8 * LAYERS * POOLS


def test_recorded_bursts_of_a_trace_hardly_have_neighbours(quick_run: Quick) -> None:
    """The headline: merging gains nothing where pages are as a real cache leaves them."""
    base = {"pattern": "trace", "direction": "load", "device": "null"}
    (plain,) = medians(quick_run[1], "copies", groups="none", **base)
    (merged,) = medians(quick_run[1], "copies", groups="neighbours", **base)
    (grouped,) = medians(quick_run[1], "copies", groups="ramp", **base)
    assert merged > 0.95 * plain
    assert grouped < plain / 9


def test_what_a_link_model_made_says_simulated_and_counts_do_not(quick_run: Quick) -> None:
    printed, content, _ = quick_run
    for row in content["rows"]:
        modelled = row["scenario"]["device"] == "host" and row["metric"] != "copies"
        assert row.get("simulated", False) == modelled
        assert row["scenario"]["link"] == (
            "h100" if row["scenario"]["device"] == "host" else "none"
        )
    assert "link h100 (simulated)" in printed
    assert "no driver counted" in printed


def test_machine_is_printed_before_any_number_and_the_baseline_explained(quick_run: Quick) -> None:
    printed, content, picture = quick_run
    assert content["machine"]["cpu"] in printed.splitlines()[0]
    assert "three arrays rebuilt from Python" in " ".join(printed.split())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_link_model_charges_every_copy() -> None:
    """Of the device, not of the benchmark's arithmetic: 64 pages x 156 copies at 2.3 us each."""
    setting = issuing.Setting("host", "h100", pages=PAGES)
    random = torch.Generator().manual_seed(0)
    bursts = page_patterns.made_up("scattered", PAGES, 64, random)
    with issuing.issuers(setting, [issuing.Way("none", "inline")], bursts) as ours:
        (issuer,) = ours.values()
        issuer.issue()
    (issued,) = issuer.issued
    assert issued.copies == PAGES * LAYERS * POOLS
    assert issued.caller_us >= issued.copies * 2.3


def test_device_of_unknown_price_has_no_baseline_but_for_its_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    null = issuing.DEVICES["null"]
    real = replace(null, ground=lambda wanted: replace(null.ground(wanted), copy_us=None))
    monkeypatch.setitem(issuing.DEVICES, "null", real)
    bursts = page_patterns.made_up("scattered", 4, 64, torch.Generator().manual_seed(0))
    ways = [issuing.Way("none", "inline"), issuing.Way("ramp", "inline")]
    rows, peers_ns = issuing.measure("b", issuing.Setting("null", "h100"), ways, bursts, 3)
    assert peers_ns == []
    assert [row.metric for row in rows if row.ratio is not None] == ["copies", "copies"]
    assert {row.n for row in rows} == {3}


# --- patterns ------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", page_patterns.MADE_UP)
def test_made_up_bursts_have_each_page_once_and_within_the_tiers(
    pattern: page_patterns.Pattern,
) -> None:
    random = torch.Generator().manual_seed(3)
    bursts = page_patterns.made_up(pattern, 100, 64, random)
    (burst,) = bursts.each
    for slots in (burst.device, burst.host):
        pages = slots[::64] // 64
        assert len(pages) == len(set(pages.tolist())) == 100
        assert 0 <= int(pages.min()) <= int(pages.max()) < bursts.tier_pages
    assert bursts.median_pages == 100


def test_runs_are_eight_neighbours_on_both_tiers() -> None:
    (burst,) = page_patterns.made_up("runs", 96, 64, torch.Generator().manual_seed(3)).each
    for slots in (burst.device, burst.host):
        steps = (slots[64::64] - slots[:-64:64]) // 64
        assert steps.view(-1)[:7].tolist() == [1] * 7
        assert int((steps != 1).sum()) >= 96 // 8 - 4


def test_recorded_bursts_are_the_last_of_their_direction_with_the_pages_they_had() -> None:
    recording = load_recording(page_patterns.RECORDED)
    bursts = page_patterns.recorded(recording, "load", 3)
    wanted = [burst for burst in recording.bursts if burst.direction == "load"][-3:]
    assert [(each.device[::64] // 64).tolist() for each in bursts.each] == [
        list(burst.device) for burst in wanted
    ]
    assert [(each.host[::64] // 64).tolist() for each in bursts.each] == [
        list(burst.host) for burst in wanted
    ]


def test_a_trace_is_replayed_for_its_bursts(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    request = {"timestamp": 0, "input_length": 1024, "output_length": 64, "hash_ids": [0, 1]}
    trace.write_text(f"{json.dumps(request)}\n")
    recording = page_patterns.read_bursts(trace)
    assert [burst.direction for burst in recording.bursts] == ["backup"] * len(recording.bursts)
    assert len(recording.bursts) > 0


# --- what it refuses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "gpu"], ["--device", "'gpu'", "null, host"]),
        (["--geometry", "gpt-2"], ["--geometry", "'gpt-2'", "deepseek-v3"]),
        (["--pages", "0"], ["--pages", "0 is not from 1 to"]),
        (["--chunk-pages", "-1"], ["--chunk-pages", "-1 is not from 0 to"]),
        (["--bursts", "/nowhere.kvb"], ["/nowhere.kvb", "cannot be read"]),
        (["--rounds", "0"], ["--rounds", "0 is not from 1 to"]),
        (["--json", "/nowhere/rows.json"], ["--json", "/nowhere", "not a folder"]),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(
    arguments: list[str], words: list[str]
) -> None:
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    for word in words:
        assert word in err


def test_caller_is_on_any_core_again() -> None:
    cores = Cores(0, 1)
    before = os.sched_getaffinity(0)
    with cores.caller_pinned():
        assert os.sched_getaffinity(0) == {0}
    assert os.sched_getaffinity(0) == before
