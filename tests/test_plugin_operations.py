"""What stands where SGLang keeps events: its slots' layers, and the start and finish of a load."""

import logging
from collections.abc import Callable

import pytest
import torch
from exchange_helpers import LAYERS as SHARED_LAYERS
from exchange_helpers import Rank, Threads, make_rank, make_ranks

from kvburst._core import BurstError, BurstIssuer, BurstPages, CopyPlanner, HostDevice, LayerGate
from kvburst._indices import index_view
from kvburst.exchange.in_process import InProcessGroup
from kvburst.pools import DevicePool, HostPool, Pool
from kvburst.sglang_plugin.layer_done import BurstLayers, last_layers
from kvburst.sglang_plugin.operations import FinishEvent, Operation, Part, StartEvent
from kvburst.sglang_plugin.status import Counters

PAGE_SIZE = 4
LAYERS = 6


class StockEvent:
    """SGLang's `LayerLoadingEvent`, as far as it is asked."""

    def __init__(self) -> None:
        self.start_event = object()
        self.finish_event = object()
        self.calls: list[tuple[str, int]] = []

    def complete(self, layer: int) -> None:
        self.calls.append(("complete", layer))

    def wait(self, layer: int) -> None:
        self.calls.append(("wait", layer))


class Rig:
    """A pool whose layers `layer_ids` come back from the host, and what SGLang would be given."""

    def __init__(self, layer_ids: list[int] | None = None) -> None:
        layer_ids = list(range(LAYERS)) if layer_ids is None else layer_ids
        self.device = HostDevice()
        self.kv = torch.zeros(len(layer_ids), 8 * PAGE_SIZE, 16, dtype=torch.uint8)
        on_device = DevicePool.from_layers("kv", self.kv, page_size=PAGE_SIZE, layer_ids=layer_ids)
        on_host = HostPool.allocate(on_device, pages=8)
        on_host.tensor.copy_(torch.randint(1, 256, on_host.tensor.shape))
        self.pool = Pool.pair(on_device, on_host)
        layouts = [self.pool.layout]
        self.gate = LayerGate(self.device, layouts, slots=3)
        planner = CopyPlanner(layouts, direction="load", limits=self.device.limits)
        self.last_layers = last_layers(planner.groups, LAYERS)
        self.issuer = BurstIssuer(
            self.device, layouts, direction="load", gate=self.gate, mode="thread", memory=self.pool
        )
        self.pages = BurstPages(layouts, direction="load", page_size=PAGE_SIZE)
        self.producer = self.device.new_stream()
        self.counters = Counters()

    def load(self, page: int, to: int) -> Operation:
        first = torch.arange(PAGE_SIZE)
        host, device = first + page * PAGE_SIZE, first + to * PAGE_SIZE
        self.pages.append(device=index_view("d", device), host=index_view("h", host))
        burst = self.issuer.submit(self.pages, [41, 42], stream=self.producer)
        assert burst is not None
        parts = [Part(burst, self.gate, self.last_layers)]
        return Operation(parts, self.device, self.counters)

    def loaded(self, page: int, to: int) -> bool:
        found = self.kv[:, to * PAGE_SIZE : (to + 1) * PAGE_SIZE].reshape(self.kv.shape[0], -1)
        return torch.equal(found, self.pool.host.tensor[page])


def test_slot_that_carries_a_load_of_sglangs_own_is_sglangs_own_event() -> None:
    stock = StockEvent()
    slot = BurstLayers(stock)
    slot.complete(3)
    slot.wait(3)
    assert stock.calls == [("complete", 3), ("wait", 3)]
    assert slot.start_event is stock.start_event
    assert slot.finish_event is stock.finish_event
    slot.wait_until_free()


def test_slot_that_carries_a_burst_waits_for_its_bytes() -> None:
    rig = Rig()
    slot = BurstLayers(StockEvent())
    stall = rig.device.stall(rig.producer)
    slot.carry(rig.load(page=2, to=5))
    assert not slot.finish_event.query()
    assert not rig.kv.any()
    stall.release()
    slot.wait(LAYERS - 1)
    assert rig.loaded(page=2, to=5)
    slot.wait_until_free()
    assert slot.finish_event.query()
    assert rig.counters.wait_us > 0


def test_done_says_that_what_was_handed_over_before_is_done_as_well() -> None:
    slow, rig = Rig(), Rig()
    stall = slow.device.stall(slow.producer)
    before = slow.load(page=0, to=1)
    alone = rig.load(page=2, to=5)
    behind = [part.burst for part in before.parts]
    ordered = Operation(alone.parts, rig.device, rig.counters, behind=behind)
    FinishEvent(alone).synchronize()
    assert FinishEvent(alone).query()
    assert not FinishEvent(ordered).query()
    stall.release()
    FinishEvent(ordered).synchronize()
    assert slow.loaded(page=0, to=1)


def test_slot_is_handed_back_to_sglang_for_a_load_of_its_own() -> None:
    rig = Rig()
    stock = StockEvent()
    slot = BurstLayers(stock)
    slot.carry(rig.load(page=2, to=5))
    slot.wait_until_free()
    slot.carry(None)
    slot.wait(1)
    assert stock.calls == [("wait", 1)]


def test_layer_without_data_waits_for_those_before_it() -> None:
    rig = Rig(layer_ids=[1, 3])
    operation = rig.load(page=0, to=7)
    operation.wait_for_layer(0)
    operation.wait_for_layer(LAYERS - 1)
    assert rig.loaded(page=0, to=7)


