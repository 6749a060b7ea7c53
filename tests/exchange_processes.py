"""Ranks as processes with gloo between them, all running one random program."""

import hashlib
import multiprocessing
import os
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exchange_helpers import LAYERS, PAGE, Rank, make_rank, pages_of, slots_of

from kvburst import HostDevice, PlanOptions
from kvburst.exchange import Channel, GroupChannel

TIMEOUT = 60.0

# Imported once, by the process that all ranks are forked from.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "exchange_processes"])


def run_ranks(ranks: int, body: Callable[..., Any], *arguments: object) -> list[Any]:
    """`body(rank, ranks, *arguments)` in a process each, which may use torch's process groups.

    What they returned, in the order of ranks; an exception counts as a result. None for a process
    that is gone, or still runs after a minute and a half and is then ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes, pipes = [], []
        for rank in range(ranks):
            here, there = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_run, args=(there, store, rank, ranks, body, arguments), daemon=True
            )
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        results = []
        for process, pipe in zip(processes, pipes, strict=True):
            try:
                results.append(pipe.recv() if pipe.poll(90) else None)
            except EOFError:
                results.append(None)
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        return results


def _run(
    pipe: Connection,
    store: str,
    rank: int,
    ranks: int,
    body: Callable[..., Any],
    arguments: Sequence[object],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )
    try:
        result: Any = body(rank, ranks, *arguments)
    except Exception as error:
        result = error
    pipe.send(result)
    pipe.close()
    os._exit(0)  # A rank whose peers are gone must not wait for them once more.


class Crowded:
    """A channel on a device that has room for one collective at a time, whoever launches it.

    `occupied` is that device: a lock that the forward's collectives take as well.
    """

    def __init__(self, channel: GroupChannel, occupied: threading.Lock) -> None:
        self._channel = channel
        self._occupied = occupied
        self.log: list[str] = []

    rank = property(lambda self: self._channel.rank)
    ranks = property(lambda self: self._channel.ranks)
    on_stream = False
    numbers_apart = True

    def staging(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return self._channel.staging(nbytes, device)

    def minimum(self, values: Sequence[int]) -> Any:
        return self._channel.minimum(values)

    def broadcast(self, staged: torch.Tensor, source: int, stream: Any) -> None:
        with self._occupied:
            self.log.append(f"exchange from {source}")
            self._channel.broadcast(staged, source, stream)


def new_channel(timeout: float = TIMEOUT) -> GroupChannel:
    """Over groups of its own, as an exchange must have them."""
    return GroupChannel(
        dist.new_group(backend="gloo"), dist.new_group(backend="gloo"), timeout=timeout
    )


# --- the random program --------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """`bursts` loads among prefills, backups and evictions on either tier, decided by `seed`.

    `exchange` None: by a rank by itself, which keeps everything.
    """

    bursts: int
    seed: int = 0
    exchange: str | None = "forward_stream"
    mode: str = "thread"
    chunk_pages: int = 0
    staging_bytes: int = 4 * PAGE * 24
    aborts: bool = False
    ahead: bool = False
    """Two loads are submitted before the forward of the first."""
    skip_exchange: bool = False
    diverge: bool = False
    """Rank 1 loads the host pages of a node in another order than the rest."""
    corrupt: bool = False
    """One byte on the host of rank 1 changes between every backup and the load."""


class _Deaf(GroupChannel):
    """Broadcasts nothing."""

    def broadcast(self, staged: torch.Tensor, source: int, stream: object) -> None:
        pass


def run_program(rank: int, ranks: int, program: Program) -> list[str]:
    """A digest of all pages after every load; the same on every rank, whatever is shared."""
    channel: GroupChannel | None = None
    if program.exchange is not None:
        kind = _Deaf if program.skip_exchange else GroupChannel
        channel = kind(
            dist.new_group(backend="gloo"), dist.new_group(backend="gloo"), timeout=TIMEOUT
        )
    return run_cache(channel, rank, program)


def run_cache(
    channel: Channel | None, rank: int, program: Program, device: HostDevice | None = None
) -> list[str]:
    """The program of one rank, on a device of its own."""
    options: dict[str, object] = {}
    if channel is not None:
        options = {"exchange": program.exchange, "staging_bytes": program.staging_bytes}
    one = make_rank(
        HostDevice() if device is None else device,
        channel,
        rank=rank,
        pages=40,
        host_pages=48,
        mode=program.mode,
        options=PlanOptions(chunk_pages=program.chunk_pages),
        **options,
    )
    return _Cache(one, program).run()


class _Cache:
    """What a scheduler decides: the same on every rank, though its device pages differ."""

    def __init__(self, one: Rank, program: Program) -> None:
        self.one = one
        self.program = program
        self.chance = random.Random(program.seed)
        self.on_device: dict[int, torch.Tensor] = {}
        self.on_host: dict[int, torch.Tensor] = {}
        self.coming: set[int] = set()
        self.tag = 0
        # Other device pages on every rank.
        own = random.Random(1000 + one.rank)
        slots = one.device_pages.alloc(one.device_pages.size)
        pages = pages_of(slots)
        own.shuffle(pages)
        one.device_pages.free(slots_of(pages))

    def run(self) -> list[str]:
        found = []
        stream = self.one.device.new_stream()
        with stream:
            while len(found) < self.program.bursts:
                if self.step():
                    found.append(self.digest())
        self.one.controller.stop()
        return found

    def step(self) -> bool:
        """One thing that a cache does; whether it was a load."""
        if len(self.on_device) < 3 or self.chance.random() < 0.2:
            self.prefill(self.chance.randint(1, 4))
        elif len(self.on_host) < 3 or self.chance.random() < 0.3:
            self.back_up(self.chance.choice(sorted(self.on_device)))
        elif self.chance.random() < 0.3:
            self.evict(self.on_device, self.one.device_pages)
        elif self.chance.random() < 0.2:
            self.evict(self.on_host, self.one.host_pages)
        else:
            return self.load()
        return False

    def prefill(self, pages: int) -> None:
        slots = self.one.device_pages.alloc(pages * PAGE)
        if slots is None:
            self.evict(self.on_device, self.one.device_pages)
            return
        bytes_ = torch.Generator().manual_seed(self.program.seed * 1000 + self.tag)
        for page in pages_of(slots):
            for pool, layers in enumerate(LAYERS.values()):
                for layer in layers:
                    view = self.one.page(pool, layer, page)
                    view.copy_(torch.randint(0, 256, view.shape, generator=bytes_))
        self.on_device[self.tag] = slots
        self.tag += 1

    def back_up(self, node: int) -> None:
        if node in self.on_host:
            return
        host = self.one.controller.write(self.on_device[node], node_id=node)
        if host is None:
            self.evict(self.on_host, self.one.host_pages)
            return
        self.one.controller.ack_write_queue.clear()
        if self.program.corrupt and self.one.rank == 1:
            self.one.pools[0].host.tensor[pages_of(host)[0], 0, 0] ^= 1
        self.on_host[node] = host

    def load(self) -> bool:
        submitted = [self.submit() for _ in range(2 if self.program.ahead else 1)]
        loads = [load for load in submitted if load is not None]
        for burst, _ in loads:
            self.forward(burst)
        if not loads:
            self.evict(self.on_device, self.one.device_pages)
            return False
        self.one.settle()
        acks = self.one.controller.poll()
        assert len(acks) == len(loads)
        for ack in acks:
            if ack.error is not None:
                raise RuntimeError(ack.error)
        for _, arrived in loads:
            self.on_device.update(arrived)
        self.coming.clear()
        return True

    def submit(self) -> tuple[int, dict[int, torch.Tensor]] | None:
        """A load of nodes that are on the host alone: its id, and where they come."""
        wanted = self.chance.sample(sorted(self.on_host), self.chance.randint(1, 3))
        arrived = {}
        for node in wanted:
            if node in self.on_device or node in self.coming:
                continue
            host = self.on_host[node]
            if self.program.diverge and self.one.rank == 1:
                host = host.flip(0).view(-1, PAGE).flip(1).reshape(-1)
            target = self.one.controller.load(host, node_id=node)
            if target is not None:
                arrived[node] = target
                self.coming.add(node)
        burst = self.one.controller.start_loading()
        return (burst, arrived) if arrived else None

    def forward(self, burst: int) -> None:
        counter = self.one.controller.layer_done_counter
        counter.set_consumer(burst)
        layers = counter.num_layers
        if self.program.aborts and self.chance.random() < 0.4:
            layers = self.chance.randrange(layers)
        for layer in range(layers):
            counter.wait_until(layer)
        if not self.program.ahead:
            counter.set_consumer(-1)

    def evict(self, tier: dict[int, torch.Tensor], pages: Any) -> None:
        if tier:
            node = self.chance.choice(sorted(tier))
            pages.free(tier.pop(node))

    def digest(self) -> str:
        """Of every page that is on the device, all pools and layers."""
        found = hashlib.blake2b(digest_size=16)
        for node in sorted(self.on_device):
            for page in pages_of(self.on_device[node]):
                for pool, layers in enumerate(LAYERS.values()):
                    for layer in layers:
                        found.update(bytes(self.one.page(pool, layer, page).flatten().tolist()))
        return found.hexdigest()
