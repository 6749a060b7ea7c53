"""Who keeps which layer, for every number of layers and ranks."""

from collections import Counter
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvburst import LayoutError
from kvburst.geometries import INDEXER_LAYERS
from kvburst.ownership import (
    Ownership,
    TierFacts,
    agreed_capacity,
    agreed_reasons,
    reasons_against_sharding,
)

layer_sets = st.sets(st.integers(0, 99), min_size=1).map(lambda layers: tuple(sorted(layers)))
all_layers = st.integers(1, 100).map(lambda count: tuple(range(count)))


@st.composite
def ownerships(draw: st.DrawFn) -> Ownership:
    """A first pool of 1 to 100 layers; others have some of them, or a few of their own."""
    first = draw(all_layers)
    fewer = draw(st.lists(layer_sets, max_size=2))
    owner = draw(st.sampled_from(["round_robin", "rank0"]))
    return Ownership(ranks=draw(st.integers(1, 16)), pools=(first, *fewer), owner=owner)


@given(ownerships())
def test_every_layer_has_one_owner_and_one_row_on_it(owned: Ownership) -> None:
    for pool, layers in enumerate(owned.pools):
        kept = [owned.layers_of(rank, pool) for rank in range(owned.ranks)]
        assert sorted(layer for of_rank in kept for layer in of_rank) == list(layers)
        for layer in layers:
            owner = owned.owner_of(pool, layer)
            assert kept[owner][owned.row_of(pool, layer)] == layer


@given(ownerships())
def test_no_rank_keeps_more_than_its_share_of_a_pool(owned: Ownership) -> None:
    for pool, layers in enumerate(owned.pools):
        rows = [len(owned.layers_of(rank, pool)) for rank in range(owned.ranks)]
        if owned.owner == "rank0":
            assert rows == [len(layers)] + [0] * (owned.ranks - 1)
        else:
            assert max(rows) == ceil(len(layers) / owned.ranks)
            assert max(rows) - min(rows) <= 1


@given(ownerships())
def test_layers_over_are_spread_over_pools(owned: Ownership) -> None:
    if owned.owner == "rank0":
        return
    total = Counter(
        owned.owner_of(pool, layer) for pool, layers in enumerate(owned.pools) for layer in layers
    )
    counts = [total[rank] for rank in range(owned.ranks)]
    assert max(counts) - min(counts) <= 1


def test_index_layers_that_are_every_fourth_do_not_all_go_to_one_of_four_ranks() -> None:
    owned = Ownership(ranks=4, pools=(tuple(range(78)), INDEXER_LAYERS))
    assert [len(owned.layers_of(rank, 1)) for rank in range(4)] == [5, 5, 6, 5]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 16])
def test_first_layer_is_not_one_ranks_to_load_in_both_pools(ranks: int) -> None:
    owned = Ownership(ranks=ranks, pools=(tuple(range(78)), INDEXER_LAYERS))
    assert owned.owner_of(0, 0) != owned.owner_of(1, 0)


@given(ownerships(), st.data())
def test_host_bytes_of_all_ranks_are_one_copy(owned: Ownership, data: st.DataObject) -> None:
    page_bytes = data.draw(
        st.lists(st.integers(1, 1 << 20), min_size=len(owned.pools), max_size=len(owned.pools))
    )
    shares = [owned.page_bytes_of(rank, page_bytes) for rank in range(owned.ranks)]
    assert sum(shares) == owned.whole_page_bytes(page_bytes)


@given(ownerships(), st.data())
@settings(max_examples=200)
def test_agreed_capacity_fits_on_every_rank_and_one_page_more_would_not(
    owned: Ownership, data: st.DataObject
) -> None:
    count = len(owned.pools)
    page_bytes = data.draw(st.lists(st.integers(1, 4096), min_size=count, max_size=count))
    whole = owned.whole_page_bytes(page_bytes)
    ram = data.draw(
        st.lists(st.integers(whole, 1000 * whole), min_size=owned.ranks, max_size=owned.ranks)
    )
    own = [owned.capacity(rank, page_bytes, ram[rank]) for rank in range(owned.ranks)]
    pages = agreed_capacity(own[0], lambda _: min(each for each in own if each is not None))
    need = [owned.page_bytes_of(rank, page_bytes) for rank in range(owned.ranks)]
    assert all(pages * need[rank] <= ram[rank] for rank in range(owned.ranks))
    assert any((pages + 1) * need[rank] > ram[rank] for rank in range(owned.ranks))


@given(ownerships(), st.integers(1, 1000))
def test_keep_capacity_keeps_the_pages_and_takes_less_memory(owned: Ownership, pages: int) -> None:
    page_bytes = [64] * len(owned.pools)
    host_bytes = pages * owned.whole_page_bytes(page_bytes)
    for rank in range(owned.ranks):
        assert owned.capacity(rank, page_bytes, host_bytes, keep_capacity=True) == pages
        assert pages * owned.page_bytes_of(rank, page_bytes) <= host_bytes


