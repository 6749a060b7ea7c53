"""How ranks are to agree: the settings, and the reducer made of them on every rank alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvburst._core import KVBurstError
from kvburst.agreement.choice import choose_transport
from kvburst.agreement.counters import ReadyCounter
from kvburst.agreement.groups import AgreementGroups, require_same
from kvburst.agreement.reducer import AckReducer, AgreementStep, payload_length
from kvburst.agreement.stages import PipelineStages
from kvburst.agreement.transports import TransportName

_LONGEST_TIMEOUT = 1e9
"""Seconds; that of a board."""


@dataclass(frozen=True)
class Agreement:
    """Which ranks agree, and how; the same on every rank but for the groups.

    transport: "board", shared memory, where the ranks share a node; "pipelined", one collective,
        consumed a step later; "blocking", collectives that each step waits for. What the groups do
        not allow is replaced, and the log says so once.
    skip_idle: no round while nothing is outstanding.
    force_every: skipped rounds in a row after which one takes place all the same.
    digest: of the state that must not differ between ranks (`AckReducer`).
    log_every: steps between lines in the log that say what the agreement took; 0: none.
    timeout: seconds after which a rank that is alive and does not come is given up, on a board. The
        collectives have that of their groups.
    tell: told of every call that took part in a round; for a flight recorder.
    """

    groups: AgreementGroups
    transport: TransportName = "board"
    skip_idle: bool = False
    force_every: int = 100
    digest: Callable[[], int] = lambda: 0
    log_every: int = 0
    timeout: float = 300.0
    tell: Callable[[AgreementStep], None] | None = None

    def __post_init__(self) -> None:
        if self.transport not in ("blocking", "pipelined", "board"):
            raise KVBurstError(
                f"transport: {self.transport!r} must be 'blocking', 'pipelined' or 'board'"
            )
        if not 0 < self.timeout <= _LONGEST_TIMEOUT:
            raise KVBurstError(
                f"timeout: {self.timeout} seconds must be more than 0, and at most "
                f"{_LONGEST_TIMEOUT:.0e}"
            )

    def reducer(self, counters: Sequence[ReadyCounter], *, idle: Callable[[], bool]) -> AckReducer:
        """Every rank calls this at the same point, with counters of the same names; blocks.

        idle: for `skip_idle`, see `AckReducer`. Settings that differ between ranks are refused on
        all of them (AgreementError).
        """
        settings = {
            "counters": [counter.name for counter in counters],
            "transport": self.transport,
            "skip_idle": self.skip_idle,
            "force_every": self.force_every,
            "grid": self.groups.grid is not None,
        }
        require_same(self.groups.everyone(), "settings of the agreement", settings)
        values = payload_length(len(counters))
        stages = self.groups.stages
        return AckReducer(
            counters,
            choose_transport(self.transport, self.groups, values=values, timeout=self.timeout),
            self.groups.peers(),
            stages=None if stages is None else PipelineStages(stages, length=values),
            digest=self.digest,
            idle=idle if self.skip_idle else None,
            force_every=self.force_every,
            log_every=self.log_every,
            tell=self.tell,
        )
