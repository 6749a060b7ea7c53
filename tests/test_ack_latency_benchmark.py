"""The benchmark of the agreement runs, says what it must, and leaves nothing behind. Nothing here
judges how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import ack_latency  # noqa: E402

ROW_KEYS = {"benchmark", "scenario", "metric", "unit", "n", "median", "p90", "p99"}
BASELINE_KEYS = {"baseline_median", "ratio"}


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    result = CliRunner().invoke(ack_latency.app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


Quick = tuple[str, dict[str, Any], Path]


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> Quick:
    """What it printed, its JSON, its picture; of two ranks."""
    folder = tmp_path_factory.mktemp("ack_latency")
    written, picture = folder / "rows.json", folder / "medians.png"
    script = str(BENCHMARKS / "ack_latency.py")
    sizes = ["--quick", "--ranks", "2", "--step-ms", "0,1", "--injected-ms", "2"]
    files = ["--json", str(written), "--plot", str(picture)]
    done = subprocess.run(
        [sys.executable, script, *sizes, *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(written.read_text()), picture


def test_every_transport_is_measured_in_every_scenario(quick_run: Quick) -> None:
    measured = [
        (*(row["scenario"][key] for key in ("transport", "step_ms", "injected_ms")), row["metric"])
        for row in quick_run[1]["rows"]
    ]
    scenarios = [(0, 0), (1, 0), (1, 2)]
    assert sorted(measured) == sorted(
        (transport, step, injected, metric)
        for transport in ("blocking", "pipelined", "board")
        for step, injected in scenarios
        for metric in ("agree_us", "steps_per_s")
        # Without a step's own time there is no rate to compare.
        if step or metric == "agree_us"
    )


def test_rows_have_the_keys_of_every_benchmark(quick_run: Quick) -> None:
    for row in quick_run[1]["rows"]:
        is_baseline = row["metric"] == "agree_us" and row["scenario"]["transport"] == "blocking"
        simulated = {"simulated"} if row["scenario"]["injected_ms"] else set()
        assert set(row) == ROW_KEYS | simulated | (set() if is_baseline else BASELINE_KEYS)
        assert row["scenario"]["ranks"] == 2
        steps = 2 * ack_latency.STEPS_A_TURN
        assert row["n"] == (2 * steps if row["metric"] == "agree_us" else 2)
        assert row["median"] > 0


def test_collective_that_each_step_waits_for_takes_what_was_injected(quick_run: Quick) -> None:
    (waited,) = (
        row["median"]
        for row in quick_run[1]["rows"]
        if row["metric"] == "agree_us"
        and row["scenario"]["transport"] == "blocking"
        and row["scenario"]["injected_ms"] == 2
    )
    assert waited >= 2000


def test_what_is_simulated_and_what_was_compared_is_said(quick_run: Quick) -> None:
    out, _, picture = quick_run
    for words in ("agree_us, us (simulated)", "steps_per_s, 1/s", "the collective is a stub"):
        assert words in out
    assert picture.stat().st_size > 10_000


def test_rank_that_ends_too_early_ends_the_run() -> None:
    with (
        ack_latency.rank_processes(1, [], 1) as pipes,
        pytest.raises(ack_latency.KVBurstError, match="a rank ended before"),
    ):
        ack_latency.hear(pipes[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "2,many"], ["--ranks", "'many'", "whole number"]),
        (["--ranks", "0"], ["--ranks", "0 is not from 1 to 64"]),
        (["--step-ms", "-1"], ["--step-ms", "-1 is not from 0 to 1000"]),
        (["--injected-ms", "much"], ["--injected-ms", "'much' is not a number"]),
        (["--injected-ms", "-3"], ["--injected-ms", "-3 is not from 0 to 1000"]),
        (["--turns", "0"], ["--turns", "0 is not from 1 to"]),
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
