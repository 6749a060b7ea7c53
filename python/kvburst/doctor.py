"""What this machine has for kvburst, and why it lacks what it lacks.

Looks and takes nothing: no memory, no context on a GPU. SGLang is known by its package metadata
alone.
"""

import importlib.metadata
import os
import platform
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvburst import _core
from kvburst.host_memory import (
    GIB,
    HostMemoryError,
    MemoryBudget,
    MemoryLimit,
    memory_budget,
    online_numa_nodes,
)
from kvburst.settings import VARIABLES, Settings, SettingsError

PACKAGES = ("torch", "sglang")


@dataclass(frozen=True)
class Finding:
    """Something that is there, or not: ``detail`` says what it is, or why it is missing."""

    present: bool
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found. ``packages`` and ``devices`` are by name; ``memlock_bytes`` is the
    soft limit on locked memory, None for unlimited. ``plugin`` is present if the environment asks
    the SGLang plugin for anything."""

    kvburst: str
    python: str
    platform: str
    compiler: str
    cuda_build: Finding
    packages: dict[str, Finding]
    plugin: Finding
    devices: dict[str, Finding]
    driver_library: Finding
    staging_kernels: Finding
    memlock_bytes: int | None
    memory: MemoryBudget
    numa_nodes: Finding


def examine(
    root: Path = Path("/"),
    driver_library: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Diagnosis:
    """Looks. ``root`` is where ``proc`` and ``sys`` are looked for. ``driver_library`` (by default
    what a `CudaDevice` loads) is loaded, started and asked for its GPUs; no context is made on
    them. ``environment`` is where the plugin's variables are looked for. Never raises for what is
    missing."""
    build = _core.build_info()
    driver = _load(driver_library)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Diagnosis(
        kvburst=_core.__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        compiler=build.compiler,
        cuda_build=Finding(build.cuda_toolkit is not None, build.cuda_toolkit or build.cuda_reason),
        packages={name: _package(name) for name in PACKAGES},
        plugin=_plugin(environment),
        devices={
            "host": Finding(True, "copies within host memory; every machine has it"),
            "cuda": _gpus(driver),
        },
        driver_library=_driver(driver),
        staging_kernels=_kernels(driver),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        memory=memory_budget(root=root),
        numa_nodes=_numa_nodes(root),
    )


def _package(name: str) -> Finding:
    try:
        return Finding(True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(False, "not installed")


def _plugin(environment: Mapping[str, str]) -> Finding:
    """What the environment asks the SGLang plugin for; whether SGLang can do it shows there."""
    given = [f"{name}={environment[name]}" for name in VARIABLES if environment.get(name)]
    if not given:
        return Finding(False, "nothing is asked for: none of its variables is set")
    try:
        asked = _asked(Settings.from_environment(environment))
    except SettingsError as error:
        return Finding(False, f"SettingsError: {error}")
    words = ", ".join(asked) if asked else "nothing"
    return Finding(bool(asked), f"{' '.join(given)}: asks for {words}")


def _asked(settings: Settings) -> list[str]:
    words = []
    if settings.async_loads:
        words.append("loads as bursts")
    if settings.planned_backups:
        pages = f", {settings.chunk_pages} pages a batch" if settings.chunk_pages else ""
        words.append(f"backups by plan{pages}")
    if settings.transport is not None:
        words.append(f"agreement between ranks ({settings.transport})")
    if settings.skip_idle:
        words.append("no collective while nothing is outstanding")
    if settings.shared_tier:
        words.append(f"one host copy between ranks ({settings.exchange})")
    if settings.pools_in_one_piece:
        words.append("device pools in one piece")
    if settings.timer_steps:
        words.append(f"step times in the log, each {settings.timer_steps} steps")
    return words


def _load(library: str | None) -> _core.CudaDriver | str:
    """The driver, or why there is none."""
    try:
        return _core.CudaDriver(library)
    except _core.DeviceError as error:
        return str(error).removeprefix("CUDA driver: ")


def _driver(driver: _core.CudaDriver | str) -> Finding:
    if isinstance(driver, str):
        return Finding(False, driver)
    words = f"{driver.library}: CUDA {_version(driver.version)}"
    if driver.stand_in:
        words += ", which stands in for a driver: no GPU is behind it"
    return Finding(True, words)


def _gpus(driver: _core.CudaDriver | str) -> Finding:
    if isinstance(driver, str):
        return Finding(False, "no driver")
    try:
        names = driver.gpu_names()
    except _core.DeviceError as error:
        return Finding(False, f"the driver does not start: {error}")
    if not names:
        return Finding(False, "the driver has no GPU")
    calls = (
        f"copies in batches, as of {_version(driver.batch_version)}"
        if driver.batch_version
        else "a driver call a copy, since the batch calls came with 12.8"
    )
    return Finding(True, f"{', '.join(names)}; {calls}")


def _kernels(driver: _core.CudaDriver | str) -> Finding:
    """Those that gather and scatter. Whether a GPU takes them shows when they are loaded, which
    needs a context on it."""
    toolkit = _core.build_info().cuda_toolkit
    if toolkit is None:
        return Finding(False, f"not built in: {_core.build_info().cuda_reason}")
    why_not = "no driver" if isinstance(driver, str) else driver.why_no_kernels
    built_in = f"built in by CUDA toolkit {toolkit}"
    if why_not is not None:
        return Finding(False, f"{built_in}, but cannot be loaded: {why_not}")
    return Finding(
        True, f"{built_in}, the driver can load them; CudaDevice.kernels says if the GPU takes them"
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _numa_nodes(root: Path) -> Finding:
    try:
        nodes = online_numa_nodes(root)
    except HostMemoryError as error:
        return Finding(False, str(error))
    return Finding(True, f"{len(nodes)} online: {', '.join(map(str, nodes))}")


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Prints what was found, one line each: on a terminal folded to its width."""
    rows: list[tuple[str, Text]] = []

    def row(what: str, words: str) -> None:
        rows.append((what, Text(words)))

    def found(what: str, finding: Finding) -> None:
        mark = ("yes", "green") if finding.present else ("no", "yellow")
        rows.append((what, Text.assemble(mark, f": {finding.detail}")))

    row("kvburst", diagnosis.kvburst)
    row("python", f"{diagnosis.python}, {diagnosis.platform}")
    row("compiler", diagnosis.compiler)
    found("CUDA toolkit", diagnosis.cuda_build)
    for name, finding in diagnosis.packages.items():
        found(name, finding)
    found("SGLang plugin", diagnosis.plugin)
    for name, finding in diagnosis.devices.items():
        found(f"device {name}", finding)
    found("CUDA driver", diagnosis.driver_library)
    found("staging kernels", diagnosis.staging_kernels)
    row("pinned-memory limit", _memlock(diagnosis.memlock_bytes))
    row("host memory", _memory(diagnosis.memory))
    for limit in _group_limits(diagnosis.memory):
        row("cgroup limit", f"{_size(limit.free_bytes)} free by {limit.source}")
    if not _group_limits(diagnosis.memory):
        row("cgroup limit", "none was found")
    for problem in diagnosis.memory.problems:
        row("not read", problem)
    found("NUMA nodes", diagnosis.numa_nodes)
    console.print(_table(rows) if console.is_terminal else _lines(rows), soft_wrap=True)


