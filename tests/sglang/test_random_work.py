"""Random work on the real tree: ranks decide alike, the plugin as stock SGLang does, and every byte
is what it must be.

`KVBURST_TEST_OPERATIONS` says how many operations, 600 if it says nothing.
"""

import os
import re
from collections.abc import Callable

import pytest
from conftest import Server
from ranks import Ranks
from setups import Setup, Worked

OPERATIONS = int(os.environ.get("KVBURST_TEST_OPERATIONS", "600"))
SLOW_OPERATIONS = max(10, OPERATIONS // 40)
SECONDS = 60 + OPERATIONS
FLUSH_UNDER_A_LOAD = re.compile("flush: [1-9]")
SETUPS = [
    Setup("mla", "page_first_direct", "write_through"),
    Setup("dsa", "page_first_direct", "write_back"),
    Setup("mha", "layer_first", "write_back"),
]

two_ranks = pytest.mark.parametrize("ranks", [Server("everything", 2)], indirect=True, ids=str)


def check(worked: list[Worked], operations: int) -> None:
    """And one line more, when all is settled."""
    assert len(worked[0].log) == operations + 1
    assert [rank.wrong for rank in worked] == [[]] * len(worked)
    for rank in worked[1:]:
        assert rank.log == worked[0].log


def check_moved_by_plugin(worked: list[Worked]) -> None:
    for rank in worked:
        assert rank.moved.loads > 0
        assert rank.moved.backups > 0
        assert rank.moved.left_to_sglang == rank.moved.failures == rank.moved.stock_copies == 0


def test_plugin_decides_what_stock_sglang_decides(ranks_of: Callable[[Server], Ranks]) -> None:
    each = -(-OPERATIONS // len(SETUPS))
    # Of the last, one rank is slow where the plugin copies.
    work = [(setup, seed, each, None) for seed, setup in enumerate(SETUPS)]
    work.append((Setup("mla"), 3, SLOW_OPERATIONS, 1))
    logs = {}
    for switches in ("stock", "everything"):
        ranks = ranks_of(Server(switches, 2))
        for setup, seed, operations, slow_rank in work:
            worked = ranks.call(
                "workload.work",
                setup,
                seed,
                operations,
                strict=True,
                slow_rank=slow_rank,
                seconds=SECONDS,
            )
            check(worked, operations)
            if switches == "everything":
                check_moved_by_plugin(worked)
            logs[switches, seed] = worked[0].log
    for _, seed, _, _ in work:
        assert logs["stock", seed] == logs["everything", seed]
    assert any(FLUSH_UNDER_A_LOAD.search(line) for log in logs.values() for line in log)


@two_ranks
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_ranks_decide_alike_whatever_is_still_under_way(ranks: Ranks, setup: Setup) -> None:
    worked = ranks.call("workload.work", setup, 11, OPERATIONS // 2, strict=False, seconds=SECONDS)
    check(worked, OPERATIONS // 2)
    check_moved_by_plugin(worked)


@two_ranks
def test_ranks_decide_alike_while_one_of_them_is_slow(ranks: Ranks) -> None:
    worked = ranks.call(
        "workload.work",
        Setup("mla"),
        21,
        SLOW_OPERATIONS,
        strict=False,
        slow_rank=1,
        seconds=SECONDS,
    )
    check(worked, SLOW_OPERATIONS)
    check_moved_by_plugin(worked)
