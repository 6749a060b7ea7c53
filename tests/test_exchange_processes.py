"""Every page of every rank equals the run of a rank by itself, over gloo between processes.

A short run by default; `KVBURST_SHARD_BURSTS=200 KVBURST_SHARD_RANKS=4,8` is the long one.
"""

import importlib
import os
import random
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from time import monotonic, sleep

import pytest
import torch
import torch.distributed as dist
from exchange_helpers import PAGE, Threads, make_rank, slots_of
from exchange_processes import (
    Crowded,
    Program,
    new_channel,
    run_cache,
    run_program,
    run_ranks,
)

from kvburst import (
    AgreementError,
    AgreementGroups,
    BurstError,
    HostDevice,
    LayoutError,
    PageError,
)
from kvburst.agreement import Agreement
from kvburst.exchange import GroupChannel
from kvburst.exchange.in_process import InProcessGroup
from kvburst.ownership import agreed_capacity

BURSTS = int(os.environ.get("KVBURST_SHARD_BURSTS", "20"))
RANKS = [int(ranks) for ranks in os.environ.get("KVBURST_SHARD_RANKS", "4").split(",")]

STEPS = int(os.environ.get("KVBURST_SHARD_STEPS", "20"))
PROGRAM = Program(bursts=BURSTS)


def unsharded(program: Program) -> list[str]:
    (alone,) = run_ranks(1, run_program, replace(program, exchange=None))
    return alone


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "program",
    [
        PROGRAM,
        replace(PROGRAM, seed=1, chunk_pages=2, mode="inline"),
        replace(PROGRAM, seed=2, aborts=True),
        replace(PROGRAM, seed=5, aborts=True, ahead=True),
        replace(PROGRAM, seed=3, exchange="side_stream", mode="inline", ahead=True),
        replace(PROGRAM, seed=4, exchange="side_stream", mode="inline", chunk_pages=1, aborts=True),
    ],
    ids=[
        "thread",
        "inline-chunked",
        "aborted",
        "aborted-ahead",
        "side-stream-ahead",
        "side-stream-chunked-aborted",
    ],
)
def test_every_page_on_every_rank_is_that_of_a_rank_by_itself(ranks: int, program: Program) -> None:
    alone = unsharded(program)
    assert len(alone) == BURSTS
    for of_rank in run_ranks(ranks, run_program, program):
        assert of_rank == alone


@pytest.mark.parametrize("exchange", ["forward_stream", "side_stream"])
def test_every_page_is_that_of_a_rank_by_itself_where_the_exchange_is_on_streams(
    exchange: str,
) -> None:
    """Ranks as threads, each with a device of its own."""
    mode = "thread" if exchange == "forward_stream" else "inline"
    program = replace(PROGRAM, seed=6, exchange=exchange, mode=mode, aborts=True, ahead=True)
    group = InProcessGroup(3)

    def one(rank: int) -> list[str]:
        device = HostDevice()
        return run_cache(group.channel(rank, device), rank, program, device)

    alone = unsharded(program)
    assert Threads(3, one).join() == [alone] * 3


def two_groups(rank: int, ranks: int, program: Program) -> list[str]:
    """Under DP attention each attention TP group has tokens, and a tier, of its own."""
    half = ranks // 2
    members = [list(range(half)), list(range(half, ranks))]
    groups = [[dist.new_group(each, backend="gloo") for _ in range(2)] for each in members]
    mine = rank // half
    channel = GroupChannel(*groups[mine], timeout=60)
    assert (channel.rank, channel.ranks) == (rank % half, half)
    return run_cache(channel, rank, replace(program, seed=10 + mine))


def test_groups_of_attention_ranks_share_a_tier_each() -> None:
    alone = [unsharded(replace(PROGRAM, seed=10 + group)) for group in range(2)]
    assert run_ranks(4, two_groups, PROGRAM) == [alone[0], alone[0], alone[1], alone[1]]


def test_skipping_the_exchange_is_seen() -> None:
    alone = unsharded(PROGRAM)
    for of_rank in run_ranks(4, run_program, replace(PROGRAM, skip_exchange=True)):
        assert of_rank != alone


