"""The report: one page with all that was measured, which a real browser shows without complaint."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import browser, render
from typer.testing import CliRunner

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import report  # noqa: E402
from harness import machine  # noqa: E402
from report_page import Part, page  # noqa: E402

needs_browser = pytest.mark.skipif(
    browser() is None, reason="no Chromium on PATH: apt-get install chromium-headless-shell"
)

ROW = {
    "benchmark": "b",
    "scenario": {"pages": 1024, "mode": "thread"},
    "metric": "caller_us",
    "unit": "us",
    "n": 20,
    "median": 12.5,
    "p90": 14.0,
    "p99": 20.0,
    "baseline_median": 2500.0,
    "ratio": 200.0,
}
FULL_LINE = "a" * 85
PICTURE = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><rect width="9" height="9"/></svg>'
)


def part(**changes: Any) -> Part:
    given: dict[str, Any] = {
        "name": "b",
        "title": "A benchmark",
        "words": "What it is.",
        "rows": [ROW, ROW | {"scenario": {"pages": 64, "mode": "thread"}}],
        "picture": PICTURE,
        # The first line is so long that no word would fit behind it, and does not go on.
        "printed": f"budget kept: {FULL_LINE}\nbudget missed: this is said in more words than fit"
        " on a line of a hundred, with its second half\nbelow it\nand this is another note",
        "seconds": 1.0,
    }
    return Part(**given | changes)


def one_page(*parts: Part) -> str:
    return page(parts, machine(), "2026-11-29", quick=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A page of two benchmarks that ran, and where their JSON is kept."""
    folder = tmp_path_factory.mktemp("report")
    out, results = folder / "report.html", folder / "results"
    options = ["--quick", "--only", "plan_cost,copy_bandwidth"]
    result = CliRunner().invoke(
        report.app, [*options, "--out", str(out), "--results", str(results)]
    )
    assert result.exit_code == 0, result.output
    return out.read_text(), results


# --- in a browser --------------------------------------------------------------------------


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_page_renders_with_its_pictures_and_without_complaint(
    written: tuple[str, Path], tmp_path: Path, width: int
) -> None:
    rendering = render(written[0], tmp_path, width)
    assert rendering.console == ()
    assert (rendering.pictures, rendering.broken) == (2, 0)
    assert rendering.remote == 0
    # No line runs out of the window, on a telephone neither: tables scroll by themselves.
    assert rendering.too_wide <= 0
    assert rendering.height > 900


@needs_browser
def test_browser_sees_what_is_broken(tmp_path: Path) -> None:
    """The control of the test above."""
    html = one_page(part(picture=b"no picture"))
    broken = "<script>console.error('no'); </script><p style='width:3000px'>wide</p>"
    rendering = render(html.replace("</body>", f"{broken}</body>"), tmp_path)
    assert rendering.broken == 1
    assert rendering.too_wide > 0
    assert len(rendering.console) == 1


# --- what is on it -------------------------------------------------------------------------


def test_machine_and_versions_come_first(written: tuple[str, Path]) -> None:
    html = written[0]
    measured_on = machine()
    first_table = html.index("<table")
    for key in ("cpu", "kernel", "python", "torch", "kvburst", "compiler"):
        assert 0 < html.index(str(measured_on[key])) < first_table


def test_every_number_of_a_benchmark_is_on_the_page_and_kept(written: tuple[str, Path]) -> None:
    html, results = written
    assert sorted(file.name for file in results.iterdir()) == [
        "copy_bandwidth.json",
        "plan_cost.json",
    ]
    for file in results.iterdir():
        content = json.loads(file.read_text())
        assert f"id='{file.stem}'" in html
        assert len(content["rows"]) > 0
        for row in content["rows"]:
            assert f"<td class='first'>{report_number(row['median'])}</td>" in html


def report_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def test_page_needs_nothing_else(written: tuple[str, Path]) -> None:
    assert re.findall(r"(?:src|href)='(?!data:|#)", written[0]) == []
    assert "<script" not in written[0]


def test_budgets_are_told_with_their_verdict_and_all_their_words() -> None:
    html = one_page(part())
    assert f"<li class='kept'>A benchmark: {FULL_LINE}</li>" in html
    assert "with its second half below it</li>" in html
    assert "another note</li>" not in html


def test_simulated_numbers_are_marked() -> None:
    assert "class='simulated'>" not in one_page(part())
    assert "class='simulated'>" in one_page(part(rows=[ROW | {"simulated": True}]))


def test_words_are_no_markup() -> None:
    html = one_page(part(printed="<b>&", words="a < b"))
    assert "<pre>&lt;b&gt;&amp;</pre>" in html
    assert "a &lt; b" in html


# --- when it goes wrong --------------------------------------------------------------------


def test_benchmark_that_fails_is_on_the_page_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = report.Benchmark("b", "B", "", ("-c", "import sys; sys.exit('out of memory')"))
    monkeypatch.setattr(report, "BENCHMARKS", (failing,))
    out = tmp_path / "report.html"
    result = CliRunner().invoke(report.app, ["--out", str(out)])
    assert result.exit_code == 1
    assert "b: failed" in result.output
    assert "exit status 1\nout of memory" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "/nowhere/report.html"], ["--out", "'/nowhere' is not a folder"]),
        (["--results", "/nowhere/results"], ["--results", "'/nowhere' is not a folder"]),
        (["--only", "speed"], ["--only", "'speed' is not one of demo, issue_latency"]),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    arguments: list[str], words: list[str]
) -> None:
    result = CliRunner().invoke(report.app, arguments)
    assert result.exit_code == 2
    for word in words:
        assert word in result.output
