"""One load or backup of SGLang's, as the bursts that carry it out."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from kvburst._core import Burst, BurstError, LayerGate, Stream
from kvburst.exchange.exchange import Exchange
from kvburst.exchange.load import ExchangedLoad
from kvburst.sglang_plugin.devices import TransferDevice, stream_of, torch_stream
from kvburst.sglang_plugin.ranges import Ranges, no_range
from kvburst.sglang_plugin.status import Counters
from kvburst.stats import BurstStats

logger = logging.getLogger("kvburst")


@dataclass(frozen=True)
class Part:
    """One burst, and for a load where its layers are waited for."""

    burst: Burst
    gate: LayerGate | None = None
    last_layers: tuple[int | None, ...] = ()
    """By transfer layer, the layer of the gate that stands for all up to it."""
    exchange: Exchange | None = None
    """Where it is waited for instead, if other ranks keep some of its layers."""
    exchanged: ExchangedLoad | None = None

    @property
    def moved(self) -> Burst | ExchangedLoad:
        """What has all of it in place when it is done."""
        return self.burst if self.exchanged is None else self.exchanged

    def elapsed_ms(self, end: "Part") -> float:
        """From the first copy of this one to all of `end`."""
        if self.exchanged is not None and end.exchanged is not None:
            return self.exchanged.start_event.elapsed_time(end.exchanged.finish_event)
        return self.burst.start_event.elapsed_time(end.burst.finish_event)

    def wait_for_layer(self, layer: int, stream: Stream | None) -> None:
        """Order `stream` behind this transfer layer and all before it."""
        if self.exchange is not None:
            self.exchange.consume(self.burst.id)
            self.exchange.wait(self.burst.id, layer, stream)
        elif self.gate is not None:
            last = self.last_layers[layer]
            if last is not None:
                self.gate.wait(self.burst.id, last, stream)


class Operation:
    """What SGLang submits at once. Pools with pages of their own move in a burst of their own.

    SGLang has entered the nodes in its tree when it submits them, so a burst that fails cannot be
    taken back: whoever asks for it is raised a BurstError that names burst, layers and nodes, and
    a scheduler that is raised one ends. Belongs to any thread.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        device: TransferDevice,
        counters: Counters,
        kept: Sequence[torch.Tensor] = (),
        *,
        behind: Sequence[Burst | ExchangedLoad] = (),
        caller_us: float = 0.0,
        ranges: Ranges = no_range,
    ) -> None:
        self.parts = tuple(parts)
        # SGLang copies on one stream a direction: what is done there has all before it done too.
        self.bursts = (*behind, *(part.moved for part in self.parts))
        self._device = device
        self._counters = counters
        # Index tensors in device memory, which the issuer reads.
        self._kept = tuple(kept)
        self._reported = False
        # Microseconds of the scheduler thread that it took to submit it.
        self._caller_us = caller_us
        self._ranges = ranges

    def raise_if_failed(self) -> None:
        error = self.failure()
        if error is not None:
            raise BurstError(error)

    def failure(self) -> str | None:
        """Of its bursts, the first one's that has failed; the log has it by then."""
        for part in self.parts:
            error = part.moved.error
            if error is not None:
                self.failed(error)
                return error
        return None

    def stats(self) -> list[BurstStats]:
        """Of its bursts that have not failed, once all are done."""
        caller_us = self._caller_us / max(1, len(self.parts))
        return [
            BurstStats.of(part.burst, part.gate, caller_us, 0.0)
            for part in self.parts
            if part.moved.error is None
        ]

    def failed(self, error: str) -> None:
        """Say so, once."""
        if not self._reported:
            self._reported = True
            self._counters.failures += 1
            logger.error("%s; what it was to move is lost, this server has to stop", error)

    def wait_for_layer(self, layer: int) -> None:
        begin = perf_counter_ns()
        try:
            with self._ranges("wait for a layer"):
                for part in self.parts:
                    part.wait_for_layer(layer, self.consumer())
        except BurstError as error:
            self.failed(str(error))
            raise
        finally:
            self._counters.wait_us += (perf_counter_ns() - begin) / 1000

    def consumer(self) -> Stream | None:
        """The stream that this thread's work is on; None where torch has none."""
        return torch_stream(self._device)

    def stream_of(self, stream: Any) -> Stream | None:
        return stream_of(self._device, stream)


@dataclass(frozen=True)
class StartEvent:
    """Before the first copy of an operation."""

    operation: Operation

    def query(self) -> bool:
        reached = all(part.burst.start_event.query() for part in self.operation.parts)
        self.operation.raise_if_failed()
        return reached

    def synchronize(self) -> None:
        for part in self.operation.parts:
            part.burst.start_event.synchronize()
        self.operation.raise_if_failed()

    def elapsed_time(self, end: "FinishEvent") -> float:
        """Milliseconds from here to `end`, of the burst that took longest."""
        return max(
            (
                part.elapsed_ms(other)
                for part, other in zip(self.operation.parts, end.operation.parts, strict=True)
            ),
            default=0.0,
        )


@dataclass(frozen=True)
class FinishEvent:
    """Behind the last copy of an operation, and of those handed over before it.

    Raises BurstError once one of its own bursts has failed.
    """

    operation: Operation

    def reached(self) -> bool:
        """Whether it is done, or has failed."""
        return all(burst.finish_event.query() for burst in self.operation.bursts)

    def query(self) -> bool:
        reached = self.reached()
        # In this order: a burst that fails is done as well, and may do so just now.
        self.operation.raise_if_failed()
        return reached

    def synchronize(self) -> None:
        for burst in self.operation.bursts:
            burst.finish_event.synchronize()
        self.operation.raise_if_failed()

    def wait(self, stream: Any = None) -> None:
        """Order one of torch's streams behind it; where torch has none, block until it is."""
        operation = self.operation
        on = operation.consumer() if stream is None else operation.stream_of(stream)
        if on is None:
            self.synchronize()
            return
        for burst in operation.bursts:
            burst.finish_event.wait(on)
        operation.raise_if_failed()
