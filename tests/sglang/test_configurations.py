"""The seventeen cache configurations of SGLang's own test kit, with `direct` copies."""

import pytest
from conftest import Server
from ranks import Ranks
from setups import Layout

CONFIGURATIONS = 17


@pytest.mark.parametrize("ranks", [Server("everything")], indirect=True)
def test_the_kit_has_seventeen_configurations(ranks: Ranks) -> None:
    (labels,) = ranks.call("configurations.labels")
    assert len(labels) == len(set(labels)) == CONFIGURATIONS


CASES = [("page_first_direct", index) for index in range(CONFIGURATIONS)] + [
    # Full attention, and with sliding windows; SGLang itself has no such host pool for Mamba.
    ("layer_first", 2),
    ("layer_first", 12),
]


@pytest.mark.parametrize(("layout", "index"), CASES)
@pytest.mark.parametrize("ranks", [Server("everything")], indirect=True, ids=str)
def test_configuration_comes_back_as_it_went_and_through_the_plugin(
    ranks: Ranks, layout: Layout, index: int
) -> None:
    (trip,) = ranks.call("configurations.round_trip", index, layout)
    assert trip.left_on_device == 0
    assert trip.full_nodes == trip.nodes > 1
    assert trip.wrong == []
    assert trip.moved.loads == 1
    assert trip.moved.backups >= 1
    assert trip.moved.failures == 0
