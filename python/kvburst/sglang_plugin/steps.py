"""The scheduler's step, in which SGLang's cache takes what is done: agreed, and timed."""

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvburst.sglang_plugin.plugin import Plugin

logger = logging.getLogger("kvburst")


class StepTimer:
    """Logs what steps take, every so many of them. 0: never."""

    def __init__(self, steps: int) -> None:
        self._every = steps
        self._steps = self._total_ns = self._longest_ns = 0

    def took(self, nanoseconds: int) -> None:
        if self._every == 0:
            return
        self._steps += 1
        self._total_ns += nanoseconds
        self._longest_ns = max(self._longest_ns, nanoseconds)
        if self._steps == self._every:
            logger.info(
                "check_hicache_events: %.1f us a step, %.1f us the longest of %d steps",
                self._total_ns / 1000 / self._steps,
                self._longest_ns / 1000,
                self._steps,
            )
            self._steps = self._total_ns = self._longest_ns = 0


class Steps:
    """Hooks on the cache. Each passes through for one whose ranks agree as SGLang does."""

    def __init__(self, plugin: "Plugin") -> None:
        self._plugin = plugin
        self._timer = StepTimer(plugin.settings.timer_steps)

    def check(self, original: Callable[[Any], None], cache: Any) -> None:
        begin = perf_counter_ns()
        try:
            with self._plugin.ranges("check_hicache_events"):
                agreement = self._plugin.agreement_of(cache)
                if agreement is None:
                    original(cache)
                else:
                    agreement.step(partial(original, cache))
        finally:
            self._timer.took(perf_counter_ns() - begin)
            self._plugin.report(cache)

    def sync(self, original: Callable[[Any], Any], cache: Any) -> Any:
        agreement = self._plugin.agreement_of(cache)
        if agreement is None or not agreement.stepping:
            return original(cache)
        return agreement.collect()

    def drain_storage(self, cache: Any, *args: Any, **kwargs: Any) -> None:
        """In a step by what was agreed; otherwise SGLang takes as many as it sees fit."""
        agreement = self._plugin.agreement_of(cache)
        if agreement is not None and not agreement.stepping:
            agreement.popped_elsewhere()

    def reset(self, cache: Any) -> None:
        agreement = self._plugin.agreement_of(cache)
        if agreement is not None:
            agreement.reset()

    def release(self, cache: Any) -> None:
        self._plugin.end_agreement(cache)