def _table(rows: Sequence[tuple[str, Text]]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for what, words in rows:
        table.add_row(Text(what), words)
    return table


def _lines(rows: Sequence[tuple[str, Text]]) -> Text:
    """Each whole, for whatever reads lines."""
    width = max(len(what) for what, _ in rows)
    return Text("\n").join(Text.assemble(f"{what:{width}}  ", words) for what, words in rows)


def _memlock(limit: int | None) -> str:
    if limit is None:
        return "unlimited (RLIMIT_MEMLOCK)"
    return f"{_size(limit)} (RLIMIT_MEMLOCK); raise it with: ulimit -l unlimited"


def _memory(budget: MemoryBudget) -> str:
    if budget.decided_by is None:
        return "no limit was found"
    return (
        f"{_size(budget.nbytes)} may be taken: {_size(budget.decided_by.free_bytes)} free by"
        f" {budget.decided_by.source}, less a reserve of {_size(budget.reserve_bytes)}"
    )


def _group_limits(budget: MemoryBudget) -> list[MemoryLimit]:
    return [limit for limit in budget.limits if not limit.source.startswith("/proc/meminfo")]


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):.0f} MiB"


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The same for machines; sizes in bytes, None where there is no limit."""
    memory = diagnosis.memory
    decided_by = memory.decided_by
    return {
        "kvburst": diagnosis.kvburst,
        "python": diagnosis.python,
        "platform": diagnosis.platform,
        "compiler": diagnosis.compiler,
        "cuda_kernels": _finding_json(diagnosis.cuda_build),
        "packages": {name: _finding_json(each) for name, each in diagnosis.packages.items()},
        "plugin": _finding_json(diagnosis.plugin),
        "devices": {name: _finding_json(each) for name, each in diagnosis.devices.items()},
        "cuda_driver": _finding_json(diagnosis.driver_library),
        "staging_kernels": _finding_json(diagnosis.staging_kernels),
        "memlock_bytes": diagnosis.memlock_bytes,
        "host_memory": {
            "budget_bytes": None if decided_by is None else memory.nbytes,
            "reserve_bytes": memory.reserve_bytes,
            "decided_by": None if decided_by is None else decided_by.source,
            "limits": {limit.source: limit.free_bytes for limit in memory.limits},
            "problems": list(memory.problems),
        },
        "numa_nodes": _finding_json(diagnosis.numa_nodes),
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {"present": finding.present, "detail": finding.detail}