def test_elapsed_time_is_from_the_first_copy_to_the_last() -> None:
    rig = Rig()
    operation = rig.load(page=1, to=1)
    start, finish = StartEvent(operation), FinishEvent(operation)
    finish.synchronize()
    assert start.query()
    assert 0 <= start.elapsed_time(finish) < 60_000


def test_operation_that_moves_nothing_is_done() -> None:
    operation = Operation([], HostDevice(), Counters())
    finish = FinishEvent(operation)
    assert finish.query()
    finish.synchronize()
    finish.wait()
    operation.wait_for_layer(0)
    assert StartEvent(operation).elapsed_time(finish) == 0


def test_whoever_asks_for_a_failed_load_is_raised_and_it_is_logged_and_counted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.device.fail_copy_call(2)
    operation = rig.load(page=3, to=3)
    finish = FinishEvent(operation)
    with caplog.at_level(logging.ERROR, "kvburst"):
        for ask in (
            finish.synchronize,
            finish.query,
            finish.wait,
            lambda: operation.wait_for_layer(LAYERS - 1),
        ):
            with pytest.raises(BurstError, match=r"load 0 failed in group 2 .*layers 1 to 2") as it:
                ask()
            assert "node_ids [41, 42]" in str(it.value)
    assert rig.counters.failures == 1
    assert len(caplog.records) == 1


# --- a tier that ranks share ---------------------------------------------------------------------


def shared_operation(rank: Rank, pages: int) -> tuple[Operation, Counters]:
    """A load whose layers come from two ranks, as the plugin has it."""
    slots = rank.device_pages.alloc(pages * 2)
    host = rank.controller.write(slots)
    rank.controller.ack_write_queue.clear()
    rank.controller.load(host)
    rank.controller.start_loading()
    (ack,) = rank.controller.ack_load_queue
    part = Part(ack.burst, exchange=rank.controller._exchange, exchanged=ack.exchanged)
    counters = Counters()
    return Operation([part], rank.device, counters), counters


def on_each(ranks: list[Rank], body: Callable[[Rank], object]) -> list[object]:
    def one(number: int) -> object:
        with ranks[number].stream:
            result = body(ranks[number])
        ranks[number].controller.stop()
        return result

    return Threads(len(ranks), one).join()


def test_shared_load_is_done_once_its_layers_came_from_all_ranks() -> None:
    def one(rank: Rank) -> tuple[bool, bool, int]:
        operation, _ = shared_operation(rank, 2)
        finish = FinishEvent(operation)
        operation.parts[0].burst.finish_event.synchronize()  # This rank's own copies.
        early = finish.reached()
        slot = BurstLayers(StockEvent())
        slot.carry(operation)
        slot.wait(max(SHARED_LAYERS["kv"]))
        finish.synchronize()
        assert StartEvent(operation).elapsed_time(finish) >= 0
        assert [stats.bytes > 0 for stats in operation.stats()] == [True]
        return early, finish.query(), slot.load

    assert on_each(make_ranks(HostDevice(), 2), one) == [(False, True, 0)] * 2


def test_whoever_waits_for_a_shared_load_without_saying_so_consumes_it() -> None:
    def one(rank: Rank) -> list[bool]:
        operation, _ = shared_operation(rank, 1)
        sent = []
        for layer in (0, 3):
            operation.wait_for_layer(layer)
            exchanged = operation.parts[0].exchanged
            assert exchanged is not None
            sent.append(exchanged.next_layer == layer + 1)
        FinishEvent(operation).synchronize()
        return sent

    assert on_each(make_ranks(HostDevice(), 2), one) == [[True, True]] * 2


def test_failed_copy_of_one_rank_fails_the_operation_on_all() -> None:
    devices = [HostDevice(), HostDevice()]
    group = InProcessGroup(2, timeout=10)
    ranks = Threads(
        2, lambda rank: make_rank(devices[rank], group.channel(rank, devices[rank]), rank=rank)
    ).join()

    def one(rank: Rank) -> tuple[str, int]:
        slots = rank.device_pages.alloc(2)
        host = rank.controller.write(slots)
        rank.controller.ack_write_queue.clear()
        if rank.rank == 1:
            rank.device.fail_copy_call(1)
        rank.controller.load(host)
        rank.controller.start_loading()
        (ack,) = rank.controller.ack_load_queue
        part = Part(ack.burst, exchange=rank.controller._exchange, exchanged=ack.exchanged)
        counters = Counters()
        operation = Operation([part], rank.device, counters)
        with pytest.raises(BurstError) as told:
            FinishEvent(operation).synchronize()
        assert operation.failure() == str(told.value)
        assert operation.stats() == []
        return str(told.value), counters.failures

    (of_0, counted_0), (of_1, counted_1) = on_each(ranks, one)  # type: ignore[misc,arg-type]
    assert "failed on rank 1" in of_0
    assert "copy: failed, as it was told to" in of_1
    assert (counted_0, counted_1) == (1, 1)


class FailsJustNow:
    """A burst that fails between two looks at it."""

    error: str | None = None

    @property
    def finish_event(self) -> "FailsJustNow":
        return self

    def query(self) -> bool:
        self.error = "load 9 failed"
        return True  # a burst that fails is done


def test_load_that_fails_while_it_is_asked_for_is_not_taken_for_done() -> None:
    part = Part(FailsJustNow())  # type: ignore[arg-type]
    finish = FinishEvent(Operation([part], HostDevice(), Counters()))
    with pytest.raises(BurstError, match="load 9 failed"):
        finish.query()
