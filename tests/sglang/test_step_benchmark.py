"""The benchmark of a scheduler step runs, and says what it must. Nothing here judges how fast
anything is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sglang_step.py"


def run(written: Path, *options: str) -> tuple[str, list[dict[str, Any]]]:
    """What it printed, and its rows."""
    environment = {name: value for name, value in os.environ.items() if name != "KVBURST"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", *options, "--json", str(written)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split()), json.loads(written.read_text())["rows"]


def test_load_back_is_timed_with_the_plugin_and_without(tmp_path: Path) -> None:
    sizes = ["--function", "start_loading", "--pages", "8", "--layers", "3"]
    printed, (row,) = run(tmp_path / "rows.json", *sizes)
    assert "hands 48 copies over" in printed
    assert "no driver" in printed
    assert row["benchmark"] == "sglang_step"
    assert row["metric"] == "scheduler_us"
    assert row["unit"] == "us"
    scenario = row["scenario"]
    assert {name: scenario[name] for name in ("function", "ranks", "pages", "layers")} == {
        "function": "start_loading",
        "ranks": 1,
        "pages": 8,
        "layers": 3,
    }
    assert min(row["median"], row["baseline_median"], row["ratio"]) > 0


def test_agreement_is_timed_over_each_transport(tmp_path: Path) -> None:
    options = ["--function", "check_hicache_events", "--ranks", "2"]
    printed, rows = run(tmp_path / "rows.json", *options)
    assert "blocking all_reduce" in printed
    assert [row["scenario"] for row in rows] == [
        {"function": "check_hicache_events", "ranks": 2, "transport": transport}
        for transport in ("board", "pipelined")
    ]
    for row in rows:
        assert row["n"] == 40  # 20 steps on each rank
        assert min(row["median"], row["baseline_median"], row["ratio"]) > 0
