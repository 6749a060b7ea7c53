"""The exchange on streams: ranks are threads of this process."""

import threading

import pytest
import torch
from exchange_helpers import LAYERS, PAGE, Rank, Threads, make_rank, make_ranks, pages_of
from rigs import quiesce

from kvburst import BurstController, BurstError, HostDevice, LayoutError, PageError
from kvburst._core import BurstPages
from kvburst._indices import deferred_view, index_view
from kvburst.exchange import RankShard
from kvburst.exchange.in_process import InProcessGroup
from kvburst.ownership import Ownership

ORDERS = [("forward_stream", "thread"), ("forward_stream", "inline"), ("side_stream", "inline")]


@pytest.fixture(params=ORDERS, ids=[f"{order}-{mode}" for order, mode in ORDERS])
def order(request: pytest.FixtureRequest) -> dict[str, str]:
    return dict(zip(("exchange", "mode"), request.param, strict=True))


def on_all(ranks: list[Rank], body) -> list:
    """`body` of every rank, on a thread and a stream of its own."""

    def one(rank: int) -> object:
        with ranks[rank].stream:
            return body(ranks[rank])

    return Threads(len(ranks), one).join()


def byte_of(node: int, page: int, pool: int, layer: int) -> int:
    return (node * 83 + page * 37 + pool * 101 + layer * 11 + 1) % 256


def back_up(rank: Rank, node: int, pages: int) -> torch.Tensor:
    """New device pages with bytes that all ranks agree on, backed up and dropped again."""
    slots = rank.device_pages.alloc(pages * 2)
    for number, page in enumerate(pages_of(slots)):
        for pool, layers in enumerate(LAYERS.values()):
            for layer in layers:
                rank.page(pool, layer, page).fill_(byte_of(node, number, pool, layer))
    host = rank.controller.write(slots, node_id=node)
    rank.controller.ack_write_queue.clear()
    rank.device_pages.free(slots)
    for pool in rank.pools:
        for layer in pool.device.layers:
            layer.fill_(0xEE)
    return host


def assert_restored(rank: Rank, node: int, slots: torch.Tensor) -> None:
    for number, page in enumerate(pages_of(slots)):
        for pool, layers in enumerate(LAYERS.values()):
            for layer in layers:
                found = set(rank.page(pool, layer, page).flatten().tolist())
                assert found == {byte_of(node, number, pool, layer)}, (rank.rank, pool, layer)


def shift_device_pages(rank: Rank) -> None:
    """From now on the rank's device pages differ from those of the others."""
    rank.device_pages.alloc(2 * rank.rank)


@pytest.mark.parametrize("ranks", [2, 3, 4, 11])
def test_every_rank_gets_every_layer_of_what_each_backed_up_in_part(
    ranks: int, order: dict[str, str]
) -> None:
    device = HostDevice()

    def one(rank: Rank) -> None:
        host = back_up(rank, 5, 3)
        shift_device_pages(rank)
        target = rank.controller.load(host)
        rank.forward(rank.controller.start_loading())
        rank.settle()
        assert [ack.error for ack in rank.controller.poll()] == [None]
        assert_restored(rank, 5, target)
        rank.controller.stop()

    on_all(make_ranks(device, ranks, pages=32, **order), one)


def test_side_by_side_ranks_keep_one_copy_between_them_on_the_host() -> None:
    alone = make_rank(HostDevice(), None)
    ranks = make_ranks(HostDevice(), 4)
    for number in range(2):
        sizes = [rank.pools[number].host.tensor.nbytes for rank in ranks]
        assert sum(sizes) == alone.pools[number].host.tensor.nbytes
    rows = [rank.pools[0].host.num_rows for rank in ranks]
    assert rows == [3, 3, 2, 2]


def test_rank0_owner_leaves_the_others_without_host_memory(order: dict[str, str]) -> None:
    device = HostDevice()
    ranks = make_ranks(device, 3, owner="rank0", **order)
    assert [rank.pools[0].host.tensor.nbytes > 0 for rank in ranks] == [True, False, False]

    def one(rank: Rank) -> None:
        host = back_up(rank, 1, 2)
        target = rank.controller.load(host)
        rank.forward(rank.controller.start_loading())
        rank.settle()
        assert_restored(rank, 1, target)

    on_all(ranks, one)


# --- order and overlap ---------------------------------------------------------------------------


