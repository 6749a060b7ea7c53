"""The script for a GPU runs to its end without one, and keeps what it has found whatever happens.
Nothing here judges how fast anything is."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from stand_in import Library, LoadStandIn

import kvburst.host_memory
from kvburst import CudaDevice
from kvburst.geometries import PoolSpec
from kvburst.host_memory import HostMemoryError, MemoryBudget

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_check.sh"
sys.path += [str(BENCHMARKS), str(Path(__file__).parent / "stand_in_cuda")]

from cuda_calls import ILLEGAL_ADDRESS  # noqa: E402
from gpu_check import probes_tall  # noqa: E402
from gpu_check import step as own_step  # noqa: E402
from gpu_check.bench import new_pools  # noqa: E402
from gpu_check.document import Document, Outcome  # noqa: E402
from gpu_check.plan import LEFT_OUT, MEASUREMENTS, PROBES, Step  # noqa: E402
from gpu_check.probe import ProbeCalls  # noqa: E402
from gpu_check.runner import Runner  # noqa: E402

STEPS_OF_A_GPU = {"device", "tests", "sanitizer", "issue_latency"}
NOT_MODELLED = {"tall-across-vmm-handles", "queue-depth-wait-value", "image-too-new"}


def run(out: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The script with this Python, which has kvburst; files in ``out``."""
    return subprocess.run(
        [str(SCRIPT), "--out", str(out), "--work", str(out / "work"), *arguments],
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


@pytest.fixture(scope="module")
def full_run(
    stand_in_library: Library, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any], Path]:
    """All steps but the build, on a stand-in driver: what it printed, the document, the folder."""
    out = tmp_path_factory.mktemp("gpu_check")
    library = str(stand_in_library.current)
    options = ("--device", "stand-in", "--quick", "--installed")
    done = run(out, *options, KVBURST_LIBCUDA=library)
    log = (out / "gpu_check.log").read_text()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log}"
    assert done.stderr == ""
    return done.stdout, json.loads((out / "gpu_check.json").read_text()), out


FullRun = tuple[str, dict[str, Any], Path]


# --- a whole run -----------------------------------------------------------------------------


@pytest.mark.slow
def test_every_step_is_in_the_document_and_went_well(full_run: FullRun) -> None:
    _, content, _ = full_run
    named = [step["step"] for step in content["steps"]]
    wanted = {name for name, _, _ in (*PROBES, *MEASUREMENTS)} | STEPS_OF_A_GPU
    assert Counter(named) == Counter(wanted)
    assert {step["step"] for step in content["steps"] if step["state"] != "done"} <= {
        "sanitizer",
        "staging",
    }
    assert {step["state"] for step in content["steps"]} <= {"done", "left out"}


@pytest.mark.slow
def test_every_probe_has_an_answer_in_one_word_and_evidence(full_run: FullRun) -> None:
    answers = {answer["probe"]: answer for answer in full_run[1]["answers"]}
    assert answers.keys() == {name for name, _, _ in PROBES}
    for answer in answers.values():
        assert answer["answer"]
        assert " " not in answer["answer"]
        assert answer["evidence"]
        assert answer["asks"].endswith("?") or "up to" in answer["asks"]
    found = {name for name, answer in answers.items() if answer["answer"] == "not-modelled"}
    assert found == NOT_MODELLED
    # What the stand-in enforces, so what the probes must have met.
    assert answers["tall-across-allocations"]["answer"] == "refused"
    assert answers["tall-across-registrations"]["answer"] == "refused"
    assert answers["batch-under-capture"]["answer"] == "refused-900"
    assert answers["queue-depth"]["answer"] == "999"  # behind the operation that stalls
    assert answers["large-batches"]["answer"] == "50000"
    assert answers["host-functions"]["answer"] == "independent"
    assert answers["range-attributes"]["answer"] == "registration"


