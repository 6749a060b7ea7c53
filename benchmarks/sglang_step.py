"""What SGLang's scheduler thread pays, with the plugin and without, in the same processes: for a
load-back, and to agree with other ranks.

`start_loading`: two caches of the released SGLang are built, one before the plugin's hooks are in
place, which it then leaves alone, and one after. Each is asked in turn for the same load of a DSA
model, whose two pools (latent KV and index-K) move the same pages. With the plugin the load is
handed to a native thread and really copied, on the device `host`; the clock stops when
`start_loading` returns.

Without it SGLang runs its own loop over layers and pools. The copy function at its end exists only
under CUDA; here it rebuilds the arrays of addresses and sizes that are handed to the driver, once
for every layer and pool, vectorised in torch, and no driver is called and nothing moves. So what a
driver costs is on neither side.

`check_hicache_events`: ranks are processes, and each has a cache that agrees by SGLang's blocking
gloo all_reduce and one that agrees as the plugin does. Their steps take turns; what is timed is one
call, on every rank, after the ranks have met.

Needs SGLang in the environment: `tests/sglang/environment.sh` makes one that has it.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from time import perf_counter_ns
from typing import Annotated, Any

import torch
import typer
from harness import (
    JsonFile,
    Outputs,
    PlotFile,
    Quick,
    Row,
    Value,
    new_app,
    one_line_errors,
    progress,
    report,
    take_turns,
    whole_number,
    whole_numbers,
)

from kvburst import KVBurstError
from kvburst.links import LINKS

# The small caches that the tests run on, and what SGLang itself lacks on a CPU.
HERE = Path(__file__).parent
TESTS = HERE.parent / "tests" / "sglang"
sys.path.append(str(TESTS))

FUNCTIONS = ("start_loading", "check_hicache_events")
TRANSPORTS = ("board", "pipelined")
BENCHMARK = "sglang_step"
POOLS = 2


class ArraysRebuilt:
    """SGLang's copy function with everything but the driver."""

    def __init__(self) -> None:
        self.copies = 0

    def transfer_kv_per_layer_direct_pf_lf(
        self,
        src_ptrs: Sequence[torch.Tensor],
        dst_ptrs: Sequence[torch.Tensor],
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        layer_id: int,
        page_size: int,
    ) -> None:
        """Of the latent KV's or index-K's one host tensor, and one layer."""
        (host,), (device,) = src_ptrs, dst_ptrs
        itemsize = host.element_size()
        pages = src_indices[::page_size] // page_size
        layer = host.data_ptr() + layer_id * host.stride(1) * itemsize
        src = pages * (host.stride(0) * itemsize) + layer
        row = device.stride(0) * itemsize
        dst = dst_indices[::page_size] * row + device.data_ptr()
        sizes = torch.full_like(src, page_size * row)
        if src.data_ptr() and dst.data_ptr() and sizes.data_ptr():
            self.copies += sizes.numel()


class Loads:
    """One cache, and the same load of its host pages over and over."""

    def __init__(self, cache: Any, pages: int) -> None:
        self._cache = cache
        random = torch.Generator().manual_seed(0)
        chosen = torch.randperm(pages, generator=random)
        size = cache.setup.page_size
        self._host = (chosen[:, None] * size + torch.arange(size)).flatten()

    def start_loading(self) -> float:
        """Microseconds of the calling thread."""
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        controller = self._cache.controller
        index_k = PoolTransfer(name=PoolName.INDEXER, indices_from_pool=PoolName.KV)
        slots = controller.load(self._host, node_id=1, extra_pools=[index_k])
        if slots is None:
            raise KVBurstError("device: no room for a load")
        begin = perf_counter_ns()
        controller.start_loading()
        microseconds = (perf_counter_ns() - begin) / 1000
        controller.ack_load_queue.pop(0).finish_event.synchronize()
        self._cache.allocator.free(slots)
        return microseconds


def _check_sglang_is_there() -> None:
    if not any(each.name == "sglang" for each in distributions()):
        raise KVBurstError(
            "SGLang is not in this environment; tests/sglang/environment.sh makes one that has it"
        )


def caches(pages: int, layers: int) -> tuple[Any, Any, ArraysRebuilt]:
    """Without the plugin, with it, and what stands at the end of SGLang's own loop."""
    # What it misses on a CPU is of no interest here.
    warnings.filterwarnings("ignore", module="sglang")
    logging.getLogger("sglang").setLevel(logging.ERROR)
    _check_sglang_is_there()
    import on_cpu
    from ranks import Context
    from real_cache import build
    from setups import Setup
    from sglang.srt.mem_cache.pool_host import dsa, mla
    from sglang.srt.plugins.hook_registry import HookRegistry

    setup = Setup("dsa", layers=layers, pages=pages)
    context = Context(0, 1, None, on_cpu.prepare())
    arrays = ArraysRebuilt()
    for module in (mla, dsa):
        module.transfer_kv_per_layer_direct_pf_lf = arrays.transfer_kv_per_layer_direct_pf_lf
    stock = build(context, setup)

    os.environ["KVBURST"] = "1"
    from kvburst import sglang_plugin

    sglang_plugin.register()
    HookRegistry.apply_hooks()
    plugin = build(context, setup)
    verdict = sglang_plugin.status().features["async_loads"]
    if not verdict.on:
        raise KVBurstError(f"async_loads is off: {'; '.join(verdict.reasons)}")
    return stock, plugin, arrays


