"""The benchmark of issue latencies runs, counts what it must, and draws it. Nothing here judges how
fast anything is."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in import Library
from typer.testing import CliRunner

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import issue_latency  # noqa: E402
import issuing  # noqa: E402
import page_patterns  # noqa: E402
from harness import Cores, Row  # noqa: E402
from issuing import Setting, Way  # noqa: E402
from page_patterns import Bursts  # noqa: E402

from kvburst._core import KVBurstError  # noqa: E402
from kvburst.replay.recording import load_recording  # noqa: E402

PAGES, SMALL_PAGES = 64, 16
# Those that every machine has, so those that are run unless others are asked for.
DEVICES = ("null", "host")
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
    for device in DEVICES:
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


def test_sections_that_are_done_are_kept_when_a_later_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or takes too long for whoever waits."""
    measure = issue_latency.measure
    file = tmp_path / "rows.json"

    def fails_in_a_backup(
        benchmark: str, setting: Setting, ways: Sequence[Way], bursts: Bursts, rounds: int
    ) -> tuple[list[Row], list[float]]:
        if setting.direction == "backup":
            raise KVBurstError("no room")
        return measure(benchmark, setting, ways, bursts, rounds)

    monkeypatch.setattr(issue_latency, "measure", fails_in_a_backup)
    sizes = ("--quick", "--device", "null", "--pages", "16", "--chunk-pages", "0")
    status, _, error = run(*sizes, "--json", str(file))
    assert (status, error) == (2, "error: no room\n")
    patterns = {row["scenario"]["pattern"] for row in json.loads(file.read_text())["rows"]}
    assert patterns == {"scattered", "contiguous", "runs", "trace"}


def test_link_model_charges_every_copy() -> None:
    """Of the device, not of the benchmark's arithmetic: 64 pages x 156 copies at 2.3 us each."""
    setting = issuing.Setting("host", "h100", pages=PAGES)
    random = torch.Generator().manual_seed(0)
    bursts = page_patterns.made_up("scattered", PAGES, 64, random)
    ground = issuing.ground_of(setting, bursts)
    with issuing.issuers(setting, [issuing.Way("none", "inline")], bursts, ground) as ours:
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


# --- drivers -------------------------------------------------------------------------------


@pytest.fixture
def stand_in(stand_in_library: Library, monkeypatch: pytest.MonkeyPatch) -> str:
    """A library that plays the driver, as the environment names it."""
    monkeypatch.setenv("KVBURST_LIBCUDA", str(stand_in_library.current))
    return str(stand_in_library.current)


def test_stand_in_driver_takes_the_same_copies_and_says_that_its_times_are_no_gpus(
    stand_in: str, tmp_path: Path
) -> None:
    written = tmp_path / "rows.json"
    small = ["--quick", "--pages", "8", "--chunk-pages", "0", "--geometry", "mla-dsa-78-full"]
    status, out, err = run("--device", "stand-in", *small, "--json", str(written))
    assert (status, err) == (0, "")
    assert "device stand-in (no GPU)" in out
    content = json.loads(written.read_text())
    base = {"device": "stand-in", "pages": 8, "direction": "load", "pattern": "scattered"}
    base["layout"] = "one-allocation"
    assert medians(content, "copies", groups="none", **base) == {8 * LAYERS * POOLS}
    assert medians(content, "copies", groups="ramp", **base) == {8 * 8 * POOLS}
    for row in content["rows"]:
        assert row.get("simulated", False) == (row["metric"] != "copies")
        assert ("ratio" in row) == (row["metric"] == "copies")
        assert row["median"] > 0


def test_a_stand_in_is_no_gpu(stand_in: str) -> None:
    status, _, err = run("--device", "cuda", "--quick")
    assert status == 2
    assert f"device cuda: {stand_in} stands in for a driver" in err


@pytest.fixture
def sgl_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of this name whose functions are kvburst's, which take the same arguments."""
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kvcacheio.py").write_text("from kvburst.kvcacheio import *\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("sgl_kernel.kvcacheio", "sgl_kernel"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("direction", ["load", "backup"])
@pytest.mark.usefixtures("stand_in", "sgl_kernel")
def test_baseline_behind_a_driver_is_sgl_kernel_which_moves_the_same_pages(
    direction: page_patterns.Direction,
) -> None:
    setting = issuing.Setting("stand-in", "h100", pages=4, direction=direction)
    bursts = page_patterns.made_up("scattered", 4, 64, torch.Generator().manual_seed(0))
    ground = issuing.ground_of(setting, bursts)
    assert ground.sgl_kernel is not None
    for pool in ground.sgl_kernel.pools:
        source, target = (pool.host, pool.device)
        if direction == "backup":
            source, target = target, source
        source.random_(0, 256)
        target.zero_()
    copies, microseconds = ground.sgl_kernel.issue(bursts.each[0], direction)
    assert copies == 4 * LAYERS * POOLS
    assert microseconds > 0
    for pool in ground.sgl_kernel.pools:
        for layer in range(LAYERS):
            on_host = pool.host[:, layer].flatten(0, 1)[bursts.each[0].host]
            assert torch.equal(pool.device[layer][bursts.each[0].device], on_host)
            assert on_host.any()

    rows, _ = issuing.measure("b", setting, [issuing.Way("ramp", "inline")], bursts, 2)
    assert all(row.ratio is not None for row in rows)


def test_without_sgl_kernel_there_is_no_baseline_behind_a_driver(stand_in: str) -> None:
    bursts = page_patterns.made_up("scattered", 4, 64, torch.Generator().manual_seed(0))
    assert issuing.ground_of(issuing.Setting("stand-in", "h100"), bursts).sgl_kernel is None


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
