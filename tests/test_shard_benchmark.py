"""The benchmark of a shared tier runs and says what it must. Nothing here judges how fast anything
is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import shard  # noqa: E402

PACES = {"1 ms a layer", "3 x copies"}


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """What it printed, its JSON, its picture."""
    folder = tmp_path_factory.mktemp("shard")
    written, picture = folder / "rows.json", folder / "medians.png"
    options = ["--quick", "--json", str(written), "--plot", str(picture)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "shard.py"), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout, json.loads(written.read_text()), picture


Quick = tuple[str, dict[str, Any], Path]


def medians(content: dict[str, Any], metric: str) -> dict[tuple[str, str], float]:
    """By tier and forward."""
    return {
        (row["scenario"]["tier"], row["scenario"]["forward"]): row["median"]
        for row in content["rows"]
        if row["metric"] == metric
    }


def test_every_tier_is_measured_and_computed_under_every_forward(quick_run: Quick) -> None:
    _, content, _ = quick_run
    assert content.keys() == {"machine", "rows"}
    for metric in (*shard.UNDER_A_FORWARD, "computed_overlap_ratio", "computed_forward_ms"):
        assert medians(content, metric).keys() == {
            (tier, pace) for tier in shard.TIERS for pace in PACES
        }
    assert medians(content, "load_back_ms").keys() == {(tier, "none") for tier in shard.TIERS}


def test_all_ranks_of_a_shared_tier_together_have_one_copy(quick_run: Quick) -> None:
    _, content, _ = quick_run
    together = medians(content, "host_gb_all_ranks")
    one = together["off", "none"] / 2
    for tier in ("rank0", "rotating", "side_stream"):
        assert together[tier, "none"] == pytest.approx(one, rel=1e-5)
    most = medians(content, "host_gb_most")
    assert most["rank0", "none"] == pytest.approx(one, rel=1e-5)
    assert most["rotating", "none"] == pytest.approx(one * 39 / 78, rel=0.01)


def test_all_times_are_said_to_be_simulated(quick_run: Quick) -> None:
    printed, content, _ = quick_run
    for row in content["rows"]:
        assert row.get("simulated", False) == (not row["metric"].startswith("host_gb"))
    assert "simulated: exchange over NVLink: 300 GB/s, 10 us a collective" in printed
    assert "budget" in printed


def test_side_stream_has_no_overlap_since_its_gate_waits_for_everything(quick_run: Quick) -> None:
    _, content, _ = quick_run
    computed = medians(content, "computed_overlap_ratio")
    for pace in PACES:
        assert computed["side_stream", pace] == 0 < computed["rotating", pace]


def test_picture_is_drawn_on_request(quick_run: Quick) -> None:
    assert quick_run[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "1"], ["--ranks", "1 is not from 2 to 16"]),
        (["--pages", "0"], ["--pages", "0 is not from 1 to"]),
        (["--rounds", "few"], ["--rounds", "'few' is not a whole number"]),
        (["--json", "/nowhere/rows.json"], ["--json", "/nowhere", "not a folder"]),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(
    arguments: list[str], words: list[str]
) -> None:
    result = CliRunner().invoke(shard.app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr
