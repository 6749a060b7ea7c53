"""What a server's metrics are, scraped as Prometheus does."""

import os
import sys
from functools import partial
from unittest import mock
from urllib.request import urlopen

import real_cache
import torch.distributed as dist
from agreed import Metered
from ranks import Context
from scenarios import on_the_host_only, prefix
from setups import Setup
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.runtime_context import get_parallel
from slowed import on_device

from kvburst.sglang_plugin import status


def scraped(context: Context, setup: Setup, folder: str, loads: int) -> Metered:
    """Ranks with SGLang's metrics on move something; the first one serves what all have written."""
    assert "prometheus_client" not in sys.modules, "it asks for the folder when it is imported"
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    tokens = prefix(1, 4, setup)
    with_metrics = partial(CacheInitParams, enable_metrics=True)
    parallel = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), context.world)
    with (
        get_parallel().override(tp_rank=context.rank, pp_rank=0, **parallel),
        mock.patch.object(real_cache, "CacheInitParams", with_metrics),
        on_device() as device,
    ):
        before = status()
        cache = real_cache.build(context, setup)
        wrong = []
        on_the_host_only(cache, tokens)
        for _ in range(loads):
            cache.load_back(tokens)
            wrong += cache.forward(cache.start(), tokens)
            cache.settle()
            cache.evict(cache.allocator.size)
            cache.settle()
        cache.step()
    assert wrong == []
    dist.barrier(context.group)
    return Metered(
        text=_scrape() if context.rank == 0 else "",
        copies={
            "load": device.counters("load").copies,
            "backup": device.counters("backup").copies,
        },
        agreements=status().agreements - before.agreements,
        agreements_in_all=status().agreements,
        failures_in_all=status().failures,
    )


def _scrape() -> str:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    with urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    server.shutdown()
    thread.join()
    return text
