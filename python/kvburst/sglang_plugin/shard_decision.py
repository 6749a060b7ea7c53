"""Whether the ranks of a cache keep one host copy of each layer between them, and how: decided, and
agreed by all, before its pools are built."""

import hashlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.runtime_context import get_memory, get_parallel

from kvburst._core import LayoutError
from kvburst.exchange import GroupChannel, RankShard
from kvburst.ownership import agreed_reasons, reasons_against_sharding
from kvburst.settings import SWITCHES, Settings
from kvburst.sglang_plugin.agreement import minimum, size_of
from kvburst.sglang_plugin.shard_facts import KV, SharedStack, gather, group_of
from kvburst.sglang_plugin.shard_plan import shards_of
from kvburst.sglang_plugin.shard_pools import UNSET, ShardedPools

logger = logging.getLogger("kvburst")

# "SHARD": what ranks vote on otherwise begins with another number.
_VOTE = 0x5348415244


@dataclass(frozen=True)
class Sharing:
    """What the ranks of a cache have decided, before its host pools are built."""

    pools: ShardedPools | None
    """None: each rank keeps everything, as ever."""
    reasons: tuple[str, ...] = ()
    """Why."""


def decide(cache: Any, params: Any, settings: Settings) -> Sharing:
    """A collective: every rank calls it before it builds its pools, and with the same result.

    Raises LayoutError if a rank votes on something else, having other variables.
    """
    stack, reasons, plan = _look(cache, params, settings)
    tag, other, fit, lowest, highest = minimum(
        cache, [_VOTE, -_VOTE, int(not reasons), plan, -plan]
    )
    if tag != -other:
        raise LayoutError(f"{SWITCHES['rank_shard']}: is not set on every rank")
    if lowest != -highest:
        reasons += ("ranks differ in variables, sizes or pools of the host tier",)
    if stack is None or reasons or not fit:
        everybodys = agreed_reasons(reasons, partial(_of_ranks, cache))
        return Sharing(None, everybodys or ("it is refused on another rank",))
    group = group_of(cache)
    shards = shards_of(stack.layers, stack.drafts, size_of(group), dist.get_rank(group))
    keep_capacity = settings.rank_shard_keep_capacity or False
    return Sharing(ShardedPools(shards, stack.page_bytes, keep_capacity))


def _look(
    cache: Any, params: Any, settings: Settings
) -> tuple[SharedStack | None, tuple[str, ...], int]:
    """What this rank finds, what it has against sharing it, and what must be the same on all."""
    try:
        stack = gather(cache, params, settings)
        return stack, reasons_against_sharding(stack.facts), _digest(stack, params, settings)
    except Exception as error:  # The others are waiting for what it says.
        logger.exception("the pools of this server cannot be described")
        return None, (f"its pools cannot be described: {error!r}",), 0


def rank_shard(cache: Any, pools: ShardedPools, settings: Settings) -> RankShard:
    """How this rank takes part in the exchange. A collective where a group is made."""
    on_gpu = torch.device(cache.cache_controller.mem_pool_device.device).type == "cuda"
    cpu_group = group_of(cache)
    assert cpu_group is not None, "a rank by itself shares nothing"
    if on_gpu:
        group = _device_group(cpu_group)
    elif settings.exchange == "side_stream":
        # Broadcasts block a thread of their own, in an order of its own.
        ranks = dist.get_process_group_ranks(cpu_group)
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    else:
        group = cpu_group
    return RankShard(
        pools.shards[KV].owned,
        GroupChannel(group, cpu_group),
        exchange=settings.exchange,
        staging_bytes=settings.staging_bytes,
        capturing=torch.cuda.is_current_stream_capturing if on_gpu else _never,
    )


def _never() -> bool:
    return False


def _digest(stack: SharedStack, params: Any, settings: Settings) -> int:
    """Of what must be the same on all ranks for their tiers to have the same pages."""
    memory = get_memory()
    kv = params.token_to_kv_pool_allocator.get_kvcache()
    plan = (
        dict(stack.layers),
        stack.drafts,
        dict(stack.page_bytes),
        (memory.hicache_size, memory.hicache_ratio, params.page_size, kv.size),
        (settings.rank_shard_keep_capacity, settings.staging_bytes, settings.exchange),
    )
    return int.from_bytes(hashlib.blake2b(repr(plan).encode(), digest_size=7).digest(), "big")


def _of_ranks(cache: Any, reasons: tuple[str, ...]) -> list[tuple[str, ...]]:
    group = group_of(cache)
    if group is None or size_of(group) == 1:
        return [reasons]
    everybodys: list[Any] = [None] * size_of(group)
    dist.all_gather_object(everybodys, reasons, group=group)
    return everybodys


def _device_group(cpu_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """SGLang's group for device memory, of the same ranks."""
    parallel = get_parallel()
    for coordinator in (parallel.attn_tp_group, parallel.tp_group):
        if coordinator.cpu_group is cpu_group:
            group: dist.ProcessGroup = coordinator.device_group
            return group
    ranks = dist.get_process_group_ranks(cpu_group)
    raise LayoutError(f"SGLang has no group for the device memory of ranks {ranks}; {UNSET}")