@pytest.mark.slow
def test_rows_have_the_shape_of_all_benchmarks_and_say_that_no_gpu_made_them(
    full_run: FullRun,
) -> None:
    printed, content, _ = full_run
    assert content["meaningless"]
    assert "MEANINGLESS NUMBERS" in printed
    assert content["machine"].keys() >= {"cpu", "cores", "load_average", "kvburst", "gpu", "driver"}
    keys = {"benchmark", "scenario", "metric", "unit", "n", "median", "p90", "p99"}
    for row in content["rows"]:
        assert row.keys() >= keys
        assert row["benchmark"] == "gpu_check"
        if row["scenario"]["step"] == "tests":
            continue
        assert row["simulated"]
        assert row["median"] > 0
        assert row["scenario"]["device"] == "stand-in"


def scenarios(content: dict[str, Any], step: str, *keys: str) -> Counter[tuple[object, ...]]:
    rows = [row for row in content["rows"] if row["scenario"]["step"] == step]
    return Counter((*(row["scenario"][key] for key in keys), row["metric"]) for row in rows)


@pytest.mark.slow
def test_each_measurement_covers_what_it_promises(full_run: FullRun) -> None:
    content = full_run[1]
    costs = scenarios(content, "copy_cost", "direction", "call", "width", "height")
    assert costs == Counter(
        (direction, call, width << 10, height, "issue_us_per_copy")
        for direction in ("load", "backup")
        for call in ("plain", "batch")
        for width in (8, 42, 128)
        for height in (1, 8, 64)
    )
    bursts = scenarios(content, "bandwidth", "direction", "groups", "max_group")
    plans = [("load", "none", 1), ("backup", "none", 1), ("backup", "ramp", 16)]
    plans += [("load", "ramp", most) for most in (4, 16, 64)]
    metrics = ("bandwidth_gbps", "wall_bandwidth_gbps")
    assert bursts == Counter((*plan, metric) for plan in plans for metric in metrics)
    callers = scenarios(content, "caller", "mode")
    assert callers == Counter((mode, "caller_us") for mode in ("thread", "inline"))
    steps = scenarios(content, "overlap", "groups", "mode")
    ways = [(groups, mode) for groups in ("none", "ramp") for mode in ("thread", "inline")]
    wanted = [(*way, "step_ms") for way in ways]
    wanted += [(*way, "overlap_ratio") for way in ways if way[1] == "thread"]
    wanted += [("ramp", "thread", "copies_alone_ms")]
    assert steps == Counter(wanted)
    tests = [row for row in content["rows"] if row["scenario"]["step"] == "tests"]
    outcomes = {row["scenario"]["outcome"]: row["median"] for row in tests}
    assert outcomes["passed"] > 0
    assert outcomes["failed"] == 0


@pytest.mark.slow
def test_issue_latencies_have_a_file_of_their_own(full_run: FullRun) -> None:
    content = json.loads((full_run[2] / "issue_latency.json").read_text())
    assert {row["scenario"]["device"] for row in content["rows"]} == {"stand-in"}


@pytest.mark.slow
def test_table_fits_what_a_terminal_keeps_and_is_in_a_file(full_run: FullRun) -> None:
    printed, _, out = full_run
    table = (out / "gpu_check.txt").read_text()
    assert table in printed
    assert len(table) < 12_000
    for name, _, _ in PROBES:
        assert f"  {name}: " in table


# --- steps that do not end well --------------------------------------------------------------


