"""A channel whose broadcasts a flight recorder sees."""

from collections.abc import Sequence

import torch

from kvburst._core import Stream
from kvburst.exchange.channel import Channel, Pending
from kvburst.timeline import EXCHANGE, FlightRecorder


class WatchedChannel:
    """A `Channel` that leaves a span of the calling thread for every broadcast: all of it, or its
    enqueueing where the channel is one that only enqueues."""

    def __init__(self, channel: Channel, recorder: FlightRecorder) -> None:
        self._channel = channel
        self._recorder = recorder

    @property
    def rank(self) -> int:
        return self._channel.rank

    @property
    def ranks(self) -> int:
        return self._channel.ranks

    @property
    def on_stream(self) -> bool:
        return self._channel.on_stream

    @property
    def numbers_apart(self) -> bool:
        return self._channel.numbers_apart

    def staging(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return self._channel.staging(nbytes, device)

    def broadcast(self, staged: torch.Tensor, source: int, stream: Stream) -> None:
        to_or_from = "to all" if source == self.rank else f"from rank {source}"
        with self._recorder.on_thread(EXCHANGE, to_or_from, source=source, bytes=staged.numel()):
            self._channel.broadcast(staged, source, stream)

    def minimum(self, values: Sequence[int]) -> Pending:
        return self._channel.minimum(values)
