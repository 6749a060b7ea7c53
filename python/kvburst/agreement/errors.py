"""What every rank is told when ranks cannot agree."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvburst._core import KVBurstError


def first_line(error: RuntimeError) -> str:
    """What torch says went wrong; its stack comes behind."""
    return str(error).partition("\n")[0]


@dataclass(frozen=True)
class Failure:
    """A burst that failed on one rank, as all ranks come to know of it."""

    rank: int
    """Of the default process group."""
    counter: str
    position: int
    """The ack's place in its queue, counted from the last reset; the first is 0."""
    text: str


class AgreementError(KVBurstError):
    """Ranks cannot go on alike. Raised before anything is retired.

    `failures`: bursts that failed on some rank; every rank gets the same ones, and the same text.
    Each is raised once: the ranks agree on, and retire those acks, if polled again.
    `ranks`: those that failed, that differ from most, or that are missing, where that is known.
    """

    def __init__(
        self, message: str, *, ranks: Sequence[int] = (), failures: Sequence[Failure] = ()
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.failures = tuple(failures)
