"""The hand-off benchmark runs, says what it must, and leaves the machine as it was. Nothing here
judges how fast anything is."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvburst._core import NullDevice

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import handoff  # noqa: E402
import peers_way  # noqa: E402

ROW_KEYS = {"benchmark", "scenario", "metric", "unit", "n", "median", "p90", "p99"}
BASELINE_KEYS = {"baseline_median", "ratio"}
METRICS = ("caller_us", "alloc_us", "first_copy_us")


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    result = CliRunner().invoke(handoff.app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """What it printed, its JSON, its picture; on a device that has streams."""
    folder = tmp_path_factory.mktemp("handoff")
    written, picture = folder / "rows.json", folder / "medians.png"
    script = str(BENCHMARKS / "handoff.py")
    sizes = ["--quick", "--pages", "1,8", "--layers", "1,5", "--device", "host"]
    files = ["--json", str(written), "--plot", str(picture)]
    done = subprocess.run(
        [sys.executable, script, *sizes, *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout, json.loads(written.read_text()), picture


Quick = tuple[str, dict[str, Any], Path]


def test_every_size_is_measured_in_both_modes_and_beside_a_busy_thread(quick_run: Quick) -> None:
    measured = [
        (*(row["scenario"][key] for key in ("pages", "layers", "mode", "busy")), row["metric"])
        for row in quick_run[1]["rows"]
    ]
    assert sorted(measured) == sorted(
        (pages, layers, mode, busy, metric)
        for pages in (1, 8)
        for layers in (1, 5)
        for mode, busy in (("thread", 0), ("inline", 0), ("thread", 1))
        for metric in METRICS
    )


def test_rows_have_the_agreed_keys(quick_run: Quick) -> None:
    for row in quick_run[1]["rows"]:
        compared = row["metric"] != "alloc_us" and not row["scenario"]["busy"]
        assert row.keys() == (ROW_KEYS | BASELINE_KEYS if compared else ROW_KEYS)
        assert row["benchmark"] == "handoff"
        assert row["scenario"]["pools"] == 2
        assert row["unit"] == "us"
        assert min(row["median"], row["p90"], row["p99"]) > 0


def test_says_what_is_compared_and_draws_it(quick_run: Quick) -> None:
    printed, _, picture = quick_run
    assert "no driver counted" in printed
    assert "device host" in printed
    assert "three arrays rebuilt for every layer and pool" in " ".join(printed.split())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_budgets_are_judged_where_their_sizes_were_measured() -> None:
    status, out, err = run("--quick", "--pages", "64,1024,4096", "--layers", "78")
    assert status == 0, err
    out = " ".join(out.split())
    assert "1,024 pages, 78 layers: " in out
    assert "4,096 pages take " in out
    assert "(budget: at most 4)" in out
    assert "ns a copy" in out


def test_caller_may_run_anywhere_again_and_no_thread_is_left() -> None:
    cores, threads = os.sched_getaffinity(0), threading.active_count()
    status, _, err = run("--quick", "--pages", "2", "--layers", "2")
    assert status == 0, err
    assert os.sched_getaffinity(0) == cores
    assert threading.active_count() == threads


@pytest.mark.parametrize("mode", handoff.MODES)
def test_every_burst_is_a_load_of_all_layers(mode: handoff.Mode) -> None:
    pages, layers = 6, 3
    cores = handoff.Cores.of(sorted(os.sched_getaffinity(0)))
    ours = handoff.Ours(NullDevice(), handoff.new_pools(layers, 2 * pages), 2 * pages, mode, cores)
    random = torch.Generator().manual_seed(0)
    indices = peers_way.Indices.of(pages, 2 * pages, "scattered", random)
    ours.prepare(indices.host)
    for _ in range(4):
        assert ours.load() > 0
    for burst in ours.bursts(4, every=1):
        assert burst.bytes == pages * layers * len(handoff.POOLS) * peers_way.PAGE_SIZE
        assert 0 < burst.queue_us < burst.first_copy_us
    ours.stop()


def test_baseline_hands_over_one_copy_for_every_page_of_every_layer() -> None:
    pages, layers = 5, 4
    random = torch.Generator().manual_seed(0)
    indices = peers_way.Indices.of(pages, 8, "scattered", random)
    issued = peers_way.PeersWay(peers_way.pools_of(layers, 8), "load").issue(indices)
    assert issued.copies == pages * layers * 2
    assert 0 < issued.first_copy_ns < issued.ns


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pages", "64,many"], ["--pages", "'many'", "whole number"]),
        (["--layers", "0"], ["--layers", "0 is not from 1 to"]),
        (["--rounds", "0"], ["--rounds", "0 is not from 1 to"]),
        (["--device", "cuda"], ["--device", "'cuda'", "null"]),
        (["--json", "/nowhere/rows.json"], ["--json", "/nowhere", "not a folder"]),
        (["--plot", "medians.txt"], ["--plot", "medians.txt", "png"]),
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
