"""Which features a server gets, and why it does not get the others."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvburst.settings import Settings
from kvburst.sglang_plugin.eligibility import FEATURES, Facts, Verdict, agree, decide

FIT = Facts(
    io_backend="direct",
    layout="page_first_direct",
    page_size=64,
    allocator_page_size=64,
    unified_memory=False,
    kv_sharded=False,
    sglang_knows=frozenset(),
    pools_refused=None,
    one_piece_pools=2,
    ranks=2,
    stages=1,
)
EVERYTHING = Settings(everything=True, one_piece_pools=True, rank_shard=True)


def test_every_feature_is_on_where_nothing_is_against_it() -> None:
    verdicts = decide(EVERYTHING, FIT)
    assert tuple(verdicts) == FEATURES
    assert all(verdict == Verdict(True) for verdict in verdicts.values())


def test_a_feature_that_nobody_asks_for_is_off_and_says_which_variable_would() -> None:
    verdicts = decide(Settings(), FIT)
    assert not any(verdict.on for verdict in verdicts.values())
    assert verdicts["async_loads"].reasons == ("SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE is not set",)
    off = decide(Settings(everything=True, async_load_enqueue=False), FIT)
    assert off["async_loads"].reasons == ("SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE is False",)
    assert off["planned_backups"].on


@pytest.mark.parametrize(
    ("against", "said"),
    [
        ({"io_backend": "kernel"}, "the io backend is 'kernel'"),
        ({"layout": "page_first"}, "the host layout is 'page_first'"),
        ({"unified_memory": True}, "unified memory"),
        ({"kv_sharded": True}, "spread over the ranks"),
        ({"allocator_page_size": 1}, "aligns slots to 1, pages are 64 slots"),
        ({"pools_refused": "pool 'x': its slots are virtual"}, "pool 'x': its slots are virtual"),
    ],
)
def test_sglang_keeps_its_copies_where(against: dict[str, object], said: str) -> None:
    verdicts = decide(EVERYTHING, replace(FIT, **against))
    for feature in ("async_loads", "planned_backups"):
        assert not verdicts[feature].on
        assert len(verdicts[feature].reasons) == 1
        assert said in verdicts[feature].reasons[0]
    assert verdicts["one_piece_pools"].on


def test_all_that_is_against_a_feature_is_said() -> None:
    verdicts = decide(EVERYTHING, replace(FIT, io_backend="kernel", layout="page_first"))
    assert len(verdicts["async_loads"].reasons) == 2


def test_layer_first_is_fit_as_well() -> None:
    assert decide(EVERYTHING, replace(FIT, layout="layer_first"))["async_loads"].on


def test_what_sglang_has_itself_is_left_to_it() -> None:
    knows = frozenset({"SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE"})
    verdicts = decide(EVERYTHING, replace(FIT, sglang_knows=knows))
    assert verdicts["async_loads"].reasons == (
        "SGLang has SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE itself",
    )
    assert verdicts["planned_backups"].on


def test_one_piece_pools_are_not_claimed_where_none_was_made() -> None:
    verdict = decide(EVERYTHING, replace(FIT, one_piece_pools=0))["one_piece_pools"]
    assert verdict == Verdict(False, ("no device pool was allocated that way",))


@pytest.mark.parametrize(
    "copies_are_sglangs",
    [
        {"io_backend": "kernel", "layout": "page_first"},
        {"kv_sharded": True},
        {"unified_memory": True},
        {"pools_refused": "no"},
    ],
    ids=str,
)
def test_ranks_agree_whoever_copies(copies_are_sglangs: dict[str, object]) -> None:
    verdicts = decide(EVERYTHING, replace(FIT, **copies_are_sglangs))  # type: ignore[arg-type]
    assert not verdicts["async_loads"].on
    assert verdicts["agreement"].on


def test_pipeline_stages_and_lone_ranks_agree_as_sglang_does() -> None:
    stages = decide(EVERYTHING, replace(FIT, stages=2))["agreement"]
    assert stages == Verdict(False, ("SGLang hands its counts through 2 pipeline stages itself",))
    alone = decide(EVERYTHING, replace(FIT, ranks=1))["agreement"]
    assert alone == Verdict(False, ("one rank has nobody to agree with",))


def test_agreement_turned_off_says_which_variable_did() -> None:
    verdict = decide(Settings(everything=True, async_ack_sync=False), FIT)["agreement"]
    assert verdict == Verdict(False, ("SGLANG_ENABLE_HICACHE_ASYNC_ACK_SYNC is False",))


def test_a_feature_is_on_where_every_rank_has_it() -> None:
    here = decide(EVERYTHING, FIT)
    elsewhere = decide(EVERYTHING, replace(FIT, pools_refused="no"))

    def minimum(values: Sequence[int]) -> list[int]:
        there = [int(verdict.on) for verdict in elsewhere.values()]
        return [min(pair) for pair in zip(values, there, strict=True)]

    agreed = agree(here, minimum)
    assert agreed["async_loads"] == Verdict(False, ("it is off on another rank",))
    assert agreed["one_piece_pools"] == Verdict(True)
    assert agree(elsewhere, lambda values: [0, 0, 1, 1, 1])["async_loads"].reasons == ("no",)


SHARD_ALONE = Settings(rank_shard=True)


def test_shared_tier_brings_loads_and_backups_with_it() -> None:
    verdicts = decide(SHARD_ALONE, FIT)
    on = [name for name, verdict in verdicts.items() if verdict.on]
    assert on == ["async_loads", "planned_backups", "rank_shard"]


def test_without_a_shared_tier_its_variable_asks_for_nothing_else() -> None:
    verdicts = decide(SHARD_ALONE, replace(FIT, not_shared=("the group has 1 rank",)))
    assert verdicts["rank_shard"] == Verdict(False, ("the group has 1 rank",))
    assert verdicts["async_loads"].reasons == ("SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE is not set",)
    assert not any(verdict.on for verdict in verdicts.values())
    others = decide(EVERYTHING, replace(FIT, not_shared=("the group has 1 rank",)))
    assert [name for name, verdict in others.items() if not verdict.on] == ["rank_shard"]


def test_shared_tier_that_nobody_asks_for_says_which_variable_would() -> None:
    verdict = decide(Settings(everything=True), FIT)["rank_shard"]
    assert verdict == Verdict(False, ("SGLANG_ENABLE_HICACHE_RANK_SHARD is not set",))


def test_shared_tier_is_left_to_an_sglang_that_has_it() -> None:
    variable = "SGLANG_ENABLE_HICACHE_RANK_SHARD"
    verdicts = decide(SHARD_ALONE, replace(FIT, sglang_knows=frozenset({variable})))
    assert verdicts["rank_shard"] == Verdict(False, (f"SGLang has {variable} itself",))
    assert not verdicts["async_loads"].on