def loading(device: HostDevice, ranks: list[Rank], pages: int = 2) -> list[torch.Tensor]:
    """Every rank has submitted a load of pages of node 1; no forward has come yet."""

    def one(rank: Rank) -> torch.Tensor:
        target = rank.controller.load(back_up(rank, 1, pages))
        assert rank.controller.start_loading() >= 0
        return target

    return on_all(ranks, one)


def test_waiting_for_a_layer_exchanges_it_and_those_before_and_no_other() -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2)
    loading(device, ranks)
    sent = []

    def one(rank: Rank) -> None:
        counter = rank.controller.layer_done_counter
        counter.set_consumer(0)
        for layer in (0, 0, 4, 2, 9):
            counter.wait_until(layer)
            if rank.rank == 0:
                sent.append(rank.controller.exchange_stats.broadcasts)

    on_all(ranks, one)
    assert sent == [2, 2, 5 + 2, 5 + 2, 10 + 4]


def test_layer_0_is_in_place_while_a_later_layer_is_still_to_be_copied() -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2)
    hosts = on_all(ranks, lambda rank: back_up(rank, 1, 2))
    reached = [device.new_event() for _ in ranks]
    held = []

    def one(rank: Rank) -> None:
        rank.controller.load(hosts[rank.rank])
        rank.controller.start_loading()
        rank.controller.layer_done_counter.set_consumer(0)
        rank.controller.layer_done_counter.wait_until(0)
        reached[rank.rank].record()
        # From here on the forward's stream waits, and with it the rest of the exchange.
        held.append(device.stall(rank.stream))
        for layer in range(1, 10):
            rank.controller.layer_done_counter.wait_until(layer)

    on_all(ranks, one)
    for event in reached:
        event.synchronize()
    quiesce()  # Every rank's own copies are done.
    assert not any(rank.controller.poll() for rank in ranks)
    assert not any(rank.controller.is_load_back_event_done(0) for rank in ranks)
    for stall in held:
        stall.release()
    on_all(ranks, Rank.settle)
    assert all(rank.controller.is_load_back_event_done(0) for rank in ranks)
    assert [len(rank.controller.poll()) for rank in ranks] == [1, 1]


def test_forward_on_another_stream_than_the_last_runs_behind_what_that_one_left() -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2)
    loading(device, ranks)
    stalls, behind = [], []

    def one(rank: Rank) -> None:
        rank.controller.layer_done_counter.set_consumer(0)
        stalls.append(device.stall(rank.stream))
        other = device.new_stream()
        with other:
            rank.controller.layer_done_counter.set_consumer(-1)
        behind.append((other, other.record_event()))

    on_all(ranks, one)
    quiesce()
    assert not any(event.query() for _, event in behind)
    for stall in stalls:
        stall.release()
    for _, event in behind:
        event.synchronize()


@pytest.mark.parametrize("waits", [True, False])
def test_another_stream_of_the_forward_that_waits_for_a_layer_runs_behind_its_exchange(
    waits: bool,
) -> None:
    """As an indexer does that writes its keys beside the forward."""
    device = HostDevice()
    ranks = make_ranks(device, 2)
    targets = loading(device, ranks)
    stalls, behind = [], []

    def one(rank: Rank) -> None:
        rank.controller.layer_done_counter.set_consumer(0)
        stalls.append(device.stall(rank.stream))
        other = device.new_stream()
        with other:
            if waits:
                rank.controller.layer_done_counter.wait_until(9)
        behind.append((other, other.record_event()))

    on_all(ranks, one)
    quiesce()
    assert [event.query() for _, event in behind] == [not waits] * 2
    for stall in stalls:
        stall.release()
    for _, event in behind:
        event.synchronize()
    if waits:
        for rank, target in zip(ranks, targets, strict=True):
            assert_restored(rank, 1, target)


