"""What tests let ranks do with a real cache. Each returns what the test then judges."""

import contextlib
from collections.abc import Sequence
from unittest import mock

import on_cpu
import torch
from ranks import Context
from real_cache import RealCache, build
from rigs import Blocking
from setups import HeldLoad, Moved, RoundTrip, Setup
from slowed import held, nobody_waits, on_device

from kvburst import BurstError, DeviceError, kvcacheio
from kvburst.sglang_plugin import devices, status
from kvburst.sglang_plugin.status import Status


def moved(before: Status, stock_copies: int) -> Moved:
    """Since `before`."""
    now = status()
    return Moved(
        loads=now.bursts_loaded - before.bursts_loaded,
        backups=now.bursts_backed_up - before.bursts_backed_up,
        pages_loaded=now.pages_loaded - before.pages_loaded,
        pages_backed_up=now.pages_backed_up - before.pages_backed_up,
        left_to_sglang=now.left_to_sglang - before.left_to_sglang,
        failures=now.failures - before.failures,
        stock_copies=stock_copies,
    )


def prefix(name: int, pages: int, setup: Setup) -> list[int]:
    """Tokens that share nothing with another name's."""
    return [name * 100_000 + token for token in range(1, 1 + pages * setup.page_size)]


def round_trip(context: Context, setup: Setup, loads: int = 5) -> RoundTrip:
    """Two prefixes with a common beginning go to the host and come back, again and again."""
    cache = build(context, setup)
    first = prefix(1, 5, setup)
    second = first[: 2 * setup.page_size] + prefix(2, 3, setup)
    touched: list[str] = []
    wrong: list[str] = []

    begin = status()
    context.copies.forget()
    host_before = cache.host_bytes()
    cache.scribble_free_pages()
    for tokens in (first, second):
        assert cache.insert(tokens)
        cache.step()
    cache.settle()
    cache.evict(8 * setup.page_size)
    cache.settle()
    assert cache.match(first).device_prefix_len == 0
    assert cache.match(second).host_hit_length == len(second)
    touched += changed("host", host_before, cache.host_bytes(), at_most=8)
    backing_up = moved(begin, context.copies.total)

    begin = status()
    context.copies.forget()
    for number in range(loads):
        cache.scribble_free_pages()
        # Pages that somebody else takes, so that the next load lands elsewhere.
        others = cache.take(setup.page_size)
        assert others is not None
        device_before, host_before = cache.device_bytes(), cache.host_bytes()
        loaded = cache.load_back(first) + cache.load_back(second)
        assert loaded == 8 * setup.page_size
        consumer = cache.start()
        assert consumer == number % 3
        for tokens in (first, second):
            wrong += cache.forward(consumer, tokens)
        cache.settle()
        assert cache.tree.is_load_back_event_done(consumer)
        assert cache.tree.has_free_load_back_slot()
        touched += changed("device", device_before, cache.device_bytes(), at_most=8)
        touched += changed("host", host_before, cache.host_bytes(), at_most=0)
        cache.evict(8 * setup.page_size)
        cache.settle()
        cache.allocator.free(others)
    loading = moved(begin, context.copies.total)

    cache.tree.reset()
    cache.allocator.clear()
    assert cache.match(first).host_hit_length == 0
    cache.scribble_free_pages()
    assert cache.insert(first)
    wrong += cache.forward(-1, first)
    cache.settle()
    return RoundTrip(8, loads, backing_up, loading, wrong, touched)


def changed(
    what: str, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], at_most: int
) -> list[str]:
    """Complains if more pages of a buffer than `at_most` differ."""
    complaints = []
    for kind, (old, new) in enumerate(zip(before, after, strict=True)):
        differs = (old != new).flatten(1).any(1)
        pages = differs.nonzero().flatten().tolist()
        if len(pages) > at_most:
            complaints.append(f"{what} buffer {kind}: pages {pages} changed, at most {at_most} may")
    return complaints


def features(_: Context) -> dict[str, tuple[bool, str]]:
    """What the plugin says is on, and why what is off is off; of the cache made last."""
    return {
        name: (verdict.on, "; ".join(verdict.reasons))
        for name, verdict in status().features.items()
    }


def build_only(context: Context, setup: Setup) -> None:
    _cache: RealCache = build(context, setup)


def on_the_host_only(cache: RealCache, *prefixes: Sequence[int]) -> None:
    for tokens in prefixes:
        assert cache.insert(tokens)
        cache.step()
    cache.settle()
    cache.evict(cache.allocator.size)
    cache.settle()
    cache.scribble_free_pages()


def held_load(context: Context, setup: Setup) -> HeldLoad:
    """A forward whose load has been started, and cannot copy anything yet."""
    tokens = prefix(1, 4, setup)
    wrong: list[str] = []
    with on_device() as device:
        cache = build(context, setup)
        on_the_host_only(cache, tokens)
        with held(device):
            assert cache.load_back(tokens) == len(tokens)
            consumer = cache.start()
            done = cache.tree.is_load_back_event_done(consumer)
            forward = Blocking(lambda: wrong.extend(cache.forward(consumer, tokens)))
            blocked = forward.blocks()
        forward.join()
        cache.settle()
        assert cache.tree.is_load_back_event_done(consumer)
    return HeldLoad(done, blocked, wrong, cache.forward(-1, tokens))


