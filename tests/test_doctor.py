"""The doctor: says what is there, and why the rest is not, on whatever machine."""

import dataclasses
import importlib.metadata
import io
import json
import platform
from pathlib import Path

import pytest
from rich.console import Console
from stand_in import LoadStandIn

from kvburst import _core
from kvburst.doctor import Diagnosis, Finding, as_json, examine, show

GIB = 1 << 30


def printed(diagnosis: Diagnosis, width: int = 160, *, terminal: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=terminal)
    show(diagnosis, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_machine_with_nothing_is_described_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing_installed)
    diagnosis = examine(root=tmp_path, driver_library="libdoes-not-exist.so.1")

    assert diagnosis.packages == {
        "torch": Finding(False, "not installed"),
        "sglang": Finding(False, "not installed"),
    }
    assert not diagnosis.driver_library.present
    assert "libdoes-not-exist.so.1" in diagnosis.driver_library.detail
    assert diagnosis.memory.decided_by is None
    assert diagnosis.memory.problems
    assert not diagnosis.numa_nodes.present
    assert str(tmp_path) in diagnosis.numa_nodes.detail
    assert diagnosis.devices["host"].present
    text = printed(diagnosis)
    assert "no limit was found" in text
    assert "none was found" in text
    assert "/proc/meminfo: cannot be read (FileNotFoundError)" in text
    assert json.loads(json.dumps(as_json(diagnosis)))["host_memory"]["budget_bytes"] is None


def test_versions_are_those_that_run() -> None:
    diagnosis = examine()
    assert diagnosis.kvburst == _core.__version__
    assert diagnosis.compiler == _core.build_info().compiler
    assert platform.python_version() in diagnosis.python
    assert diagnosis.packages["torch"] == Finding(True, importlib.metadata.version("torch"))


def test_missing_kernels_give_the_reason_of_the_build() -> None:
    diagnosis = examine()
    toolkit = _core.build_info().cuda_toolkit
    assert diagnosis.cuda_build.present == (toolkit is not None)
    assert diagnosis.cuda_build.detail == (toolkit or _core.build_info().cuda_reason)


def test_staging_kernels_are_there_where_build_and_driver_have_them(
    load_stand_in: LoadStandIn,
) -> None:
    build = _core.build_info()
    current = examine(driver_library=str(load_stand_in(13000).path)).staging_kernels
    older = examine(driver_library=str(load_stand_in(11080).path)).staging_kernels
    none = examine(driver_library="libdoes-not-exist.so.1").staging_kernels
    assert current.present == (build.cuda_toolkit is not None)
    assert not older.present
    assert not none.present
    if build.cuda_toolkit is None:
        words = f"not built in: {build.cuda_reason}"
        assert current.detail == older.detail == none.detail == words
    else:
        words = f"built in by CUDA toolkit {build.cuda_toolkit}, "
        assert current.detail.startswith(f"{words}the driver can load them; ")
        why = "cuLibraryLoadData came with 12.0, the driver is 11.8"
        assert older.detail == f"{words}but cannot be loaded: {why}"
        assert none.detail == f"{words}but cannot be loaded: no driver"


def test_device_cuda_is_not_claimed_without_a_driver() -> None:
    diagnosis = examine(driver_library="libdoes-not-exist.so.1")
    assert diagnosis.devices["cuda"] == Finding(False, "no driver")


def test_library_that_is_no_driver_is_not_taken_for_one() -> None:
    libc = examine(driver_library="libc.so.6").driver_library
    assert libc == Finding(False, "libc.so.6: has no cuDriverGetVersion")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (11080, "a driver call a copy, since the batch calls came with 12.8"),
        (12040, "a driver call a copy, since the batch calls came with 12.8"),
        (12080, "copies in batches, as of 12.8"),
        (13000, "copies in batches, as of 13.0"),
    ],
)
def test_driver_is_described_with_the_copy_calls_it_has(
    load_stand_in: LoadStandIn, version: int, words: str
) -> None:
    driver = load_stand_in(version)
    diagnosis = examine(driver_library=str(driver.path))
    shown = f"{version // 1000}.{version % 1000 // 10}"
    assert diagnosis.driver_library == Finding(
        True, f"{driver.path}: CUDA {shown}, which stands in for a driver: no GPU is behind it"
    )
    cuda = diagnosis.devices["cuda"]
    assert cuda.present
    assert cuda.detail.endswith(f"; {words}")
    assert driver.counts().retained == 0  # it only looks


def test_driver_without_a_gpu_says_so(load_stand_in: LoadStandIn) -> None:
    cuda = examine(driver_library=str(load_stand_in(13000, devices=0).path)).devices["cuda"]
    assert not cuda.present
    assert "CUDA_ERROR_NO_DEVICE" in cuda.detail or cuda.detail == "the driver has no GPU"