def _over_a_group_of_another_kind(rank: int, ranks: int) -> str:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    with pytest.raises(LayoutError) as refused:
        GroupChannel(dist.new_group(backend="fake"), dist.new_group(backend="gloo"))
    return str(refused.value)


def test_group_of_which_nobody_knows_whether_it_blocks_is_refused() -> None:
    (refused,) = run_ranks(1, _over_a_group_of_another_kind)
    assert refused == "group: backend 'fake' must be one of gloo, nccl"


def test_byte_that_changes_on_one_rank_is_seen_on_all() -> None:
    alone = unsharded(PROGRAM)
    for of_rank in run_ranks(3, run_program, replace(PROGRAM, corrupt=True)):
        assert of_rank != alone


@pytest.mark.parametrize("exchange", ["forward_stream", "side_stream"])
def test_rank_that_loads_other_pages_is_an_error_on_all_before_anything_is_exchanged(
    exchange: str,
) -> None:
    program = replace(PROGRAM, diverge=True, exchange=exchange, mode="inline")
    for error in run_ranks(3, run_program, program):
        assert "ranks do not load the same host pages" in str(error)
        assert "nothing was exchanged" in str(error)


# --- the order of exchange and forward -----------------------------------------------------------


def forwards_with_collectives(rank: int, ranks: int, order: str, steps: int) -> list[str]:
    """Loads and forwards that call a collective of their own in every layer, with every rank late
    now and then. Returns what was launched, both groups merged."""
    chance = random.Random(rank)
    occupied = threading.Lock()
    forward_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    channel = Crowded(new_channel(timeout=20), occupied)
    device = HostDevice()
    one = make_rank(device, channel, rank=rank, exchange=order, mode="inline")
    controller = one.controller
    stored = controller.write(one.device_pages.alloc(2 * PAGE))
    controller.ack_write_queue.clear()
    counter = controller.layer_done_counter
    for _ in range(steps):
        target = controller.load(stored)
        burst = controller.start_loading()
        sleep(chance.random() / 500)
        counter.set_consumer(burst)
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
            sleep(chance.random() / 5000)
            with occupied:
                channel.log.append(f"forward {layer}")
                dist.all_reduce(torch.ones(4), group=forward_group)
        one.settle()
        controller.ack_load_queue.clear()
        one.device_pages.free(target)
    controller.stop()
    return channel.log


@pytest.mark.parametrize("order", ["forward_stream", "side_stream"])
def test_every_rank_launches_exchange_and_forward_in_one_order_whoever_is_late(order: str) -> None:
    """vllm-project/vllm#56956: two communicators in flight at once."""
    logs = run_ranks(4, forwards_with_collectives, order, STEPS)
    assert len(logs[0]) == STEPS * (10 + 14)
    assert all(log == logs[0] for log in logs)


def forward_past_the_gate(rank: int, ranks: int, gated: bool) -> str:
    """Rank 1's copies are late, and its forward comes first. On rank 0 the exchange does."""
    occupied = threading.Lock()
    seconds = 60 if gated else 3
    forward_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    channel = Crowded(new_channel(timeout=seconds), occupied)
    device = HostDevice()
    one = make_rank(device, channel, rank=rank, exchange="side_stream", mode="inline")
    stored = one.controller.write(one.device_pages.alloc(PAGE))
    one.controller.ack_write_queue.clear()
    copies = device.new_stream()
    held = device.stall(copies) if rank == 1 else None
    with copies:
        one.controller.load(stored)
        one.controller.start_loading()
    if held is not None and gated:
        held.release()  # A forward behind the gate comes late, but its copies need none.
    if rank == 0 and not gated:
        while not channel.log:  # The exchange occupies this device.
            sleep(0.001)
    try:
        if gated:
            one.controller.layer_done_counter.set_consumer(0)
        with occupied:
            channel.log.append("forward")
            if held is not None:
                held.release()
            dist.all_reduce(torch.ones(1), group=forward_group)
    except RuntimeError:
        return "the forward waited for ever"
    one.controller.drain()
    (ack,) = one.controller.ack_load_queue
    return "done" if ack.error is None else f"the exchange waited for ever: {ack.error}"


