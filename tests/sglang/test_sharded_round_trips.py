"""Ranks share one host copy of each layer: every page comes back bit-exact on all of them, and each
keeps its own layers alone."""

from collections import Counter
from itertools import product
from typing import get_args

import pytest
from conftest import SHARING_RANKS, Server
from ranks import Ranks
from setups import Layout, Model, Policy, RoundTrip, Setup
from sharing import HostTier

REPLICATED: tuple[Model, ...] = ("mla", "dsa")
SETUPS = [
    Setup(model, layout, policy)
    for model, layout, policy in product(REPLICATED, get_args(Layout), get_args(Policy))
]
UNEVEN = [
    Setup("mla", "page_first_direct", layers=5),
    Setup("mla", "layer_first", "write_back", layers=7),
    *(Setup("dsa", layout, layers=6, without_index=(1, 2, 4)) for layout in get_args(Layout)),
    # A rank keeps none of the index keys, or nothing at all.
    Setup("dsa", "page_first_direct", "write_back", without_index=(0, 1, 3)),
    Setup("dsa", "layer_first", without_index=(0, 1, 3)),
    Setup("mla", "page_first_direct", layers=1),
]
WITH_DRAFTS = [
    Setup("mla", "page_first_direct", drafts=2),
    Setup("mla", "layer_first", layers=3, drafts=1),
    Setup("dsa", "page_first_direct", "write_back", drafts=1),
]
ALL = SETUPS + UNEVEN + WITH_DRAFTS
SOME = [SETUPS[0], SETUPS[-1], UNEVEN[2], UNEVEN[4], WITH_DRAFTS[0]]

sharing = pytest.mark.parametrize("ranks", [Server("sharing", SHARING_RANKS)], indirect=True)
keeping = pytest.mark.parametrize("ranks", [Server("sharing-keep", SHARING_RANKS)], indirect=True)


def on(*servers: tuple[str, list[Setup]]) -> pytest.MarkDecorator:
    parameters = [
        pytest.param(Server(switches, SHARING_RANKS), setup, id=f"{switches}-{setup}")
        for switches, setups in servers
        for setup in setups
    ]
    return pytest.mark.parametrize(("ranks", "setup"), parameters, indirect=["ranks"])


def check(trips: list[RoundTrip]) -> None:
    for rank, trip in enumerate(trips):
        assert trip.wrong == [], f"rank {rank}"
        assert trip.touched == [], f"rank {rank}"
        for moved in (trip.backing_up, trip.loading):
            assert moved.failures == moved.left_to_sglang == moved.stock_copies == 0
        assert trip.loading.loads == trip.loads
        assert trip.loading.pages_loaded == trip.loads * trip.pages


@on(("sharing", ALL), ("sharing-keep", ALL), ("sharing-side", SOME))
def test_pages_come_back_bit_exact_on_every_rank(ranks: Ranks, setup: Setup) -> None:
    check(ranks.call("scenarios.round_trip", setup))
    for features in ranks.call("scenarios.features"):
        assert features["rank_shard"] == (True, "")


@on(("sharing", [SETUPS[0], SETUPS[-1]]))
def test_without_the_exchange_they_do_not(ranks: Ranks, setup: Setup) -> None:
    for trip in ranks.call("sharded.round_trip_without_exchange", setup):
        read = trip.loads * trip.pages * setup.layers
        assert len(trip.wrong) > read // 4


# --- what is kept where --------------------------------------------------------------------------


