"""``kvburst demo --ranks N``: the same run in N processes, with gloo between them.

Each rank has a device, pools and a controller of its own, and they retire the same bursts. With
``--shard`` they keep one host copy of each layer between them. Gloo's broadcasts block the thread
that launches the forward, as no GPU's would: with a link model the exchange is charged as modelled
time instead.
"""

import dataclasses
import multiprocessing
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from types import FrameType

import torch
import torch.distributed as dist

from kvburst._core import HostDevice, KVBurstError
from kvburst.agreement import AgreementGroups
from kvburst.demo import Demo, Seat, Tick, num_ticks
from kvburst.demo_options import DemoOptions
from kvburst.demo_result import DemoResult
from kvburst.exchange import GroupChannel
from kvburst.exchange.timeline import (
    ModelledForward,
    charges_us,
    modelled_forward,
    planned_load,
)
from kvburst.geometries import geometry
from kvburst.links import NVLINK
from kvburst.ownership import TierFacts, reasons_against_sharding

# How long a rank waits for another, which may be filling its pools.
_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Modelled:
    """The forward by the plans of all ranks and the modelled links alone, and how long this rank's
    copies take by them, in milliseconds."""

    forward: ModelledForward
    copies_ms: float


@dataclass(frozen=True)
class RankResult:
    """What one rank did. ``result`` is as of a run by itself; ``modelled`` is there where the
    exchange was charged as modelled time, and then says what the forward waited for."""

    rank: int
    result: DemoResult
    rows: Mapping[str, int]
    """Layers that the rank keeps on its host, by pool."""
    exchange_bytes: int
    """Of pages that came from other ranks."""
    modelled: Modelled | None

    @property
    def overlap_ratio(self) -> float:
        """The part of the copies' time that cost nobody anything: 1 - (caller + stalls) / copies,
        within 0 and 1. The exchange itself is work of the forward's stream, not a stall."""
        paid = self.result.load.stats.caller_us / 1e3 + self.stalls_ms
        return min(1.0, max(0.0, 1 - paid / self.copies_ms))

    @property
    def stalls_ms(self) -> float:
        """That the forward stood still for layers to come."""
        return self.result.stalls_ms if self.modelled is None else self.modelled.forward.stalls_ms

    @property
    def copies_ms(self) -> float:
        """That this rank's copies took."""
        if self.modelled is not None:
            return self.modelled.copies_ms
        return self.result.load.stats.copies_took_ms


def check_sharding(options: DemoOptions) -> None:
    """Refuses with ``KVBurstError`` what cannot be shared, with the reasons."""
    if not options.shard:
        return
    reasons = reasons_against_sharding(
        TierFacts(
            ranks=options.ranks,
            replicated={pool.name: pool.replicated for pool in geometry(options.geometry).pools},
            host_layout=options.layout,
        )
    )
    if reasons:
        raise KVBurstError(f"--shard: {'; '.join(reasons)}")


def num_rank_ticks(options: DemoOptions) -> int:
    """How often ``run_ranks`` calls ``tick``."""
    return num_ticks(options) + options.ranks


def run_ranks(
    options: DemoOptions, tick: Tick = lambda step: None, *, record: bool = False
) -> list[RankResult]:
    """Runs every rank to its end; ticks are the first one's, and then one a rank. With `record` a
    flight recorder watches the load of each, all on the machine's one clock.

    Raises KVBurstError if a rank fails or is gone; the others are then ended. Of the main thread,
    which alone hears Ctrl-C.
    """
    check_sharding(options)
    with tempfile.TemporaryDirectory() as folder, _ended_at_exit() as processes:
        pipes = _started(options, record, str(Path(folder) / "store"), processes)
        results: dict[int, RankResult] = {}
        while pipes:
            for pipe in wait(list(pipes)):
                assert isinstance(pipe, Connection)
                rank = pipes[pipe]
                said = _receive(pipe, rank, processes[rank])
                if isinstance(said, str):
                    tick(said)
                else:
                    results[rank] = said
                    del pipes[pipe]
                    tick("waiting for the other ranks")
        return [results[rank] for rank in range(options.ranks)]


