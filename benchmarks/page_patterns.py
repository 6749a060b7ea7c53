"""Which pages a burst moves: made up, or as a cache under a real request trace chose them.

``contiguous``: neighbours on both tiers, in order, as in a fresh pool. ``runs``: eight neighbours
at a time, the runs anywhere. ``scattered``: every page anywhere. ``trace``: bursts of a recording
that ``kvburst replay TRACE --record FILE`` wrote, each with the pages that it had.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from peers_way import Indices

from kvburst._core import KVBurstError
from kvburst.replay.options import ReplayOptions
from kvburst.replay.recording import Recording, load_recording
from kvburst.replay.replay import Replay

Pattern = Literal["contiguous", "runs", "scattered", "trace"]
Direction = Literal["load", "backup"]

MADE_UP: tuple[Pattern, ...] = ("contiguous", "runs", "scattered")
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
RUN = 8
# 400 bursts in a row from the later half of a replay, with the defaults, of Mooncake's public
# conversation trace (kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl): page ids
# alone, 4,096 of the device and 32,768 of the host.
RECORDED = Path(__file__).parent.parent / "tests" / "data" / "scattered_bursts.kvb"


@dataclass(frozen=True)
class Bursts:
    """Bursts to issue one after the other, by their slots; and the pages of the tiers they are of.

    Made-up patterns have one burst, which is issued again and again.
    """

    each: tuple[Indices, ...]
    tier_pages: int
    page_size: int

    @property
    def median_pages(self) -> int:
        pages = sorted(burst.device.numel() // self.page_size for burst in self.each)
        return pages[len(pages) // 2]


def made_up(pattern: Pattern, pages: int, page_size: int, random: torch.Generator) -> Bursts:
    """One burst of ``pages`` pages, over tiers of twice as many."""
    available = 2 * pages

    def chosen() -> torch.Tensor:
        if pattern == "contiguous":
            return torch.arange(pages)
        if pattern == "runs":
            firsts = torch.randperm(-(-available // RUN), generator=random) * RUN
            return (firsts[:, None] + torch.arange(RUN)).flatten()[:pages]
        return torch.randperm(available, generator=random)[:pages]

    return Bursts(
        (Indices(slots_of(chosen(), page_size), slots_of(chosen(), page_size)),),
        # The last run may reach beyond.
        available + RUN,
        page_size,
    )


def recorded(recording: Recording, direction: Direction, most: int) -> Bursts:
    """The last ``most`` bursts of one direction: a fresh pool is still in order, and takes a while
    to scatter."""
    bursts = [burst for burst in recording.bursts if burst.direction == direction][-most:]
    if not bursts:
        raise KVBurstError(f"--bursts: the recording has no {direction}")
    size = recording.page_size
    return Bursts(
        tuple(Indices(_slots(burst.device, size), _slots(burst.host, size)) for burst in bursts),
        max(recording.device_pages, recording.host_pages),
        size,
    )


def read_bursts(file: Path) -> Recording:
    """A recording; or a trace, which is replayed for it, planning only. Raises ``KVBurstError``."""
    if file.suffix == ".kvb":
        return load_recording(file)
    return Replay(ReplayOptions(trace=file, plan_only=True, layers=1)).run().recording


def slots_of(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Token slots of these pages, in order."""
    return (pages[:, None] * page_size + torch.arange(page_size)).flatten()


def _slots(pages: Sequence[int], page_size: int) -> torch.Tensor:
    return slots_of(torch.tensor(pages, dtype=torch.int64), page_size)
