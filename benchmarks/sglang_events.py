"""What `sglang_step.py` lets each rank do: steps of two caches of the released SGLang, of which one
agrees as SGLang does and one as the plugin does. Only for processes that have SGLang."""

import os
import time
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch.distributed as dist
from harness import take_turns
from ranks import Context
from real_cache import build
from setups import Setup

BETWEEN_STEPS_S = 0.0005
WARM_UP = 20

SWITCHES = {"board": "KVBURST", "pipelined": "SGLANG_ENABLE_HICACHE_ASYNC_ACK_SYNC"}
"""By transport, the variable that asks for it."""


@dataclass(frozen=True)
class Steps:
    """A cache with nothing under way."""

    cache: Any
    group: Any

    def check(self) -> float:
        """Microseconds of this rank's thread, for one step that all ranks begin together."""
        dist.barrier(self.group)
        time.sleep(BETWEEN_STEPS_S)
        begin = perf_counter_ns()
        self.cache.tree.check_hicache_events()
        return (perf_counter_ns() - begin) / 1000


def measure(context: Context, transport: str, steps: int) -> tuple[dict[str, list[float]], str]:
    """Samples of both arms, and the transport that the plugin really had."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvburst import sglang_plugin

    stock = build(context, Setup())
    os.environ[SWITCHES[transport]] = "1"
    sglang_plugin.register()
    HookRegistry.apply_hooks()
    plugin = build(context, Setup())
    barrier = dist.new_group(list(range(context.world)), backend="gloo")
    arms = {"stock": Steps(stock, barrier).check, "plugin": Steps(plugin, barrier).check}
    before = sglang_plugin.status().agreements
    samples = take_turns(arms, steps, warm_up=WARM_UP)
    if sglang_plugin.status().agreements - before != steps + WARM_UP:
        raise RuntimeError(f"{sglang_plugin.status().agreements} rounds in {steps} steps")
    return samples, sglang_plugin.status().transport