def test_capacity_grows_with_the_ranks_as_far_as_the_one_with_most_layers_allows() -> None:
    owned = Ownership(ranks=4, pools=(tuple(range(78)),))
    pages = min(owned.capacity(rank, [100], 78 * 100 * 1000) or 0 for rank in range(4))
    assert pages == 78 * 1000 // ceil(78 / 4) == 3900


def test_rank_that_owns_nothing_does_not_bound_the_capacity() -> None:
    owned = Ownership(ranks=4, pools=((0, 1),))
    assert [owned.capacity(rank, [10], 100) for rank in range(4)] == [10, 10, None, None]
    assert agreed_capacity(None, lambda mine: min(mine, 10)) == 10


def test_capacity_below_one_page_is_refused_on_every_rank_alike() -> None:
    for own in (0, 5, None):
        with pytest.raises(LayoutError, match="no room for one page"):
            agreed_capacity(own, lambda _: 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks: 0 is below 1"),
        ({"pools": ()}, "pools: 0 pools"),
        ({"pools": ((0, 2, 1),)}, r"pools\[0\]: 1 at position 2 must be at least 3"),
        ({"owner": "rank1"}, "owner: 'rank1' must be 'round_robin' or 'rank0'"),
    ],
)
def test_bad_ownership_is_refused_by_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Ownership(**{"ranks": 2, "pools": ((0, 1, 2),), **arguments})


def test_bad_questions_are_refused_by_name() -> None:
    owned = Ownership(ranks=2, pools=((0, 1, 5),))
    for ask, message in (
        (lambda: owned.owner_of(0, 3), r"layer: 3 is none of the 3 of pools\[0\]"),
        (lambda: owned.owner_of(1, 0), "pool: 1 is out of range, there are 1 pools"),
        (lambda: owned.layers_of(2, 0), "rank: 2 is out of range, there are 2 ranks"),
        (lambda: owned.page_bytes_of(0, [1, 2]), "page_bytes: 2 values for 1 pools"),
        (lambda: owned.page_bytes_of(0, [0]), r"page_bytes\[0\]: 0 is below 1"),
        (lambda: owned.capacity(0, [1], -1), "host_bytes: -1 is below 0"),
    ):
        with pytest.raises(LayoutError, match=message):
            ask()


# --- eligibility ---------------------------------------------------------------------------------

FIT = TierFacts(ranks=8, replicated={"kv": True, "index_k": True})


def test_replicated_pools_over_several_ranks_can_be_shared() -> None:
    assert reasons_against_sharding(FIT) == ()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"replicated": {"k": False, "v": False}}, "not replicated"),
        ({"replicated": {}}, "not replicated"),
        ({"ranks": 1}, "1 rank"),
        ({"host_layout": "page_first"}, "page_first"),
        ({"direct_copies": False}, "direct"),
        ({"context_parallel": 2}, "context parallelism"),
        ({"pipeline_stages": 2}, "pipeline stages"),
        ({"nodes": 2}, "2 nodes"),
        ({"storage_attached": True}, "storage backend"),
        ({"decode_of_disaggregation": True}, "disaggregated decode"),
        ({"packed_fp4": True}, "FP4"),
        ({"exchange": "side_stream"}, "side_stream"),
        ({"decode_context_parallel": 4}, "decode context parallelism over 4 ranks"),
        ({"unified_memory": True}, "unified memory"),
        ({"waits_for_no_layer": "an embedding server's forwards"}, "forwards wait for no layer"),
        ({"others": ("pool 'kv': it is not known",)}, "it is not known"),
    ],
)
def test_each_obstacle_is_named(change: dict[str, object], word: str) -> None:
    (reason,) = reasons_against_sharding(replace(FIT, **change))
    assert word in reason


def test_what_would_corrupt_is_named_first() -> None:
    mha = replace(FIT, replicated={"k": False, "v": True}, nodes=2, storage_attached=True)
    first, *others = reasons_against_sharding(mha)
    assert "'k' differs from rank to rank" in first
    assert "'v'" not in first
    assert len(others) == 2


def test_side_stream_is_fine_where_loads_are_issued_inline() -> None:
    assert (
        reasons_against_sharding(replace(FIT, exchange="side_stream", threaded_loads=False)) == ()
    )


def test_what_one_rank_refuses_is_refused_on_all() -> None:
    of_ranks = [("no room",), (), ("no room", "too old")]
    answers = [agreed_reasons(mine, lambda _: of_ranks) for mine in of_ranks]
    assert set(answers) == {("rank 0: no room", "rank 2: no room", "rank 2: too old")}


def test_what_every_rank_refuses_is_said_once() -> None:
    of_ranks = [("both", "here"), ("both",)]
    assert agreed_reasons(of_ranks[0], lambda _: of_ranks) == ("both", "rank 0: here")
    assert agreed_reasons((), lambda _: [(), ()]) == ()
