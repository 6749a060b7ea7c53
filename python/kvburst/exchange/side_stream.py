"""The side-stream order, for comparison: all at once, on its own stream, then the forward."""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence

from kvburst._core import Stream
from kvburst.exchange.exchange import Exchange
from kvburst.exchange.load import ExchangedLoad


class SideStreamExchange(Exchange):
    """Every layer's exchange is enqueued at `start_loading`, on a stream and a group of its own.

    Its broadcasts and the forward's collectives would be in flight together, and could deadlock. So
    before the first kernel of the next forward its stream waits for every exchange submitted:
    `forward_gate`, which `set_consumer` passes through. Needs loads that are issued inline, behind
    the load fence; simpler for a forward that does not wait layer by layer, and without overlap.

    Where the channel blocks, a thread plays the stream; what ranks agree on must then travel over
    another group than what it broadcasts.
    """

    # Made by the first load; which one, the channel decides.
    _stream: Stream | None = None
    _thread: "_SideThread | None" = None

    def _begun(self, load: ExchangedLoad) -> None:
        if not load.given_up:
            self._agree(load)
        if not self.channel.on_stream:
            if self._thread is None:
                self._thread = _SideThread()
                weakref.finalize(self, self._thread.close)
            self._thread.submit(lambda: self._send_apart(load))
            return
        if self._stream is None:
            self._stream = self.device.new_stream()
        self._send(load, self._stream)
        self._finish(load, self._stream)

    def _send_apart(self, load: ExchangedLoad) -> None:
        """On the thread that plays the stream, whose end somebody may be waiting for."""
        try:
            self._send(load, self.device.current_stream())
        except Exception as error:
            self._die(load, f"load {load.id}: {error!r}")
            assert self._thread is not None
            self._thread.progressed()

    def _send(self, load: ExchangedLoad, stream: Stream) -> None:
        """On the thread that plays the stream, or on the one that enqueues."""
        if not load.given_up:
            self._order_behind_fences(load, stream)
        while load.next_layer < self.num_layers and not load.given_up:
            self._send_layer(load, load.next_layer, stream)
            if self.channel.on_stream:
                load.layer_events.append(stream.record_event())
            if self._thread is not None:
                self._thread.progressed()
        if self._thread is not None:
            self._thread.progressed()

    def set_consumer(self, burst: int) -> None:
        self.forward_gate(self.device.current_stream())

    def forward_gate(self, stream: Stream) -> None:
        """What is enqueued on `stream` next runs behind every exchange submitted so far."""
        with self._lock:
            loads = list(self._loads.values())
            self._flush(loads)
            for load in loads:
                if self.channel.on_stream:
                    stream.wait_event(load.finish)
                else:
                    load.synchronize()

    def _flush(self, loads: Sequence[ExchangedLoad]) -> None:
        """All has been sent, or will be; but what ranks agree on is this thread's to say."""
        for load in loads:
            self._await(load, self.num_layers - 1)
            if not load.finish_recorded:
                self._finish(load, self.device.current_stream())

    def _wait(self, load: ExchangedLoad, layer: int, stream: Stream) -> None:
        self._await(load, layer)
        if layer < len(load.layer_events):
            stream.wait_event(load.layer_events[layer])

    def _await(self, load: ExchangedLoad, layer: int) -> None:
        if self._thread is not None:
            self._thread.wait_for(lambda: load.next_layer > layer or load.given_up)


class _SideThread:
    """Runs what it is given, in order. Ends with the process, or when it is closed."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._progress = threading.Condition()
        threading.Thread(target=self._run, args=(self._work,), daemon=True).start()

    @staticmethod
    def _run(work: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
        while True:
            task = work.get()
            if task is None:
                return
            task()
            del task  # What it belongs to must not live for as long as there is nothing to do.

    def submit(self, task: Callable[[], None]) -> None:
        self._work.put(task)

    def progressed(self) -> None:
        with self._progress:
            self._progress.notify_all()

    def wait_for(self, reached: Callable[[], bool]) -> None:
        with self._progress:
            self._progress.wait_for(reached)

    def close(self) -> None:
        self._work.put(None)
