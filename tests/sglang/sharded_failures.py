"""Ranks that share a tier and do not do the same: what each of them is told, and what it has read
by then."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

from ranks import Context
from real_cache import RealCache, build
from scenarios import on_the_host_only, prefix
from setups import Setup
from sharing import Told
from slowed import on_device

from kvburst import KVBurstError
from kvburst.exchange import GroupChannel
from kvburst.exchange.primitive import LayerBroadcast
from kvburst.sglang_plugin import shard_decision

PAGES = 4
TIMEOUT = 10.0
"""Seconds."""


def _told(cache: RealCache, tokens: list[int], consumer: int) -> Told:
    begin = time.monotonic()
    counter = cache.controller.layer_done_counter
    slots = cache.device_slots(cache.match(tokens))
    read = 0
    wrong: list[str] = []

    def forward() -> None:
        nonlocal read
        counter.set_consumer(consumer)
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
            here = f", layer {layer}, "
            now = cache.wrong_pages(tokens, slots, waiting=False)
            wrong.extend(page for page in now if here in page)
            read += 1
        counter.set_consumer(-1)

    told = _error(forward)
    return Told(told, read, wrong, _error(cache.settle), time.monotonic() - begin)


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except KVBurstError as error:
        return str(error)
    return "nothing"


def copy_fails(context: Context, setup: Setup, rank: int, call: int) -> Told:
    """On `rank`, at its `call`-th copy call of the load."""
    tokens = prefix(1, PAGES, setup)
    with on_device() as device:
        cache = build(context, setup)
        on_the_host_only(cache, tokens)
        assert cache.load_back(tokens) == len(tokens)
        if context.rank == rank:
            device.fail_copy_call(call)
        return _told(cache, tokens, cache.start())


def other_pages(context: Context, setup: Setup, rank: int) -> Told:
    """`rank` loads the same host pages in another order: to other tokens, that is."""
    tokens = prefix(1, PAGES, setup)
    cache = build(context, setup)
    on_the_host_only(cache, tokens)
    assert cache.load_back(tokens) == len(tokens)
    if context.rank == rank:
        (operation,) = cache.controller.load_queue
        pages = operation.host_indices.view(PAGES, setup.page_size)
        operation.host_indices = pages.flip(0).reshape(-1)
    return _told(cache, tokens, cache.start())


def _impatient(context: Context, setup: Setup) -> RealCache:
    """Here a rank that is told does not end, as a server does. So those that have no connection to
    the one that is gone, and wait for the others, are told by the channel's timeout alone."""
    channel = partial(GroupChannel, timeout=TIMEOUT)
    with mock.patch.object(shard_decision, "GroupChannel", channel):
        return build(context, setup)


def killed(context: Context, setup: Setup, rank: int) -> Told:
    """`rank` is killed when the exchange of its third layer begins."""
    tokens = prefix(1, PAGES, setup)
    cache = _impatient(context, setup)
    on_the_host_only(cache, tokens)
    assert cache.load_back(tokens) == len(tokens)
    consumer = cache.start()
    send, sent = LayerBroadcast.send, 0

    def send_two(*args: object) -> None:
        nonlocal sent
        sent += 1
        if context.rank == rank and sent == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        send(*args)  # type: ignore[arg-type]

    with mock.patch.object(LayerBroadcast, "send", send_two):
        return _told(cache, tokens, consumer)


def never_comes(context: Context, setup: Setup, rank: int) -> Told:
    """`rank` is killed before its forward, while the others wait for it."""
    tokens = prefix(1, PAGES, setup)
    cache = _impatient(context, setup)
    on_the_host_only(cache, tokens)
    assert cache.load_back(tokens) == len(tokens)
    consumer = cache.start()
    if context.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return _told(cache, tokens, consumer)
