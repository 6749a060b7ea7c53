"""Without a switch SGLang makes the calls that it makes without the package, in the same order."""

from collections.abc import Callable

import pytest
from conftest import SHARING_RANKS, Server
from ranks import Ranks
from setups import Setup

SETUPS = [Setup("mla"), Setup("dsa", "layer_first", "write_back")]

Recorded = tuple[list[str], list[str]]


@pytest.fixture(scope="module")
def recorded(ranks_of: Callable[[Server], Ranks]) -> dict[tuple[str, Setup], Recorded]:
    """By switches and setup."""
    return {
        (switches, setup): ranks_of(Server(switches)).call("call_log.recorded", setup)[0]
        for switches in ("stock", "everything", "off")
        for setup in SETUPS
    }


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_without_a_switch_the_calls_are_those_without_the_package(
    recorded: dict[tuple[str, Setup], Recorded], setup: Setup
) -> None:
    calls, threads = recorded["off", setup]
    stock_calls, stock_threads = recorded["stock", setup]
    assert len(stock_calls) > 1000
    assert any("submit_host_to_device" in call for call in stock_calls)
    assert calls == stock_calls
    assert threads == stock_threads


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_with_a_switch_they_are_not(
    recorded: dict[tuple[str, Setup], Recorded], setup: Setup
) -> None:
    assert recorded["everything", setup][0] != recorded["stock", setup][0]


@pytest.mark.parametrize("ranks", [Server("off")], indirect=True, ids=str)
def test_without_a_switch_nothing_is_hooked(ranks: Ranks) -> None:
    assert ranks.call("call_log.hooks") == [[]]


@pytest.mark.parametrize("ranks", [Server("everything")], indirect=True, ids=str)
def test_with_a_switch_something_is(ranks: Ranks) -> None:
    (hooks,) = ranks.call("call_log.hooks")
    assert any("L2TransferEngine" in hook for hook in hooks)


SHARING = ("forward_batch_embedding", "run_batch", "PoolHost", "register_host_pool_entry")
"""In names of what is hooked for a host tier that ranks share."""


@pytest.mark.parametrize("ranks", [Server("everything")], indirect=True, ids=str)
def test_of_a_tier_that_ranks_share_nothing_is_hooked_unless_its_own_variable_is_set(
    ranks: Ranks,
) -> None:
    (hooks,) = ranks.call("call_log.hooks")
    assert hooks
    assert not [hook for hook in hooks if any(name in hook for name in SHARING)]


@pytest.mark.parametrize("ranks", [Server("sharing-side", SHARING_RANKS)], indirect=True, ids=str)
def test_with_its_own_variable_all_of_it_is(ranks: Ranks) -> None:
    for hooks in ranks.call("call_log.hooks"):
        for name in SHARING:
            assert any(name in hook for hook in hooks), name
