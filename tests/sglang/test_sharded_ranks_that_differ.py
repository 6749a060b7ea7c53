"""Ranks of a shared tier that do not do the same are all told, in bounded time, and no forward
comes to an end over pages that are not whole."""

import pytest
from conftest import SHARING_RANKS, Server
from ranks import Ranks
from setups import Setup

SETUP = Setup("mla", layers=3 * SHARING_RANKS)
SECONDS = 60
LOST = SHARING_RANKS - 1

either = pytest.mark.parametrize(
    "ranks",
    [Server("sharing", SHARING_RANKS), Server("sharing-side", SHARING_RANKS)],
    indirect=True,
    ids=str,
)


@either
@pytest.mark.parametrize("call", [1, 3])
def test_failed_copy_of_one_rank_ends_the_forward_of_all(ranks: Ranks, call: int) -> None:
    answers = ranks.call("sharded_failures.copy_fails", SETUP, LOST, call)
    for rank, told in enumerate(answers):
        assert told.layers_read < SETUP.layers
        for words in (told.forward, told.step):
            assert "load" in words
            assert f"rank {LOST}" in words or "copy: failed" in words
        if rank != LOST:
            assert f"rank {LOST}" in told.forward
        assert told.seconds < SECONDS


@either
def test_ranks_that_load_other_pages_exchange_nothing(ranks: Ranks) -> None:
    for told in ranks.call("sharded_failures.other_pages", SETUP, LOST):
        assert told.layers_read == 0
        assert "ranks do not load the same host pages" in told.forward
        assert told.step != "nothing"
        assert told.seconds < SECONDS


@pytest.mark.parametrize(
    ("ranks", "when"),
    [
        (Server("sharing", SHARING_RANKS), "killed"),
        (Server("sharing-side", SHARING_RANKS), "never_comes"),
    ],
    indirect=["ranks"],
    ids=str,
)
def test_rank_that_is_killed_ends_the_others(ranks: Ranks, when: str) -> None:
    answers = ranks.call_losing(LOST, f"sharded_failures.{when}", SETUP, LOST)
    assert sorted(answers) == list(range(LOST))
    for told in answers.values():
        assert told.layers_read < SETUP.layers
        assert told.wrong == []
        assert "load" in told.forward
        assert f"rank {LOST}" in told.forward + told.step
        assert told.seconds < SECONDS
