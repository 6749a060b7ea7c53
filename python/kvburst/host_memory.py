"""How much host memory may still be taken, and taking it.

Inside a container ``/proc/meminfo`` tells of the machine and not of the container: a pool sized by
it is killed. What may be taken is the smallest headroom of the machine and of every control group
from the process' own up to the root, less a reserve for everybody else.
"""

import ctypes
import mmap
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
import torch.distributed as dist

from kvburst._core import KVBurstError, LayoutError

GIB = 1 << 30
# Our choice: room for the interpreter, its threads and a page cache. A server states its own.
DEFAULT_RESERVE_BYTES = GIB


class HostMemoryError(KVBurstError, MemoryError):
    """Host memory cannot be had: too little is left, or the kernel refuses its placement."""


@dataclass(frozen=True)
class MemoryLimit:
    """One limit: where it was read, and the bytes that are still free under it."""

    source: str
    free_bytes: int


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of host memory that may still be taken, and why it is not more.

    ``decided_by`` is the tightest of ``limits``, which lists all that were found. ``problems`` says
    which files could not be read, and so count as no limit, or as no usage under a limit. With no
    limit at all ``nbytes`` is the largest signed 64-bit number.
    """

    nbytes: int
    reserve_bytes: int
    decided_by: MemoryLimit | None
    limits: tuple[MemoryLimit, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        if self.decided_by is None:
            return "no limit on host memory was found"
        return (
            f"{self.nbytes} bytes of host memory may be taken: {self.decided_by.free_bytes} free"
            f" by {self.decided_by.source}, less a reserve of {self.reserve_bytes}"
        )


def memory_budget(
    reserve_bytes: int = DEFAULT_RESERVE_BYTES, root: Path = Path("/")
) -> MemoryBudget:
    """How many bytes of host memory may still be taken, now.

    The minimum of ``MemAvailable`` and of limit minus usage of every control group from the
    process' own up to the root, v2 and v1, less ``reserve_bytes`` and never below 0. File pages on
    the inactive list are not counted as usage: they go when the memory is needed, and without that
    a container that has just read its model from disk seems full. ``root`` is where ``proc`` and
    ``sys`` are looked for. Takes nothing, so two callers may be told the same bytes.
    """
    if reserve_bytes < 0:
        raise LayoutError(f"reserve_bytes: {reserve_bytes} is below 0")
    reader = _LimitReader(root)
    limits = tuple(reader.limits())
    tightest = min(limits, key=lambda limit: limit.free_bytes, default=None)
    return MemoryBudget(
        nbytes=(1 << 63) - 1 if tightest is None else max(0, tightest.free_bytes - reserve_bytes),
        reserve_bytes=reserve_bytes,
        decided_by=tightest,
        limits=limits,
        problems=tuple(reader.problems),
    )


def agree_on_minimum(value: int, group: dist.ProcessGroup | None = None) -> int:
    """The smallest ``value`` of all ranks of ``group``, the same number on each.

    Ranks read their budgets at different times and hold different layers; pools sized by each
    rank's own reading differ in pages. Collective: every rank of the group must call it, and it
    blocks until all have. The group must reduce CPU tensors (gloo). Without an initialised process
    group the value itself.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return value
    agreed = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    return int(agreed.item())


def allocate_host(
    nbytes: int, numa_interleave: bool = False, *, budget: MemoryBudget | None = None
) -> torch.Tensor:
    """``nbytes`` bytes of plain host memory, zeroed, as a one-dimensional uint8 tensor.

    The tensor owns the memory. Every page is touched before it returns, so the call takes as long
    as writing the bytes, and no backup pays for page faults later. ``numa_interleave`` spreads the
    pages over all online NUMA nodes in turn. Raises ``HostMemoryError``, naming both numbers, above
    ``budget`` (by default what ``memory_budget()`` says now), and when the kernel refuses an
    interleaving that was asked for.
    """
    if nbytes < 1:
        raise LayoutError(f"nbytes: {nbytes} is below 1")
    allowed = memory_budget() if budget is None else budget
    if nbytes > allowed.nbytes:
        raise HostMemoryError(
            f"nbytes: {nbytes} is above the budget of {allowed.nbytes} bytes ({allowed});"
            " ask for fewer pages"
        )
    memory = _interleaved(nbytes) if numa_interleave else torch.empty(nbytes, dtype=torch.uint8)
    return memory.zero_()


def online_numa_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """The ids of the NUMA nodes that are online, ascending. Raises ``HostMemoryError`` if the
    kernel does not say."""
    path = root / "sys/devices/system/node/online"
    try:
        text = path.read_text().strip()
        nodes: list[int] = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            nodes += range(int(first), int(last or first) + 1)
    except (OSError, ValueError) as error:
        raise HostMemoryError(f"{path}: cannot tell the online NUMA nodes: {error}") from error
    return tuple(nodes)


# --- limits --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _GroupFiles:
    """What the two versions of control groups call the same three numbers."""

    limit: str
    usage: str
    inactive: str


V1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = _GroupFiles("memory.max", "memory.current", "inactive_file")

# v1 has no word for "no limit": it reports the largest page multiple below 2^63, whatever the page.
V1_UNLIMITED = (1 << 63) - (1 << 20)


