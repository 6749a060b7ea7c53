"""A prompt gets the same logits, bit for bit, whether its KV was on the device or on the host."""

import pytest
from conftest import SHARING_RANKS, Server
from ranks import Ranks
from setups import Layout, Setup

PROMPTS = 50

with_everything = pytest.mark.parametrize("ranks", [Server("everything")], indirect=True, ids=str)


@with_everything
@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_logits_are_the_same_from_device_and_host(ranks: Ranks, layout: Layout) -> None:
    (probed,) = ranks.call("small_model.probes", Setup("mha", layout), PROMPTS, waits=True)
    assert probed.prompts == PROMPTS
    assert probed.differ == []
    assert probed.moved.loads == PROMPTS
    assert probed.moved.backups >= PROMPTS
    assert probed.moved.stock_copies == 0


@with_everything
def test_without_the_wait_they_are_not(ranks: Ranks) -> None:
    (probed,) = ranks.call("small_model.probes", Setup("mha"), PROMPTS, waits=False)
    assert probed.differ == list(range(PROMPTS))


@pytest.mark.parametrize("ranks", [Server("stock", 2)], indirect=True, ids=str)
def test_logits_are_the_same_with_sglangs_own_copies(ranks: Ranks) -> None:
    for probed in ranks.call("small_model.probes", Setup("mha"), PROMPTS, waits=True):
        assert probed.differ == []
        assert probed.moved.loads == 0
        assert probed.moved.stock_copies > 0


SHARED = [
    Setup("mla", layers=5),
    Setup("dsa", "layer_first", without_index=(2,)),
]


@pytest.mark.parametrize(
    "ranks",
    [Server("sharing", SHARING_RANKS), Server("sharing-side", SHARING_RANKS)],
    indirect=True,
    ids=str,
)
@pytest.mark.parametrize("setup", SHARED, ids=str)
def test_logits_are_the_same_on_every_rank_from_a_tier_that_they_share(
    ranks: Ranks, setup: Setup
) -> None:
    prompts = PROMPTS // 5
    alone = ranks.call("small_model.probes", setup, prompts, waits=True, alone=True)
    shared = ranks.call("small_model.probes", setup, prompts, waits=True)
    for probed in (*alone, *shared):
        assert probed.differ == []
        assert probed.logits == alone[0].logits
    for probed in shared:
        assert probed.moved.loads == prompts
        assert probed.moved.stock_copies == 0


@pytest.mark.parametrize("ranks", [Server("sharing", SHARING_RANKS)], indirect=True, ids=str)
@pytest.mark.parametrize("setup", SHARED, ids=str)
def test_without_the_exchange_no_ranks_logits_are_the_same(ranks: Ranks, setup: Setup) -> None:
    for probed in ranks.call("small_model.probes_without_exchange", setup, 5):
        assert probed.differ == list(range(5))