@pytest.mark.slow
def test_step_that_fails_is_named_with_its_reason_and_the_others_keep_their_answers(
    stand_in_library: Library, tmp_path: Path
) -> None:
    """A driver with too little memory for one of them."""
    only = ("--only", "device,attributes,copy_cost,caller")
    done = run(
        tmp_path,
        *("--device", "stand-in", "--quick", "--installed", *only),
        KVBURST_LIBCUDA=str(stand_in_library.current),
        KVBURST_STAND_IN=f"memory={12 << 20}",
    )
    assert done.returncode == 1
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    states = {step["step"]: step for step in content["steps"]}
    assert states["copy_cost"]["state"] == "failed"
    assert "CUDA_ERROR_OUT_OF_MEMORY" in states["copy_cost"]["reason"]
    assert states["attributes"]["state"] == "done"
    assert [answer["probe"] for answer in content["answers"]] == ["attributes"]
    table = (tmp_path / "gpu_check.txt").read_text()
    assert "copy_cost" in table
    assert "CUDA_ERROR_OUT_OF_MEMORY" in table


def test_library_of_the_other_kind_is_refused_and_what_needs_a_driver_is_not_run(
    stand_in_library: Library, tmp_path: Path
) -> None:
    library = str(stand_in_library.current)
    only = ("--only", "attributes,queue-depth")
    done = run(tmp_path, "--device", "cuda", "--installed", *only, KVBURST_LIBCUDA=library)
    assert done.returncode == 1
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    first, second = content["steps"]
    assert f"device cuda: {library} is the other kind" in first["reason"]
    assert (second["state"], second["reason"]) == ("not run", "needs attributes")


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import json, os, signal, subprocess, sys, time\n{code}")


class Rig:
    """Steps that are small programs, run as those of a GPU are."""

    def __init__(self, folder: Path, seconds: float = 60) -> None:
        self.folder = folder
        self.document = Document("cuda")
        self.said: list[str] = []
        self._runner = Runner(
            self.document, folder, time.monotonic() + seconds, os.environ, self.said.append
        )

    def step(self, name: str, code: str, seconds: float = 30, **more: Any) -> Step:
        result = self.folder / f"{name}.json"
        code = f"result = {str(result)!r}\n{code}"
        return Step(name, f"Does {name} work?", seconds, python(code), result, **more)

    def run(self, *steps: Step) -> dict[str, Outcome]:
        self.well = self._runner.run(steps)
        return {outcome.step: outcome for outcome in self.document.outcomes}

    @property
    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "gpu_check.json").read_text())
        return content

    @property
    def table(self) -> str:
        return (self.folder / "gpu_check.txt").read_text()


ROW = {
    "benchmark": "gpu_check",
    "scenario": {"step": "rows"},
    "metric": "seconds",
    "unit": "s",
    **dict.fromkeys(("n", "median", "p90", "p99"), 1),
}
WRITE_ROW = f"open(result, 'w').write(json.dumps({{'rows': [{ROW!r}]}}))"


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_steps_that_do_their_work_leave_their_rows_and_an_exit_status_of_success(rig: Rig) -> None:
    outcomes = rig.run(rig.step("rows", WRITE_ROW))
    assert outcomes["rows"].state == "done"
    assert rig.well
    assert rig.table.endswith("\nall 1 steps done\n")
    assert rig.content["rows"] == [ROW]


def test_killed_step_leaves_what_it_wrote_and_the_next_one_runs(rig: Rig) -> None:
    die = f"{WRITE_ROW}\nprint('at work', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    outcomes = rig.run(rig.step("dies", die), rig.step("lives", "print('well')"))
    assert outcomes["dies"].state == "killed"
    assert outcomes["dies"].reason == "SIGKILL; last line: at work"
    assert outcomes["lives"].state == "done"
    assert rig.content["rows"] == [ROW]
    assert not rig.well
    assert rig.table.endswith("\n1 of 2 steps failed or were left out: dies (killed)\n")
    assert "dies" in rig.table
    assert "SIGKILL" in rig.table


def test_step_that_takes_too_long_is_ended_with_all_that_it_started(rig: Rig) -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    hang = f"{WRITE_ROW}\nchild = {child}\nprint(child.pid, flush=True)\ntime.sleep(600)"
    outcomes = rig.run(rig.step("hangs", hang, seconds=4))
    assert outcomes["hangs"].state == "timed out"
    assert outcomes["hangs"].reason == "not done after 4 s"
    assert rig.content["rows"] == [ROW]
    process = int((rig.folder / "gpu_check.log").read_text().split()[-1])
    assert is_gone(process)


