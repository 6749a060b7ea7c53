"""Pages go to the host and come back through the released tree and controller, bit-exact, and
really through the plugin where it is on."""

from itertools import product
from typing import get_args

import pytest
from conftest import Server
from ranks import Ranks
from setups import Layout, Model, Policy, RoundTrip, Setup

SETUPS = [
    Setup(model, layout, policy)
    for model, layout, policy in product(get_args(Model), get_args(Layout), get_args(Policy))
]
WITH_HOLES = [
    Setup("dsa", layout, layers=6, without_index=(1, 2, 4)) for layout in get_args(Layout)
]
WITH_DRAFTS = [
    Setup("mla", "page_first_direct", drafts=2),
    Setup("dsa", "layer_first", drafts=1),
    Setup("mha", "page_first_direct", drafts=6),
]
NOT_ELIGIBLE = Setup("mla", "page_first", io_backend="kernel")
ONE_A_MODEL = [
    Setup("mla", "page_first_direct", "write_back"),
    Setup("dsa", "page_first_direct", "write_through"),
    Setup("mha", "layer_first", "write_through"),
]


def on(*servers: tuple[Server, list[Setup]]) -> pytest.MarkDecorator:
    parameters = [
        pytest.param(server, setup, id=f"{server}-{setup}")
        for server, setups in servers
        for setup in setups
    ]
    return pytest.mark.parametrize(("ranks", "setup"), parameters, indirect=["ranks"])


def check_bytes(trips: list[RoundTrip]) -> None:
    for rank, trip in enumerate(trips):
        assert trip.wrong == [], f"rank {rank}"
        assert trip.touched == [], f"rank {rank}"
        assert trip.backing_up.failures == trip.loading.failures == 0


def check_loads_went_through(trip: RoundTrip) -> None:
    assert trip.loading.loads == trip.loads
    assert trip.loading.pages_loaded == trip.loads * trip.pages


def check_backups_went_through(trip: RoundTrip) -> None:
    assert trip.backing_up.backups >= 1
    assert trip.backing_up.pages_backed_up == trip.pages
    assert trip.backing_up.stock_copies == 0


@on((Server("stock", 2), ONE_A_MODEL), (Server("off"), SETUPS))
def test_without_a_switch_sglang_copies_itself(ranks: Ranks, setup: Setup) -> None:
    trips = ranks.call("scenarios.round_trip", setup)
    check_bytes(trips)
    for trip in trips:
        assert trip.loading.loads == trip.backing_up.backups == 0
        assert trip.loading.stock_copies > 0
        assert trip.backing_up.stock_copies > 0


@on(
    (Server("everything"), SETUPS + WITH_DRAFTS + WITH_HOLES),
    (Server("everything", 2), SETUPS),
    (Server("one-piece"), SETUPS),
)
def test_with_everything_on_both_ways_go_through_the_plugin(ranks: Ranks, setup: Setup) -> None:
    trips = ranks.call("scenarios.round_trip", setup)
    check_bytes(trips)
    for trip in trips:
        check_loads_went_through(trip)
        check_backups_went_through(trip)
        assert trip.loading.stock_copies == 0
        assert trip.backing_up.left_to_sglang == trip.loading.left_to_sglang == 0


@on((Server("loads", 2), ONE_A_MODEL))
def test_loads_alone_go_through_the_plugin(ranks: Ranks, setup: Setup) -> None:
    trips = ranks.call("scenarios.round_trip", setup)
    check_bytes(trips)
    for trip in trips:
        check_loads_went_through(trip)
        assert trip.backing_up.backups == 0
        assert trip.backing_up.stock_copies > 0


@on((Server("backups", 2), ONE_A_MODEL), (Server("all-but-loads"), ONE_A_MODEL))
def test_backups_alone_go_through_the_plugin(ranks: Ranks, setup: Setup) -> None:
    trips = ranks.call("scenarios.round_trip", setup)
    check_bytes(trips)
    for trip in trips:
        check_backups_went_through(trip)
        assert trip.loading.loads == 0
        assert trip.loading.stock_copies > 0


@on((Server("everything"), [Setup("mha", layout) for layout in get_args(Layout)]))
def test_retracted_request_gets_its_pages_back(ranks: Ranks, setup: Setup) -> None:
    ((wrong, moved),) = ranks.call("scenarios.retraction", setup)
    assert wrong == []
    assert moved.loads == moved.backups == 1
    assert moved.stock_copies == 0


@on((Server("stock", 2), SETUPS))
def test_our_drop_in_copies_do_what_sglangs_do(ranks: Ranks, setup: Setup) -> None:
    trips = ranks.call("scenarios.round_trip_with_our_copies", setup)
    check_bytes(trips)
    for trip in trips:
        assert trip.loading.stock_copies == trip.backing_up.stock_copies == 0


@on((Server("everything"), ONE_A_MODEL), (Server("one-piece"), ONE_A_MODEL))
def test_in_one_piece_a_copy_spans_layers(
    ranks: Ranks, setup: Setup, request: pytest.FixtureRequest
) -> None:
    ((backup, load),) = ranks.call("scenarios.copies_of_five_scattered_pages", setup)
    buffers = 1 if setup.model == "mla" else 2
    spans = request.node.callspec.params["ranks"].switches == "one-piece"
    assert backup == 5 * buffers * (1 if spans else setup.layers)
    # Layers 0, 1 and 2, and 3.
    assert load == 5 * buffers * (3 if spans else setup.layers)


@on((Server("everything", 2), [Setup()]))
def test_what_one_rank_cannot_do_is_off_on_all(ranks: Ranks, setup: Setup) -> None:
    told = ranks.call("scenarios.one_rank_without_a_device", setup)
    for rank, (features, trip) in enumerate(told):
        for name in ("async_loads", "planned_backups"):
            on, why = features[name]
            assert not on
            assert ("no such device" if rank == 1 else "another rank") in why
        assert trip.wrong == trip.touched == []
        assert trip.loading.loads == trip.backing_up.backups == 0
        assert trip.loading.stock_copies > 0


@on((Server("everything"), [Setup()]))
def test_one_line_says_what_is_on(ranks: Ranks, setup: Setup) -> None:
    before = ranks.log()
    ranks.call("scenarios.build_only", setup)
    said = [line for line in ranks.log()[len(before) :].splitlines() if "with SGLang" in line]
    assert len(said) == 1
    assert "async_loads on; planned_backups on" in said[0]


@on((Server("everything", 2), [NOT_ELIGIBLE]))
def test_what_is_not_eligible_is_left_to_sglang_with_a_reason(ranks: Ranks, setup: Setup) -> None:
    ranks.call("scenarios.build_only", setup)
    for features in ranks.call("scenarios.features"):
        for name in ("async_loads", "planned_backups"):
            on, why = features[name]
            assert not on
            assert "page_first" in why or "kernel" in why
