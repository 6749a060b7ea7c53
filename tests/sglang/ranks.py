"""Processes that run the released SGLang, one a rank, in which tests call functions.

SGLang takes its plugins once a process, from the environment it was started with, so every set of
switches has processes of its own. They start once and serve many tests. What is called in them is
named, as "module.function", since its module needs SGLang; it gets the rank's `Context` first.
"""

import contextlib
import faulthandler
import importlib
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from on_cpu import StockCopies
    from torch.distributed import ProcessGroup

HERE = Path(__file__).parent
START_SECONDS = 300
SWITCHES = ("KVBURST", "SGLANG_")


@dataclass(frozen=True)
class Context:
    """What a rank knows of itself."""

    rank: int
    world: int
    group: "ProcessGroup | None"
    copies: "StockCopies"
    """Calls of SGLang's own copies in this process."""


class RankError(AssertionError):
    """What went wrong in a rank, with its traceback, or how it ended."""


class Ranks:
    """`world` processes with `switches` in their environment. The first call starts them."""

    def __init__(self, world: int, switches: Mapping[str, str], *, plugin: bool = True) -> None:
        self.world = world
        self._switches = dict(switches)
        self._plugin = plugin
        self._folder = tempfile.TemporaryDirectory(prefix="kvburst_ranks_")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []

    def call(
        self, function: str, *arguments: object, seconds: float = 120, **named: object
    ) -> list[Any]:
        """The result of each rank. An error in one ends all of them; a later call starts anew."""
        if not self._processes:
            self._start()
        request = (function, arguments, named, seconds)
        for connection in self._connections:
            connection.send(request)
        return self._answers(function, seconds)

    def call_losing(
        self, lost: int, function: str, *arguments: object, seconds: float = 120
    ) -> dict[int, Any]:
        """The results of all ranks but `lost`, which ends in the call. A later call starts anew."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, arguments, {}, seconds))
        answers = self._collect(function, seconds, lost)
        self._end()
        return answers

    def log(self) -> str:
        """What the ranks have printed so far."""
        files = sorted(Path(self._folder.name).glob("rank*.log"))
        return "".join(file.read_text(errors="replace") for file in files)

    def close(self) -> None:
        self._end()
        self._folder.cleanup()

    def _start(self) -> None:
        (Path(self._folder.name) / "meeting").unlink(missing_ok=True)
        outside = {
            name: value for name, value in os.environ.items() if not name.startswith(SWITCHES)
        }
        path = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = outside | {
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "SGLANG_PLUGINS": "kvburst" if self._plugin else "none",
            **self._switches,
        }
        for rank in range(self.world):
            ours, theirs = Pipe()
            with open(Path(self._folder.name) / f"rank{rank}.log", "ab") as log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        __file__,
                        str(theirs.fileno()),
                        str(rank),
                        str(self.world),
                        self._folder.name,
                    ],
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._answers("starting", START_SECONDS)

    def _answers(self, what: str, seconds: float) -> list[Any]:
        answers = self._collect(what, seconds)
        return [answers[rank] for rank in range(self.world)]

    def _collect(self, what: str, seconds: float, lost: int | None = None) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        expected = set(range(self.world)) - {lost}
        deadline = time.monotonic() + seconds + 5  # The rank prints its stacks first.
        while len(answers) < len(expected):
            waiting = [self._connections[rank] for rank in expected - set(answers)]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"{what}: no answer within {seconds} s")
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    succeeded, value = self._connections[rank].recv()
                except EOFError:
                    status = self._processes[rank].wait(10)
                    self._fail(f"{what}: rank {rank} ended with status {status}")
                if not succeeded:
                    self._fail(f"{what}: in rank {rank} of {self.world}:\n{value}")
                answers[rank] = value
        return answers

    def _fail(self, message: str) -> None:
        self._end()
        raise RankError(f"{message}\n--- what the ranks printed\n{self.log()[-6000:]}")

    def _end(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._connections = [], []


# --- in the processes ----------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    descriptor, rank, world = map(int, arguments[:3])
    connection = Connection(descriptor)
    try:
        context = _prepare(rank, world, Path(arguments[3]))
        connection.send((True, None))
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise
    with contextlib.suppress(EOFError):
        while True:
            _serve(connection, context)


def _prepare(rank: int, world: int, folder: Path) -> Context:
    import torch
    import torch.distributed as dist

    logging.basicConfig(level=logging.INFO, format=f"[rank {rank}] %(name)s: %(message)s")
    torch.set_num_threads(1)
    group = None
    if world > 1:
        meeting = f"file://{folder / 'meeting'}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
        group = dist.new_group(list(range(world)), backend="gloo")
    import on_cpu
    from sglang.srt.plugins import load_plugins

    copies = on_cpu.prepare()
    load_plugins()
    return Context(rank, world, group, copies)


def _serve(connection: Connection, context: Context) -> None:
    function, arguments, named, seconds = connection.recv()
    module, _, name = function.rpartition(".")
    faulthandler.dump_traceback_later(seconds, file=sys.stderr)
    try:
        call = getattr(importlib.import_module(module), name)
        answer = (True, call(context, *arguments, **named))
    except BaseException:
        answer = (False, traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    connection.send(answer)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
