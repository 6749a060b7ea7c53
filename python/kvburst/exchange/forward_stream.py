"""The default order: a layer is exchanged where the forward waits for it, and on its stream."""

from collections.abc import Sequence

from kvburst._core import BurstError, Stream
from kvburst.exchange.exchange import Exchange
from kvburst.exchange.load import ExchangedLoad


class ForwardStreamExchange(Exchange):
    """Enqueued by the thread that launches the forward, on the forward's own stream.

    `wait(l)` first enqueues every unsent layer up to `l`, once and in order, on the stream that
    `set_consumer` found current; another stream that waits is ordered behind that one. What a
    forward leaves is sent when the next consumer is set, when the load's gate slot is needed, and
    by `flush`: all of them calls that every rank makes alike.
    """

    # Of all exchanges: the forward's, from `set_consumer` on. And the load it waits for.
    _stream: Stream | None = None
    _consumer = -1

    def _begun(self, load: ExchangedLoad) -> None:
        pass

    def set_consumer(self, burst: int) -> None:
        with self._lock:
            self._flush([load for load in self._loads.values() if load.id <= self._consumer])
            before, self._stream = self._stream, self.device.current_stream()
            if before is not None and before.handle != self._stream.handle:
                # One stream of exchanges, whichever carries it.
                self._stream.wait_stream(before)
            self._consumer = burst
            self._flush([load for load in self._loads.values() if load.id < burst])

    def consume(self, burst: int) -> None:
        with self._lock:
            if burst != self._consumer:
                self.set_consumer(burst)

    def _wait(self, load: ExchangedLoad, layer: int, stream: Stream) -> None:
        if load.id != self._consumer or self._stream is None:
            raise BurstError(
                f"load {load.id}: no forward consumes it (the consumer is {self._consumer}), call "
                "set_consumer on the forward's stream first"
            )
        self._send_through(load, layer, self._stream)
        if load.burst.error is not None:
            # Whoever is told ends its forward here. The other ranks go on to ask for the rest.
            self._send_through(load, self.num_layers - 1, self._stream)
        if stream.handle != self._stream.handle:
            # Such as that of an indexer, which writes its keys beside the forward.
            stream.wait_stream(self._stream)
        if load.all_sent and not self.channel.on_stream:
            load.synchronize()

    def _send_through(self, load: ExchangedLoad, last: int, stream: Stream) -> None:
        if load.all_sent or load.given_up or load.next_layer > last:
            return
        if load.next_layer == 0:
            self._agree(load)
            self._order_behind_fences(load, stream)
        while load.next_layer <= last and not load.given_up:
            self._send_layer(load, load.next_layer, stream)
        if load.next_layer == self.num_layers or load.given_up:
            self._finish(load, stream)

    def _flush(self, loads: Sequence[ExchangedLoad]) -> None:
        for load in loads:
            if self._stream is None:  # The first forward's must be behind it.
                self._stream = self.device.current_stream()
            self._send_through(load, self.num_layers - 1, self._stream)
