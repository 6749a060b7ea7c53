"""What a run of the demo did, how long it took, and whether every byte was right."""

from dataclasses import dataclass
from typing import Literal

from kvburst.demo_options import DemoOptions
from kvburst.geometries import Geometry
from kvburst.stats import BurstStats
from kvburst.timeline import Flight

Direction = Literal["backup", "load"]
Place = Literal["snapshot", "device", "host"]


@dataclass(frozen=True)
class Mismatch:
    """A page of one layer with wrong bytes: where it was seen, and its first wrong byte."""

    seen_in: Place
    pool: str
    layer: int
    page: int
    wrong_bytes: int
    byte: int
    expected: int
    found: int

    def __str__(self) -> str:
        return (
            f"{self.seen_in}: pool {self.pool!r}, layer {self.layer}, page {self.page}:"
            f" {self.wrong_bytes} bytes differ, the first at {self.byte}:"
            f" {self.found:#04x} instead of {self.expected:#04x}"
        )


@dataclass(frozen=True)
class Transfer:
    """One burst. ``copies``, ``calls`` and ``bytes_moved`` are counted inside the device;
    ``bytes`` are the geometry's, which is what a link model charges; ``stats`` are the
    controller's."""

    direction: Direction
    calls: int
    copies: int
    one_per_page_and_layer: int
    bytes: int
    bytes_moved: int
    fallbacks: dict[str, int]
    stats: BurstStats

    @property
    def gbps(self) -> float:
        """10^9 bytes a second, from the first copy's start to the last one's end."""
        return self.bytes / self.stats.copies_took_ms / 1e6


@dataclass(frozen=True)
class Span:
    """Something that went on from ``start`` to ``end``, in milliseconds from the hand-over."""

    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The load-back and the forward, on one clock.

    On the scheduler's thread the hand-over (``load`` and ``start_loading``) and the launch of the
    forward; on the transfer stream the copies; on the forward's stream, one for each layer, the
    wait at the gate and the layer itself.
    """

    hand_over: Span
    launch: Span
    copying: Span
    stalls: tuple[Span, ...]
    layers: tuple[Span, ...]

    @property
    def end(self) -> float:
        """When the last of it was over, in milliseconds."""
        return max(self.launch.end, self.copying.end, self.layers[-1].end)


@dataclass(frozen=True)
class DemoResult:
    """What one run did, how long it took, and whether every byte was right.

    ``stalls_ms`` is the time that the forward stood at its layers, for their issue or for their
    bytes, measured on its own stream; ``forward_ms`` its length with them. ``row_scale`` is how
    many times smaller the rows in memory are than the geometry's. ``host_bytes`` are those of the
    host pools' tensors; ``checked_bytes`` counts what was compared. ``device`` says in words what
    it ran on; with ``stand_in`` no GPU was behind it.
    """

    options: DemoOptions
    device: str
    stand_in: bool
    geometry: Geometry
    device_pages: int
    held_device_pages: int
    host_pages: int
    row_scale: int
    backup: Transfer
    load: Transfer
    grouped_ms: float
    stalls_ms: float
    forward_ms: float
    timeline: Timeline
    host_bytes: int
    checked_bytes: int
    mismatches: tuple[Mismatch, ...]
    flight: Flight | None = None
    """What the flight recorder saw, if one was wanted."""

    @property
    def bit_exact(self) -> bool:
        return not self.mismatches

    @property
    def simulated(self) -> bool:
        """Whether a link model made the times, or a stand-in for a GPU."""
        return self.options.link is not None or self.stand_in

    @property
    def overlap_ratio(self) -> float:
        """The part of the copies' time that cost nobody anything: 1 - (caller + stalls) / copies,
        within 0 and 1."""
        paid = self.load.stats.caller_us / 1e3 + self.stalls_ms
        return min(1.0, max(0.0, 1 - paid / self.load.stats.copies_took_ms))