def _started(
    options: DemoOptions, record: bool, store: str, processes: list[BaseProcess]
) -> dict[Connection, int]:
    """Starts every rank into `processes`, and returns the pipe from each."""
    # All ranks are forked from one process that has imported torch.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvburst.demo_ranks"])
    pipes: dict[Connection, int] = {}
    with _interrupted_afterwards():
        for rank in range(options.ranks):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(there, store, rank, options, record), daemon=True
            )
            process.start()
            processes.append(process)
            there.close()
            pipes[here] = rank
    return pipes


@contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Ctrl-C, which a terminal sends to every process, is heard by this one alone, and when all
    ranks are there to be ended: those that were started would wait for those that were not."""
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()  # ignores what is ignored now, and so do those that it forks
        signal.signal(signal.SIGINT, note)
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def _ended_at_exit() -> Iterator[list[BaseProcess]]:
    processes: list[BaseProcess] = []
    try:
        yield processes
    finally:
        deadline = monotonic() + 1
        for process in processes:
            process.join(max(0.0, deadline - monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _receive(pipe: Connection, rank: int, process: BaseProcess) -> RankResult | str:
    """A result, or the name of a step that is done."""
    try:
        said = pipe.recv()
    except EOFError:
        process.join(5)
        raise KVBurstError(
            f"rank {rank} ended with exit status {process.exitcode} before its result"
        ) from None
    if isinstance(said, KVBurstError):
        raise said
    assert isinstance(said, (RankResult, str))
    return said


# --- in the process of a rank --------------------------------------------------------------------


def _run_rank(pipe: Connection, store: str, rank: int, options: DemoOptions, record: bool) -> None:
    # The ranks share the machine's cores.
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=options.ranks,
            timeout=_TIMEOUT,
        )
        tick: Tick = pipe.send if rank == 0 else lambda step: None
        result = _Rank(rank, options, tick, record).run()
        pipe.send(result)
        dist.barrier()
        dist.destroy_process_group()
    except KVBurstError as error:
        pipe.send(KVBurstError(str(error)))
    except Exception as error:
        pipe.send(KVBurstError(f"rank {rank}: {type(error).__name__}: {error}"))


class _Rank:
    def __init__(self, rank: int, options: DemoOptions, tick: Tick, record: bool) -> None:
        world = dist.group.WORLD
        assert world is not None
        channel = None
        if options.shard:
            channel = GroupChannel(world, timeout=_TIMEOUT.total_seconds())
        self._rank = rank
        self._options = options
        self._demo = Demo(
            options,
            tick,
            Seat(
                rank=rank,
                channel=channel,
                groups=AgreementGroups(tp=world),
                together=dist.barrier,
                longest=self._longest,
            ),
            record=record,
        )

    def run(self) -> RankResult:
        demo = self._demo
        result = demo.run()
        stats = demo.controller.exchange_stats
        return RankResult(
            rank=self._rank,
            result=result,
            rows={pool.name: pool.host.num_rows for pool in demo.pools},
            exchange_bytes=0 if stats is None else stats.received_bytes,
            modelled=self._modelled(result),
        )

    @staticmethod
    def _longest(mine: float) -> float:
        longest = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return float(longest)

    def _modelled(self, result: DemoResult) -> Modelled | None:
        demo, options = self._demo, self._options
        link = demo.device.link if isinstance(demo.device, HostDevice) else None
        if demo.shard is None or link is None:
            return None
        planned = planned_load(
            [pool.layout for pool in demo.pools],
            demo.targets,
            demo.on_host,
            demo.geometry.page_size,
            link,
        )
        arrivals: list[dict[int, float]] = [{} for _ in range(options.ranks)]
        dist.all_gather_object(arrivals, dict(planned.arrivals_ms))
        charged = charges_us(
            demo.shard.ownership,
            [pool.page_bytes(demo.geometry.page_size) for pool in demo.geometry.pools],
            options.pages,
            demo.shard.staging_bytes,
            NVLINK,
        )
        layer_ms = options.forward * self._longest(planned.copies_ms) / demo.geometry.num_layers
        launched_ms = self._longest(result.load.stats.caller_us / 1e3)
        return Modelled(
            modelled_forward(arrivals, charged, layer_ms, launched_ms), planned.copies_ms
        )


def alone(options: DemoOptions) -> DemoOptions:
    """The same run of one rank that keeps everything."""
    return dataclasses.replace(options, ranks=1, shard=False)