def test_side_stream_without_its_gate_deadlocks_and_with_it_does_not() -> None:
    """What the timeouts of both groups then end."""
    assert run_ranks(2, forward_past_the_gate, True) == ["done", "done"]
    assert any("for ever" in of_rank for of_rank in run_ranks(2, forward_past_the_gate, False))


# --- a rank that is gone -------------------------------------------------------------------------


def bereft(rank: int, ranks: int) -> str:
    """The last rank's process ends under its load."""
    one = make_rank(HostDevice(), new_channel(), rank=rank)
    stored = one.controller.write(one.device_pages.alloc(PAGE))
    one.controller.ack_write_queue.clear()
    one.controller.load(stored)
    burst = one.controller.start_loading()
    if rank == ranks - 1:
        os._exit(3)
    try:
        one.forward(burst)
    except BurstError as error:
        return str(error)
    return "nothing"


def test_rank_whose_process_ends_is_named_on_the_others() -> None:
    """Those that are told of it end too, and may be named beside it by one that is told later."""
    *others, gone = run_ranks(3, bereft)
    assert gone is None
    for told in others:
        assert "rank 2 has ended" in told


def lonely(rank: int, ranks: int) -> tuple[str, str, float]:
    """The last rank never waits for its load."""
    one = make_rank(HostDevice(), new_channel(timeout=3), rank=rank)
    stored = one.controller.write(one.device_pages.alloc(PAGE))
    one.controller.ack_write_queue.clear()
    one.controller.load(stored)
    burst = one.controller.start_loading()
    if rank == ranks - 1:
        sleep(8)
        return "", "", 0.0
    begin = monotonic()
    errors = []
    for _ in range(2):
        try:
            one.forward(burst)
        except BurstError as error:
            errors.append(str(error))
    one.controller.drain()
    (ack,) = one.controller.poll()
    assert ack.error == errors[0]
    one.controller.stop()
    return errors[0], errors[1], monotonic() - begin


def test_rank_that_does_not_come_is_an_error_of_the_others_in_bounded_time() -> None:
    *others, _ = run_ranks(3, lonely)
    for first, second, seconds in others:
        assert "load 0: layer " in first
        assert "broadcast from rank" in first
        assert second == first
        assert seconds < 7


def failing(rank: int, ranks: int, order: str) -> list[str]:
    """The first copy of rank 1 fails. What each rank is told by its forward and by its ack."""
    one = make_rank(HostDevice(), new_channel(), rank=rank, exchange=order, mode="inline")
    stored = one.controller.write(one.device_pages.alloc(PAGE))
    one.controller.ack_write_queue.clear()
    if rank == 1:
        one.device.fail_copy_call(1)
    one.controller.load(stored)
    burst = one.controller.start_loading()
    told = []
    try:
        one.forward(burst)
    except BurstError as error:
        told.append(str(error))
    one.controller.drain()
    (ack,) = one.controller.poll()
    one.controller.stop()
    return [*told, str(ack.error)]


@pytest.mark.parametrize("order", ["forward_stream", "side_stream"])
def test_forward_of_every_rank_is_told_of_a_copy_that_failed_on_one(order: str) -> None:
    first, second, third = run_ranks(3, failing, order)
    others = "load 0 failed on rank 1, which sent bytes of no meaning"
    assert first == third == [others, others]
    assert len(second) == 2
    assert all("copy: failed, as it was told to" in words for words in second)


def stopping(rank: int, ranks: int) -> tuple[str, float]:
    """Rank 0 stops with a load that nobody has waited for, and the other does nothing."""
    one = make_rank(HostDevice(), new_channel(timeout=8), rank=rank)
    stored = one.controller.write(one.device_pages.alloc(PAGE))
    one.controller.ack_write_queue.clear()
    one.controller.load(stored)
    one.controller.start_loading()
    if rank > 0:
        sleep(5)
        return "", 0.0
    begin = monotonic()
    try:
        one.controller.stop(timeout=0.5)
    except BurstError as error:
        return str(error), monotonic() - begin
    return "stopped", monotonic() - begin


