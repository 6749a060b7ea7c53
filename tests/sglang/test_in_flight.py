"""Whatever happens to SGLang's queues while a round is in flight, no rank takes too much."""

from pathlib import Path

import pytest
from conftest import Server
from ranks import Ranks
from setups import Setup

SETUP = Setup("mla")
PLACES = ["by numbers of its own", "without numbers", "by a reset", "by detaching"]

lagging = pytest.mark.parametrize(
    "ranks", [Server("board", 2), Server("pipelined", 2)], indirect=True, ids=str
)


@lagging
def test_flush_before_an_eviction_is_not_counted_again(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.call("in_flight.flush", SETUP, str(tmp_path)) == [1, 1]


@lagging
def test_reset_consumes_the_round_in_flight(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.call("in_flight.reset", SETUP, str(tmp_path)) == [(1, 1)] * 2


@lagging
def test_checks_that_reduce_by_themselves_are_not_counted_again(ranks: Ranks) -> None:
    assert ranks.call("in_flight.own_checks", SETUP) == [(1, 1)] * 2


@lagging
def test_pool_that_comes_later_makes_rounds_longer_on_all_ranks(ranks: Ranks) -> None:
    assert ranks.call("in_flight.pool_registered", SETUP) == [(0, 2)] * 2


@lagging
@pytest.mark.parametrize("place", PLACES)
def test_storage_queue_popped_elsewhere_is_not_popped_again(
    ranks: Ranks, tmp_path: Path, place: str
) -> None:
    taken = ranks.call("in_flight.storage_popped", SETUP, str(tmp_path), place)
    assert taken == [[0, 1, 0, 1, 0]] * 2


@lagging
def test_untold_of_it_a_rank_notices_that_something_is_missing(
    ranks: Ranks, tmp_path: Path
) -> None:
    for told in ranks.call("in_flight.storage_popped_untold", SETUP, str(tmp_path)):
        assert "taken by other means" in told
        assert "host_mem_release" in told


@lagging
def test_failed_burst_of_one_rank_is_raised_on_all(ranks: Ranks) -> None:
    for text, named, counters in ranks.call("in_flight.failed_backup", SETUP):
        assert "rank 1" in text
        assert "backup" in text
        assert "node" in text
        assert named == (1,)
        assert counters == ["write"]


@pytest.mark.parametrize("ranks", [Server("board", 4)], indirect=True, ids=str)
def test_killed_rank_ends_the_others_with_its_name(ranks: Ranks) -> None:
    answers = ranks.call_losing(1, "in_flight.killed", SETUP)
    assert sorted(answers) == [0, 2, 3]
    for text, named, seconds in answers.values():
        assert "rank 1" in text
        assert named == (1,)
        assert seconds < 30


@pytest.mark.parametrize("ranks", [Server("pipelined", 2)], indirect=True, ids=str)
def test_killed_rank_ends_the_others_where_they_agree_by_a_collective(ranks: Ranks) -> None:
    ((text, _, _),) = ranks.call_losing(1, "in_flight.killed", SETUP).values()
    assert "all_reduce" in text
