"""Step boards over process groups: every rank has one, or none has, and nothing is left behind."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from kvburst import KVBurstError, StepBoard
from kvburst.agreement import board_group
from kvburst.agreement.board_group import BoardConnection, connect_board, host_identity

pytestmark = pytest.mark.slow

SHARED_MEMORY = Path("/dev/shm")
GROUP_TIMEOUT = timedelta(seconds=60)

Body = Callable[[int, Connection], None]


def run_rank(body: Body, rank: int, ranks: int, rendezvous: str, pipe: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=GROUP_TIMEOUT,
    )
    body(rank, pipe)
    dist.destroy_process_group()


@contextmanager
def ranks_of(
    count: int, body: Body, folder: Path
) -> Iterator[list[tuple[SpawnProcess, Connection]]]:
    """Processes of one gloo group, each with a pipe to it. They end with the context."""
    context = multiprocessing.get_context("spawn")
    ranks: list[tuple[SpawnProcess, Connection]] = []
    try:
        for rank in range(count):
            pipe, theirs = context.Pipe()
            arguments = (body, rank, count, str(folder / "rendezvous"), theirs)
            process = context.Process(target=run_rank, args=arguments)
            process.start()
            theirs.close()
            ranks.append((process, pipe))
        yield ranks
    finally:
        for process, pipe in ranks:
            process.kill()
            process.join()
            pipe.close()


def hear(pipe: Connection) -> Any:
    assert pipe.poll(120), "the rank said nothing for two minutes"
    return pipe.recv()


def segments_of(pid: int) -> set[str]:
    """Names of the segments that the process has open, those whose name is gone included."""
    names = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        target = ""
        with suppress(FileNotFoundError):  # closed meanwhile
            target = os.readlink(file)
        if target.startswith("/dev/shm/kvburst-"):
            names.add(target.removeprefix("/dev/shm/"))
    return names


# --- set-up --------------------------------------------------------------------------------


def rounds_of(connection: BoardConnection, steps: int) -> list[list[int]]:
    board = connection.board
    assert board is not None, connection.reason
    seen = []
    for step in range(steps):
        board.publish([step * (board.rank + 1), -board.rank])
        seen.append(board.read())
    return seen


def set_up_in_turn(rank: int, pipe: Connection) -> None:
    """Each of these on three ranks, one after the other."""
    # A whole group.
    whole = connect_board(values=2, timeout=60)
    pipe.send((rounds_of(whole, 5), segments_of(os.getpid())))
    # A part of it. Ranks of a group are in ascending order, however they are given.
    some = dist.new_group([2, 1])
    if rank > 0:
        pair = connect_board(some, values=2, timeout=60)
        assert pair.board is not None
        pipe.send((pair.board.rank, rounds_of(pair, 5)))
        pair.board.close()
    else:
        with pytest.raises(KVBurstError) as caught:
            connect_board(some, values=2, timeout=60)
        pipe.send(str(caught.value))
    # A rank that is somewhere else.
    moved = patch.object(board_group, "host_identity", return_value="elsewhere")
    with moved if rank == 1 else nullcontext():
        pipe.send(connect_board(values=2, timeout=60))
    # Ranks that do not mean the same board, and a first one that can have none.
    pipe.send(connect_board(values=2 + rank % 2, timeout=60))
    pipe.send(connect_board(values=2 if rank else 32, timeout=60))
    # The first board is still there, and nothing else is.
    pipe.send((rounds_of(whole, 2), len(segments_of(os.getpid()))))


def test_every_rank_has_the_board_or_none_has_and_all_know_why(tmp_path: Path) -> None:
    with ranks_of(3, set_up_in_turn, tmp_path) as ranks:
        pipes = [pipe for _, pipe in ranks]
        for pipe in pipes:
            rounds, segments = hear(pipe)
            assert rounds == [[0, -2], [1, -2], [2, -2], [3, -2], [4, -2]]
            # Open still, and its name is gone.
            (name,) = segments
            assert name.endswith(" (deleted)")

        assert "group: rank 0 of the world is not one of its ranks" in hear(pipes[0])
        assert [hear(pipe) for pipe in pipes[1:]] == [
            (0, [[step, -1] for step in range(5)]),
            (1, [[step, -1] for step in range(5)]),
        ]

        elsewhere = [hear(pipe) for pipe in pipes]
        assert [connection.board for connection in elsewhere] == [None] * 3
        (reason,) = {connection.reason for connection in elsewhere}
        assert "rank 1: shares no memory with rank 0: it is on elsewhere, rank 0 on " in reason

        (reason,) = {hear(pipe).reason for pipe in pipes}
        assert "rank 1: /dev/shm/kvburst-" in reason
        assert "its number of values is 2, and not 3" in reason

        (reason,) = {hear(pipe).reason for pipe in pipes}
        assert reason == "rank 0: values: 32 must be from 1 to 31"

        for pipe in pipes:
            assert hear(pipe) == ([[0, -2], [1, -2]], 1)


# --- killed while setting up ---------------------------------------------------------------


def connect_but_for_the_last(rank: int, pipe: Connection) -> None:
    """Ranks that wait for one that does not come, and say what they were told."""
    if rank == dist.get_world_size() - 1:
        pipe.send("stays away")
        pipe.recv()
    try:
        connect_board(values=1, timeout=60)
        pipe.send("connected")
    except RuntimeError as error:
        pipe.send(str(error))
    pipe.recv()


def wait_for_segment(pid: int) -> str:
    while not (found := segments_of(pid)):
        time.sleep(0.005)
    return found.pop()


def test_rank_killed_while_a_board_is_set_up_leaves_nothing_behind(tmp_path: Path) -> None:
    with ranks_of(2, connect_but_for_the_last, tmp_path) as ((first, first_pipe), (last, pipe)):
        assert hear(pipe) == "stays away"
        assert first.pid is not None
        name = wait_for_segment(first.pid)
        last.kill()
        # Whatever gloo says.
        assert hear(first_pipe) != "connected"
        assert not (SHARED_MEMORY / name).exists()
        assert not segments_of(first.pid)


def test_first_rank_killed_while_a_board_is_set_up_is_swept_at_the_next_start(
    tmp_path: Path,
) -> None:
    with ranks_of(2, connect_but_for_the_last, tmp_path) as ((first, _), (_, pipe)):
        assert hear(pipe) == "stays away"
        assert first.pid is not None
        name = wait_for_segment(first.pid)
        os.kill(first.pid, signal.SIGKILL)
        first.join()
    folder = tmp_path / "next"
    folder.mkdir()
    with ranks_of(1, connect_alone, folder) as ((_, pipe),):
        assert hear(pipe) == [[0]]
    assert not (SHARED_MEMORY / name).exists()


def connect_alone(_rank: int, pipe: Connection) -> None:
    board = connect_board(values=1, timeout=60).board
    assert isinstance(board, StepBoard)
    board.publish([0])
    pipe.send([board.read()])


# --- where a process is --------------------------------------------------------------------


def test_processes_that_share_no_memory_differ_in_their_host(tmp_path: Path) -> None:
    def machine(name: str, boot: str) -> Path:
        root = tmp_path / name
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        (root / "proc/sys/kernel/random/boot_id").write_text(boot + "\n")
        (root / "dev").mkdir()
        (root / "dev/shm").symlink_to("/dev/shm" if name != "other mount" else "/proc")
        return root

    here = host_identity(machine("here", "boot 1"))
    assert host_identity(machine("again", "boot 1")) == here
    assert host_identity(machine("other boot", "boot 2")) != here
    assert host_identity(machine("other mount", "boot 1")) != here
    assert host_identity() == host_identity()
