"""On a tier that ranks share a layer may come from another rank: whoever waits for it gets it, and
whoever does not holds up nobody."""

import pytest
from conftest import SHARING_RANKS, Server
from ranks import Ranks
from setups import Setup

SETUPS = [Setup("mla", layers=5), Setup("dsa", "layer_first", drafts=1)]

sharing = pytest.mark.parametrize(
    "ranks", [Server("sharing", SHARING_RANKS)], indirect=True, ids=str
)
side = pytest.mark.parametrize(
    "ranks", [Server("sharing-side", SHARING_RANKS)], indirect=True, ids=str
)
either = pytest.mark.parametrize(
    "ranks",
    [Server("sharing", SHARING_RANKS), Server("sharing-side", SHARING_RANKS)],
    indirect=True,
    ids=str,
)
everywhere = pytest.mark.parametrize("setup", SETUPS, ids=str)


@either
@everywhere
@pytest.mark.parametrize(
    "who", ["last_layer_alone", "event_of_a_slot", "next_forward", "idle_steps"]
)
def test_whoever_waits_for_all_layers_has_them_and_so_has_who_comes_later(
    ranks: Ranks, setup: Setup, who: str
) -> None:
    for waited in ranks.call(f"sharded_waits.{who}", setup):
        assert waited.after == waited.later == []


@sharing
@everywhere
def test_before_anybody_waits_the_layers_of_others_are_not_there(
    ranks: Ranks, setup: Setup
) -> None:
    """The control of all others: nothing is sent that nobody has asked for."""
    for waited in ranks.call("sharded_waits.last_layer_alone", setup):
        assert waited.before


@sharing
@everywhere
def test_forward_is_given_its_first_layer_before_the_others_are_sent(
    ranks: Ranks, setup: Setup
) -> None:
    for waited in ranks.call("sharded_waits.first_layer_alone", setup):
        assert not [page for page in waited.after if ", layer 0, " in page and "draft" not in page]
        assert waited.after
        assert waited.later == []


@either
@everywhere
def test_draft_worker_of_an_older_load_gets_that_one(ranks: Ranks, setup: Setup) -> None:
    for wrong in ranks.call("sharded_waits.events_of_an_older_load", setup):
        assert wrong == []


@either
@everywhere
@pytest.mark.parametrize(
    "what", ["loads_that_nobody_waits_for", "reset_under_loads", "stop_under_a_load"]
)
def test_load_whose_forward_never_runs_holds_up_nobody(
    ranks: Ranks, setup: Setup, what: str
) -> None:
    for wrong in ranks.call(f"sharded_waits.{what}", setup):
        assert wrong == []


@either
def test_retracted_request_gets_its_pages_back_or_is_refused_by_name(ranks: Ranks) -> None:
    answers = ranks.call("sharded_waits.restored_after_retraction", Setup("mla"))
    for wrong, refused in answers:
        assert wrong == []
        assert refused == answers[0][1]
        if refused:
            assert "SGLANG_ENABLE_HICACHE_RANK_SHARD" in refused


@side
@everywhere
def test_batch_begins_when_all_is_there(ranks: Ranks, setup: Setup) -> None:
    for gated in ranks.call("sharded_waits.gate", setup):
        assert gated.blocked
        assert gated.wrong == []


@sharing
@everywhere
def test_without_a_side_stream_a_batch_begins_at_once(ranks: Ranks, setup: Setup) -> None:
    """Its forward waits, layer by layer; the control of the one before."""
    for gated in ranks.call("sharded_waits.gate", setup):
        assert not gated.blocked
        assert gated.wrong
