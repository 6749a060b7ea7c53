"""A step board over the ranks of a process group.

The group is used to set the board up, and never again: its name goes from the group's first rank
to the others, and all of them learn whether everybody could map it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from kvburst._core import KVBurstError, StepBoard

SHARED_MEMORY = "dev/shm"


@dataclass(frozen=True)
class BoardConnection:
    """The board, or why there is none: one of the two, and on every rank the same one.

    ``reason`` is the same text on every rank, and empty where there is a board.
    """

    board: StepBoard | None
    reason: str


@dataclass(frozen=True)
class _Offer:
    """What the first rank hands out. Without a board ``reason`` says why."""

    host: str = ""
    name: str = ""
    nonce: int = 0
    reason: str | None = None


def host_identity(root: Path = Path("/")) -> str:
    """The same for two processes that can share memory by name, and different otherwise.

    They run on one kernel, and ``/dev/shm`` is one file system to them: containers on one machine
    may each have their own. ``root`` is where ``proc`` and ``dev`` are looked for.
    """
    boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat(root / SHARED_MEMORY).st_dev}"


def connect_board(
    group: dist.ProcessGroup | None = None, *, values: int, timeout: float, lag: int = 1
) -> BoardConnection:
    """A board over the ranks of ``group``, in its order; on every rank or on none.

    Collective: every rank of the group must call it, with the same ``values`` (integers a round, 1
    to 31) and ``lag`` (rounds published before the oldest is read, 1 to 16), and it blocks until
    all have, for as long as the group's timeout. The group must exchange CPU objects (gloo).
    ``timeout``: seconds that a read of the board waits for a late rank.

    There is a board if every rank could map the segment; otherwise no rank has one, and all learn
    the reason of the first one that could not: another host or ``/dev/shm``, another user, no
    memory. The segment's name is gone when it returns. What a set-up whose ranks were killed has
    left is removed by the next. The caller closes the board.
    """
    rank = dist.get_rank(group)
    if rank < 0:
        raise KVBurstError(f"group: rank {dist.get_rank()} of the world is not one of its ranks")
    ranks = dist.get_world_size(group)
    board: StepBoard | None = None
    offer: _Offer | None = None
    if rank == 0:
        board, offer = _create(ranks, values, timeout, lag)
    try:
        offer = _handed_out(offer, group)
        refusal = offer.reason
        if refusal is None and rank > 0:
            board, refusal = _attach(offer, rank, ranks, values, timeout, lag)
        refusals: list[str | None] = [None] * ranks
        # Also the barrier behind which nobody needs the name.
        dist.all_gather_object(refusals, refusal, group=group)
    except BaseException:
        if board is not None:
            board.unlink()
            board.close()
        raise
    if board is not None:
        board.unlink()
    reason = next(
        (f"rank {rank}: {reason}" for rank, reason in enumerate(refusals) if reason is not None), ""
    )
    if reason and board is not None:
        board.close()
        board = None
    return BoardConnection(board, reason)


def _create(ranks: int, values: int, timeout: float, lag: int) -> tuple[StepBoard | None, _Offer]:
    try:
        StepBoard.sweep()
        host = host_identity()
        board = StepBoard.create(ranks=ranks, values=values, timeout=timeout, lag=lag)
    except (KVBurstError, OSError) as error:
        return None, _Offer(reason=str(error))
    return board, _Offer(host=host, name=board.name, nonce=board.nonce)


def _handed_out(offer: _Offer | None, group: dist.ProcessGroup | None) -> _Offer:
    """The first rank's offer, on every rank."""
    box: list[_Offer | None] = [offer]
    first = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(box, src=first, group=group)
    received = box[0]
    assert received is not None
    return received


def _attach(
    offer: _Offer, rank: int, ranks: int, values: int, timeout: float, lag: int
) -> tuple[StepBoard | None, str | None]:
    """The board, or why this rank cannot have it."""
    try:
        host = host_identity()
        if host != offer.host:
            return None, f"shares no memory with rank 0: it is on {host}, rank 0 on {offer.host}"
        board = StepBoard.attach(
            offer.name, offer.nonce, rank=rank, ranks=ranks, values=values, timeout=timeout, lag=lag
        )
    except (KVBurstError, OSError) as error:
        return None, str(error)
    return board, None
