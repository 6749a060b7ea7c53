"""Everybody in SGLang who waits for a load, or does not: what is then in memory.

Copies of the host pages travel on their own; what a rank does not keep it gets from the others only
where somebody waits. So each scenario says who waits, and looks at the memory itself.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from ranks import Context
from real_cache import RealCache, build
from rigs import Blocking
from scenarios import on_the_host_only, prefix, retraction
from setups import Setup
from sharing import Gated, Waited
from slowed import held, on_device

from kvburst import KVBurstError


def _loading(context: Context, setup: Setup, *names: int) -> tuple[RealCache, list[list[int]]]:
    """A cache, and prefixes that are on its host alone."""
    cache = build(context, setup)
    prefixes = [prefix(name, 3, setup) for name in names]
    on_the_host_only(cache, *prefixes)
    return cache, prefixes


def _start(cache: RealCache, tokens: Sequence[int]) -> int:
    assert cache.load_back(tokens) == len(tokens)
    return cache.start()


def _waited(
    context: Context, setup: Setup, wait: Callable[[Any, int], None], *, consumes: bool
) -> Waited:
    """`wait(counter, consumer)` stands for a worker, behind `set_consumer` if it `consumes`."""
    cache, (tokens, others) = _loading(context, setup, 1, 2)
    counter = cache.controller.layer_done_counter
    consumer = _start(cache, tokens)
    before = cache.in_memory(tokens)
    if consumes:
        counter.set_consumer(consumer)
    wait(counter, consumer)
    after = cache.in_memory(tokens)
    later = cache.forward(consumer, tokens)
    cache.settle()
    later += cache.forward(_start(cache, others), others)
    cache.settle()
    return Waited(before, after, later + cache.forward(-1, tokens))


def last_layer_alone(context: Context, setup: Setup) -> Waited:
    """As a runner of whole CUDA graphs does: the last layer stands for all."""
    return _waited(
        context,
        setup,
        lambda counter, _: counter.wait_until(counter.num_layers - 1),
        consumes=True,
    )


def first_layer_alone(context: Context, setup: Setup) -> Waited:
    """What a forward is promised for its first layer is no more than that."""
    return _waited(context, setup, lambda counter, _: counter.wait_until(0), consumes=True)


def event_of_a_slot(context: Context, setup: Setup) -> Waited:
    """As a draft worker does, before anybody has said which load it consumes."""
    return _waited(
        context,
        setup,
        lambda counter, consumer: counter.events[consumer].wait(counter.num_layers - 1),
        consumes=False,
    )


def next_forward(context: Context, setup: Setup) -> Waited:
    """Nobody waits, but a forward that consumes nothing is launched: a decode, say."""
    return _waited(context, setup, lambda counter, _: counter.set_consumer(-1), consumes=False)


def idle_steps(context: Context, setup: Setup) -> Waited:
    """No forward is launched at all; the scheduler's steps go on."""
    cache, (tokens,) = _loading(context, setup, 1)
    consumer = _start(cache, tokens)
    before = cache.in_memory(tokens)
    cache.settle()
    assert cache.tree.is_load_back_event_done(consumer)
    return Waited(before, cache.in_memory(tokens), cache.forward(consumer, tokens))


def events_of_an_older_load(context: Context, setup: Setup) -> list[str]:
    """A second load starts before the forward of the first, whose draft worker then waits."""
    cache, (first, second) = _loading(context, setup, 1, 2)
    counter = cache.controller.layer_done_counter
    one, two = _start(cache, first), _start(cache, second)
    counter.events[one].wait(counter.num_layers - 1)
    wrong = cache.in_memory(first)
    wrong += cache.forward(one, first)
    counter.events[two].wait(counter.num_layers - 1)
    wrong += cache.in_memory(second)
    wrong += cache.forward(two, second)
    cache.settle()
    return wrong


# --- forwards that never run ---------------------------------------------------------------------


def loads_that_nobody_waits_for(context: Context, setup: Setup) -> list[str]:
    """Three fill all slots, and a fourth needs one; only its forward runs."""
    cache, prefixes = _loading(context, setup, 1, 2, 3, 4)
    for tokens in prefixes[:3]:
        _start(cache, tokens)
    assert not cache.tree.has_free_load_back_slot()
    consumer = _start(cache, prefixes[3])
    wrong = cache.forward(consumer, prefixes[3])
    cache.settle()
    for tokens in prefixes:
        wrong += cache.in_memory(tokens)
    return wrong


def reset_under_loads(context: Context, setup: Setup) -> list[str]:
    """The cache is flushed under two loads whose forwards never run, and used anew."""
    cache, (first, second, third) = _loading(context, setup, 1, 2, 3)
    _start(cache, first)
    _start(cache, second)
    cache.tree.reset()
    cache.allocator.clear()
    assert not cache.controller.has_inflight_device_transfers()
    cache.scribble_free_pages()
    on_the_host_only(cache, third)
    wrong = cache.forward(_start(cache, third), third)
    cache.settle()
    return wrong


def stop_under_a_load(context: Context, setup: Setup) -> list[str]:
    """The server ends under a load whose forward never runs; another cache then works."""
    cache, (tokens,) = _loading(context, setup, 1)
    _start(cache, tokens)
    cache.tree.release_host_resources()
    cache, (tokens,) = _loading(context, setup, 2)
    wrong = cache.forward(_start(cache, tokens), tokens)
    cache.settle()
    cache.tree.release_host_resources()
    return wrong


def restored_after_retraction(context: Context, setup: Setup) -> tuple[list[str], str]:
    """What is wrong with the pages of a retracted request, or why it does not get them back."""
    try:
        wrong, _ = retraction(context, setup)
    except KVBurstError as error:
        return [], str(error)
    return wrong, ""


# --- the gate of the side stream -----------------------------------------------------------------


class _BegunError(Exception):
    """SGLang's own `run_batch` has been entered; there is no model to go on with."""


def gate(context: Context, setup: Setup) -> Gated:
    """The scheduler's `run_batch` as it is hooked, with hardly a scheduler behind it."""
    from sglang.srt.managers.scheduler import Scheduler

    wrong: list[str] = []
    with on_device() as device:
        cache, (tokens,) = _loading(context, setup, 1)

        def begun(_: int) -> None:
            wrong.extend(cache.in_memory(tokens))
            raise _BegunError

        scheduler = SimpleNamespace(
            tree_cache=cache.tree,
            forward_stream=None,  # Where torch is synchronous.
            scheduler_stage_metrics=None,
            metrics_reporter=SimpleNamespace(record_scheduler_active=begun),
        )
        with held(device):
            consumer = _start(cache, tokens)
            batch = SimpleNamespace(hicache_consumer_index=consumer)

            def run_batch() -> None:
                with suppress(_BegunError):
                    Scheduler.run_batch(scheduler, batch)

            batch_runs = Blocking(run_batch)
            blocked = batch_runs.blocks()
        batch_runs.join()
        cache.forward(consumer, tokens)
        cache.settle()
    return Gated(blocked, wrong)
