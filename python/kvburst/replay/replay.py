"""One replay, from the options to what came out."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvburst._core import KVBurstError
from kvburst.geometries import Geometry
from kvburst.pools import Pool
from kvburst.replay.burst_log import BurstCounts, BurstLog
from kvburst.replay.movers import ByteMover, Mover, PlanMover
from kvburst.replay.options import ReplayOptions
from kvburst.replay.page_bytes import NoBytes, PageBytes, RealBytes
from kvburst.replay.prefix_cache import PrefixCache
from kvburst.replay.recording import Recording
from kvburst.replay.server import Server, ServerCounts
from kvburst.replay.tiers import TierSizes, absent_layouts, geometry_of, real_pools
from kvburst.replay.trace import Request, read_trace
from kvburst.timeline import Flight, FlightRecorder


@dataclass(frozen=True)
class ReplayResult:
    """What a replay did. ``interrupted`` if it was ended before the trace was.

    ``copies_issued`` are those that the device counted or, where no bytes moved, those that the
    bursts are planned to take. ``later_loads`` and ``later_backups`` are of the later half of the
    bursts: a pool begins in order, and it takes a while to scatter it. ``mismatched_pages`` is
    None where no bytes moved. ``seconds`` are of the run with all its checks; reading the trace
    and laying out memory are not included.
    """

    options: ReplayOptions
    geometry: Geometry
    requests_in_trace: int
    interrupted: bool
    server: ServerCounts
    loads: BurstCounts
    backups: BurstCounts
    later_loads: BurstCounts
    later_backups: BurstCounts
    copies_issued: int
    mismatched_pages: int | None
    mismatches: tuple[str, ...]
    seconds: float
    recording: Recording
    flight: Flight | None = None
    """What the flight recorder saw, if one was wanted."""


class Replay:
    """Reads the trace and lays out the tiers; `run` then replays it, once, with `record` under a
    flight recorder.

    Raises ``KVBurstError`` where the trace, the geometry or the memory do not allow it, before
    anything has moved.
    """

    def __init__(self, options: ReplayOptions, *, record: bool = False) -> None:
        if record and options.plan_only:
            raise KVBurstError("--timeline: nothing moves with --plan-only, there is none")
        self.options = options
        self.geometry = geometry_of(options)
        self.requests = read_trace(options.trace, options.limit)
        for request in self.requests:
            self._check_capacity(request)
        sizes = TierSizes(options.device_pages, options.host_pages, self.geometry.page_size)
        self.pools: tuple[Pool, ...] = ()
        """Whose pages move; none with ``plan_only``."""
        self._mover: Mover
        self._bytes: PageBytes
        self._recorder: FlightRecorder | None = None
        if options.plan_only:
            self._log = BurstLog(absent_layouts(self.geometry, sizes))
            self._mover, self._bytes = PlanMover(sizes, self._log), NoBytes()
        else:
            self.pools = real_pools(self.geometry, sizes)
            self._log = BurstLog([pool.layout for pool in self.pools])
            mover = ByteMover(self.pools, sizes, self._log)
            self._recorder = mover.record(f"replay of {options.trace.name}") if record else None
            self._mover = mover
            self._bytes = RealBytes(self.pools)
        self._sizes = sizes

    def run(
        self,
        on_step: Callable[[ServerCounts], None] = lambda counts: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> ReplayResult:
        """Replays until the trace's end or, between two steps, until ``stopped`` says so. Does not
        raise for wrong bytes: see ``mismatched_pages``."""
        cache = PrefixCache(self._mover)
        server = Server(self.requests, cache, self._mover, self._bytes, self._sizes.page_size)
        begin = time.perf_counter()
        try:
            while not server.done and not stopped():
                server.step()
                on_step(server.counts)
            server.finish()
        finally:
            self._mover.stop()
        seconds = time.perf_counter() - begin
        return ReplayResult(
            options=self.options,
            geometry=self.geometry,
            requests_in_trace=len(self.requests),
            interrupted=not server.done,
            server=server.counts,
            loads=self._log.counts("load"),
            backups=self._log.counts("backup"),
            later_loads=self._log.counts("load", later_half=True),
            later_backups=self._log.counts("backup", later_half=True),
            copies_issued=self._mover.copies_issued,
            mismatched_pages=None if self.options.plan_only else server.counts.mismatched_pages,
            mismatches=tuple(server.mismatches),
            seconds=seconds,
            recording=Recording(
                self._sizes.page_size,
                self._sizes.device_pages,
                self._sizes.host_pages,
                tuple(self._log.records),
            ),
            flight=None if self._recorder is None else self._recorder.flight(),
        )

    def _check_capacity(self, request: Request) -> None:
        pages = -(-request.tokens // self.geometry.page_size)
        if pages > self.options.device_pages:
            raise KVBurstError(
                f"--device-pages: {self.options.device_pages} is too small for line {request.line}"
                f" of {self.options.trace}, whose {request.tokens:,} tokens need {pages} pages"
            )
