"""The demo's stand-in for a model's forward: at each layer it waits for the layer's bytes, takes a
snapshot of them, which is what a real one would have read, and is busy for a while."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kvburst._core import ComputeDevice, Event, HostDevice, Stream
from kvburst.controller import BurstController
from kvburst.cuda import TierMemory
from kvburst.demo_result import Span
from kvburst.pools import Pool
from kvburst.timeline import SCHEDULER, FlightRecorder


@dataclass(frozen=True)
class ForwardEvents:
    """By layer: the forward came to it, its bytes were there, its work was done."""

    arrived: Sequence[Event]
    passed: Sequence[Event]
    done: Sequence[Event]

    @classmethod
    def of(cls, device: ComputeDevice, layers: int) -> "ForwardEvents":
        arrived, passed, done = ([device.new_event() for _ in range(layers)] for _ in range(3))
        return cls(arrived, passed, done)

    def stalls(self, origin: Event) -> tuple[Span, ...]:
        """The waits at the gate, once they are over; milliseconds from `origin`."""
        return _between(origin, self.arrived, self.passed)

    def layers(self, origin: Event) -> tuple[Span, ...]:
        return _between(origin, self.passed, self.done)


def _between(origin: Event, starts: Sequence[Event], ends: Sequence[Event]) -> tuple[Span, ...]:
    return tuple(
        Span(origin.elapsed_time(start), origin.elapsed_time(end))
        for start, end in zip(starts, ends, strict=True)
    )


class StandInForward:
    """Of ``layers`` layers over all pages of ``pools``. Holds the snapshots, as many bytes as the
    pools' device tiers, so nothing of it may still run when it is dropped."""

    def __init__(self, pools: Sequence[Pool], layers: int, memory: TierMemory) -> None:
        self.snapshots = tuple(
            memory.device(
                len(pool.device.layers) * pool.device.pages * pool.device.page_bytes
            ).view(len(pool.device.layers), pool.device.pages, pool.device.page_bytes)
            for pool in pools
        )
        """Of each pool: ``[layers, pages, page_bytes]``."""
        self._pools = pools
        self._layers = layers

    def launch(
        self,
        device: ComputeDevice,
        controller: BurstController,
        burst: int,
        stream: Stream,
        compute_ms: float,
        recorder: FlightRecorder | None = None,
    ) -> ForwardEvents:
        """Enqueues a forward that consumes a load, ``compute_ms`` a layer beside its snapshots.

        recorder: told how long this thread was in the wait for each layer, which is where ranks
            that share their host tier exchange it.
        """
        gate = controller.layer_done_counter
        events = ForwardEvents.of(device, self._layers)
        with stream:
            gate.set_consumer(burst)
            for layer in range(self._layers):
                events.arrived[layer].record()
                with _told(recorder, layer):
                    gate.wait_until(layer)
                events.passed[layer].record()
                self._take_snapshot(device, stream, layer)
                device.busy(stream, 1e3 * compute_ms)
                events.done[layer].record()
        return events

    def snapshots_ms(self, device: ComputeDevice) -> float:
        """Milliseconds that the snapshots of all layers take on a stream."""
        if isinstance(device, HostDevice) and device.link is not None:
            return 0.0  # only what crosses the link takes modelled time
        stream = device.new_stream()
        begin, end = device.new_event(), device.new_event()
        begin.record(stream)
        for layer in range(self._layers):
            self._take_snapshot(device, stream, layer)
        end.record(stream)
        end.synchronize()
        return begin.elapsed_time(end)

    def _take_snapshot(self, device: ComputeDevice, stream: Stream, layer: int) -> None:
        """Enqueues a copy of the layer, all its device pages, in every pool that has it."""
        for pool, snapshot in zip(self._pools, self.snapshots, strict=True):
            if layer in pool.device.layer_ids:
                position = pool.device.layer_ids.index(layer)
                target: torch.Tensor = snapshot[position]
                device.copy(
                    stream,
                    target.data_ptr(),
                    pool.device.layers[position].data_ptr(),
                    target.numel(),
                )


def _told(recorder: FlightRecorder | None, layer: int) -> AbstractContextManager[None]:
    if recorder is None:
        return nullcontext()
    return recorder.on_thread(SCHEDULER, f"wait_until({layer})", layer=layer)