def test_tightest_memory_limit_is_named(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {64 * GIB // 1024} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/self/mountinfo").write_text(
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
    )
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{8 * GIB}\n")
    (group / "memory.current").write_text(f"{2 * GIB}\n")
    (group / "memory.stat").write_text("inactive_file 0\n")

    diagnosis = examine(root=tmp_path)

    memory = as_json(diagnosis)["host_memory"]
    assert memory["decided_by"] == "/sys/fs/cgroup/memory.max"
    assert memory["budget_bytes"] == 5 * GIB
    assert "5.00 GiB may be taken: 6.00 GiB free by /sys/fs/cgroup/memory.max" in printed(diagnosis)
    (row,) = [line for line in printed(diagnosis).splitlines() if line.startswith("cgroup limit")]
    assert "6.00 GiB free by /sys/fs/cgroup/memory.max" in row
    assert memory["limits"]["/proc/meminfo MemAvailable"] == 64 * GIB


def test_numa_nodes_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/system/node"
    folder.mkdir(parents=True)
    (folder / "online").write_text("0-1,3\n")
    assert examine(root=tmp_path).numa_nodes == Finding(True, "3 online: 0, 1, 3")


@pytest.mark.parametrize(
    ("limit", "words"),
    [(None, "unlimited"), (8 << 20, "8 MiB (RLIMIT_MEMLOCK); raise it with: ulimit -l unlimited")],
)
def test_pinned_memory_limit_is_told(limit: int | None, words: str) -> None:
    diagnosis = dataclasses.replace(examine(), memlock_bytes=limit)
    assert words in printed(diagnosis)
    assert as_json(diagnosis)["memlock_bytes"] == limit


def test_narrow_terminal_loses_no_words() -> None:
    diagnosis = examine()
    words = "".join(printed(diagnosis, width=40).split())
    assert "".join(diagnosis.compiler.split()) in words


def test_messages_are_whole_lines_for_what_is_no_terminal() -> None:
    diagnosis = examine(driver_library="libdoes-not-exist.so.1")
    lines = printed(diagnosis, width=40, terminal=False).splitlines()
    assert not [line for line in lines if line != line.rstrip()]
    (driver,) = [line for line in lines if line.startswith("CUDA driver")]
    assert driver.endswith(f"no: {diagnosis.driver_library.detail}")
    assert len(driver) > 80


# --- the SGLang plugin ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "finding"),
    [
        ({"HOME": "/"}, Finding(False, "nothing is asked for: none of its variables is set")),
        ({"KVBURST": "0"}, Finding(False, "KVBURST=0: asks for nothing")),
        (
            {"KVBURST": "1"},
            Finding(
                True,
                "KVBURST=1: asks for loads as bursts, backups by plan,"
                " agreement between ranks (board)",
            ),
        ),
        (
            {
                "KVBURST_ONE_PIECE_POOLS": "yes",
                "SGLANG_ENABLE_HICACHE_IDLE_SYNC_SKIP": "1",
                "SGLANG_HICACHE_D2H_ISSUE_CHUNK_PAGES": "64",
                "SGLANG_HICACHE_EVENTS_TIMER_STEPS": "100",
            },
            Finding(
                True,
                "KVBURST_ONE_PIECE_POOLS=yes SGLANG_ENABLE_HICACHE_IDLE_SYNC_SKIP=1"
                " SGLANG_HICACHE_D2H_ISSUE_CHUNK_PAGES=64 SGLANG_HICACHE_EVENTS_TIMER_STEPS=100:"
                " asks for backups by plan, 64 pages a batch, agreement between ranks (blocking),"
                " no collective while nothing is outstanding, device pools in one piece,"
                " step times in the log, each 100 steps",
            ),
        ),
        (
            {"KVBURST": "perhaps"},
            Finding(False, "SettingsError: KVBURST: 'perhaps' must be 1 or 0"),
        ),
    ],
)
def test_plugin_is_told_by_what_its_variables_ask_for(
    environment: dict[str, str], finding: Finding
) -> None:
    diagnosis = examine(environment=environment)
    assert diagnosis.plugin == finding
    assert finding.detail in " ".join(printed(diagnosis, width=400).split())
    assert as_json(diagnosis)["plugin"]["detail"] == finding.detail


def test_plugin_is_told_of_a_shared_tier_and_its_exchange() -> None:
    asked = {"SGLANG_ENABLE_HICACHE_RANK_SHARD": "1", "KVBURST_RANK_SHARD_EXCHANGE": "side_stream"}
    assert "one host copy between ranks (side_stream)" in examine(environment=asked).plugin.detail
