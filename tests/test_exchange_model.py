"""Which order of exchange and forward can deadlock, found by trying every interleaving.

`KVBURST_MODEL_STATES=3000000 pytest tests/test_exchange_model.py -s` looks further with 4 ranks;
`-s` shows the table.
"""

import os
from dataclasses import replace

import pytest
from exchange_model import Model, Operation, Scenario, Verdict, model_of

# Of 4 ranks; with 2 there is no bound.
STATES = int(os.environ.get("KVBURST_MODEL_STATES", "40000"))

Steps = tuple[tuple[str, int, int], ...]

ONE: Steps = (("load", 0, 0), ("forward", 0, 2))
IN_TURN: Steps = (*ONE, ("load", 1, 0), ("forward", 1, 2))
AHEAD: Steps = (("load", 0, 0), ("load", 1, 0), ("forward", 0, 2), ("forward", 1, 2))
ABORTED: Steps = (("load", 0, 0), ("forward", 0, 1), ("load", 1, 0), ("forward", 1, 2))
NEVER_RAN: Steps = (("load", 0, 0), ("forward", 0, 0), ("load", 1, 0), ("forward", 1, 2))
EVERY_WAY: dict[str, Steps] = {
    "one burst": ONE,
    "two in turn": IN_TURN,
    "two loads ahead": AHEAD,
    "aborted forward": ABORTED,
    "forward never runs": NEVER_RAN,
}

OURS = Scenario("forward stream", ranks=2, layers=2, steps=ONE)
SIDE = Scenario("side stream", ranks=2, layers=2, steps=ONE)


def explored(scenario: Scenario) -> Verdict:
    """To the end with 2 ranks, to the bound with more."""
    verdict = model_of(scenario).explore(STATES if scenario.ranks > 2 else 10_000_000)
    assert verdict.complete or scenario.ranks > 2
    return verdict


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("steps", EVERY_WAY.values(), ids=EVERY_WAY)
def test_exchange_on_the_forwards_stream_cannot_deadlock(ranks: int, steps: Steps) -> None:
    assert explored(replace(OURS, ranks=ranks, steps=steps)).deadlock is None


@pytest.mark.parametrize("steps", EVERY_WAY.values(), ids=EVERY_WAY)
def test_side_stream_with_its_gate_and_the_fence_cannot_deadlock(steps: Steps) -> None:
    assert explored(replace(SIDE, gate=True, steps=steps)).deadlock is None


@pytest.mark.parametrize("ranks", [2, 4])
def test_side_stream_without_its_gate_deadlocks(ranks: int) -> None:
    found = explored(replace(SIDE, ranks=ranks)).deadlock
    assert found is not None
    assert "exchange" in found
    assert "forward" in found


def test_gate_alone_is_not_enough_once_a_load_is_submitted_under_a_forward() -> None:
    """The side stream's exchange is behind the load fence for a reason."""
    unfenced = replace(SIDE, gate=True, fence=False, steps=IN_TURN)
    assert explored(unfenced).deadlock is not None
    assert explored(replace(unfenced, steps=ONE)).deadlock is None


def test_exchange_on_the_forwards_stream_needs_no_fence_against_deadlock() -> None:
    for steps in EVERY_WAY.values():
        assert explored(replace(OURS, fence=False, steps=steps)).deadlock is None


def test_rank_that_flushes_what_another_does_not_deadlocks() -> None:
    """A flush is part of the order: every rank does it, or none."""
    flushes = replace(OURS, steps=ABORTED)
    leaves = replace(flushes, flush=False)
    assert Model((flushes.program(0), leaves.program(1))).explore().deadlock is not None
    assert Model((leaves.program(0), leaves.program(1))).explore().deadlock is None


@pytest.mark.parametrize("steps", EVERY_WAY.values(), ids=EVERY_WAY)
def test_every_rank_launches_all_collectives_in_one_order(steps: Steps) -> None:
    model = model_of(replace(OURS, ranks=4, layers=5, steps=steps))
    assert len({tuple(model.launch_order(rank)) for rank in range(4)}) == 1


def test_exchange_of_a_layer_is_launched_right_before_the_forward_needs_it() -> None:
    assert model_of(replace(OURS, steps=IN_TURN)).launch_order(1) == [
        f"{kind} {burst}.{layer}"
        for burst in range(2)
        for layer in range(2)
        for kind in ("exchange", "forward")
    ]


def test_model_finds_the_plainest_deadlock_of_all() -> None:
    """Two ranks that call two collectives in opposite orders."""
    calls = {name: Operation(2, name) for name in "ab"}
    crossed = Model(((calls["a"], calls["b"]), (calls["b"], calls["a"])))
    assert crossed.explore().deadlock == "rank 0 in a; rank 1 in b"
    assert Model(((calls["a"], calls["b"]),) * 2).explore().deadlock is None


def test_table_of_every_order() -> None:
    """Printed with `-s`."""
    rows = [
        ("side stream, no gate", SIDE),
        ("side stream, gate, no fence", replace(SIDE, gate=True, fence=False)),
        ("side stream, gate and fence", replace(SIDE, gate=True)),
        ("forward stream", OURS),
    ]
    print(f"\n{'order':30}{'steps':20}{'ranks':>6}{'states':>10}  result")
    deadlocks: dict[str, int] = {}
    for name, scenario in rows:
        for way, steps in EVERY_WAY.items():
            for ranks in (2, 4):
                if ranks == 4 and way not in ("one burst", "aborted forward"):
                    continue
                verdict = explored(replace(scenario, ranks=ranks, steps=steps))
                result = f"DEADLOCK: {verdict.deadlock}" if verdict.deadlock else "cannot deadlock"
                if not verdict.complete:
                    result = "no deadlock so far"
                print(f"{name:30}{way:20}{ranks:6}{verdict.states:10,}  {result}")
                deadlocks[name] = deadlocks.get(name, 0) + (verdict.deadlock is not None)
    assert deadlocks["side stream, no gate"] > 0
    assert deadlocks["side stream, gate, no fence"] > 0
    assert deadlocks["side stream, gate and fence"] == 0
    assert deadlocks["forward stream"] == 0
