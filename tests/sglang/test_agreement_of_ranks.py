"""Ranks that agree without waiting take the same acks, in the same order, as stock SGLang does.

`KVBURST_TEST_STEPS` says how many of the scheduler's steps, or more; as many as 2,000
take some minutes.
"""

import os
from collections.abc import Callable

import pytest
from agreed import Agreed
from conftest import Server
from ranks import RankError, Ranks
from setups import Setup

STEPS = int(os.environ.get("KVBURST_TEST_STEPS", "100"))
SECONDS = 60 + STEPS
SETUP = Setup("mla", policy="write_through")
WRITE_BACK = Setup("dsa", policy="write_back")

TRANSPORTS = {"board": "board", "pipelined": "pipelined", "idle-skip": "blocking"}
"""Of each server's switches."""


def check(worked: list[Agreed]) -> None:
    """Every rank did the same."""
    first = worked[0]
    for rank in worked:
        assert rank.wrong == []
        assert rank.log == first.log
        assert rank.retired == first.retired
        assert rank.prefixes == first.prefixes
        assert rank.bytes == first.bytes
        assert rank.steps == first.steps
        assert rank.agreements == first.agreements
    assert first.steps >= STEPS // 4
    assert first.retired["write"]
    assert first.retired["load"]


def check_agreed_by(worked: list[Agreed], switches: str) -> None:
    for rank in worked:
        assert rank.transport == TRANSPORTS[switches]
        if switches == "idle-skip":
            assert 0 < rank.agreements < rank.steps
        else:
            assert rank.agreements == rank.steps


def test_what_is_retired_and_left_is_what_stock_sglang_retires_and_leaves(
    ranks_of: Callable[[Server], Ranks],
) -> None:
    servers = [Server("stock", 2), *(Server(switches, 2) for switches in TRANSPORTS)]
    servers += [Server("board", 4), Server("pipelined", 4)]
    stock: dict[Setup, Agreed] = {}
    for server in servers:
        for setup in (SETUP, WRITE_BACK):
            worked = ranks_of(server).call(
                "agreeing.work", setup, 5, STEPS // 2, strict=True, seconds=SECONDS
            )
            check(worked)
            if server.switches == "stock":
                stock[setup] = worked[0]
                assert worked[0].transport == ""
                continue
            check_agreed_by(worked, server.switches)
            assert worked[0].log == stock[setup].log
            assert worked[0].retired == stock[setup].retired
            assert worked[0].prefixes == stock[setup].prefixes
            assert worked[0].bytes == stock[setup].bytes


@pytest.mark.parametrize(
    "ranks",
    [Server(switches, world) for world in (2, 4) for switches in ("board", "pipelined")],
    indirect=True,
    ids=str,
)
def test_uneven_ranks_retire_the_same_acks_at_the_same_steps(
    ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    worked = ranks.call("agreeing.work", SETUP, 7, STEPS, strict=False, seconds=SECONDS)
    check(worked)
    check_agreed_by(worked, request.node.callspec.params["ranks"].switches)


@pytest.mark.parametrize(
    "ranks", [Server("board", 4), Server("pipelined", 4)], indirect=True, ids=str
)
def test_grid_of_context_and_tensor_parallel_ranks_has_one_board(ranks: Ranks) -> None:
    worked = ranks.call(
        "agreeing.work", SETUP, 9, STEPS, strict=False, groups="cp x tp", seconds=SECONDS
    )
    check(worked)
    check_agreed_by(worked, "board")


@pytest.mark.parametrize("ranks", [Server("board", 2)], indirect=True, ids=str)
def test_ranks_agree_where_sglang_copies_itself(ranks: Ranks) -> None:
    ranks.call("scenarios.build_only", Setup("mla", "page_first", io_backend="kernel"))
    for features in ranks.call("scenarios.features"):
        assert not features["async_loads"][0]
        assert features["agreement"] == (True, "")


@pytest.mark.parametrize("ranks", [Server("all-but-agreement", 2)], indirect=True, ids=str)
def test_turned_off_sglang_agrees_itself_and_its_steps_are_still_timed(ranks: Ranks) -> None:
    worked = ranks.call("agreeing.work", SETUP, 9, STEPS // 2, strict=False, seconds=SECONDS)
    check(worked)
    for rank in worked:
        assert rank.transport == ""
        assert rank.agreements == 0
        assert rank.reasons == ("SGLANG_ENABLE_HICACHE_ASYNC_ACK_SYNC is False",)
    assert "the longest of 5 steps" in ranks.log()


@pytest.mark.parametrize("ranks", [Server("board", 2)], indirect=True, ids=str)
def test_cache_that_nobody_has_any_more_is_not_kept(ranks: Ranks) -> None:
    assert ranks.call("agreeing.forgotten", SETUP) == [True, True]


@pytest.mark.parametrize("ranks", [Server("board", 2)], indirect=True, ids=str)
def test_pipeline_stages_agree_as_sglang_does_and_it_says_so(ranks: Ranks) -> None:
    worked = ranks.call(
        "agreeing.work", SETUP, 9, STEPS, strict=False, groups="stages", seconds=SECONDS
    )
    check(worked)
    for rank in worked:
        assert rank.transport == ""
        assert rank.agreements == 0
        assert rank.reasons == ("SGLang hands its counts through 2 pipeline stages itself",)


@pytest.mark.parametrize("ranks", [Server("board", 2)], indirect=True, ids=str)
def test_sglangs_own_checker_would_have_ended_ranks_that_differ(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="ended with status"):
        ranks.call("agreeing.diverge", seconds=60)
