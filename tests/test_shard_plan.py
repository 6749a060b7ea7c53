"""Which rows of SGLang's host pools a rank keeps of a shared tier, and how many slots there are."""

import pytest

from kvburst.sglang_plugin.shard_plan import HostShard, host_slots, shards_of, slots_alone

KV = tuple(range(78))
INDEXER = tuple(range(0, 78, 4))


def of_ranks(
    layers: dict[str, tuple[int, ...]], drafts: int, ranks: int
) -> list[dict[str, HostShard]]:
    return [shards_of(layers, drafts, ranks, rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_every_layer_and_draft_is_kept_by_one_rank(ranks: int, drafts: int) -> None:
    everybodys = of_ranks({"kv": KV, "indexer": INDEXER}, drafts, ranks)
    for name, layers in (("kv", KV), ("indexer", INDEXER)):
        shards = [mine[name] for mine in everybodys]
        assert sorted(layer for each in shards for layer in each.kept_layers) == list(layers)
        assert sorted(depth for each in shards for depth in each.kept_drafts) == list(range(drafts))
        assert sum(each.kept_rows for each in shards) == len(layers) + drafts
        assert {each.rows_of(0) for each in shards} == {shards[0].kept_rows}
        assert {each.all_rows for each in shards} == {len(layers) + drafts}


def test_all_ranks_have_the_same_ownership_without_asking() -> None:
    everybodys = of_ranks({"kv": KV, "indexer": INDEXER}, 2, 4)
    assert len({mine[name].owned for mine in everybodys for name in mine}) == 1
    owned = everybodys[0]["kv"].owned
    assert owned.pools == (KV, (0,), (1,), INDEXER, (0,), (1,))


def test_drafts_beyond_the_last_layer_are_loaded_with_it() -> None:
    shard = shards_of({"kv": (0, 1)}, 4, 2, 0)["kv"]
    assert shard.owned.pools == ((0, 1), (0,), (1,), (1,), (1,))


def test_rank_may_keep_no_layer_of_a_pool() -> None:
    shards = [mine["indexer"] for mine in of_ranks({"kv": (0, 1, 2), "indexer": (2,)}, 0, 3)]
    assert sorted(each.kept_rows for each in shards) == [0, 0, 1]


KV_BYTES, INDEXER_BYTES = 656 * 64, 132 * 64


def alone(**options: float) -> int:
    arguments = {"gigabytes": 0.0, "ratio": 2.0, "device_slots": 1000, "slot_bytes": 400}
    return slots_alone(**{**arguments, "page_size": 10, **options})  # type: ignore[arg-type]


def test_slots_of_a_rank_by_itself_are_those_that_sglang_computes() -> None:
    assert alone() == (1000 * 2 // 10 + 1) * 10
    assert alone(ratio=0.5, device_slots=999) == (499 // 10 + 1) * 10
    assert alone(gigabytes=0.001) == (1_000_000 // 400 // 10 + 1) * 10


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_same_memory_has_room_for_as_many_times_the_slots(ranks: int) -> None:
    shards = shards_of({"kv": tuple(range(8))}, 0, ranks, 0)
    assert host_slots(1000, shards, {"kv": 4096}, 10) == 1000 * ranks


def test_the_rank_with_most_layers_decides() -> None:
    # 3, 3, 2 and 2 of 10 layers: 10/3 of the slots, and not 4 times.
    shards = shards_of({"kv": tuple(range(10))}, 0, 4, 0)
    assert host_slots(3000, shards, {"kv": 4096}, 10) == 10_000
    assert host_slots(1000, shards, {"kv": 4096}, 10) == 3330


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("indexer", [INDEXER, (5,)])
def test_no_rank_takes_more_memory_than_by_itself_and_one_page_more_would(
    ranks: int, drafts: int, indexer: tuple[int, ...]
) -> None:
    page_bytes = {"kv": KV_BYTES, "indexer": INDEXER_BYTES}
    pages = 1000
    everybodys = of_ranks({"kv": KV, "indexer": indexer}, drafts, ranks)
    (slots,) = {host_slots(pages * 64, mine, page_bytes, 64) for mine in everybodys}
    taken = [
        sum(page_bytes[name] * each.kept_rows for name, each in mine.items()) for mine in everybodys
    ]
    whole = sum(page_bytes[name] * each.all_rows for name, each in everybodys[0].items())
    assert max(taken) * slots // 64 <= pages * whole < max(taken) * (slots // 64 + 1)
    assert slots > (0.75 * ranks) * pages * 64
