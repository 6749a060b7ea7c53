"""Random work on a host tier that ranks share: they decide what stock SGLang decides, whose ranks
keep everything, and every byte is what it must be.

`KVBURST_TEST_SHARDED_OPERATIONS` says how many operations, 2,000 if it says nothing.
"""

import os
from collections.abc import Callable

import pytest
from agreed import Agreed
from conftest import SHARING_RANKS, Server
from ranks import Ranks
from setups import Setup, Worked
from test_random_work import FLUSH_UNDER_A_LOAD, check, check_moved_by_plugin

OPERATIONS = int(os.environ.get("KVBURST_TEST_SHARDED_OPERATIONS", "2000"))
SECONDS = 120 + OPERATIONS
SETUPS = [
    Setup("mla", "page_first_direct", "write_through"),
    Setup("dsa", "layer_first", "write_back", layers=5, without_index=(1, 3)),
]

sharing = pytest.mark.parametrize(
    "ranks", [Server("sharing", SHARING_RANKS)], indirect=True, ids=str
)
side = pytest.mark.parametrize(
    "ranks", [Server("sharing-side", SHARING_RANKS)], indirect=True, ids=str
)


def test_ranks_that_share_decide_what_stock_sglang_decides(
    ranks_of: Callable[[Server], Ranks],
) -> None:
    """With as many pages on the host, in a part of the memory."""
    logs: dict[str, list[list[str]]] = {}
    for switches in ("stock", "sharing-keep"):
        ranks = ranks_of(Server(switches, SHARING_RANKS))
        logs[switches] = []
        for seed, setup in enumerate(SETUPS):
            worked = ranks.call(
                "workload.work", setup, seed, OPERATIONS // 2, strict=True, seconds=SECONDS
            )
            check(worked, OPERATIONS // 2)
            if switches == "sharing-keep":
                check_moved_by_plugin(worked)
            logs[switches].append(worked[0].log)
    assert logs["stock"] == logs["sharing-keep"]
    assert any(FLUSH_UNDER_A_LOAD.search(line) for log in logs["stock"] for line in log)


@sharing
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_without_the_exchange_the_same_work_goes_wrong(ranks: Ranks, setup: Setup) -> None:
    worked: list[Worked] = ranks.call(
        "sharded.work_without_exchange", setup, 0, OPERATIONS // 20, strict=True, seconds=SECONDS
    )
    for rank in worked:
        assert rank.wrong


@sharing
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_ranks_that_share_decide_alike_whatever_is_under_way(ranks: Ranks, setup: Setup) -> None:
    worked = ranks.call("workload.work", setup, 11, OPERATIONS // 4, strict=False, seconds=SECONDS)
    check(worked, OPERATIONS // 4)
    check_moved_by_plugin(worked)


@sharing
def test_ranks_that_share_decide_alike_while_one_of_them_is_slow(ranks: Ranks) -> None:
    operations = max(10, OPERATIONS // 200)
    worked = ranks.call(
        "workload.work", Setup("mla"), 21, operations, strict=False, slow_rank=1, seconds=SECONDS
    )
    check(worked, operations)
    check_moved_by_plugin(worked)


@pytest.mark.parametrize(
    "ranks",
    [Server(switches, SHARING_RANKS) for switches in ("sharing", "sharing-keep", "sharing-side")],
    indirect=True,
    ids=str,
)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_late_ranks_that_share_retire_the_same_acks(ranks: Ranks, setup: Setup) -> None:
    operations = OPERATIONS // 20
    worked: list[Agreed] = ranks.call(
        "agreeing.work", setup, 7, operations, strict=False, seconds=SECONDS
    )
    for rank in worked:
        assert rank.wrong == []
        assert rank.log == worked[0].log
        assert rank.retired == worked[0].retired
        assert rank.prefixes == worked[0].prefixes
    assert worked[0].retired["load"]


@side
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_ranks_that_send_on_a_side_stream_decide_alike(ranks: Ranks, setup: Setup) -> None:
    worked = ranks.call("workload.work", setup, 13, OPERATIONS // 4, strict=False, seconds=SECONDS)
    check(worked, OPERATIONS // 4)
    check_moved_by_plugin(worked)


@pytest.mark.parametrize("ranks", [Server("sharing-pairs", 4)], indirect=True, ids=str)
def test_pairs_of_dp_attention_share_each_its_own_tier(ranks: Ranks) -> None:
    operations = OPERATIONS // 10
    worked = ranks.call("sharded.work_in_pairs", SETUPS[1], 17, operations, seconds=SECONDS)
    for pair in (worked[:2], worked[2:]):
        check(pair, operations)
        check_moved_by_plugin(pair)
    assert worked[0].log != worked[2].log
