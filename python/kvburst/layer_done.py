"""The gate as a forward sees it: SGLang's `LayerDoneCounter`, with burst ids for indices."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvburst._core import BurstEvent, Device, DeviceError, Stream

if TYPE_CHECKING:
    from kvburst.exchange.load import ExchangedEvent

    LoadEvent: TypeAlias = "BurstEvent | ExchangedEvent | ReachedEvent"


class LoadRecord(Protocol):
    """A load whose gate slot has not moved on."""

    @property
    def start_event(self) -> "BurstEvent | ExchangedEvent": ...
    @property
    def finish_event(self) -> "BurstEvent | ExchangedEvent": ...


class Gate(Protocol):
    """Where a layer is waited for: the native `LayerGate`, or an exchange in front of it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    def wait(self, burst: int, layer: int, stream: Stream | None = None) -> None: ...
    def wait_for_slot(self, burst: int) -> None: ...
    def find(self, burst: int) -> LoadRecord | None: ...


class ReachedEvent:
    """The event of a burst that was complete before its gate slot was handed on."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def elapsed_time(self, end: "LoadEvent") -> float:
        raise DeviceError("elapsed time: the burst's events have been handed on, ask its ack")


@dataclass(frozen=True)
class LayerLoadingEvent:
    """The layers of one load. A view: it names its burst and never sees a newer one's events."""

    burst: int
    _gate: Gate
    _device: Device

    def wait(self, layer_index: int, stream: Stream | None = None) -> None:
        """Order `stream` (default: the current one) behind the layer, every pool's part of it.

        Blocks the calling thread only while the layer has not been issued. Raises BurstError if the
        burst failed. A layer that no pool stores is there at once.
        """
        self._gate.wait(
            self.burst, layer_index, self._device.current_stream() if stream is None else stream
        )

    @property
    def start_event(self) -> "LoadEvent":
        record = self._gate.find(self.burst)
        return ReachedEvent() if record is None else record.start_event

    @property
    def finish_event(self) -> "LoadEvent":
        record = self._gate.find(self.burst)
        return ReachedEvent() if record is None else record.finish_event


@dataclass(frozen=True)
class LayerLoadingEvents:
    """`events[id]`: the layers of load `id`, for every id that `start_loading` has returned."""

    _gate: Gate
    _device: Device

    def __getitem__(self, burst: int) -> LayerLoadingEvent:
        return LayerLoadingEvent(burst, self._gate, self._device)


class LayerDoneCounter:
    """Which load a forward consumes, and the waits for its layers.

    Belongs to the scheduler thread, but for `wait_until` and the events, which any thread may use.
    """

    def __init__(self, gate: Gate, device: Device) -> None:
        self._gate = gate
        self.events = LayerLoadingEvents(gate, device)
        self.producer_index = -1
        """Id of the newest load; -1 before the first."""
        self.consumer_index = -1
        """Id of the load that `wait_until` waits for; negative: none."""
        self._next = 0

    @property
    def num_layers(self) -> int:
        """One more than the highest layer id of any pool."""
        return self._gate.num_layers

    @property
    def num_counters(self) -> int:
        """Loads that may be under way at a time: the gate's slots."""
        return self._gate.num_slots

    def update_producer(self) -> int:
        """The next load's id; blocks while the gate slot that it needs is still copying.

        Submitting the load is what uses it up: until then this is the same again.
        """
        self._gate.wait_for_slot(self._next)
        return self._next

    @property
    def next_id(self) -> int:
        """Of the load that is submitted next."""
        return self._next

    def submitted(self, burst: int) -> None:
        """Load `burst` is under way, and now the newest."""
        self.producer_index = burst
        self._next = burst + 1

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Order the current stream behind layer `threshold` of the consumed load, if any.

        Blocks while the layer has not been issued; raises BurstError if the load failed.
        """
        if self.consumer_index >= 0:
            self.events[self.consumer_index].wait(threshold)

    def reset(self) -> None:
        """Consume no load. Ids go on: none is used twice."""
        self.producer_index = -1
        self.consumer_index = -1
