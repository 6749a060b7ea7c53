"""What the plugin hooks in SGLang, and the check that it is what the plugin was written for."""

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

VERSIONS = ("0.5.23",)
"""Releases of SGLang that the plugin was tested with."""

_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_COUNTER = "sglang.srt.managers.cache_controller.LayerDoneCounter"
_ENGINE = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine"
_GROUP = "sglang.srt.mem_cache.pool_host.group.HostPoolGroup"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_POOLS = "sglang.srt.mem_cache.memory_pool"
_HOST_POOLS = "sglang.srt.mem_cache.pool_host"
_MANAGERS = "sglang.srt.managers"


@dataclass(frozen=True)
class Target:
    """Something in SGLang by its dotted path, with the parameters it must have."""

    path: str
    parameters: str
    """Names as in its signature; ``=`` for those with a default."""


ATTACH = Target(f"{_CACHE}.init_hicache", "self, server_args, params")
CHECK = Target(f"{_CACHE}.check_hicache_events", "self")
SYNC = Target(f"{_CACHE}._sync_hicache_ready_counts", "self")
RESET_CACHE = Target(f"{_CACHE}._reset_full", "self")
DRAIN_STORAGE = Target(
    f"{_CACHE}._drain_storage_control_queues_impl",
    "self, n_storage_hit, n_ack_prefetch, n_backup, n_release, extra_release_counts, log_metrics",
)
RELEASE = Target(f"{_CACHE}.release_host_resources", "self")
LOAD = Target(
    f"{_ENGINE}.submit_host_to_device",
    "self, transfers, *, transfer_layer_id_max, start_event=, on_layer_done=",
)
BACKUP = Target(f"{_ENGINE}.submit_device_to_host", "self, transfers")
START_LOADING = Target(f"{_CONTROLLER}.start_loading", "self")
START_WRITING = Target(f"{_CONTROLLER}.start_writing", "self")
MOVE_INDICES = Target(f"{_CONTROLLER}.move_indices", "self, host_indices, device_indices")
RESET = Target(f"{_CONTROLLER}.reset", "self")
UPDATE_PRODUCER = Target(f"{_COUNTER}.update_producer", "self")
ATTACH_STORAGE = Target(
    f"{_HYBRID}.attach_storage_backend",
    "self, storage_backend, prefetch_threshold=, model_name=, storage_backend_extra_config=,"
    " host_pools=",
)
DETACH_STORAGE = Target(f"{_HYBRID}.detach_storage_backend", "self")
CLEAR_GROUP = Target(f"{_GROUP}.clear", "self")
DESTROY_GROUP = Target(f"{_GROUP}.destroy", "self")
RELEASE_MEMORY = Target(f"{_UPDATER}.release_memory_occupation", "self, recv_req")
MLA_BUFFERS = Target(f"{_POOLS}.MLATokenToKVPool._create_buffers", "self")
MHA_BUFFERS = Target(f"{_POOLS}.MHATokenToKVPool._create_buffers_normal", "self")
INDEX_BUFFERS = Target(f"{_POOLS}.DSATokenToKVPool._create_index_key_cache", "self")
BUILD_MLA = Target(
    f"{_HOST_POOLS}.mla.MLATokenToKVPoolHost.__init__",
    "self, buffer_info, host_to_device_ratio, host_size, page_size, layout, pin_memory=, device=,"
    " allocator_type=, override_kv_cache_dim=, draft_buffer_infos=, dcp_size=, dcp_rank=, *,"
    " device_capacity_tokens, start_layer, end_layer, target_layer_num, layer_shard_enabled=,"
    " pool_label=, host_token_capacity=",
)
BUILD_INDEX = Target(
    f"{_HOST_POOLS}.dsa.DSAIndexerPoolHost.__init__",
    "self, decl, anchor_host, *, packed_draft_device_pools=, pin_memory=, device=, allocator_type=,"
    " is_dummy=",
)
SET_CONSUMER = Target(f"{_COUNTER}.set_consumer", "self, index")
EMBEDDING = Target(f"{_MANAGERS}.tp_worker.BaseTpWorker.forward_batch_embedding", "self, batch")
RUN_BATCH = Target(f"{_MANAGERS}.scheduler.Scheduler.run_batch", "self, batch, pp_proxy_tensors=")
ADD_POOL = Target(f"{_HYBRID}.register_host_pool_entry", "self, entry")
ATTACH_CACHE_STORAGE = Target(
    f"{_CACHE}.attach_storage_backend",
    "self, storage_backend, storage_backend_extra_config_json=, served_model_name=,"
    " hicache_storage_prefetch_policy=, hicache_write_policy=",
)

SHAPES = (
    Target(f"{_CACHE}._all_reduce_attn_groups", "self, tensor, op"),
    Target(
        "sglang.srt.mem_cache.l2_transfer.L2Transfer",
        "host_pool, device_pool, host_indices, device_indices, layer_mapper=, is_draft=",
    ),
    Target(
        "sglang.srt.mem_cache.l2_transfer.TransferCompletion",
        "start_event, finish_event, timing_enabled",
    ),
    Target(
        "sglang.srt.mem_cache.pool_host.group.PoolEntry",
        "name, host_pool, device_pool, layer_mapper, is_primary_index_anchor=, host_evict_fn=,"
        " device_evict_fn=, device_alloc_fn=, device_free_fn=, packed_draft_device_pools=",
    ),
)
"""What the plugin calls, makes or reads, and does not hook."""


def version_problem(version: str) -> str | None:
    """What is against this version of SGLang, if anything."""
    if version in VERSIONS:
        return None
    return f"SGLang {version} is none of the versions it was tested with: {', '.join(VERSIONS)}"


def problems(
    targets: Sequence[Target], resolve: Callable[[str], Any] = pkgutil.resolve_name
) -> list[str]:
    """What is not as it must be; nothing: the targets may be hooked."""
    found = (_problem(target, resolve) for target in targets)
    return [problem for problem in found if problem is not None]


def _problem(target: Target, resolve: Callable[[str], Any]) -> str | None:
    try:
        found = resolve(target.path)
    except (ImportError, AttributeError, ValueError) as error:
        return f"{target.path} is not there ({error})"
    parameters = _parameters(found)
    if parameters != target.parameters:
        return f"{target.path} takes ({parameters}), expected ({target.parameters})"
    return None


def _parameters(callable_: Any) -> str:
    parts = []
    star = False
    for parameter in inspect.signature(callable_).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        default = "" if parameter.default is parameter.empty else "="
        parts.append(f"{stars}{parameter.name}{default}")
    return ", ".join(parts)
