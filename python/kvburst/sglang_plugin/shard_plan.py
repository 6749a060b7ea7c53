"""Which rows of SGLang's host pools a rank keeps, where ranks share one copy, and how many slots.

Arithmetic, the same on every rank: nobody asks another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvburst.ownership import Ownership


@dataclass(frozen=True)
class HostShard:
    """What one rank keeps of one host pool of SGLang's: a row for each of its own target layers, in
    order, and behind them one for each of its own packed draft layers."""

    owned: Ownership
    rank: int
    first: int
    """Its number in the ownership; those of its drafts, a pool of one layer each, follow."""
    drafts: int

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the device pool."""
        return self.owned.pools[self.first]

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """This rank's; row *i* is the *i*-th of them."""
        return self.owned.layers_of(self.rank, self.first)

    @property
    def kept_drafts(self) -> tuple[int, ...]:
        """This rank's, by depth; their rows follow."""
        return self._drafts_of(self.rank)

    @property
    def kept_rows(self) -> int:
        return self.rows_of(self.rank)

    @property
    def all_rows(self) -> int:
        """Of a rank that keeps everything."""
        return len(self.layers) + self.drafts

    def rows_of(self, rank: int) -> int:
        return len(self.owned.layers_of(rank, self.first)) + len(self._drafts_of(rank))

    def _drafts_of(self, rank: int) -> tuple[int, ...]:
        numbers = enumerate(range(self.first + 1, self.first + 1 + self.drafts))
        return tuple(depth for depth, number in numbers if self.owned.layers_of(rank, number))


def shards_of(
    layers: Mapping[str, Sequence[int]], drafts: int, ranks: int, rank: int
) -> dict[str, HostShard]:
    """Of each host pool by name, in SGLang's order; `layers` are those of its device pool.

    A packed draft of depth *d* is loaded with layer *d*, or with the last: a pool of its own, since
    it shares that layer's number.
    """
    last = max((each[-1] for each in layers.values() if each), default=0)
    draft_pools = [(min(depth, last),) for depth in range(drafts)]
    pools: list[tuple[int, ...]] = []
    first: dict[str, int] = {}
    for name, own in layers.items():
        first[name] = len(pools)
        pools += [tuple(own), *draft_pools]
    owned = Ownership(ranks, tuple(pools))
    return {name: HostShard(owned, rank, number, drafts) for name, number in first.items()}


def host_slots(
    alone: int, shards: Mapping[str, HostShard], page_bytes: Mapping[str, int], page_size: int
) -> int:
    """Slots of a tier that ranks share, where each of them has room for `alone` by itself.

    No rank takes more memory than it would by itself: the one that keeps most, of all pools
    together, decides how many times the slots there are. `page_bytes`: of a page of one layer.
    """
    whole = sum(page_bytes[name] * shard.all_rows for name, shard in shards.items())
    ranks = range(next(iter(shards.values())).owned.ranks)
    most = max(
        sum(page_bytes[name] * shard.rows_of(rank) for name, shard in shards.items())
        for rank in ranks
    )
    return alone * whole // most // page_size * page_size


def slots_alone(
    *, gigabytes: float, ratio: float, device_slots: int, slot_bytes: int, page_size: int
) -> int:
    """Slots of the host tier of a rank that keeps everything, as SGLang computes them: of
    `gigabytes` (10^9 bytes), if any, or else `ratio` times the device's; and one page more.

    `slot_bytes`: of all layers of the pool that `gigabytes` is about, the first.
    """
    slots = int(gigabytes * 1e9 // slot_bytes) if gigabytes > 0 else int(device_slots * ratio)
    return (slots // page_size + 1) * page_size