def test_half_of_a_document_is_not_taken_over(rig: Rig) -> None:
    """A step that dies while it writes."""
    outcomes = rig.run(rig.step("dies", "open(result, 'w').write('{')\nos.abort()"))
    assert outcomes["dies"].state == "killed"
    assert rig.content["rows"] == []


def test_step_that_ignores_being_asked_to_end_is_killed(rig: Rig) -> None:
    hang = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
    assert rig.run(rig.step("hangs", hang, seconds=2))["hangs"].state == "timed out"


def is_gone(process: int) -> bool:
    """Or dead, and not yet asked for by its parent."""
    for _ in range(100):
        try:
            status = Path(f"/proc/{process}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if status.rpartition(") ")[2].startswith("Z"):
            return True
        time.sleep(0.05)
    return False


def test_probe_that_crashes_has_that_for_an_answer_and_what_it_was_about_to_do(rig: Rig) -> None:
    note = {"probe": "p", "asks": "?", "answer": "unfinished", "evidence": "51,828: not back yet"}
    crash = f"open(result, 'w').write(json.dumps({{'answers': [{note!r}]}}))\nos.abort()"
    rig.run(rig.step("p", crash, probe=True))
    (answer,) = rig.content["answers"]
    assert answer["answer"] == "crashed"
    assert "51,828: not back yet" in answer["evidence"]
    assert "SIGABRT" in answer["evidence"]
    assert "p: crashed" in rig.table


def test_what_is_not_on_this_machine_is_left_out_which_is_no_failure(rig: Rig) -> None:
    outcomes = rig.run(rig.step("tool", f"print('no such tool'); sys.exit({LEFT_OUT})"))
    assert outcomes["tool"].state == "left out"
    assert outcomes["tool"].reason == "no such tool"
    assert rig.well
    assert rig.table.endswith("\n1 of 1 steps failed or were left out: tool (left out)\n")


def test_what_needs_a_failed_step_is_not_run(rig: Rig) -> None:
    outcomes = rig.run(
        rig.step("build", "sys.exit(3)"),
        rig.step("rows", WRITE_ROW, needs=("build",)),
        rig.step("other", "print('well')", needs=("not asked for",)),
    )
    assert outcomes["build"].state == "failed"
    assert outcomes["rows"] == Outcome("rows", "not run", reason="needs build")
    assert outcomes["other"].state == "done"


def test_no_step_outlasts_the_time_for_everything(tmp_path: Path) -> None:
    rig = Rig(tmp_path, seconds=4)
    begin = time.monotonic()
    outcomes = rig.run(
        rig.step("long", "time.sleep(600)", seconds=500), rig.step("never", WRITE_ROW)
    )
    assert time.monotonic() - begin < 30
    assert outcomes["long"].state == "timed out"
    assert outcomes["never"].reason == "the time for everything is over"
    assert "never" in rig.table


def test_time_that_is_over_at_once_skips_every_step_by_name(tmp_path: Path) -> None:
    only = ("--only", "attributes,copy_cost", "--minutes", "0.01")
    done = run(tmp_path, "--device", "stand-in", "--installed", *only)
    assert done.returncode == 1
    for name in ("attributes", "copy_cost"):
        assert f"{name}: not run, 0 s: the time for everything is over" in done.stdout


def test_signal_to_end_keeps_what_was_found_and_names_what_was_not_run(rig: Rig) -> None:
    stop = f"{WRITE_ROW}\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)"
    before = signal.getsignal(signal.SIGTERM)
    outcomes = rig.run(rig.step("first", stop), rig.step("second", "print('never')"))
    assert (outcomes["first"].state, outcomes["first"].reason) == ("stopped", "stopped by SIGTERM")
    assert outcomes["second"] == Outcome("second", "not run", reason="stopped by SIGTERM")
    assert rig.content["rows"] == [ROW]
    assert not rig.well
    assert signal.getsignal(signal.SIGTERM) == before


