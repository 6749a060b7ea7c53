"""Servers whose ranks cannot share a host tier, built as far as a CPU can. All ask for it."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import configurations
import real_cache
from ranks import Context
from real_cache import RealCache, build
from scenarios import on_the_host_only, prefix
from setups import Setup
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_hicache_draft_sidecars
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.test.kits.unified_radix_cache import fixtures
from sharded import host_buffers
from sharing import Standing

from kvburst import KVBurstError
from kvburst.sglang_plugin import devices, status

MLA = Setup("mla", layers=3)


def standing(context: Context, case: str, folder: str) -> Standing:
    """Of a server as `case` is."""
    logged: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kvburst")
    logger.addHandler(handler)
    try:
        controller = CASES[case](context, folder)
    finally:
        logger.removeHandler(handler)
    verdict = status().features["rank_shard"]
    return Standing(
        verdict.on,
        verdict.reasons,
        [line for line in logged if "is not shared between ranks" in line],
        [tensor.shape[1] for tensor in host_buffers(controller)],
    )


@contextmanager
def _arguments(**named: Any) -> Iterator[None]:
    with mock.patch.object(real_cache, "ServerArgs", partial(ServerArgs, **named)):
        yield


@contextmanager
def _parameters(**named: Any) -> Iterator[None]:
    with mock.patch.object(real_cache, "CacheInitParams", partial(CacheInitParams, **named)):
        yield


def _eligible(context: Context, _: str) -> Any:
    return build(context, MLA).controller


def _heads(context: Context, _: str) -> Any:
    return build(context, Setup("mha", layers=3)).controller


def _one_rank(context: Context, _: str) -> Any:
    return build(replace(context, group=None), MLA).controller


def _kernel_copies(context: Context, _: str) -> Any:
    return build(context, replace(MLA, layout="layer_first", io_backend="kernel")).controller


def _page_first(context: Context, _: str) -> Any:
    return build(context, replace(MLA, layout="page_first", io_backend="kernel")).controller


def _context_parallel(context: Context, _: str) -> Any:
    with _parameters(
        attn_cp_cache_group=context.group,
        attn_cp_rank=context.rank,
        attn_cp_size=context.world,
    ):
        return build(context, MLA).controller


def _stages(context: Context, _: str) -> Any:
    with _parameters(pp_cache_group=context.group, pp_rank=context.rank, pp_size=context.world):
        return build(replace(context, group=None), MLA).controller


def _storage(context: Context, folder: str) -> Any:
    ranks = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), context.world)
    with (
        mock.patch.dict(os.environ, {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": folder}),
        get_parallel().override(tp_rank=context.rank, pp_rank=0, **ranks),
        _arguments(hicache_storage_backend="file"),
    ):
        cache = build(context, MLA)
    cache.tree.detach_storage_backend()
    return cache.controller


def _decode(context: Context, _: str) -> Any:
    with _arguments(disaggregation_mode="decode"):
        return build(context, MLA).controller


def _embedding(context: Context, _: str) -> Any:
    with _arguments(is_embedding=True):
        return build(context, MLA).controller


def _split_prefill(context: Context, _: str) -> Any:
    with _arguments(enable_pdmux=True):
        return build(context, MLA).controller


def _sidecar_drafts(context: Context, _: str) -> Any:
    draft, _buffers = real_cache._pools(replace(MLA, layers=1), MLA.pages * MLA.page_size)
    with _parameters(sidecar_draft_device_pools=(draft,)):
        return build(context, MLA).controller


def _no_device_on_one_rank(context: Context, _: str) -> Any:
    if context.rank == 0:
        return build(context, MLA).controller
    missing = devices.DeviceError("no such device")
    with mock.patch.object(devices, "new_device", side_effect=missing):
        return build(context, MLA).controller


def _hybrid(component: str, context: Context, _: str) -> Any:
    """One of the wheel's own configurations, whose ranks have a group."""
    labels = configurations.labels(context)
    (index, *_rest) = [at for at, label in enumerate(labels) if component in label.lower()]
    steps = configurations.Steps(configurations.HICACHE[index])
    with_group = partial(CacheInitParams, tp_cache_group=context.group)
    with (
        configurations.direct_copies("page_first_direct"),
        mock.patch.object(fixtures, "CacheInitParams", with_group),
    ):
        cache, _allocator, _requests = fixtures.build_fixture(steps.cfg)
        steps._init_hicache(cache, write_policy="write_back")
    return cache.cache_controller


