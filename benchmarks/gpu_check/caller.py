"""What ``load`` and ``start_loading`` cost the thread that calls them, with a driver behind them.

As ``benchmarks/handoff.py``, whose parts these are, but on this device, with rows of their real
size: mode ``thread`` hands the burst over, ``inline`` issues its layer groups on the caller. The
baseline rebuilds three arrays for every layer and pool, from Python, and calls no driver.
"""

import os
from functools import partial

import torch
from handoff import MODES, Ours, Theirs, last_of_a_turn
from harness import Cores, Value, take_turns
from peers_way import Indices, PeersWay, pools_of

from gpu_check.bench import Bench, new_pools
from kvburst.geometries import geometry

GEOMETRY = "mla-dsa-78-full"
LAYERS = 78


def run(bench: Bench) -> None:
    device = bench.open()
    shape = geometry(GEOMETRY)
    sizes = (8,) if bench.small else (64, 512)
    available = 2 * max(sizes)
    pools = new_pools(device, shape.pools, available, shape.page_size)
    cores = Cores.of(sorted(os.sched_getaffinity(0)))
    # Before the caller is pinned: what they start inherits its cores.
    modes = {mode: Ours(device, pools, available, mode, cores) for mode in MODES}
    way = PeersWay(pools_of(LAYERS, available), "load")
    random = torch.Generator().manual_seed(0)
    with cores.caller_pinned():
        for pages in sizes:
            indices = Indices.of(pages, available, "scattered", random)
            for ours in modes.values():
                ours.prepare(indices.host)
            theirs = Theirs(way, indices)
            arms = {"peer's way": partial(last_of_a_turn, theirs.load)}
            arms |= {str(mode): partial(last_of_a_turn, modes[mode].load) for mode in MODES}
            samples = take_turns(arms, bench.size(20, 2))
            for mode in MODES:
                scenario: dict[str, Value] = {
                    "geometry": GEOMETRY,
                    "layers": LAYERS,
                    "pages": pages,
                    "mode": mode,
                }
                bench.results.add(
                    bench.row(
                        scenario,
                        "caller_us",
                        "us",
                        samples[mode],
                        baseline=samples["peer's way"],
                    )
                )
    for ours in modes.values():
        ours.stop()
