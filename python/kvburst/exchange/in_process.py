"""Ranks that are threads of one process: an exchange that is truly on streams.

What NCCL does on a GPU cannot be had without one, and gloo blocks the thread that calls it. Here a
broadcast is enqueued, occupies the streams of all ranks until each has come, and takes the time
that a modelled link charges. For benchmarks and tests; whatever is timed with it is simulated.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence

import torch

from kvburst._core import BurstError, HostDevice, MeetingPoint, Stream
from kvburst.links import ExchangeLink


class InProcessGroup:
    """Makes the channels of `ranks` ranks, each to be used by one thread at a time, on streams that
    no other rank uses: of a device of its own, or of one that they share.

    `link`: what a broadcast costs; None: nothing but the bytes' own time. `timeout`: seconds that
    a rank waits for the others' numbers. Streams held up by a rank that does not come go on when
    the group is closed.
    """

    def __init__(
        self,
        ranks: int,
        *,
        link: ExchangeLink | None = None,
        byte_scale: float = 1.0,
        timeout: float = 60.0,
    ) -> None:
        self.ranks = ranks
        self.link = link
        self.byte_scale = byte_scale
        self.timeout = timeout
        self.changed = threading.Condition()
        # By number, counted by each rank for itself: what is under way.
        self.meetings: defaultdict[int, _Meeting] = defaultdict(lambda: _Meeting(ranks))
        self.minima: defaultdict[int, list[Sequence[int]]] = defaultdict(list)
        self.staging: dict[int, torch.Tensor] = {}

    def channel(self, rank: int, device: HostDevice) -> "InProcessChannel":
        """The end of rank `rank`, whose streams are those of `device`."""
        return InProcessChannel(self, rank, device)

    def close(self) -> None:
        """Lets go of streams that wait for a rank; what they then copy is of no meaning."""
        with self.changed:
            self.meetings.clear()


class _Meeting:
    """One broadcast. Changed under the group's lock."""

    def __init__(self, ranks: int) -> None:
        self.joined = [MeetingPoint() for _ in range(ranks)]
        self.sent = MeetingPoint()
        self.copied = [MeetingPoint() for _ in range(ranks)]
        self.arrivals = 0


class InProcessChannel:
    """One rank's end; a `kvburst.exchange.Channel`."""

    on_stream = True
    numbers_apart = True

    def __init__(self, group: InProcessGroup, rank: int, device: HostDevice) -> None:
        self._group = group
        self._rank = rank
        self._device = device
        self._broadcasts = 0
        self._minima = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def ranks(self) -> int:
        return self._group.ranks

    def staging(self, nbytes: int, device: torch.device) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._group.staging[self._rank] = memory
        return memory

    def broadcast(self, staged: torch.Tensor, source: int, stream: Stream) -> None:
        group = self._group
        others = [rank for rank in range(group.ranks) if rank != source]
        with group.changed:
            meeting = group.meetings[self._broadcasts]
            if self._rank == source:
                for rank in others:
                    meeting.joined[rank].wait(stream)
                if group.link is not None:
                    charged = staged.numel() * group.byte_scale
                    self._device.busy(stream, group.link.microseconds(charged))
                meeting.sent.reach(stream)
                for rank in others:
                    meeting.copied[rank].wait(stream)
            else:
                meeting.joined[self._rank].reach(stream)
                meeting.sent.wait(stream)
                self._device.copy(
                    stream,
                    staged.data_ptr(),
                    group.staging[source].data_ptr(),
                    staged.numel() * staged.element_size(),
                )
                meeting.copied[self._rank].reach(stream)
            meeting.arrivals += 1
            if meeting.arrivals == group.ranks:
                del group.meetings[self._broadcasts]
            self._broadcasts += 1

    def minimum(self, values: Sequence[int]) -> "_Minimum":
        group = self._group
        with group.changed:
            gathered = group.minima[self._minima]
            gathered.append(tuple(values))
            if len(gathered) == group.ranks:
                del group.minima[self._minima]
                group.changed.notify_all()
            self._minima += 1
        return _Minimum(group, gathered)


class _Minimum:
    def __init__(self, group: InProcessGroup, gathered: list[Sequence[int]]) -> None:
        self._group = group
        self._gathered = gathered

    def done(self) -> bool:
        return len(self._gathered) == self._group.ranks

    def result(self) -> list[int]:
        with self._group.changed:
            if not self._group.changed.wait_for(self.done, self._group.timeout):
                raise BurstError(
                    f"agreement of the ranks: {len(self._gathered)} of {self._group.ranks} came "
                    f"within {self._group.timeout} s"
                )
        return [min(column) for column in zip(*self._gathered, strict=True)]