@pytest.mark.parametrize("flushed", [True, False])
def test_first_forward_runs_behind_what_was_exchanged_before_it(flushed: bool) -> None:
    """By a step, say, or a restore, on a stream of its own."""
    device = HostDevice()
    ranks = make_ranks(device, 2)
    targets = loading(device, ranks)
    stalls, behind = [], []

    def one(rank: Rank) -> None:
        early = device.new_stream()
        stalls.append((early, device.stall(early)))
        if flushed:
            with early:
                assert rank.controller._exchange is not None
                rank.controller._exchange.flush()
        rank.forward(0)
        behind.append(rank.stream.record_event())

    on_all(ranks, one)
    if flushed:
        quiesce()
        assert not any(event.query() for event in behind)
        for _, stall in stalls:
            stall.release()
    for event in behind:
        event.synchronize()
    for rank, target in zip(ranks, targets, strict=True):
        assert_restored(rank, 1, target)
    for _, stall in stalls:
        stall.release()


@pytest.mark.parametrize("gated", [True, False])
def test_side_stream_holds_a_forward_until_every_layer_is_exchanged(gated: bool) -> None:
    """And without its gate each layer's wait until that layer is."""
    device = HostDevice()
    ranks = make_ranks(device, 2, exchange="side_stream", mode="inline")
    hosts = on_all(ranks, lambda rank: back_up(rank, 1, 2))
    earlier = device.new_stream()
    stall = device.stall(earlier)
    forwards = []

    def one(rank: Rank) -> None:
        rank.controller.load_fence_stream = earlier
        rank.controller.load(hosts[rank.rank])
        burst = rank.controller.start_loading()
        if gated:
            rank.controller.layer_done_counter.set_consumer(burst)
        else:
            rank.controller.layer_done_counter.events[burst].wait(3)
        forwards.append(rank.stream.record_event())

    on_all(ranks, one)
    quiesce()
    assert not any(event.query() for event in forwards)
    stall.release()
    for event in forwards:
        event.synchronize()


@pytest.mark.parametrize("fenced", [True, False])
def test_what_others_send_waits_for_forwards_launched_before_the_load(fenced: bool) -> None:
    """A rank scatters into pages that an earlier forward of its own may still write."""
    device = HostDevice()
    ranks = make_ranks(device, 2)
    hosts = on_all(ranks, lambda rank: back_up(rank, 1, 1))
    earlier = device.new_stream()
    stall = device.stall(earlier)

    def one(rank: Rank) -> torch.Tensor:
        target = rank.controller.load(hosts[rank.rank])
        if rank.rank == 1:
            for pool in rank.pools:
                for layer in pool.device.layers:
                    page = layer[target]
                    device.fill(earlier, layer[int(target[0]) :].data_ptr(), 0x11, page.numel())
            if fenced:
                rank.controller.load_fence_stream = earlier
        rank.forward(rank.controller.start_loading())
        return target

    targets = on_all(ranks, one)
    quiesce()  # What nothing holds up is exchanged.
    stall.release()
    on_all(ranks, Rank.settle)
    assert_restored(ranks[0], 1, targets[0])
    if fenced:
        assert_restored(ranks[1], 1, targets[1])
    else:
        found = ranks[1].pools[0].device.layers[0][targets[1]]
        assert set(found.flatten().tolist()) == {0x11}


def test_pages_stay_reserved_until_the_last_layer_is_exchanged() -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2)
    targets = loading(device, ranks)
    on_all(ranks, lambda rank: rank.controller._loads.issuer.drain())
    for rank, target in zip(ranks, targets, strict=True):
        rank.device_pages.free(target)
        assert rank.controller.poll() == []  # This rank's copies are done, the exchange is not.
        rest = rank.device_pages.alloc(rank.device_pages.available_size())
        assert not set(pages_of(rest)) & set(pages_of(target))
    on_all(ranks, lambda rank: rank.forward(0))
    on_all(ranks, Rank.settle)
    for rank, target in zip(ranks, targets, strict=True):
        assert len(rank.controller.poll()) == 1
        assert pages_of(rank.device_pages.alloc(2 * PAGE)) == pages_of(target)


def test_pages_of_a_load_that_was_given_up_stay_reserved_while_it_still_copies() -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2)
    hosts = on_all(ranks, lambda rank: [back_up(rank, node, 1) for node in range(2)])
    earlier = device.new_stream()
    stall = device.stall(earlier)

    def one(rank: Rank) -> None:
        rank.controller.load_fence_stream = earlier
        rank.controller.load(hosts[rank.rank][rank.rank])
        with pytest.raises(BurstError, match="do not load the same host pages"):
            rank.forward(rank.controller.start_loading())
        assert rank.controller.poll() == []

    on_all(ranks, one)
    stall.release()
    on_all(ranks, Rank.settle)
    assert all(len(rank.controller.poll()) == 1 for rank in ranks)


