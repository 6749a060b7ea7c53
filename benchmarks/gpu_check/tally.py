"""A plugin of pytest that keeps count in a file, so that the count outlives the tests."""

import json
from pathlib import Path

import pytest

from gpu_check.whole_file import replace_file


class Tally:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._counts = dict.fromkeys(("passed", "failed", "skipped"), 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test counts once: by its body, or by what kept it from that."""
        if report.when != "call" and report.outcome == "passed":
            return
        self._counts[report.outcome] += 1
        rows = [
            {
                "benchmark": "gpu_check",
                "scenario": {"step": self._file.stem, "outcome": outcome},
                "metric": "tests",
                "unit": "tests",
                "n": 1,
                **dict.fromkeys(("median", "p90", "p99"), count),
            }
            for outcome, count in self._counts.items()
        ]
        replace_file(self._file, json.dumps({"rows": rows}))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tally", type=Path, help="where the count of outcomes goes, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tally(config.getoption("--tally")))
