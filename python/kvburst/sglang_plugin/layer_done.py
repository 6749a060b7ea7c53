"""The gate as SGLang's forwards see it: one rotation slot's layers."""

from collections.abc import Sequence
from typing import Any

from kvburst._core import LayerGroup
from kvburst.sglang_plugin.operations import FinishEvent, Operation


class BurstLayers:
    """Stands in an SGLang ``LayerDoneCounter`` for the ``LayerLoadingEvent`` of one slot.

    SGLang numbers slots, 0 to 2, and kvburst numbers bursts: here is which of them a slot means
    now. A load that SGLang copies itself goes to its own events, which are kept. The scheduler
    thread hands the slot on; any thread may wait.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self._operation: Operation | None = None

    # What SGLang uses.

    @property
    def start_event(self) -> Any:
        """Recorded by SGLang when it hands a load over."""
        return self._stock.start_event

    @property
    def finish_event(self) -> Any:
        if self._operation is None:
            return self._stock.finish_event
        return FinishEvent(self._operation)

    def complete(self, layer_index: int) -> None:
        """Called by SGLang's own copy loop behind each layer."""
        self._stock.complete(layer_index)

    def wait(self, layer_index: int) -> None:
        """Order the current stream behind this layer and all before it, every pool's part.

        Blocks this thread while the layer is not issued; where torch has no streams, until its
        bytes are there. Raises BurstError if the load failed.
        """
        if self._operation is None:
            self._stock.wait(layer_index)
        else:
            self._operation.wait_for_layer(layer_index)

    # What the plugin uses.

    @property
    def load(self) -> int:
        """The number of the burst that the slot stands for; negative: of none."""
        parts = () if self._operation is None else self._operation.parts
        return parts[0].burst.id if parts else -1

    def carry(self, operation: Operation | None) -> None:
        """The slot stands for this load now; None: for one of SGLang's own."""
        self._operation = operation

    def wait_until_free(self) -> None:
        """Block until the load that the slot stands for is in place."""
        if self._operation is not None:
            FinishEvent(self._operation).synchronize()


def last_layers(groups: Sequence[LayerGroup], transfer_layers: int) -> tuple[int | None, ...]:
    """For each transfer layer the one at or before it that is issued last; None: there is none.

    In SGLang a wait for a layer is one for all layers before it: some consumers wait for the last
    alone. Pools are issued in groups of layers, so a layer may be issued after a later one, and
    what stands for "up to here" is whichever comes last.
    """
    issued_at = {layer: at for at, group in enumerate(groups) for layer in group.completes}
    result: list[int | None] = []
    last: int | None = None
    for layer in range(transfer_layers):
        if layer in issued_at and (last is None or issued_at[layer] >= issued_at[last]):
            last = layer
        result.append(last)
    return tuple(result)
