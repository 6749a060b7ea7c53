"""A prompt gets the same logits, bit for bit, whether its KV was on the device or on the host."""

import pytest
from conftest import Server
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