# --- forwards that never run ---------------------------------------------------------------------


def test_load_whose_forward_never_runs_completes_on_every_rank(order: dict[str, str]) -> None:
    device = HostDevice()
    ranks = make_ranks(device, 3, pages=32, **order)

    def one(rank: Rank) -> None:
        hosts = [back_up(rank, node, 1) for node in range(8)]
        targets = []
        for host in hosts:
            if not rank.controller.has_free_load_back_slot():
                rank.controller.drain()
                rank.controller.poll()
                assert rank.controller.has_free_load_back_slot()
            targets.append(rank.controller.load(host))
            rank.controller.start_loading()
        rank.settle()
        rank.controller.poll()
        assert not rank.controller.has_inflight_device_transfers()
        for node, target in enumerate(targets):
            assert_restored(rank, node, target)

    on_all(ranks, one)


def test_load_that_no_forward_came_for_is_exchanged_before_a_later_one() -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2)
    loading(device, ranks)
    loading(device, ranks)

    def one(rank: Rank) -> None:
        rank.controller.layer_done_counter.set_consumer(1)
        assert rank.controller.exchange_stats.broadcasts == 10 + 4
        device.synchronize()
        while not rank.controller.poll():  # The other rank may not have said that it is done.
            pass

    on_all(ranks, one)


def test_full_gate_that_nobody_waits_at_is_emptied_by_asking_for_a_slot() -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2)

    def one(rank: Rank) -> None:
        for node in range(3):
            rank.controller.load(back_up(rank, node, 1))
            rank.controller.start_loading()
        assert not rank.controller.has_free_load_back_slot()
        device.synchronize()
        while not rank.controller.poll():  # The other rank may not have said that it is done.
            pass
        assert rank.controller.has_free_load_back_slot()

    on_all(ranks, one)


@pytest.mark.parametrize("end", ["reset", "stop", "next consumer", "next loads"])
def test_what_an_aborted_forward_leaves_is_exchanged(end: str, order: dict[str, str]) -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2, pages=32, **order)

    def one(rank: Rank) -> None:
        host = back_up(rank, 1, 2)
        target = rank.controller.load(host)
        rank.controller.start_loading()
        rank.controller.layer_done_counter.set_consumer(0)
        rank.controller.layer_done_counter.wait_until(3)
        if end == "reset":
            rank.controller.reset()
            assert not rank.controller.has_inflight_device_transfers()
        elif end == "stop":
            rank.controller.stop()
        elif end == "next consumer":
            rank.controller.layer_done_counter.set_consumer(-1)
        else:
            for _ in range(3):
                rank.controller.load(host)
                rank.controller.start_loading()
        device.synchronize()
        assert_restored(rank, 1, target)

    on_all(ranks, one)


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["thread", "inline"])
def test_failed_copy_on_one_rank_is_an_error_on_all_and_nobody_waits_for_ever(mode: str) -> None:
    devices = HostDevice()
    ranks = make_ranks(devices, 3, mode=mode)
    hosts = on_all(ranks, lambda rank: back_up(rank, 1, 2))
    ranks[2].controller.load(hosts[2])
    devices.fail_copy_call(1)
    errors: list[str] = [""] * 3
    turn, over = threading.Barrier(3), threading.Barrier(3)

    def one(rank: Rank) -> None:
        if rank.rank != 2:
            rank.controller.load(hosts[rank.rank])
            turn.wait()
        burst = rank.controller.start_loading()
        if rank.rank == 2:
            while not rank.controller.ack_load_queue[0].burst.settled:
                pass
            turn.wait()
        try:
            rank.forward(burst)
        except BurstError as error:
            errors[rank.rank] = str(error)
        rank.stream.synchronize()  # The one that failed has sent what the others wait for.
        over.wait(20)
        rank.settle()
        (ack,) = rank.controller.poll()
        assert ack.error is not None
        assert ack.num_tokens == 0
        if rank.rank != 2:
            assert ack.error == "load 0 failed on rank 2, which sent bytes of no meaning"
        with pytest.raises(BurstError):
            rank.controller.is_load_back_event_done(burst)

    on_all(ranks, one)
    assert "copy: failed, as it was told to" in errors[2]


