"""What one host copy between the ranks is worth: a trace over host tiers of the same bytes on every
rank, where each rank keeps a copy of all layers, and where they keep one between them.

Nothing moves and nothing is exchanged: layers are shared out, not pages, so that the cache decides
alike on every rank, and all that differs is how many pages the same bytes are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvburst._core import KVBurstError
from kvburst.geometries import Geometry
from kvburst.ownership import Ownership, TierFacts, reasons_against_sharding
from kvburst.replay.options import MAX_PAGES, MAX_RANKS, ReplayOptions
from kvburst.replay.replay import Replay, ReplayResult
from kvburst.replay.server import ServerCounts
from kvburst.replay.tiers import geometry_of


@dataclass(frozen=True)
class HostSize:
    """A host tier of ``nbytes`` on every rank: that is ``pages`` if each keeps all layers, and
    ``shared_pages`` if they keep one copy of each layer between them."""

    nbytes: int
    pages: int
    shared_pages: int


def host_size(shape: Geometry, ranks: int, pages: int) -> HostSize:
    """Of the bytes that ``pages`` whole pages take. The rank with most bytes of a page decides how
    many the same bytes are when shared (``Ownership.capacity``).

    Raises ``KVBurstError`` where the ranks hold different bytes, and for more pages than a replay
    can take.
    """
    different = {pool.name: pool.replicated for pool in shape.pools if not pool.replicated}
    if different:
        # Only the first reason is about the pools.
        reason = reasons_against_sharding(TierFacts(ranks=ranks, replicated=different))[0]
        raise KVBurstError(f"--shard: {shape.name}: {reason}")
    owned = Ownership(ranks, tuple(pool.layer_ids for pool in shape.pools))
    page_bytes = [pool.page_bytes(shape.page_size) for pool in shape.pools]
    nbytes = pages * owned.whole_page_bytes(page_bytes)
    capacities = [owned.capacity(rank, page_bytes, nbytes) for rank in range(ranks)]
    shared = min(capacity for capacity in capacities if capacity is not None)
    if shared > MAX_PAGES:
        raise KVBurstError(
            f"--host-pages: {pages} are {shared} when {ranks} ranks share them, above {MAX_PAGES}"
        )
    return HostSize(nbytes, pages, shared)


@dataclass(frozen=True)
class Compared:
    """The whole trace, served twice."""

    size: HostSize
    unshared: ServerCounts
    shared: ServerCounts


@dataclass(frozen=True)
class SharingResult:
    """``compared`` are the host sizes that both were replayed for, of ``sizes`` that were wanted;
    ``last`` is the last run of a tier that is not shared."""

    ranks: int
    sizes: int
    compared: tuple[Compared, ...]
    last: ReplayResult

    @property
    def interrupted(self) -> bool:
        return len(self.compared) < self.sizes


class SharingReplay:
    """Replays the trace of ``options``, whose ``host_pages`` are not used, once for each of
    ``host_pages`` and once for as many pages as the same bytes are when ``ranks`` share them.

    Raises ``KVBurstError`` as `Replay` and `host_size` do, before anything runs.
    """

    def __init__(self, options: ReplayOptions, ranks: int, host_pages: Sequence[int]) -> None:
        if ranks < 1:
            raise KVBurstError(f"--ranks: {ranks} is below 1")
        if ranks > MAX_RANKS:
            raise KVBurstError(f"--ranks: {ranks} is above {MAX_RANKS}")
        if not options.plan_only:
            raise KVBurstError(
                f"--shard: a replay of {ranks} ranks moves no bytes, add --plan-only"
                " (kvburst demo --ranks N --shard moves them)"
            )
        self.ranks = ranks
        shape = geometry_of(options)
        self._runs = [
            (host_size(shape, ranks, pages), replace(options, host_pages=pages))
            for pages in host_pages
        ]
        if not self._runs:
            raise KVBurstError("--host-pages: 0 sizes, at least 1 is needed")
        self._first = Replay(self._runs[0][1])

    @property
    def total_requests(self) -> int:
        """Of all runs together."""
        return 2 * len(self._runs) * len(self._first.requests)

    def run(
        self,
        on_step: Callable[[ServerCounts], None] = lambda counts: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> SharingResult:
        """All runs, or until ``stopped`` says so. The ``requests`` of ``on_step`` are those of all
        runs so far."""
        compared: list[Compared] = []
        served = 0

        def run(replay: Replay) -> ReplayResult:
            nonlocal served
            before = served
            result = replay.run(
                lambda counts: on_step(replace(counts, requests=before + counts.requests)), stopped
            )
            served += result.server.requests
            return result

        for number, (size, options) in enumerate(self._runs):
            last = run(Replay(options) if number else self._first)
            if last.interrupted:
                break
            shared = run(Replay(replace(options, host_pages=size.shared_pages)))
            if shared.interrupted:
                break
            compared.append(Compared(size, last.server, shared.server))
        return SharingResult(self.ranks, len(self._runs), tuple(compared), last)
