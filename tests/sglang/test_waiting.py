"""A forward gets the bytes of its load, since it waits for them; without the wait it does not."""

import pytest
from conftest import Server
from ranks import Ranks
from setups import Setup

SETUPS = [
    Setup("mla"),
    Setup("dsa"),
    Setup("mha", "layer_first"),
]

everywhere = pytest.mark.parametrize("setup", SETUPS, ids=str)
with_everything = pytest.mark.parametrize("ranks", [Server("everything")], indirect=True, ids=str)


@with_everything
@everywhere
def test_forward_waits_until_its_pages_are_there(ranks: Ranks, setup: Setup) -> None:
    (load,) = ranks.call("scenarios.held_load", setup)
    assert not load.done_while_held
    assert load.blocked
    assert load.wrong == load.wrong_afterwards == []


@with_everything
@everywhere
def test_without_the_wait_a_forward_reads_what_was_there_before(ranks: Ranks, setup: Setup) -> None:
    (load,) = ranks.call("scenarios.held_load_without_the_wait", setup)
    buffers = 1 if setup.model == "mla" else 2
    assert not load.done_while_held
    assert len(load.wrong) == buffers * 4 * setup.layers  # every page of every layer
    assert load.wrong_afterwards == []


@with_everything
@everywhere
def test_flush_waits_for_the_loads_under_way(ranks: Ranks, setup: Setup) -> None:
    assert ranks.call("scenarios.reset_while_held", setup) == [[]]


@with_everything
@everywhere
def test_fourth_load_waits_for_the_first_ones_slot(ranks: Ranks, setup: Setup) -> None:
    assert ranks.call("scenarios.loads_beyond_the_rotation", setup) == [[]]


@with_everything
def test_failed_load_is_raised_to_whoever_asks_for_it(ranks: Ranks) -> None:
    ((forward, step, failures),) = ranks.call("scenarios.failed_load", Setup())
    for told in (forward, step):
        assert "load" in told
        assert "layer" in told
        assert "node" in told
    assert failures == 1