def test_ranks_that_do_not_load_the_same_pages_are_told_before_anything_moves_between_them() -> (
    None
):
    device = HostDevice()
    ranks = make_ranks(device, 2)

    def one(rank: Rank) -> None:
        hosts = [back_up(rank, node, 1) for node in range(2)]
        rank.controller.load(hosts[rank.rank])
        burst = rank.controller.start_loading()
        with pytest.raises(BurstError, match="do not load the same host pages"):
            rank.forward(burst)
        assert rank.controller.exchange_stats.broadcasts == 0
        # The next is another matter.
        target = rank.controller.load(hosts[0])
        rank.forward(rank.controller.start_loading())
        rank.settle()
        first, second = rank.controller.poll()
        assert "do not load the same" in first.error
        assert second.error is None
        assert_restored(rank, 0, target)

    on_all(ranks, one)
    assert ranks[0].controller.loaded_digest != ranks[1].controller.loaded_digest


def test_digest_of_loaded_pages_is_the_same_on_ranks_with_other_device_pages() -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2)

    def one(rank: Rank) -> int:
        shift_device_pages(rank)
        rank.controller.load(back_up(rank, 1, 2))
        rank.controller.start_loading()
        rank.settle()
        return rank.controller.loaded_digest

    first, second = on_all(ranks, one)
    assert first == second != 0
    assert make_rank(HostDevice(), None).controller.loaded_digest == 0


def test_page_ids_of_a_burst_are_those_of_each_tier_in_the_order_of_submission() -> None:
    rank = make_rank(HostDevice(), None)
    slots = rank.device_pages.alloc(3 * PAGE)
    host = rank.controller.write(slots)
    (ack,) = rank.controller.ack_write_queue
    out = torch.empty(3, dtype=torch.int64)
    for tier, given in (("device", slots), ("host", host)):
        ack.burst.copy_page_ids(1, tier=tier, out=out.data_ptr())
        assert out.tolist() == pages_of(given)
    with pytest.raises(PageError, match="pool: 2 is out of range, the burst has 2 pools"):
        ack.burst.copy_page_ids(2, tier="host", out=out.data_ptr())


# --- refusals ------------------------------------------------------------------------------------


def refused(ranks: list[Rank], body, message: str) -> None:
    def one(rank: Rank) -> None:
        with pytest.raises((BurstError, LayoutError), match=message):
            body(rank)

    on_all(ranks, one)


@pytest.mark.parametrize("exchange", ["forward_stream", "side_stream"])
def test_load_whose_indices_lie_on_the_device_is_exchanged_by_pages_that_the_device_names(
    exchange: str,
) -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2, exchange=exchange, mode="inline")

    def one(rank: Rank) -> None:
        host = back_up(rank, 7, 3)
        shift_device_pages(rank)
        target = rank.device_pages.alloc(len(host))
        layouts = [pool.layout for pool in rank.pools]
        pages = BurstPages(layouts, direction="load", page_size=PAGE)
        pages.append_deferred(device=deferred_view("d", target), host=index_view("h", host))
        stream = device.current_stream()
        burst = rank.controller._loads.issuer.submit(pages, [7], stream=stream)
        known = torch.empty(3, dtype=torch.int64)
        burst.copy_page_ids(0, tier="device", out=known.data_ptr())
        gate = rank.controller._exchange
        gate.begin(burst, stream, None, target[::PAGE] // PAGE)
        gate.set_consumer(burst.id)
        for layer in range(gate.num_layers):
            gate.wait(burst.id, layer)
        gate.drain()
        device.synchronize()
        assert_restored(rank, 7, target)
        rank.controller.stop()

    on_all(ranks, one)


def test_pages_that_the_device_names_must_be_as_many_as_the_loads() -> None:
    def one(rank: Rank) -> None:
        host = back_up(rank, 7, 3)
        rank.controller.load(host)
        burst = rank.controller._loads.issuer.submit(
            rank.controller._loads._pages, [7], stream=rank.device.current_stream()
        )
        gate = rank.controller._exchange
        strided = torch.zeros(6, dtype=torch.int64)[::2]
        for wrong in (strided, strided[1:].contiguous(), strided.to(torch.int32)):
            with pytest.raises(PageError, match=r"page_ids: torch.int.* one for each of 3 pages"):
                gate.begin(burst, rank.device.current_stream(), None, wrong)

    on_all(make_ranks(HostDevice(), 1), one)


def test_wait_of_no_forward_is_refused_by_name() -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2)
    loading(device, ranks)
    wait = "call set_consumer on the forward's stream first"
    refused(ranks, lambda rank: rank.controller.layer_done_counter.events[0].wait(0), wait)