CASES: dict[str, Callable[[Context, str], Any]] = {
    "eligible": _eligible,
    "heads": _heads,
    "one rank": _one_rank,
    "kernel copies": _kernel_copies,
    "page_first": _page_first,
    "context parallel": _context_parallel,
    "pipeline stages": _stages,
    "storage": _storage,
    "decode": _decode,
    "embedding": _embedding,
    "split prefill": _split_prefill,
    "sidecar drafts": _sidecar_drafts,
    "no device on one rank": _no_device_on_one_rank,
    "mamba": partial(_hybrid, "mamba"),
    "swa": partial(_hybrid, "swa"),
}


# --- what comes once the tier is shared ----------------------------------------------------------


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except KVBurstError as error:
        return str(error)
    return "nothing"


def storage_later(context: Context, folder: str) -> tuple[str, str, list[str]]:
    """What the tree says, what the controller raises, and what is wrong with loads afterwards."""
    cache = build(context, MLA)
    done, said = cache.tree.attach_storage_backend("file", None, "small", "wait_complete")
    assert not done
    raised = _refused(lambda: cache.controller.attach_storage_backend("file"))
    assert not cache.controller.enable_storage
    assert os.listdir(folder) == []
    return said, raised, _loads(cache)


def draft_later(context: Context) -> tuple[str, list[str], list[str]]:
    """What is raised, the names of pools then, and what is wrong with loads afterwards."""
    cache = build(context, MLA)
    draft, _ = real_cache._pools(replace(MLA, layers=1), MLA.pages * MLA.page_size)

    def register() -> None:
        specs, entries = build_hicache_draft_sidecars(
            draft_device_pools=(draft,), tree_cache=cache.tree
        )
        for spec, entry in zip(specs, entries, strict=True):
            cache.tree.register_sidecar_pool(spec, entry)

    raised = _refused(register)
    names = [str(entry.name.value) for entry in cache.controller.mem_pool_host.entries]
    assert cache.tree.sidecar_pool_specs == []
    return raised, names, _loads(cache)


def _loads(cache: RealCache) -> list[str]:
    tokens = prefix(1, 3, cache.setup)
    on_the_host_only(cache, tokens)
    assert cache.load_back(tokens) == len(tokens)
    wrong = cache.forward(cache.start(), tokens)
    cache.settle()
    return wrong


def whole_pages(context: Context, setup: Setup) -> dict[str, str]:
    """By accessor of whole pages, what each host pool of a shared tier says."""
    cache = build(context, setup)
    kv = cache.kv
    slots = cache.take(setup.page_size)
    found: dict[str, str] = {}
    for entry in cache.controller.mem_pool_host.entries:
        pool = entry.host_pool
        calls: dict[str, Callable[[], object]] = {
            "get_data_page": lambda pool=pool: pool.get_data_page(0),
            "get_dummy_flat_data_page": lambda pool=pool: pool.get_dummy_flat_data_page(),
            "set_from_flat_data_page": lambda pool=pool: pool.set_from_flat_data_page(0, None),
            "get_page_buffer_meta": lambda pool=pool: pool.get_page_buffer_meta(slots),
            "load_to_device_per_layer": lambda pool=pool: pool.load_to_device_per_layer(
                kv, slots, slots, 0, "direct"
            ),
            "backup_from_device_all_layer": lambda pool=pool: pool.backup_from_device_all_layer(
                kv, slots, slots, "direct"
            ),
        }
        for name, call in calls.items():
            found[f"{entry.name.value}.{name}"] = _refused(call)
    return found


def embedding_forward(context: Context) -> tuple[str, list[str]]:
    """SGLang's own function, as it is hooked, is given a batch with a load."""
    from sglang.srt.managers.tp_worker import BaseTpWorker

    cache = build(context, MLA)
    tokens = prefix(1, 3, MLA)
    on_the_host_only(cache, tokens)
    assert cache.load_back(tokens) == len(tokens)
    consumer = cache.start()
    counter = cache.controller.layer_done_counter
    worker = SimpleNamespace(hicache_layer_transfer_counter=counter)
    batch = SimpleNamespace(hicache_consumer_index=consumer)
    said = _refused(lambda: BaseTpWorker.forward_batch_embedding(worker, batch))
    wrong = cache.forward(consumer, tokens)
    cache.settle()
    return said, wrong
