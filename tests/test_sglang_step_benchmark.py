"""Where SGLang is not installed its benchmark says so in one line."""

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "sglang_step.py"
SGLANG_IS_HERE = any(each.name == "sglang" for each in distributions())


@pytest.mark.skipif(SGLANG_IS_HERE, reason="SGLang is installed; tests/sglang runs the benchmark")
def test_says_in_one_line_that_sglang_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: SGLang is not in this environment")
    assert "tests/sglang/environment.sh" in line