def test_document_is_written_while_a_step_runs(rig: Rig) -> None:
    """So that even this process may be killed: the step reads what is there already."""
    wait = f"""{WRITE_ROW}
document = {str(rig.folder / "gpu_check.json")!r}
for _ in range(200):
    if os.path.exists(document) and json.load(open(document))["rows"]:
        break
    time.sleep(0.1)
else:
    sys.exit("the row is not in the document")"""
    assert rig.run(rig.step("reads", wait))["reads"].state == "done"


# --- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "gpu"], ["--device", "'gpu'", "stand-in"]),
        (["--only", "moon"], ["--only", "'moon'", "copy_cost"]),
        (["--minutes", "0"], ["--minutes", "0 must be above 0"]),
        (["--out", "/nowhere/out"], ["--out", "'/nowhere' is not a folder"]),
    ],
)
def test_bad_options_are_refused_before_anything_is_run(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_says_what_it_needs_and_what_its_exit_status_means(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert done.returncode == 0
    for words in ("--device", "--minutes", "exit status", "needs:", "gpu_check.json", ".cache/"):
        assert words in done.stdout


def test_steps_are_listed_with_their_time_and_question(tmp_path: Path) -> None:
    done = run(tmp_path, "--list")
    assert done.returncode == 0
    for name, seconds, asks in (*PROBES, *MEASUREMENTS):
        assert f"{name:28} at most {seconds:3.0f} s  {asks}" in done.stdout
    assert "build" in done.stdout


def test_script_is_well_formed() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0


# --- what would cost the one run on a GPU --------------------------------------------------------


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_tool_that_does_not_answer_keeps_no_measurement_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "nvidia-smi", "exec sleep 600")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(own_step, "SMI_SECONDS", 0.5)
    assert "timed out after 0.5 seconds" in own_step._nvidia_smi()["link"]


def test_pools_are_measured_on_a_machine_that_grows_as_its_memory_is_used(
    load_stand_in: LoadStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_free = MemoryBudget(0, 0, None, (), ())
    monkeypatch.setattr(kvburst.host_memory, "memory_budget", lambda: nothing_free)
    with pytest.raises(HostMemoryError):
        kvburst.host_memory.allocate_host(1)
    device = CudaDevice(driver=str(load_stand_in().path))
    (pool,) = new_pools(device, [PoolSpec("kv", 16, (0, 1))], 4, 2)
    assert pool.host.registrations


def test_probe_that_breaks_the_context_says_so_and_asks_nothing_more(
    load_stand_in: LoadStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stream comes back with then comes back from every call."""
    driver = load_stand_in()
    calls = ProbeCalls(str(driver.path))

    def breaks(*_: object) -> tuple[str, bool]:
        driver.fail("*", ILLEGAL_ADDRESS)
        return "accepted, then CUDA_ERROR_ILLEGAL_ADDRESS (700)", False

    monkeypatch.setattr(probes_tall, "try_one", breaks)
    answer = probes_tall.across_registrations(calls, lambda evidence: None)
    driver.stop_failing()
    assert answer.word == "breaks-context"
    assert "ILLEGAL_ADDRESS" in answer.evidence


def test_sanitizer_judges_accesses_and_not_calls_that_fail(tmp_path: Path) -> None:
    program(tmp_path, "compute-sanitizer", 'echo "$@"')
    done = subprocess.run(
        [sys.executable, "-m", "gpu_check.sanitizer", "--device", "cuda", "--", "echo", "this"],
        env=os.environ | {"PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "--report-api-errors no" in done.stdout
    assert done.stdout.endswith("echo this\n")