def test_stop_is_over_in_time_though_another_rank_does_not_come() -> None:
    (said, seconds), _ = run_ranks(2, stopping)
    assert said == "stop: after 0.5 s other ranks have not come for the rest of a sharded load"
    assert seconds < 4


# --- with the agreement of acks -------------------------------------------------------------------


def agreeing(rank: int, ranks: int, what: str, transport: str) -> tuple[list[str], int]:
    """A few loads whose acks retire on all ranks alike. What polling raised, and how many acks it
    retired; on rank 1 a copy fails, or other pages are loaded, in the second of three loads."""
    groups = AgreementGroups(tp=dist.new_group(backend="gloo"))
    one = make_rank(
        HostDevice(),
        new_channel(),
        rank=rank,
        agreement=Agreement(groups, transport=transport, timeout=30),
    )
    controller = one.controller
    slots = one.device_pages.alloc(4 * PAGE)
    stored = [controller.write(slots[: 2 * PAGE]), controller.write(slots[2 * PAGE :])]
    controller.ack_write_queue.clear()
    raised: list[str] = []
    retired = 0
    for number in range(3):
        odd = number == 1 and rank == 1
        if odd and what == "fails":
            one.device.fail_copy_call(1)
        controller.load(stored[1] if odd and what == "differs" else stored[0])
        burst = controller.start_loading()
        with suppress(BurstError):
            one.forward(burst)
        controller.drain()
        for _ in range(4):
            try:
                retired += len(controller.poll())
            except AgreementError as error:
                raised.append(str(error))
    controller.stop()
    return raised, retired


@pytest.mark.parametrize("transport", ["blocking", "pipelined", "board"])
def test_sharded_loads_are_retired_by_agreement_and_all_is_well(transport: str) -> None:
    assert run_ranks(3, agreeing, "well", transport) == [([], 3)] * 3


def test_copy_that_fails_on_one_rank_is_raised_on_all_by_the_agreement() -> None:
    answers = run_ranks(3, agreeing, "fails", "pipelined")
    for raised, retired in answers:
        assert raised == answers[0][0]
        assert "copy: failed, as it was told to" in "".join(raised)
        assert retired == 3


def test_ranks_that_loaded_other_host_pages_are_found_by_the_agreements_digest() -> None:
    for raised, _ in run_ranks(3, agreeing, "differs", "blocking"):
        assert any("the digest differs" in words for words in raised)


# --- capacity ------------------------------------------------------------------------------------


def capacities(rank: int, ranks: int, layers: list[int], ram: list[int]) -> tuple[int, str]:
    channel = new_channel()
    page_bytes = 100
    mine = ram[rank] // (layers[rank] * page_bytes)
    pages = agreed_capacity(mine, lambda least: channel.minimum([least]).result()[0])
    one = make_rank(HostDevice(), None, pages=pages, host_pages=pages)
    stored = one.controller.write(one.device_pages.alloc(PAGE))
    one.controller.ack_write_queue.clear()
    refused = []
    before = one.device.counters("load").copies
    for beyond in (-1, pages, 1 << 40):
        good = [0] * 1000
        good[500] = beyond
        try:
            one.controller.load(slots_of(good))
        except PageError as error:
            refused.append(str(error))
    assert one.controller.start_loading() == -1
    assert one.device.counters("load").copies == before
    assert one.device_pages.available_pages == pages - 1
    del stored
    return pages, "; ".join(refused)


def test_ranks_with_unequal_layers_and_memory_agree_on_the_least_capacity() -> None:
    """vllm-project/vllm#50653: ids beyond one rank's pool."""
    layers, ram = [20, 19, 19, 21], [2_400_000, 2_200_000, 2_600_000, 2_310_000]
    answers = run_ranks(4, capacities, layers, ram)
    least = min(have // (count * 100) for have, count in zip(ram, layers, strict=True))
    assert [pages for pages, _ in answers] == [least] * 4
    for _, refused in answers:
        assert refused.count("host_indices") == 3
