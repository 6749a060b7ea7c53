"""Geometries: the published numbers, and what is refused."""

import pytest

from kvburst._core import KVBurstError, LayoutError
from kvburst.geometries import GEOMETRIES, Geometry, PoolSpec, geometry


def test_every_geometry_is_found_by_its_name_and_names_its_source() -> None:
    for known in GEOMETRIES:
        assert geometry(known.name) is known
        assert known.source


def test_unknown_geometry_is_refused_naming_it_and_the_known_ones() -> None:
    with pytest.raises(LayoutError) as refused:
        geometry("deepseek-v9")
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, KVBurstError)
    for name in ("deepseek-v9", *(known.name for known in GEOMETRIES)):
        assert name in str(refused.value)


def test_deepseek_v3_keeps_1152_bytes_a_token_and_layer_in_61_layers() -> None:
    model = geometry("deepseek-v3")
    (kv,) = model.pools
    assert (kv.row_bytes, len(kv.layer_ids), model.page_size) == (1152, 61, 64)
    assert kv.page_bytes(model.page_size) == 73_728
    assert model.bytes_per_page == 61 * 73_728


def test_dsa_geometry_keeps_index_k_in_21_of_78_layers() -> None:
    kv, index_k = geometry("mla-dsa-78").pools
    assert (kv.row_bytes, len(kv.layer_ids)) == (656, 78)
    assert (index_k.row_bytes, len(index_k.layer_ids)) == (132, 21)
    assert index_k.paged
    # The producer layers that GLM-5.2 declares: the first three, then every fourth.
    assert index_k.layer_ids == (0, 1, 2, *range(6, 75, 4))


# sgl-project/sglang#38426: 2,772 bytes a token in 21 layers, 10,296 in 78
def test_index_k_of_dsa_costs_what_its_public_measurement_says() -> None:
    _, partial = geometry("mla-dsa-78").pools
    _, full = geometry("mla-dsa-78-full").pools
    assert partial.row_bytes * len(partial.layer_ids) == 2_772
    assert full.row_bytes * len(full.layer_ids) == 10_296


def test_llama_keeps_320_kib_a_token_and_a_rank_of_eight_an_eighth_of_it() -> None:
    whole = geometry("llama-3.1-70b")
    share = geometry("llama-3.1-70b-tp8")
    assert [pool.name for pool in whole.pools] == ["k", "v"]
    assert whole.bytes_per_token == 320 * 1024
    assert share.bytes_per_token * 8 == whole.bytes_per_token


def test_packed_draft_layer_is_one_more_layer_with_an_allocation_of_its_own() -> None:
    (packed,) = geometry("deepseek-v3-mtp").pools
    (target,) = geometry("deepseek-v3").pools
    assert packed.layer_ids == (*target.layer_ids, 61)
    assert packed.own_allocation == (61,)
    assert packed.row_bytes == target.row_bytes


@pytest.mark.parametrize(
    ("row_bytes", "layer_ids", "own_allocation", "named"),
    [
        (0, (0,), (), "row_bytes: 0"),
        (132, (), (), "layer_ids: 0 layers"),
        (132, (0, 0), (), "0 at position 1"),
        (132, (2, 1), (), "1 at position 1"),
        (132, (-1,), (), "-1 at position 0"),
        (132, (0, 1), (2,), "own_allocation: layer 2"),
    ],
)
def test_pool_spec_that_describes_nothing_is_refused(
    row_bytes: int, layer_ids: tuple[int, ...], own_allocation: tuple[int, ...], named: str
) -> None:
    with pytest.raises(LayoutError, match=named):
        PoolSpec("kv", row_bytes, layer_ids, own_allocation=own_allocation)


def test_geometry_without_pools_or_slots_is_refused() -> None:
    spec = PoolSpec("kv", 132, (0,))
    with pytest.raises(LayoutError, match="page_size: 0"):
        Geometry("empty", 0, (spec,), "none")
    with pytest.raises(LayoutError, match="pools: 0"):
        Geometry("empty", 64, (), "none")
