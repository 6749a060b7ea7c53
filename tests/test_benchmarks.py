"""The benchmarks run, say what they must, and refuse what they cannot measure. Nothing here judges
how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvburst import CopyLimits, DevicePool, HostPool, Pool
from kvburst._core import BurstIssuer, BurstPages, NullDevice
from kvburst._indices import index_view

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import copy_bandwidth  # noqa: E402
import plan_cost  # noqa: E402
from harness import Row, percentile, take_turns  # noqa: E402

APPS = {"copy_bandwidth": copy_bandwidth.app, "plan_cost": plan_cost.app}

MACHINE_KEYS = {"cpu", "cores", "memory_bytes", "kernel", "python", "torch", "kvburst", "compiler"}
ROW_KEYS = {"benchmark", "scenario", "metric", "unit", "n", "median", "p90", "p99"}
BASELINE_KEYS = {"baseline_median", "ratio"}

SCENARIO_KEYS = {
    "copy_bandwidth": {"page_bytes", "pattern", "direction"},
    "plan_cost": {"pages", "layers", "pools", "groups", "pattern", "direction", "device"},
}
# Metrics, and whether a baseline stands beside them.
METRICS = {
    "copy_bandwidth": {"bandwidth_gbps": True, "bandwidth_between_events_gbps": True},
    "plan_cost": {"caller_ns_per_page_and_layer": True, "native_ns_per_page_and_layer": False},
}


def run(benchmark: str, *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    result = CliRunner().invoke(APPS[benchmark], list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


# --- the scripts ---------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(METRICS))
def quick_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, dict[str, Any], Path]:
    """Name, what it printed, its JSON, its picture."""
    folder = tmp_path_factory.mktemp(request.param)
    written, picture = folder / "rows.json", folder / "medians.png"
    script = str(BENCHMARKS / f"{request.param}.py")
    options = ["--quick", "--json", str(written), "--plot", str(picture)]
    done = subprocess.run(
        [sys.executable, script, *options], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return request.param, done.stdout, json.loads(written.read_text()), picture


Quick = tuple[str, str, dict[str, Any], Path]


def test_json_is_the_machine_and_rows_of_the_agreed_keys(quick_run: Quick) -> None:
    name, _, content, _ = quick_run
    assert content.keys() == {"machine", "rows"}
    assert content["machine"].keys() >= MACHINE_KEYS
    for row in content["rows"]:
        has_baseline = METRICS[name][row["metric"]]
        assert row.keys() == (ROW_KEYS | BASELINE_KEYS if has_baseline else ROW_KEYS)
        assert row["benchmark"] == name
        assert row["scenario"].keys() >= SCENARIO_KEYS[name]
        assert row["n"] >= 1
        assert min(row["median"], row["p90"], row["p99"]) > 0


def test_every_scenario_has_every_metric_once(quick_run: Quick) -> None:
    name, _, content, _ = quick_run
    measured = [(json.dumps(row["scenario"]), row["metric"]) for row in content["rows"]]
    scenarios = {scenario for scenario, _ in measured}
    assert sorted(measured) == sorted(
        (scenario, metric) for scenario in scenarios for metric in METRICS[name]
    )


def test_machine_and_versions_are_printed_before_any_number(quick_run: Quick) -> None:
    _, printed, content, _ = quick_run
    machine = content["machine"]
    first, second = printed.splitlines()[:2]
    assert machine["cpu"] in first
    assert machine["kernel"] in first
    assert f"torch {machine['torch']}, kvburst {machine['kvburst']}" in second
    assert "median" not in first + second


def test_picture_is_drawn_on_request(quick_run: Quick) -> None:
    assert quick_run[3].read_bytes().startswith(b"\x89PNG")


def test_copy_bandwidth_measures_40_kib_scattered_in_both_directions(tmp_path: Path) -> None:
    written = tmp_path / "rows.json"
    status, out, err = run(
        "copy_bandwidth", "--quick", "--page-bytes", "40960", "--json", str(written)
    )
    assert status == 0, err
    assert "budget" in out
    scenarios = {
        (scenario["page_bytes"], scenario["pattern"], scenario["direction"])
        for scenario in (row["scenario"] for row in json.loads(written.read_text())["rows"])
    }
    assert {(40960, "scattered", "load"), (40960, "scattered", "backup")} <= scenarios


def test_plan_cost_says_that_no_driver_is_counted() -> None:
    status, out, err = run("plan_cost", "--quick", "--pages", "4", "--direction", "backup")
    assert status == 0, err
    assert "no driver counted" in out
    assert "device null" in out


@pytest.mark.parametrize("benchmark", sorted(METRICS))
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json", "/nowhere/rows.json"], ["--json", "/nowhere", "not a folder"]),
        (["--plot", "medians.txt"], ["--plot", "medians.txt", "png"]),
        (["--rounds", "0"], ["--rounds", "0 is not from 1 to"]),
        (["--rounds", "few"], ["--rounds", "'few' is not a whole number"]),
        (["--layers", "0"], ["--layers", "0 is not from 1 to"]),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(
    benchmark: str, arguments: list[str], words: list[str]
) -> None:
    assert_refused(benchmark, arguments, words)


@pytest.mark.parametrize(
    ("benchmark", "arguments", "words"),
    [
        ("copy_bandwidth", ["--page-bytes", "8k"], ["--page-bytes", "'8k'", "whole number"]),
        ("copy_bandwidth", ["--page-bytes", "8192,0"], ["--page-bytes", "0", "from 1"]),
        (
            "copy_bandwidth",
            ["--burst-mib", "16", "--page-bytes", "1000000"],
            ["--page-bytes", "1000000", "215092"],
        ),
        ("plan_cost", ["--pages", "64,many"], ["--pages", "'many'", "whole number"]),
        ("plan_cost", ["--pages", "65537"], ["--pages", "65537", "65536"]),
        ("plan_cost", ["--direction", "up"], ["--direction", "'up'", "load"]),
    ],
)
def test_bad_sizes_are_refused_with_value_and_bound(
    benchmark: str, arguments: list[str], words: list[str]
) -> None:
    assert_refused(benchmark, arguments, words)


def assert_refused(benchmark: str, arguments: list[str], words: list[str]) -> None:
    status, out, err = run(benchmark, *arguments)
    assert status == 2
    assert out == ""
    for word in words:
        assert word in err


# --- the device null -----------------------------------------------------------------------


def test_null_device_is_handed_every_copy_and_moves_no_byte() -> None:
    pages, page_bytes, layers = 3, 64, 2
    device_memory = torch.full((layers, pages, page_bytes), 7, dtype=torch.uint8)
    host_memory = torch.full((pages, layers, page_bytes), 9, dtype=torch.uint8)
    on_device = DevicePool.from_paged_layers("kv", device_memory, page_size=1)
    on_host = HostPool.from_tensor(on_device, host_memory, layout="page_first_direct")
    layout = Pool.pair(on_device, on_host).layout
    device = NullDevice(limits=CopyLimits(tall_copies=False))
    issuer = BurstIssuer(device, [layout], direction="load")
    collected = BurstPages([layout], direction="load", page_size=1)
    slots = torch.arange(pages)
    collected.append(device=index_view("slots", slots), host=index_view("slots", slots))

    burst = issuer.submit(collected, [1], stream=device.current_stream())

    assert burst is not None
    assert burst.error is None
    assert burst.finish_event.query()
    assert burst.num_copies == layers * pages
    assert bool((device_memory == 7).all())
    assert bool((host_memory == 9).all())


# --- the harness ---------------------------------------------------------------------------


def test_percentiles_interpolate_and_look_at_the_bad_side() -> None:
    samples = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert percentile(samples, 50) == 3
    assert percentile(samples, 90) == pytest.approx(4.6)
    assert percentile(samples, 90, "higher") == pytest.approx(1.4)


def test_ratio_is_times_better_than_the_baseline_for_times_and_for_rates() -> None:
    time = Row.of("b", {}, "m", "ns", [2.0], baseline=[8.0])
    rate = Row.of("b", {}, "m", "GB/s", [8.0], baseline=[2.0], better="higher")
    assert time.ratio == rate.ratio == 4


def test_a_simulated_row_says_so_and_others_do_not() -> None:
    simulated = Row.of("b", {}, "m", "ns", [1.0], simulated=True)
    assert simulated.as_json()["simulated"] is True
    assert "simulated" not in Row.of("b", {}, "m", "ns", [1.0]).as_json()


def test_arms_take_turns_and_warm_up_is_dropped() -> None:
    order: list[str] = []

    def arm(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = take_turns({"a": lambda: arm("a"), "b": lambda: arm("b")}, 2, warm_up=1)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert samples == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
