"""One agreement a scheduler step: how many acks every rank retires now."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from time import perf_counter_ns
from typing import Literal, NamedTuple

from kvburst._core import KVBurstError
from kvburst.agreement.counters import ReadyCounter
from kvburst.agreement.errors import AgreementError, Failure, first_line
from kvburst.agreement.groups import Peers, minority, ranks_by_value
from kvburst.agreement.stages import Stages
from kvburst.agreement.transports import Transport

_logger = logging.getLogger("kvburst")

_MAX = (1 << 63) - 1

# Values behind the counts: whether all is well, then step and digest, each with its negative: the
# MIN of a negative is the negative of the MAX.
_VALUES_BEHIND = 5
_FAILED, _WELL, _NO_ROUND = 0, 1, 2


def payload_length(counters: int) -> int:
    """Values of a round for so many counters: the same at every step, whatever is pending."""
    return counters + _VALUES_BEHIND


@dataclass(frozen=True)
class AgreementStats:
    """What the agreement took so far, on this rank."""

    steps: int
    """Calls of `collect`."""
    rounds: int
    """Rounds that this rank took part in, the forced ones among them."""
    skips: int
    """Rounds left out because nothing was outstanding."""
    forced: int
    """Rounds that took place although nothing was: after so many skips."""
    spent_us: float
    """Microseconds of the scheduler thread, in `collect` and `issue`."""


@dataclass(frozen=True)
class AgreementStep:
    """One call that took part in a round, on this rank. Nanoseconds of ``time.perf_counter_ns``."""

    call: Literal["collect", "issue"]
    step: int
    begin_ns: int
    end_ns: int
    taken: tuple[int, ...] = ()
    """What ``collect`` returned."""


class _Round(NamedTuple):
    """What this rank knew when the round began."""

    step: int
    digest: int
    failures: tuple[Failure, ...] = ()
    problems: tuple[str, ...] = ()
    """What else is wrong on this rank."""


class AckReducer:
    """Agrees on how many entries of each queue all ranks take, once a scheduler step.

        counts = reducer.collect()  # how many to take of each queue; every rank gets the same
        ...                         # take exactly those
        reducer.issue()             # count what is left

    Counting after taking matters: what was just taken must not be reported again. Over a transport
    that lags, `collect` consumes the round that `issue` began a step ago; over one that blocks, it
    does the whole round and `issue` does nothing. Every rank calls both at every step, and `reset`
    at the same steps. Belongs to the scheduler thread, and not to a child that its process forks.

    counters: the queues. How many there are fixes the length of a round.
    transport: of `payload_length(len(counters))` values, over the ranks of this stage.
    peers: the same ranks; asked only when something is wrong.
    stages: pipeline stages, if there are several. The first one agrees, the others get its numbers,
        wait for their own copies and make sure, among themselves, that none failed.
    digest: a number that is the same on every rank unless their state differs, of 64 bits but the
        lowest. It travels with each round and is compared as it was when the round began.
    idle: says that nothing is outstanding on any rank, from what is the same on every rank and
        nothing else (queue lengths, whether storage is attached; never what is ready here). There
        is then no round. None: a round at every step.
    force_every: skipped rounds in a row after which one takes place all the same.
    log_every: steps between lines in the log that say what the agreement took; 0: none.
    tell: told of every call that took part in a round, when it is over.

    One rank's failed burst, or a digest that differs, is everyone's: `collect` raises the same
    AgreementError on every rank before anything is taken. On later pipeline stages it concerns the
    ranks of that stage; what the first stage raises, all do.
    """

    def __init__(
        self,
        counters: Sequence[ReadyCounter],
        transport: Transport,
        peers: Peers,
        *,
        stages: Stages | None = None,
        digest: Callable[[], int] = lambda: 0,
        idle: Callable[[], bool] | None = None,
        force_every: int = 100,
        log_every: int = 0,
        tell: Callable[[AgreementStep], None] | None = None,
    ) -> None:
        if force_every < 1:
            raise KVBurstError(f"force_every: {force_every} skipped rounds must be at least 1")
        if log_every < 0:
            raise KVBurstError(f"log_every: {log_every} steps must be at least 0")
        self._counters = tuple(counters)
        self._transport = transport
        self._peers = peers
        self._stages = stages
        self._follows = stages is not None and not stages.leads
        self._digest = digest
        self._idle = idle
        self._force_every = force_every
        self._log_every = log_every
        self._tell = tell
        self._round: _Round | None = None
        self._process = os.getpid()
        self._skipped = 0
        self._steps = self._rounds = self._skips = self._forced = 0
        self._spent_ns = self._logged_ns = 0

    @property
    def transport(self) -> Transport:
        return self._transport

    @property
    def rounds(self) -> int:
        """Those that this rank took part in so far."""
        return self._rounds

    def collect(self) -> list[int]:
        """How many of each queue every rank takes now; the caller takes exactly those.

        Raises AgreementError where the ranks cannot go on alike, or one is missing.
        """
        begin = perf_counter_ns()
        self._check_process()
        self._steps += 1
        if self._transport.lag == 0:
            self._begin()
        takes_part = self._follows or self._round is not None
        counts: list[int] = []
        try:
            counts = self._follow() if self._follows else self._agree()
            return counts
        finally:
            end = perf_counter_ns()
            self._spent_ns += end - begin
            if self._tell is not None and takes_part:
                self._tell(AgreementStep("collect", self._steps, begin, end, tuple(counts)))
            self._log()

    def issue(self) -> None:
        """Count what is left, after what `collect` returned has been taken."""
        begin = perf_counter_ns()
        self._check_process()
        if self._transport.lag > 0:
            self._begin()
        end = perf_counter_ns()
        self._spent_ns += end - begin
        if self._tell is not None and self._transport.lag > 0 and self._round is not None:
            self._tell(AgreementStep("issue", self._steps, begin, end))

    def reset(self) -> None:
        """Consume what is in flight, whatever it says, and count from here. On every rank alike."""
        self._check_process()
        in_flight, self._round = self._round, None
        if in_flight is not None and not self._follows:
            self._transport.collect()
        for counter in self._counters:
            counter.reset()
        self._skipped = 0

    def hand_over(self) -> None:
        """Block until the next pipeline stage has the last numbers, at most its group's timeout.

        A rank that leaves without that may take them with it.
        """
        if self._stages is not None:
            self._stages.hand_over()

    def close(self) -> None:
        """End taking part, on every rank at the same point; later stages get the last numbers."""
        self._round = None
        try:
            self.hand_over()
        finally:
            self._transport.close()

    def stats(self) -> AgreementStats:
        return AgreementStats(
            self._steps, self._rounds, self._skips, self._forced, self._spent_ns / 1000
        )

    def _check_process(self) -> None:
        # The threads of a process group are not there in a forked child: it would wait for ever.
        if os.getpid() != self._process:
            raise KVBurstError(
                f"agreement: it belongs to process {self._process}, and not to process "
                f"{os.getpid()} that was forked from it"
            )

    # --- a round ---------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._round is not None:
            raise KVBurstError("issue: a round is in flight already, `collect` it first")
        if not self._follows and not self._is_due():
            return
        digest = index(self._digest())
        if not -_MAX <= digest <= _MAX:
            raise KVBurstError(f"digest: {digest} must be {-_MAX} to {_MAX}")
        # A follower's numbers go nowhere, but its counters must look when the leader's do.
        reports = [counter.report(self._peers.rank) for counter in self._counters]
        failures = tuple(one for report in reports for one in report.failures)
        current = _Round(self._steps, digest, failures)
        if not self._follows:
            self._issue([report.number for report in reports], current)
        self._round = current

    def _is_due(self) -> bool:
        if self._idle is None or not self._idle():
            self._skipped = 0
            return True
        if self._skipped < self._force_every:
            self._skipped += 1
            self._skips += 1
            return False
        self._skipped = 0
        self._forced += 1
        return True

    def _issue(self, counts: Sequence[int], current: _Round) -> None:
        self._rounds += 1
        ok = _FAILED if current.failures or current.problems else _WELL
        step, digest = current.step, current.digest
        self._transport.issue([*counts, ok, step, -step, digest, -digest])

    def _agree(self) -> list[int]:
        """One stage, or the first of several."""
        current, self._round = self._round, None
        values = None if current is None else self._transport.collect()
        if self._stages is not None:
            self._stages.forward(self._no_round() if values is None else values)
        if current is None or values is None:
            return [0] * len(self._counters)
        if not self._is_well(values):
            error = self._everyones_error(current)
            if self._stages is not None:
                self._stages.tell(str(error), error.ranks, error.failures)
            raise error
        counts = self._due(values)
        for counter, count in zip(self._counters, counts, strict=True):
            if count and count > counter.waiting():
                raise AgreementError(
                    f"step {self._steps}: every rank has {count} of '{counter.name}' to take, this "
                    f"one has {counter.waiting()} left: some were taken by other means, untold",
                    ranks=[self._peers.rank],
                )
        return self._taken(counts)

    def _no_round(self) -> list[int]:
        values = [0] * payload_length(len(self._counters))
        values[len(self._counters)] = _NO_ROUND
        return values

    def _is_well(self, values: Sequence[int]) -> bool:
        ok, step, minus_step, digest, minus_digest = values[len(self._counters) :]
        return ok != _FAILED and step == -minus_step and digest == -minus_digest

    def _due(self, values: Sequence[int]) -> list[int]:
        return [counter.due(values[place]) for place, counter in enumerate(self._counters)]

    def _taken(self, counts: list[int]) -> list[int]:
        for counter, count in zip(self._counters, counts, strict=True):
            counter.take(count)
        return counts

    # --- a later pipeline stage ------------------------------------------------------------

    def _follow(self) -> list[int]:
        assert self._stages is not None, "only a stage follows"
        current, self._round = self._round, None
        values = self._stages.receive()
        if values[len(self._counters)] == _NO_ROUND:
            return [0] * len(self._counters)
        if not self._is_well(values):
            message, ranks, failures = self._stages.hear()
            raise AgreementError(message, ranks=ranks, failures=failures)
        counts = self._due(values)
        if any(counts):
            digest = -values[-1]
            self._agree_to_follow(counts, digest, digest if current is None else current.digest)
        return self._taken(counts)

    def _agree_to_follow(self, counts: Sequence[int], leaders_digest: int, digest: int) -> None:
        """Wait until all that the leader takes is there, on every rank of this stage, or raise."""
        problems = [
            f"the first pipeline stage takes {count} of '{counter.name}', and {counter.waiting()} "
            "are there"
            for counter, count in zip(self._counters, counts, strict=True)
            if count > counter.waiting() and not counter.fills_late
        ]
        if digest != leaders_digest:
            problems.append(
                f"the digest is {digest}, that of the first pipeline stage {leaders_digest}"
            )
        if not problems:
            for counter, count in zip(self._counters, counts, strict=True):
                counter.wait(count)
        reports = [counter.report(self._peers.rank) for counter in self._counters]
        failures = tuple(one for report in reports for one in report.failures)
        mine = _Round(self._steps, leaders_digest, failures, tuple(problems))
        self._issue(counts, mine)
        if not self._is_well(self._transport.collect()):
            raise self._everyones_error(mine)

    # --- errors ----------------------------------------------------------------------------

    def _everyones_error(self, current: _Round) -> AgreementError:
        """What went wrong, put the same on every rank of the stage: they all ask."""
        try:
            said = self._peers.exchange(current)
        except RuntimeError as error:
            here = [*(one.text for one in current.failures), *current.problems]
            raise AgreementError(
                f"step {current.step}: some rank cannot go on, and asking which one failed: "
                f"{first_line(error)}; on rank {self._peers.rank}, "
                f"{'; '.join(here) or 'nothing is wrong'}",
                failures=current.failures,
            ) from error
        for counter in self._counters:
            counter.reported([one for one in current.failures if one.counter == counter.name])
        failures = tuple(one for their in said.values() for one in their.failures)
        reasons = []
        ranks = set()
        for rank, their in said.items():
            wrong = [*(one.text for one in their.failures), *their.problems]
            reasons += [f"on rank {rank}, {text}" for text in wrong]
            ranks.update([rank] if wrong else [])
        for what, found in (
            ("the ranks are out of step", {rank: their.step for rank, their in said.items()}),
            ("the digest differs", {rank: their.digest for rank, their in said.items()}),
        ):
            if len(set(found.values())) > 1:
                reasons.append(f"{what}: {ranks_by_value(found)}")
                ranks.update(minority(found))
        return AgreementError(
            f"step {min(their.step for their in said.values())}: {'; '.join(reasons)}; nothing "
            "was retired",
            ranks=sorted(ranks),
            failures=failures,
        )

    def _log(self) -> None:
        if self._log_every == 0 or self._steps % self._log_every != 0:
            return
        spent_us = (self._spent_ns - self._logged_ns) / 1000 / self._log_every
        self._logged_ns = self._spent_ns
        _logger.info(
            "agreement, %s: %.1f us a step; %d steps, %d rounds, %d skipped, %d forced",
            self._transport.name,
            spent_us,
            self._steps,
            self._rounds,
            self._skips,
            self._forced,
        )
