"""What each burst took: a few numbers a burst, always on, and nothing else is telemetry."""

import logging
from collections import deque
from dataclasses import dataclass
from typing import Literal

from kvburst._core import Burst, LayerGate
from kvburst.acks import Ack
from kvburst.agreement.reducer import AgreementStats

_logger = logging.getLogger("kvburst")


@dataclass(frozen=True)
class BurstStats:
    """One burst that is retired."""

    burst: int
    direction: Literal["load", "backup"]
    pages: int
    """Counted once for all pools and layers."""
    copies: int
    bytes: int
    """Handed to the device."""
    caller_us: float
    """Microseconds of the scheduler thread: queueing and submission, the allocator not counted."""
    alloc_us: float
    """Microseconds that the allocators took on it beside that."""
    queue_us: float
    """Microseconds from submission until the issuer took the burst up."""
    first_copy_us: float
    """Microseconds from submission until its first copy was handed to the device."""
    issue_us: float
    """Microseconds from there until its last copy was issued."""
    copies_took_ms: float
    """From the first copy's start to the last one's end."""
    stalls_ms: float | None
    """Milliseconds that streams stood at the gate. None where that is not measured: of backups, of
    loads issued inline, and of loads whose gate slot has moved on."""

    @classmethod
    def of(
        cls, burst: Burst, gate: LayerGate | None, caller_us: float, alloc_us: float
    ) -> "BurstStats":
        """A burst that is done, and has not failed. gate: of a load, where it is known."""
        return cls(
            burst=burst.id,
            direction=burst.direction,
            pages=burst.num_pages,
            copies=burst.num_copies,
            bytes=burst.num_bytes,
            caller_us=caller_us,
            alloc_us=alloc_us,
            queue_us=burst.queue_us,
            first_copy_us=burst.first_copy_us,
            issue_us=burst.issue_us,
            copies_took_ms=burst.start_event.elapsed_time(burst.finish_event),
            stalls_ms=None if gate is None else gate.stalls_ms(burst.id),
        )

    @property
    def overlap_ratio(self) -> float | None:
        """The part of the copies' time that held nobody up: 1 - (caller + stalls) / copies, 0 to 1.

        None where stalls are not measured, or the copies took no time.
        """
        if self.stalls_ms is None or self.copies_took_ms <= 0:
            return None
        held_up_ms = self.caller_us / 1000 + self.stalls_ms
        return min(1.0, max(0.0, 1 - held_up_ms / self.copies_took_ms))


@dataclass(frozen=True)
class LaneStats:
    """The bursts of one direction."""

    bursts: int
    """Retired, those that failed among them."""
    failures: int
    last_error: str | None
    recent: tuple[BurstStats, ...]
    """The newest that did not fail, oldest first."""


@dataclass(frozen=True)
class ControllerStats:
    loads: LaneStats
    backups: LaneStats
    agreement: AgreementStats | None = None
    """What agreeing with other ranks took; None where none do."""


class BurstRecorder:
    """Keeps the numbers of retired bursts, and says once of each failed one that it failed."""

    _KEPT = 256

    def __init__(self, gate: LayerGate | None) -> None:
        self._gate = gate
        self._bursts = 0
        self._failures = 0
        self._last_error: str | None = None
        self._recent: deque[BurstStats] = deque(maxlen=self._KEPT)

    def retired(self, ack: Ack) -> None:
        burst = ack.burst
        self._bursts += 1
        if ack.error is not None:
            self._failures += 1
            self._last_error = ack.error
            _logger.error("%s", ack.error)
            return
        self._recent.append(BurstStats.of(burst, self._gate, ack.caller_us, ack.alloc_us))

    def stats(self) -> LaneStats:
        return LaneStats(self._bursts, self._failures, self._last_error, tuple(self._recent))
