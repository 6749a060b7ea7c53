"""The agreement between real processes, over gloo and over shared memory.

`KVBURST_AGREEMENT_STEPS` and `KVBURST_AGREEMENT_SEEDS` make the random runs longer: 2000 and 3
before a release.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agreement_scenarios as scenarios
import pytest
from agreement_scenarios import Outcome, Plan
from rank_pool import Raised, RankPool

from kvburst.agreement import TransportName, payload_length

STEPS = int(os.environ.get("KVBURST_AGREEMENT_STEPS", "120"))
SEEDS = range(int(os.environ.get("KVBURST_AGREEMENT_SEEDS", "1")))

TRANSPORTS = pytest.mark.parametrize("transport", ["blocking", "pipelined", "board"])

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    made = RankPool(4, tmp_path_factory.mktemp("ranks"), patience=120 + STEPS / 10)
    yield made
    made.close()


@pytest.fixture
def own_pool(tmp_path: Path) -> Iterator[RankPool]:
    """For those that end ranks."""
    made = RankPool(4, tmp_path, timeout=20, patience=40)
    yield made
    made.close()


def alike(results: list[Any]) -> Any:
    """What all ranks gave, which must be the same."""
    for rank, result in enumerate(results):
        assert result == results[0], f"rank {rank} differs from rank 0"
    return results[0]


# --- many random steps ---------------------------------------------------------------------------

EVENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "resets and clears": {"resets": True, "clears": True},
    "storage and clears": {"storage": True, "clears": True},
    "a rank fails": {"failing_rank": 2, "clears": True},
}


def without_step(errors: list[tuple[int, str]]) -> list[str]:
    return [re.sub(r"^step \d+: ", "", text) for _, text in errors]


# sgl-project/sglang#26921
@TRANSPORTS
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("events", EVENTS)
def test_ranks_take_the_same_in_the_same_steps_with_and_without_skipping(
    pool: RankPool, transport: TransportName, seed: int, events: str
) -> None:
    found: list[Outcome] = []
    for skip in (False, True):
        plan = Plan(transport, steps=STEPS, seed=seed, skip=skip, **EVENTS[events])
        outcome = alike(pool.run(scenarios.random_steps, plan))
        assert outcome.transport == transport
        assert outcome.taken
        found.append(outcome)
    always, skipping = found
    assert always.gone == skipping.gone
    assert always.skips == 0
    if "storage" not in EVENTS[events]:
        assert skipping.skips > 0
        assert skipping.forced > 0
        assert len(skipping.calls) < len(always.calls)
    assert without_step(always.errors) == without_step(skipping.errors)
    assert bool(always.errors) == ("failing_rank" in EVENTS[events])


def test_control_ranks_that_do_not_agree_take_different_ones(pool: RankPool) -> None:
    results = pool.run(scenarios.random_steps, Plan("blocking", "each for itself", steps=50))
    assert results[0].taken != results[1].taken


@pytest.mark.parametrize(
    ("wanted", "shape", "used"),
    [
        ("pipelined", "cp", "pipelined"),
        ("blocking", "cp x tp", "blocking"),
        ("pipelined", "cp x tp", "blocking"),
        ("pipelined", "cp x tp, one group", "board"),
        ("board", "cp x tp, one group", "board"),
        ("blocking", "pp", "blocking"),
        ("pipelined", "pp", "board"),
    ],
)
def test_ranks_of_a_grid_or_a_pipeline_take_the_same(
    pool: RankPool, wanted: TransportName, shape: str, used: str
) -> None:
    plan = Plan(wanted, shape, steps=STEPS, clears=True, resets=True)
    results = pool.run(scenarios.random_steps, plan)
    assert {result.transport for result in results} == {used}
    first = results[0]
    assert first.taken
    for result in results:
        assert result.taken == first.taken
        assert result.gone == first.gone
        assert result.errors == []
    if shape == "cp x tp, one group":
        assert not [call for call in first.calls if call[0] == "all_reduce"]
    if (wanted, shape) == ("blocking", "cp x tp"):
        reduced = [ranks for name, ranks in first.calls if name == "all_reduce"]
        assert reduced[:2] == [(0, 2), (0, 1)]
        assert len(reduced) == 2 * (plan.steps + 60)


@TRANSPORTS
@pytest.mark.parametrize("skip", [False, True], ids=["always", "skipping"])
def test_controllers_on_stalled_devices_retire_the_same_acks(
    pool: RankPool, transport: TransportName, skip: bool
) -> None:
    retired, errors, calls, free, stats = alike(
        pool.run(scenarios.controllers, transport, 120, 5, skip, None)
    )
    assert sum(len(nodes) for _, nodes in retired) > 20
    assert errors == []
    assert bool(calls) == (transport != "board")  # which needs none
    assert free[0] == 32
    assert (stats[1] > 0) == skip


@TRANSPORTS
def test_burst_that_fails_on_one_device_is_raised_on_every_rank(
    pool: RankPool, transport: TransportName
) -> None:
    results = pool.run(scenarios.controllers, transport, 120, 6, False, 3)
    retired, errors, *_ = results[0]
    assert [result[0] for result in results] == [retired] * 4
    assert [result[1] for result in results] == [errors] * 4
    ((_, text),) = errors
    assert re.match(r"step \d+: on rank 3, (load|backup) \d+ failed in group \d+ of ", text)
    assert text.endswith("; nothing was retired")


# --- queues that differ --------------------------------------------------------------------------


# sgl-project/sglang#27489
@TRANSPORTS
def test_rank_with_nothing_takes_part_while_others_have_three(
    pool: RankPool, transport: TransportName
) -> None:
    results = pool.run(scenarios.one_is_empty, transport)
    counts, calls, _ = results[0]
    assert counts == [0] * 20
    assert [result[0] for result in results] == [counts] * 4
    assert [result[1] for result in results] == [calls] * 4
    assert [result[2] for result in results] == [0, 3, 3, 3]


# sgl-project/sglang#39267
@TRANSPORTS
def test_payload_is_as_long_whatever_ranks_have(pool: RankPool, transport: TransportName) -> None:
    assert alike(pool.run(scenarios.local_state_varies, transport)) == {payload_length(4)}


def test_ranks_with_other_counters_are_refused_on_every_rank(pool: RankPool) -> None:
    outcomes = pool.outcomes(scenarios.counters_differ)
    assert {(outcome.type, outcome.text) for outcome in outcomes} == {
        ("AgreementError", outcomes[0].text)
    }
    assert "settings of the agreement: must be the same on every rank" in outcomes[0].text
    assert "on rank 2" in outcomes[0].text


@TRANSPORTS
@pytest.mark.parametrize("shape", ["tp", "cp x tp, one group", "cp x tp"])
def test_digest_that_differs_is_raised_on_every_rank_before_anything_is_retired(
    pool: RankPool, transport: TransportName, shape: str
) -> None:
    text, ranks, left = alike(pool.run(scenarios.digests_differ, transport, shape))
    assert text.endswith("the digest differs: 5 on ranks 0, 2, 3; 6 on rank 1; nothing was retired")
    assert (ranks, left) == ((1,), 1)


# --- pipeline stages -----------------------------------------------------------------------------


# sgl-project/sglang#27285
def test_stage_that_is_not_ready_waits_and_retires_the_leaders_number(pool: RankPool) -> None:
    results = pool.run(scenarios.stage_behind, 3, 1, False, 3)
    assert results == [([0, 1, 2], [0, 0, 0], 0)] * 2 + [([0, 1, 2], [0, 1, 1], 0)] * 2


def test_stage_with_fewer_acks_raises_before_anything_changes(pool: RankPool) -> None:
    results = pool.run(scenarios.stage_behind, 2, 1, False, 3)
    assert results[:2] == [([0, 1, 2], [0, 0, 0], 0)] * 2
    for text, left, retired in results[2:]:
        assert text == results[2][0]
        assert "on rank 2, the first pipeline stage takes 3 of 'loads', and 2 are there" in text
        assert (left, retired) == (2, 0)


def test_stage_without_acks_takes_none_of_none(pool: RankPool) -> None:
    assert pool.run(scenarios.stage_behind, 0, 0, False, 0) == [([], [], 0)] * 4


def test_burst_that_fails_on_a_later_stage_is_raised_on_all_of_that_stage(pool: RankPool) -> None:
    results = pool.run(scenarios.stage_behind, 3, 1, True, 3)
    text = "step 1: on rank 3, load 1 failed: copy; nothing was retired"
    assert results[2:] == [(text, 3, 0)] * 2


def test_digest_that_differs_on_the_first_stage_is_raised_on_every_stage(pool: RankPool) -> None:
    results = pool.run(scenarios.digests_differ, "blocking", "pp")
    text = "step 1: the digest differs: 5 on rank 0; 6 on rank 1; nothing was retired"
    assert results == [(text, (1,), 1)] * 4


# --- groups --------------------------------------------------------------------------------------


# sgl-project/sglang#15805
def test_every_rank_creates_every_group_in_the_same_order(own_pool: RankPool) -> None:
    begin = time.monotonic()
    results = own_pool.run(scenarios.two_tp_groups)
    assert time.monotonic() - begin < 20
    for rank, (created, mine) in enumerate(results):
        assert created == [[0, 1], [2, 3]] * 2
        assert mine == [[0, 1] if rank < 2 else [2, 3]] * 2


def test_groups_listed_in_another_order_are_refused_on_every_rank(pool: RankPool) -> None:
    outcomes = pool.outcomes(scenarios.groups_in_another_order)
    text = (
        "ranks of the groups to create: must be the same on every rank, but is "
        "[[0, 1], [2, 3]] on ranks 0, 1, 2; [[2, 3], [0, 1]] on rank 3"
    )
    assert [(outcome.type, outcome.text) for outcome in outcomes] == [("AgreementError", text)] * 4


def test_feature_that_only_some_ranks_have_on_is_refused_on_every_rank(pool: RankPool) -> None:
    outcomes = pool.outcomes(scenarios.feature_differs)
    text = (
        "rank_shard: must be the same on every rank, but is True on ranks 0, 1; False on ranks 2, 3"
    )
    assert [(outcome.type, outcome.text) for outcome in outcomes] == [("AgreementError", text)] * 4


def test_group_that_a_rank_is_not_in_is_refused_there(pool: RankPool) -> None:
    outcomes = pool.outcomes(scenarios.group_of_others)
    assert outcomes[:2] == [None, None]
    assert [(outcome.type, outcome.text) for outcome in outcomes[2:]] == [
        ("KVBurstError", f"tp: rank {rank} is not one of its ranks") for rank in (2, 3)
    ]


@pytest.mark.parametrize("transport", ["pipelined", "board"])
def test_grid_that_leaves_ranks_out_is_refused_on_every_rank(
    pool: RankPool, transport: TransportName
) -> None:
    outcomes = pool.outcomes(scenarios.grid_of_a_row, transport)
    text = (
        "grid: it has ranks 0, 1, and cp and tp connect ranks 0, 1, 2, 3 on ranks 0, 1; "
        "it has ranks 2, 3, and cp and tp connect ranks 0, 1, 2, 3 on ranks 2, 3"
    )
    assert [(outcome.type, outcome.text) for outcome in outcomes] == [("AgreementError", text)] * 4


def test_grid_that_only_some_ranks_have_is_refused_on_every_rank(pool: RankPool) -> None:
    outcomes = pool.outcomes(scenarios.grid_on_some)
    assert {outcome.type for outcome in outcomes} == {"AgreementError"}
    assert {outcome.text for outcome in outcomes} == {outcomes[0].text}
    assert "'grid': False} on rank 3" in outcomes[0].text


@pytest.mark.parametrize(
    ("wanted", "shape", "used", "reason"),
    [
        ("blocking", "tp", "blocking", None),
        ("pipelined", "tp", "pipelined", None),
        ("board", "tp", "board", None),
        ("board", "pp", "board", None),
        (
            "pipelined",
            "cp x tp, one group",
            "board",
            "'board' instead of 'pipelined': 'pipelined' needs exactly one collective a step, and "
            "there are a group for CP and one for TP",
        ),
        (
            "pipelined",
            "cp x tp",
            "blocking",
            "'blocking' instead of 'pipelined': 'pipelined' needs exactly one collective a step, "
            "and there are a group for CP and one for TP; no board: no group spans both CP and TP",
        ),
        (
            "board",
            "cp x tp",
            "blocking",
            "'blocking' instead of 'board': no board: no group spans both CP and TP",
        ),
        (
            "pipelined",
            "pp",
            "board",
            "'board' instead of 'pipelined': 'pipelined' needs exactly one collective a step, and "
            "there are pipeline stages",
        ),
    ],
)
def test_what_the_groups_do_not_allow_is_replaced_and_said_once(
    pool: RankPool, wanted: TransportName, shape: str, used: str, reason: str | None
) -> None:
    results = pool.run(scenarios.chosen, wanted, shape, None)
    assert {name for name, _, _ in results} == {used}
    said = [] if reason is None else [f"agreement: {reason}"]
    assert [said for _, said, _ in results] == [said, [], [], []]
    lowest = [3, 3, 5, 5] if shape == "pp" else [3] * 4
    assert [value for _, _, value in results] == lowest


@pytest.mark.parametrize(
    ("wanted", "shape", "used"),
    [
        ("board", "tp", "pipelined"),
        ("board", "cp x tp, one group", "blocking"),
        ("pipelined", "cp x tp, one group", "blocking"),
        ("board", "pp", "blocking"),
    ],
)
def test_ranks_on_several_nodes_use_collectives_and_say_so_once(
    pool: RankPool, wanted: TransportName, shape: str, used: str
) -> None:
    results = pool.run(scenarios.chosen, wanted, shape, 3)
    assert {name for name, _, _ in results} == {used}
    ((text,), *others) = [said for _, said, _ in results]
    assert others == [[], [], []]
    assert text.startswith(f"agreement: '{used}' instead of '{wanted}': ")
    assert "no board: " in text
    assert "shares no memory with rank 0: it is on another machine" in text
    lowest = [3, 3, 5, 5] if shape == "pp" else [3] * 4
    assert [value for _, _, value in results] == lowest


# --- ranks that are gone -------------------------------------------------------------------------


@TRANSPORTS
def test_rank_that_is_killed_is_an_error_on_the_others(
    own_pool: RankPool, transport: TransportName
) -> None:
    outcomes = own_pool.outcomes(
        scenarios.a_rank_gets, signal.SIGKILL, 2, transport, "tp", 2.0, gone=(2,)
    )
    check_survivors(outcomes, transport)


def test_rank_killed_while_the_agreement_is_set_up_is_an_error_on_the_others(
    own_pool: RankPool,
) -> None:
    outcomes = own_pool.outcomes(scenarios.killed_in_set_up, 2, gone=(2,))
    for rank in (0, 1, 3):
        assert outcomes[rank].type == "AgreementError"
        assert "one has ended or did not come within the group's timeout" in outcomes[rank].text


@TRANSPORTS
def test_rank_that_is_stopped_is_an_error_after_the_timeout(
    own_pool: RankPool, transport: TransportName
) -> None:
    outcomes = own_pool.outcomes(
        scenarios.a_rank_gets, signal.SIGSTOP, 2, transport, "tp", 2.0, gone=(2,)
    )
    check_survivors(outcomes, transport)


def check_survivors(outcomes: list[Any], transport: str) -> None:
    for rank in (0, 1, 3):
        outcome = outcomes[rank]
        assert isinstance(outcome, Raised)
        assert outcome.type == "AgreementError"
        assert outcome.after < 2.0 + 10  # on a busy machine
        if transport == "board":
            assert "rank 2" in outcome.text
        else:
            assert (
                "all_reduce over ranks 0, 1, 2, 3 failed, a rank has ended or did" in outcome.text
            )


@pytest.mark.parametrize("transport", ["blocking", "board"])
def test_rank_of_the_first_stage_that_is_killed_ends_every_stage(
    own_pool: RankPool, transport: TransportName
) -> None:
    outcomes = own_pool.outcomes(
        scenarios.a_rank_gets, signal.SIGKILL, 0, transport, "pp", 2.0, gone=(0,)
    )
    assert {outcome.type for outcome in outcomes[1:]} == {"AgreementError"}
    assert max(outcome.after for outcome in outcomes[1:]) < 2 * 2.0 + 10
    assert outcomes[2].text.startswith("pipeline stage 1: no numbers from rank 0, it has ended or")


def test_stage_that_stops_after_its_last_poll_leaves_its_numbers_behind(
    own_pool: RankPool, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    said.mkdir()
    outcomes = own_pool.outcomes(scenarios.leaders_leave, said, gone=(0, 1))
    assert outcomes[2:] == [[[7]], [[7]]]