def held_load_without_the_wait(context: Context, setup: Setup) -> HeldLoad:
    """The same, where the forward does not wait."""
    tokens = prefix(1, 4, setup)
    with on_device() as device:
        cache = build(context, setup)
        on_the_host_only(cache, tokens)
        with held(device):
            assert cache.load_back(tokens) == len(tokens)
            consumer = cache.start()
            done = cache.tree.is_load_back_event_done(consumer)
            with nobody_waits():
                wrong = cache.forward(consumer, tokens)
        cache.settle()
    return HeldLoad(done, False, wrong, cache.forward(-1, tokens))


def reset_while_held(context: Context, setup: Setup) -> list[str]:
    """A cache is flushed under a load, and its pages are used anew; what is wrong with them."""
    tokens, others = prefix(1, 4, setup), prefix(2, setup.pages, setup)
    with on_device() as device:
        cache = build(context, setup)
        on_the_host_only(cache, tokens)

        def flush() -> None:
            cache.tree.reset()
            cache.allocator.clear()

        with held(device):
            assert cache.load_back(tokens) == len(tokens)
            cache.start()
            flushing = Blocking(flush)
            assert flushing.blocks()
        flushing.join()
        assert not cache.controller.has_inflight_device_transfers()
        assert cache.insert(others)
        return cache.forward(-1, others)


def loads_beyond_the_rotation(context: Context, setup: Setup) -> list[str]:
    """A fourth load is started while three are held; what is wrong with all of them."""
    prefixes = [prefix(name, 3, setup) for name in range(4)]
    wrong: list[str] = []
    with on_device() as device:
        cache = build(context, setup)
        on_the_host_only(cache, *prefixes)
        with held(device):
            for tokens in prefixes[:3]:
                assert cache.load_back(tokens) == len(tokens)
                cache.start()
            assert not cache.tree.has_free_load_back_slot()
            assert cache.load_back(prefixes[3]) == len(prefixes[3])
            consumers: list[int] = []
            fourth = Blocking(lambda: consumers.append(cache.start()))
            assert fourth.blocks()
        fourth.join()
        for tokens in prefixes:
            wrong += cache.forward(consumers[0], tokens)
        cache.settle()
    return wrong


def failed_load(context: Context, setup: Setup) -> tuple[str, str, int]:
    """The device fails in a load: what the forward is told, what the next step is told, and how
    many failures are counted."""
    tokens = prefix(1, 4, setup)
    before = status().failures
    with on_device() as device:
        cache = build(context, setup)
        on_the_host_only(cache, tokens)
        assert cache.load_back(tokens) == len(tokens)
        device.fail_copy_call(2)
        consumer = cache.start()
        told = []
        for ask in (lambda: cache.forward(consumer, tokens), cache.settle):
            try:
                ask()
            except BurstError as error:
                told.append(str(error))
            else:
                told.append("nothing")
    return told[0], told[1], status().failures - before


def retraction(context: Context, setup: Setup) -> tuple[list[str], Moved]:
    """A request gives its pages up and gets others: no slot, no callback, and it waits at once."""
    tokens = prefix(1, 4, setup)
    begin = status()
    context.copies.forget()
    cache = build(context, setup)
    cache.scribble_free_pages()
    request = cache.request([*tokens, 1])
    cache.requests.alloc([request])
    row = (request.kv.req_pool_idx, slice(0, len(tokens)))
    slots = cache.take(len(tokens))
    assert slots is not None
    cache.write(tokens, slots)
    cache.requests.write(row, slots.to(torch.int32))
    backup = cache.tree.backup_kv_cache(request)
    assert backup is not None
    others = cache.take(2 * setup.page_size)
    assert others is not None
    cache.allocator.free(slots)
    cache.scribble_free_pages()
    slots = cache.take(len(tokens))
    assert slots is not None
    cache.requests.write(row, slots.to(torch.int32))
    cache.tree.restore_kv_cache(request, backup)
    return cache.wrong_pages(tokens, slots), moved(begin, context.copies.total)


def round_trip_with_our_copies(context: Context, setup: Setup) -> RoundTrip:
    """SGLang's own loops, with `kvburst.kvcacheio` in place of its copy functions."""
    with contextlib.ExitStack() as stack:
        for module in on_cpu.host_pool_modules():
            for function in kvcacheio.__all__:
                ours = getattr(kvcacheio, function)
                stack.enter_context(mock.patch.object(module, function, ours))
        return round_trip(context, setup, loads=2)


def copies_of_five_scattered_pages(context: Context, setup: Setup) -> tuple[int, int]:
    """Copies of a backup and of a load, counted inside the device."""
    with on_device() as device:
        cache = build(context, setup)
        free = cache.allocator.free_pages
        # No page lies beside the one that is handed out before or after it.
        cache.allocator.free_pages = torch.cat([free[::2], free[1::2]])
        tokens = prefix(1, 5, setup)
        on_the_host_only(cache, tokens)
        backup = device.counters("backup").copies
        free = cache.allocator.get_all_free_pages()
        cache.allocator.free_pages = torch.cat([free[::2], free[1::2]])
        assert cache.load_back(tokens) == len(tokens)
        cache.start()
        cache.settle()
        return backup, device.counters("load").copies


def one_rank_without_a_device(
    context: Context, setup: Setup
) -> tuple[dict[str, tuple[bool, str]], RoundTrip]:
    """Rank 1 has none."""
    missing = DeviceError("no such device")
    on_rank_1 = mock.patch.object(devices, "new_device", side_effect=missing)
    with on_rank_1 if context.rank == 1 else contextlib.nullcontext():
        trip = round_trip(context, setup, loads=1)
    return features(context), trip
