"""Every burst of a run: its pages, and the copies that they take, cut in one way or another."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvburst._core import BurstPages, CopyPlanner, IndexView, PlanOptions, PoolLayout

Direction = Literal["load", "backup"]
DIRECTIONS: tuple[Direction, ...] = ("load", "backup")


@dataclass(frozen=True)
class BurstRecord:
    """The pages of one burst in the order in which the cache named them: page ids of both tiers,
    ``device[i]`` from or to ``host[i]``, as ``array('i')`` of equal length."""

    direction: Direction
    device: "array[int]"
    host: "array[int]"


@dataclass(frozen=True)
class CopyCounts:
    """Copies of one burst, or of several: one for every page and layer; neighbouring pages merged;
    in layer groups without a ramp (of one layer in a load, of all in a backup); and in groups that
    ramp up, which is what is issued."""

    one_per_page_and_layer: int
    neighbours_merged: int
    groups_without_ramp: int
    groups_with_ramp: int


@dataclass(frozen=True)
class BurstCounts:
    """Bursts of one direction, their pages (percentiles: of a burst) and their copies."""

    bursts: int
    pages: int
    pages_p50: int
    pages_p90: int
    pages_p99: int
    copies: CopyCounts


class _Planners:
    """Counts the copies of bursts of one direction."""

    def __init__(self, layouts: Sequence[PoolLayout], direction: Direction) -> None:
        # With pages of one slot, slots are pages.
        self._pages = BurstPages(layouts, direction=direction, page_size=1)
        self._ramped, self._flat = (
            CopyPlanner(layouts, direction=direction, options=PlanOptions(ramp=ramp))
            for ramp in (True, False)
        )

    def count(self, record: BurstRecord) -> CopyCounts:
        self._pages.append(device=_view("device", record.device), host=_view("host", record.host))
        ramped, flat = self._ramped.plan(self._pages), self._flat.plan(self._pages)
        self._pages.truncate(0)
        return CopyCounts(
            one_per_page_and_layer=ramped.one_per_page_and_layer,
            neighbours_merged=ramped.neighbours_merged,
            groups_without_ramp=flat.num_copies,
            groups_with_ramp=ramped.num_copies,
        )


class BurstLog:
    """Keeps the bursts of a run, 8 bytes a page, and plans them to count their copies."""

    def __init__(self, layouts: Sequence[PoolLayout]) -> None:
        self.records: list[BurstRecord] = []
        self._copies: list[CopyCounts] = []
        self._planners = {each: _Planners(layouts, each) for each in DIRECTIONS}

    def add(self, direction: Direction, device: Sequence[int], host: Sequence[int]) -> None:
        record = BurstRecord(direction, array("i", device), array("i", host))
        self.records.append(record)
        self._copies.append(self._planners[direction].count(record))

    def counts(self, direction: Direction, *, later_half: bool = False) -> BurstCounts:
        """Of the bursts so far, or of the later half of them, loads and backups together."""
        first = len(self.records) // 2 if later_half else 0
        chosen = [
            (len(record.device), copies)
            for record, copies in zip(self.records[first:], self._copies[first:], strict=True)
            if record.direction == direction
        ]
        sizes = sorted(pages for pages, _ in chosen)
        return BurstCounts(
            bursts=len(sizes),
            pages=sum(sizes),
            pages_p50=percentile(sizes, 50),
            pages_p90=percentile(sizes, 90),
            pages_p99=percentile(sizes, 99),
            copies=CopyCounts(
                one_per_page_and_layer=sum(each.one_per_page_and_layer for _, each in chosen),
                neighbours_merged=sum(each.neighbours_merged for _, each in chosen),
                groups_without_ramp=sum(each.groups_without_ramp for _, each in chosen),
                groups_with_ramp=sum(each.groups_with_ramp for _, each in chosen),
            ),
        )


def percentile(ascending: Sequence[int], percent: int) -> int:
    """The smallest value that at least so many percent do not exceed; 0 if there are none."""
    if not ascending:
        return 0
    return ascending[max(0, math.ceil(len(ascending) * percent / 100) - 1)]


def _view(name: str, pages: "array[int]") -> IndexView:
    address, count = pages.buffer_info()
    return IndexView(name=name, address=address, count=count, stride=1, itemsize=pages.itemsize)