class _LimitReader:
    """Reads the limits below ``root``; what it cannot read it notes in ``problems``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.problems: list[str] = []

    def limits(self) -> Iterator[MemoryLimit]:
        available = self._field("proc/meminfo", "MemAvailable:", unit=1024)
        if available is not None:
            yield MemoryLimit("/proc/meminfo MemAvailable", available)
        groups = self._own_groups()
        for mount_root, mount_point, files in self._mounts():
            if files in groups:
                yield from self._chain(mount_root, mount_point, groups[files], files)

    def _own_groups(self) -> dict[_GroupFiles, PurePosixPath]:
        """The process' own memory group in each version: lines ``id:controllers:path``."""
        groups = {}
        for line in self._lines("proc/self/cgroup"):
            parts = line.split(":", 2)
            if len(parts) != 3:
                self.problems.append(f"/proc/self/cgroup: malformed line {line!r}")
            elif parts[:2] == ["0", ""]:
                groups[V2] = PurePosixPath(parts[2])
            elif "memory" in parts[1].split(","):
                groups[V1] = PurePosixPath(parts[2])
        return groups

    def _mounts(self) -> Iterator[tuple[PurePosixPath, str, _GroupFiles]]:
        """Root, mount point and version of each mounted hierarchy that may limit memory (proc(5):
        the fourth and fifth field; after a dash the type and, last, the controllers)."""
        for line in self._lines("proc/self/mountinfo"):
            fields, _, rest = line.partition(" - ")
            place, kind = fields.split(), rest.split()
            if len(place) < 5 or len(kind) < 3:
                self.problems.append(f"/proc/self/mountinfo: malformed line {line!r}")
            elif kind[0] == "cgroup2":
                yield PurePosixPath(place[3]), place[4].lstrip("/"), V2
            elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
                yield PurePosixPath(place[3]), place[4].lstrip("/"), V1

    def _chain(
        self, mount_root: PurePosixPath, mount_point: str, group: PurePosixPath, files: _GroupFiles
    ) -> Iterator[MemoryLimit]:
        """The limits of ``group`` and of its parents, as far up as the mount shows them."""
        if group.is_relative_to(mount_root) and ".." not in group.parts:
            below = group.relative_to(mount_root)
        else:
            self.problems.append(f"{group}: lies outside what /{mount_point} shows of {mount_root}")
            below = PurePosixPath()
        for level in (below, *below.parents):
            folder = PurePosixPath(mount_point, level)
            limit = self._group_limit(folder, files)
            if limit is not None:
                yield limit

    def _group_limit(self, folder: PurePosixPath, files: _GroupFiles) -> MemoryLimit | None:
        # The root of v2, and a v2 group without the controller, have no such file and no limit.
        if (self._root / folder).is_dir() and not (self._root / folder / files.limit).exists():
            return None
        limit = self._number(folder / files.limit)
        if limit is None or limit >= V1_UNLIMITED:
            return None
        usage = self._number(folder / files.usage) or 0
        reclaimable = self._field(f"{folder}/memory.stat", files.inactive, unit=1) or 0
        used = max(0, usage - reclaimable)
        return MemoryLimit(f"/{folder / files.limit}", max(0, limit - used))

    def _number(self, path: PurePosixPath) -> int | None:
        text = self._text(str(path))
        if text is None or text.strip() == "max":
            return None
        if not text.strip().isdecimal():
            self.problems.append(f"/{path}: {text.strip()!r} is not a number of bytes")
            return None
        return int(text)

    def _field(self, path: str, key: str, unit: int) -> int | None:
        """The number behind ``key`` in a file of ``key number ...`` lines, in bytes."""
        text = self._text(path)
        if text is None:
            return None
        for line in text.splitlines():
            words = line.split()
            if words[:1] == [key] and len(words) > 1 and words[1].isdecimal():
                return int(words[1]) * unit
        self.problems.append(f"/{path}: has no number for {key!r}")
        return None

    def _lines(self, path: str) -> list[str]:
        return (self._text(path) or "").splitlines()

    def _text(self, path: str) -> str | None:
        try:
            return (self._root / path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(f"/{path}: cannot be read ({type(error).__name__})")
            return None


# --- NUMA ----------------------------------------------------------------------------------

# From the kernel's system call tables (arch/x86/entry/syscalls/syscall_64.tbl, and
# include/uapi/asm-generic/unistd.h for aarch64) and its include/uapi/linux/mempolicy.h. Called by
# number since glibc has no wrapper and libnuma is not everywhere.
SYS_MBIND = {"x86_64": 237, "aarch64": 235}
MPOL_INTERLEAVE = 3


def _interleaved(nbytes: int) -> torch.Tensor:
    """Untouched anonymous memory whose pages will lie on the online nodes in turn."""
    # Private: the kernel may ignore a policy on shared mappings. The tensor keeps the mapping.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)
    nodes = online_numa_nodes()
    machine = platform.machine()
    if machine not in SYS_MBIND:
        raise HostMemoryError(
            f"numa_interleave: the number of mbind is not known on {machine!r}, only on"
            f" {', '.join(SYS_MBIND)}; allocate without it"
        )
    word = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (nodes[-1] // word + 1))()
    for node in nodes:
        mask[node // word] |= 1 << node % word
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(SYS_MBIND[machine]),
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(MPOL_INTERLEAVE),
        mask,
        ctypes.c_ulong(len(mask) * word + 1),  # the kernel reads one bit less than it is told
        ctypes.c_long(0),
    )
    if failed:
        code = ctypes.get_errno()
        raise HostMemoryError(
            f"numa_interleave: mbind over nodes {list(nodes)} failed with {code}"
            f" ({os.strerror(code)}); allocate without it"
        )
    return memory
