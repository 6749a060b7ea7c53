"""In an SGLang that it was not written for the plugin says so, once, and SGLang runs untouched."""

import pytest
from conftest import Server
from ranks import Ranks
from setups import Refused, Setup

in_stock_sglang = pytest.mark.parametrize("ranks", [Server("refusals")], indirect=True, ids=str)


def check_untouched(refused: Refused) -> None:
    trip = refused.trip
    assert trip.wrong == trip.touched == []
    assert trip.loading.loads == trip.backing_up.backups == 0
    assert trip.loading.stock_copies > 0
    assert trip.backing_up.stock_copies > 0


@in_stock_sglang
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("renamed target", ["L2TransferEngine.submit_host_to_device", "not there"]),
        ("changed signature", ["L2TransferEngine.submit_host_to_device", "priority", "expected"]),
        ("another version", ["0.5.24", "0.5.23"]),
        ("hooked by another plugin", ["L2TransferEngine.submit_device_to_host", "another plugin"]),
    ],
)
def test_is_refused_with_one_error_and_nothing_hooked(
    ranks: Ranks, case: str, words: list[str]
) -> None:
    (refused,) = ranks.call("refusals.refused", case, Setup())
    (error,) = refused.errors
    for word in ["off", *words]:
        assert word in error
    expected_hooks = 1 if case == "hooked by another plugin" else 0
    renamed = [path for path in refused.newly_hooked if "submit_host_to_device" in path]
    assert len(refused.newly_hooked) - len(renamed) == expected_hooks
    check_untouched(refused)


@in_stock_sglang
def test_hook_that_sglang_could_not_apply_turns_all_off(ranks: Ranks) -> None:
    (refused,) = ranks.call("refusals.refused", "cannot be applied", Setup())
    (error,) = refused.errors
    assert "HiCacheController.start_loading" in error
    assert refused.newly_hooked  # They pass through.
    check_untouched(refused)


@in_stock_sglang
def test_value_that_cannot_be_meant_is_refused(ranks: Ranks) -> None:
    (refused,) = ranks.call("refusals.refused", "bad value", Setup())
    assert "KVBURST" in refused.raised
    assert "perhaps" in refused.raised
    assert refused.newly_hooked == []
    check_untouched(refused)