def test_consuming_a_load_once_more_leaves_its_later_layers_to_the_forward(
    order: dict[str, str],
) -> None:
    """Unlike setting the consumer anew, which is the end of the forward before."""
    device = HostDevice()

    def one(rank: Rank) -> list[int]:
        rank.controller.load(back_up(rank, 3, 2))
        load = rank.controller.start_loading()
        exchange = rank.controller._exchange
        assert exchange is not None
        sent = []
        for _ in range(2):
            exchange.consume(load)
            exchange.wait(load, 1)
            sent.append(exchange.find(load).next_layer)  # type: ignore[union-attr]
        exchange.set_consumer(load)
        sent.append(exchange.find(load).next_layer)  # type: ignore[union-attr]
        rank.settle()
        rank.controller.stop()
        return sent

    for sent in on_all(make_ranks(device, 2, **order), one):
        least = 2 if order["exchange"] == "forward_stream" else max(LAYERS["kv"]) + 1
        assert sent == [least, least, max(LAYERS["kv"]) + 1]


def test_wait_on_a_capturing_stream_is_refused_by_name(order: dict[str, str]) -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2, capturing=lambda: True, **order)
    loading(device, ranks)
    refused(ranks, lambda rank: rank.forward(0), "layer 0 cannot be exchanged on a stream that is")


def test_sharded_load_outside_start_loading_is_refused_by_name(order: dict[str, str]) -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2, **order)

    def past_it(rank: Rank) -> None:
        rank.controller.load(back_up(rank, 1, 1))
        lane = rank.controller._loads
        burst = lane.issuer.submit(lane._pages, [], stream=device.current_stream())
        rank.forward(burst.id)

    refused(ranks, past_it, "load 0: was not submitted by start_loading")


def test_layer_that_the_gate_does_not_have_is_refused_by_name() -> None:
    device = HostDevice()
    ranks = make_ranks(device, 2)
    loading(device, ranks)

    def beyond(rank: Rank) -> None:
        rank.controller.layer_done_counter.set_consumer(0)
        rank.controller.layer_done_counter.wait_until(10)

    refused(ranks, beyond, "layer: 10 is out of range, the gate has 10 layers")


def test_storage_access_to_a_sharded_pool_is_refused_by_name() -> None:
    rank = make_ranks(HostDevice(), 2)[1]
    with pytest.raises(LayoutError, match="pool 'kv': a whole page is not here, 5 of its 10"):
        rank.pools[0].host.whole_page(0)
    alone = make_rank(HostDevice(), None)
    assert alone.pools[0].host.whole_page(3).shape == (10, PAGE * 24)
    with pytest.raises(LayoutError, match="page 24 is out of range"):
        alone.pools[0].host.whole_page(24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "side_stream", "mode": "thread"}, "'side_stream' needs mode 'inline'"),
        ({"exchange": "any_stream"}, "'any_stream' must be 'forward_stream' or 'side_stream'"),
        ({"staging_bytes": 47}, "staging_bytes: 47 has no room for one page of pool 'kv', 48"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make_ranks(HostDevice(), 2, **options)


def test_ranks_that_are_not_set_up_alike_are_refused_on_all() -> None:
    device = HostDevice()
    group = InProcessGroup(2, timeout=10)

    def one(rank: int) -> None:
        with pytest.raises(LayoutError, match="exchange: ranks differ in pools"):
            make_rank(device, group.channel(rank, device), rank=rank, staging_bytes=100 + rank)

    Threads(2, one).join()


def test_pools_that_keep_other_layers_than_the_rank_owns_are_refused_by_name() -> None:
    device = HostDevice()
    alone = make_rank(device, None)
    shard = RankShard(Ownership(2, tuple(LAYERS.values())), InProcessGroup(2).channel(1, device))
    with pytest.raises(LayoutError, match=r"pool 'kv': its host tier stores layers \[0, 1, 2"):
        BurstController(
            alone.pools,
            device,
            device_allocator=alone.device_pages,
            host_allocator=alone.host_pages,
            shard=shard,
        )
