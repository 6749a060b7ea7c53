"""Storage that comes and goes while ranks agree loses nothing, and nothing is taken twice."""

from pathlib import Path

import pytest
from agreed import Stored
from conftest import Server
from ranks import Ranks
from setups import Setup

ROUNDS = 3
# One server of each way to agree; the last of them SGLang's own.
SERVERS = [
    Server("board", 2),
    Server("pipelined", 2),
    Server("idle-skip", 2),
    Server("all-but-agreement", 2),
]


def check(stored: list[Stored]) -> None:
    for rank in stored:
        assert rank.wrong == []
        assert rank.leaked == 0
        assert rank.popped == stored[0].popped
        assert rank.put["ack_backup_queue"] > 0
        assert rank.put["prefetch_hit_queue"] > 0
        assert rank.put["ack_prefetch_queue"] > 0


@pytest.mark.parametrize("ranks", SERVERS, indirect=True, ids=str)
def test_what_went_to_storage_comes_back_whatever_comes_and_goes(
    ranks: Ranks, tmp_path: Path
) -> None:
    stored = ranks.call(
        "storing.storage_comes_and_goes", Setup("mla"), str(tmp_path), 3, ROUNDS, seconds=180
    )
    check(stored)


@pytest.mark.parametrize("ranks", SERVERS, indirect=True, ids=str)
def test_host_that_is_a_buffer_for_storage_loses_nothing(ranks: Ranks, tmp_path: Path) -> None:
    stored = ranks.call("storing.host_is_a_buffer", Setup("mla"), str(tmp_path))
    check(stored)
