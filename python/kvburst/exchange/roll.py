"""Which ranks of a group have ended, asked when the group itself only knows that one has."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
# A process that has closed its connections may take some time to end.
_LOOK_SECONDS = 1.0
_LOOK_EVERY_SECONDS = 0.01


@dataclass(frozen=True)
class Process:
    """A process, as it is known to those that see the same ``/proc``."""

    seen_by: str
    """The same for two processes that see each other there: kernel and name space."""
    pid: int
    started: str
    """Clock ticks since boot, since a number is used again."""

    @classmethod
    def own(cls, root: Path = _PROC) -> "Process":
        started = _state(root, os.getpid())
        assert started is not None, "a process that asks for itself is there"
        return cls(_seen_by(root), os.getpid(), started)

    def has_ended(self, root: Path = _PROC) -> bool:
        """False, too, of one that this process cannot see."""
        return self.seen_by == _seen_by(root) and _state(root, self.pid) != self.started


def ended(roll: Sequence[Process], *, within: float = _LOOK_SECONDS) -> list[int]:
    """The positions of those that have ended; none: `within` seconds brought none to light."""
    deadline = time.monotonic() + within
    while True:
        found = [at for at, process in enumerate(roll) if process.has_ended()]
        if found or time.monotonic() > deadline:
            return found
        time.sleep(_LOOK_EVERY_SECONDS)


def _seen_by(root: Path) -> str:
    boot = (root / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink(root / 'self/ns/pid')}"


def _state(root: Path, pid: int) -> str | None:
    """When it was started; None of one that is not there, or only waits to be reaped."""
    try:
        fields = (root / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