def loading(
    pages: int, layers: int, rounds: int, tick: Callable[[], None]
) -> tuple[Row, list[str]]:
    """start_loading, one row and what is to be said of it."""
    stock, plugin, arrays = caches(pages, layers)
    arms: dict[str, Callable[[], float]] = {
        "stock": Loads(stock, pages).start_loading,
        "plugin": Loads(plugin, pages).start_loading,
    }
    samples = take_turns(arms, rounds, tick=tick)
    copies = arrays.copies // (rounds + 1)
    _check_went_through(rounds + 1, copies, pages * layers * POOLS)
    scenario: dict[str, Value] = {
        "function": "start_loading",
        "ranks": 1,
        "pages": pages,
        "layers": layers,
        "pools": POOLS,
        "device": "host",
    }
    row = Row.of(
        BENCHMARK,
        scenario,
        "scheduler_us",
        "us",
        samples["plugin"],
        baseline=samples["stock"],
    )
    return row, _notes(row, copies)


def agreeing(world: int, transport: str, steps: int) -> Row:
    """check_hicache_events, one row of all ranks' samples."""
    _check_sglang_is_there()
    from ranks import RankError, Ranks

    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    ranks = Ranks(world, {}, plugin=False)
    try:
        answers = ranks.call("sglang_events.measure", transport, steps, seconds=60 + steps)
    except RankError as error:
        raise KVBurstError(str(error)) from error
    finally:
        ranks.close()
    if any(used != transport for _, used in answers):
        raise KVBurstError(f"{transport}: the ranks agree by {answers[0][1]!r}")
    scenario: dict[str, Value] = {
        "function": "check_hicache_events",
        "ranks": world,
        "transport": transport,
    }
    return Row.of(
        BENCHMARK,
        scenario,
        "scheduler_us",
        "us",
        [each for samples, _ in answers for each in samples["plugin"]],
        baseline=[each for samples, _ in answers for each in samples["stock"]],
    )


app = new_app("What SGLang's scheduler thread pays, with the plugin and without.")


@app.command()
def sglang_step(
    function: Annotated[
        str, typer.Option(metavar="A,B", help=f"Any of {', '.join(FUNCTIONS)}.")
    ] = ",".join(FUNCTIONS),
    pages: Annotated[
        int, typer.Option(parser=whole_number(1, 65536), metavar="N", help="Pages of a load.")
    ] = 1024,
    layers: Annotated[
        int,
        typer.Option(
            parser=whole_number(1, 1000), metavar="N", help="Layers of each of the two pools."
        ),
    ] = 78,
    rounds: Annotated[
        int, typer.Option(parser=whole_number(1, 100_000), metavar="N", help="Loads an arm.")
    ] = 30,
    ranks: Annotated[
        str, typer.Option(metavar="N,N", help="Numbers of ranks that agree, 2 to 16.")
    ] = "2,4",
    steps: Annotated[
        int, typer.Option(parser=whole_number(1, 100_000), metavar="N", help="Steps an arm.")
    ] = 300,
    quick: Quick = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Time start_loading and check_hicache_events of the released SGLang, stock against plugin.

    \b
    Both in the same processes, in turns. No driver is counted: SGLang's loop ends where the driver
    would be called. At the default size some 1.5 GB of memory are touched, and a rank takes 1 GB.

    \b
    Examples:
      python benchmarks/sglang_step.py
      python benchmarks/sglang_step.py --pages 256 --json sglang_step.json
      python benchmarks/sglang_step.py --function check_hicache_events --ranks 2
    """
    outputs = Outputs(json_file, plot_file)
    functions = _functions(function)
    worlds = whole_numbers("--ranks", ranks, least=2, most=16)
    rounds, steps = (3, 20) if quick else (rounds, steps)
    agreements = [(world, transport) for world in worlds for transport in TRANSPORTS]
    ticks = (rounds + 1) * ("start_loading" in functions)
    ticks += len(agreements) * ("check_hicache_events" in functions)
    rows: list[Row] = []
    notes: list[str] = []
    with one_line_errors(), progress(ticks) as tick:
        # Ranks are processes, and start from this one: before it grows.
        if "check_hicache_events" in functions:
            for world, transport in agreements:
                rows.append(agreeing(world, transport, steps))
                tick(f"{world} ranks, {transport}")
            notes.append(
                "check_hicache_events: baseline is SGLang's blocking all_reduce; nothing is under"
                " way, and the ranks meet before each step, which is not timed"
            )
        if "start_loading" in functions:
            row, said = loading(
                pages, layers, rounds, partial(tick, f"{pages} pages, {layers} layers")
            )
            rows.insert(0, row)
            notes = said + notes
    report(
        rows,
        outputs,
        title="What SGLang's scheduler thread pays, no driver counted",
        notes=notes,
    )


def _functions(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in FUNCTIONS:
            raise typer.BadParameter(
                f"{name!r} is none of {', '.join(FUNCTIONS)}", param_hint="--function"
            )
    return names


def _check_went_through(loads: int, stock_copies: int, expected_copies: int) -> None:
    """Whether either side did what it is said to have done."""
    from kvburst.sglang_plugin import status

    if status().bursts_loaded != loads:
        raise KVBurstError(f"{status().bursts_loaded} of {loads} loads went through the plugin")
    if stock_copies != expected_copies:
        raise KVBurstError(f"SGLang handed {stock_copies} copies over, not {expected_copies}")


def _notes(row: Row, copies: int) -> list[str]:
    issue_us = LINKS["h100"].issue_us
    return [
        "baseline: SGLang's own loop, which rebuilds three arrays for every layer and pool and"
        " hands them to no driver; the plugin's loads are really copied, by other threads",
        f"the baseline hands {copies:,} copies over: with a driver that takes {issue_us:g} us of"
        f" each (a public figure) {copies * issue_us / 1000:,.0f} ms would come on top (computed)",
    ]


if __name__ == "__main__":
    app()
