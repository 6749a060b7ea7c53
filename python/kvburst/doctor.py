"""What this machine has for kvburst, and why it lacks what it lacks.

Looks and takes nothing: no memory, no device. SGLang is known by its package metadata alone.
"""

import ctypes
import importlib.metadata
import os
import platform
import resource
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

DRIVER_LIBRARY = "libcuda.so.1"
PACKAGES = ("torch", "sglang")


@dataclass(frozen=True)
class Finding:
    """Something that is there, or not: ``detail`` says what it is, or why it is missing."""

    present: bool
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found. ``packages`` and ``devices`` are by name; ``memlock_bytes`` is the
    soft limit on locked memory, None for unlimited."""

    kvburst: str
    python: str
    platform: str
    compiler: str
    cuda_build: Finding
    packages: dict[str, Finding]
    devices: dict[str, Finding]
    driver_library: Finding
    memlock_bytes: int | None
    memory: MemoryBudget
    numa_nodes: Finding


def examine(
    root: Path = Path("/"), driver_library: str = os.environ.get("KVBURST_LIBCUDA", DRIVER_LIBRARY)
) -> Diagnosis:
    """Looks. ``root`` is where ``proc`` and ``sys`` are looked for; ``driver_library`` is loaded,
    and asked for nothing but its version. Never raises for what is missing."""
    build = _core.build_info()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Diagnosis(
        kvburst=_core.__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        compiler=build.compiler,
        cuda_build=Finding(build.cuda_toolkit is not None, build.cuda_toolkit or build.cuda_reason),
        packages={name: _package(name) for name in PACKAGES},
        devices={
            "host": Finding(True, "copies within host memory; every machine has it"),
            "cuda": Finding(False, "not in this release"),
        },
        driver_library=_driver(driver_library),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        memory=memory_budget(root=root),
        numa_nodes=_numa_nodes(root),
    )


def _package(name: str) -> Finding:
    try:
        return Finding(True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(False, "not installed")


def _driver(library: str) -> Finding:
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        return Finding(False, f"cannot be loaded: {error}")
    version = ctypes.c_int()
    try:
        status = driver.cuDriverGetVersion(ctypes.byref(version))
    except AttributeError:
        return Finding(False, f"{library}: has no cuDriverGetVersion")
    if status != 0:
        return Finding(False, f"{library}: cuDriverGetVersion returned {status}")
    major, minor = version.value // 1000, version.value % 1000 // 10
    return Finding(True, f"{library}: CUDA {major}.{minor}")


def _numa_nodes(root: Path) -> Finding:
    try:
        nodes = online_numa_nodes(root)
    except HostMemoryError as error:
        return Finding(False, str(error))
    return Finding(True, f"{len(nodes)} online: {', '.join(map(str, nodes))}")


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Prints what was found, one line each."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def row(what: str, words: str) -> None:
        table.add_row(Text(what), Text(words))

    def found(what: str, finding: Finding) -> None:
        mark = ("yes", "green") if finding.present else ("no", "yellow")
        table.add_row(Text(what), Text.assemble(mark, f": {finding.detail}"))

    row("kvburst", diagnosis.kvburst)
    row("python", f"{diagnosis.python}, {diagnosis.platform}")
    row("compiler", diagnosis.compiler)
    found("CUDA toolkit", diagnosis.cuda_build)
    for name, finding in diagnosis.packages.items():
        found(name, finding)
    for name, finding in diagnosis.devices.items():
        found(f"device {name}", finding)
    found("CUDA driver", diagnosis.driver_library)
    row("pinned-memory limit", _memlock(diagnosis.memlock_bytes))
    row("host memory", _memory(diagnosis.memory))
    for limit in _group_limits(diagnosis.memory):
        row("cgroup limit", f"{_size(limit.free_bytes)} free by {limit.source}")
    if not _group_limits(diagnosis.memory):
        row("cgroup limit", "none was found")
    for problem in diagnosis.memory.problems:
        row("not read", problem)
    found("NUMA nodes", diagnosis.numa_nodes)
    console.print(table)


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
        "devices": {name: _finding_json(each) for name, each in diagnosis.devices.items()},
        "cuda_driver": _finding_json(diagnosis.driver_library),
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
