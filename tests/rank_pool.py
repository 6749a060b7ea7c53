"""Ranks as processes with real gloo groups: started once, then given one scenario after another."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Raised:
    """What a rank raised instead of returning."""

    type: str
    text: str
    stack: str
    after: float
    """Seconds."""


class RankPool:
    """Processes 0 to `ranks` - 1 in one gloo world.

    `run(body, ...)` calls `body(...)`, a function of a module, on every rank and gives what each
    returned. A rank that does not answer within `patience` seconds fails the test.
    """

    def __init__(
        self, ranks: int, folder: Path, *, timeout: float = 30.0, patience: float = 120.0
    ) -> None:
        # Forked off a process that has imported torch once, and has no threads: it takes no time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "kvburst.controller"])
        rendezvous = folder / f"rendezvous-{time.monotonic_ns()}"
        self._patience = patience
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, ranks, str(rendezvous), timeout), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        results = self.outcomes(body, *args)
        for rank, result in enumerate(results):
            assert not isinstance(result, Raised), f"rank {rank}: {result.stack}"
        return results

    def outcomes(
        self, body: Callable[..., Any], *args: Any, gone: Collection[int] = ()
    ) -> list[Any]:
        """As `run`, but ranks may raise; those `gone` do not answer, which gives None."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send((body, args))
        deadline = time.monotonic() + self._patience
        results = []
        for rank, pipe in enumerate(self._pipes):
            if rank in gone:
                results.append(None)
                continue
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"rank {rank} did not answer in {self._patience} s")
            results.append(pipe.recv())
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(30)


def _serve(pipe: Connection, rank: int, ranks: int, rendezvous: str, timeout: float) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )
    while True:
        try:
            body, args = pipe.recv()
        except EOFError:
            return
        begin = time.monotonic()
        try:
            pipe.send(body(*args))
        except BaseException as error:
            after = time.monotonic() - begin
            pipe.send(Raised(type(error).__name__, str(error), traceback.format_exc(), after))