@on(("sharing", ALL), ("sharing-keep", SOME))
def test_each_layer_is_on_the_host_of_one_rank(ranks: Ranks, setup: Setup) -> None:
    tiers: list[HostTier] = ranks.call("sharded.host_tier", setup)
    kept = [name for tier in tiers for rows in tier.rows for name in rows]
    assert sorted(kept) == sorted(tiers[0].layers)
    for tier in tiers:
        most = Counter(name.rpartition(" ")[0] for name in tier.layers)
        for rows in tier.rows:
            (kind,) = {name.split()[-2] for name in rows}
            layers = sum(count for name, count in most.items() if name.split()[-1] == kind)
            assert len(rows) <= -(-layers // SHARING_RANKS)


@on(("sharing", [Setup("mla")]))
def test_alone_a_rank_keeps_every_layer(ranks: Ranks, setup: Setup) -> None:
    for tier in ranks.call("sharded.host_tier", setup, alone=True):
        assert tier.rows == [tier.layers]


def even(setup: Setup) -> Setup:
    """With layers that the ranks can share out evenly."""
    return Setup(setup.model, setup.layout, layers=2 * SHARING_RANKS)


EVEN = [even(Setup(model, layout)) for model in REPLICATED for layout in get_args(Layout)]


@keeping
@pytest.mark.parametrize("setup", EVEN, ids=str)
def test_capacity_kept_takes_a_part_of_the_memory(ranks: Ranks, setup: Setup) -> None:
    shared = ranks.call("sharded.host_tier", setup)
    whole = ranks.call("sharded.host_tier", setup, alone=True)
    for mine, alone in zip(shared, whole, strict=True):
        assert mine.pages == alone.pages
        assert mine.nbytes * SHARING_RANKS == alone.nbytes
    assert sum(tier.nbytes for tier in shared) == whole[0].nbytes


@sharing
@pytest.mark.parametrize("setup", EVEN, ids=str)
@pytest.mark.parametrize("gigabytes", [0.0, 0.001], ids=["ratio", "size"])
def test_same_memory_has_room_for_that_many_times_the_pages(
    ranks: Ranks, setup: Setup, gigabytes: float
) -> None:
    shared = ranks.call("sharded.host_tier", setup, gigabytes=gigabytes)
    whole = ranks.call("sharded.host_tier", setup, alone=True, gigabytes=gigabytes)
    for mine, alone in zip(shared, whole, strict=True):
        page = alone.nbytes // alone.pages // SHARING_RANKS
        assert mine.pages >= SHARING_RANKS * (alone.pages - 1)
        assert mine.nbytes <= alone.nbytes + page
        assert mine.pages == shared[0].pages


@sharing
@pytest.mark.parametrize("setup", UNEVEN[:-1] + WITH_DRAFTS, ids=str)
def test_no_rank_takes_more_memory_however_layers_are_dealt_out(ranks: Ranks, setup: Setup) -> None:
    shared = ranks.call("sharded.host_tier", setup)
    whole = ranks.call("sharded.host_tier", setup, alone=True)
    for mine, alone in zip(shared, whole, strict=True):
        assert mine.nbytes <= alone.nbytes + alone.nbytes // alone.pages
        assert mine.pages == shared[0].pages >= alone.pages
    # And there is no room for one page more on the rank that has most.
    most = max(shared, key=lambda tier: tier.nbytes)
    assert most.nbytes + 2 * most.nbytes // most.pages > whole[0].nbytes


@sharing
def test_one_line_says_that_the_tier_is_shared(ranks: Ranks) -> None:
    def said() -> int:
        lines = [line for line in ranks.log().splitlines() if "with SGLang" in line]
        return sum("rank_shard on" in line for line in lines)

    ranks.call("scenarios.build_only", Setup("mla"))
    before = said()
    ranks.call("scenarios.build_only", Setup("dsa"))
    assert said() == before + 1


@pytest.mark.parametrize("ranks", [Server("everything", 2)], indirect=True, ids=str)
@pytest.mark.parametrize("setup", [Setup("mla"), Setup("dsa", "layer_first")], ids=str)
def test_unless_asked_for_nothing_is_shared(ranks: Ranks, setup: Setup) -> None:
    for tier in ranks.call("sharded.host_tier", setup):
        assert sorted(name for rows in tier.rows for name in rows) == sorted(tier.layers)
    for features in ranks.call("scenarios.features"):
        assert features["rank_shard"] == (False, "SGLANG_ENABLE_HICACHE_RANK_SHARD is not set")
