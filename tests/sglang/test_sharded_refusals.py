"""A server whose ranks cannot share a host tier says why, on all of them, and keeps every layer."""

from pathlib import Path

import pytest
from conftest import SHARE, SHARING_RANKS, Server
from ranks import Ranks
from setups import Setup

sharing = pytest.mark.parametrize(
    "ranks", [Server("sharing", SHARING_RANKS)], indirect=True, ids=str
)

REASONS = {
    "heads": (
        "the pool is not replicated across ranks: 'kv' differs from rank to rank (MHA, GQA,"
        " recurrent state), and one rank's copy would overwrite the others'"
    ),
    "one rank": "the group has 1 rank, there is nobody to share with",
    "kernel copies": "copies are made by a kernel, 'direct' I/O is needed",
    "page_first": (
        "host layout 'page_first' has no page of a layer in one piece, use 'page_first_direct'"
    ),
    "context parallel": (
        f"context parallelism over {SHARING_RANKS} ranks splits the tokens of a pool"
    ),
    "pipeline stages": f"{SHARING_RANKS} pipeline stages keep different layers",
    "storage": "a storage backend reads whole pages, which no rank has",
    "decode": "a disaggregated decode server loads outside forwards",
    "embedding": "an embedding server's forwards wait for no layer",
    "split prefill": "the split prefills of PD multiplexing wait for no layer",
    "sidecar drafts": "a draft pool that comes later, MLATokenToKVPool, is not part of it",
    "mamba": "'kv', 'mamba' differ from rank to rank",
    "swa": "'kv', 'swa' differ from rank to rank",
}


@sharing
def test_eligible_server_shares(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.call("sharded_refusals.standing", "eligible", str(tmp_path))
    for standing in answers:
        assert standing.shared
        assert standing.reasons == ()
        assert standing.logged == []
    assert sum(rows for standing in answers for rows in standing.rows) == 3


@sharing
@pytest.mark.parametrize("case", REASONS)
def test_is_refused_by_name_on_every_rank(ranks: Ranks, tmp_path: Path, case: str) -> None:
    answers = ranks.call("sharded_refusals.standing", case, str(tmp_path))
    for rank, standing in enumerate(answers):
        assert not standing.shared
        assert any(REASONS[case] in reason for reason in standing.reasons), standing.reasons
        if case not in ("mamba", "swa"):
            assert set(standing.rows) == {3}
        if rank == 0:
            (line,) = standing.logged
            assert REASONS[case] in line


@sharing
def test_what_one_rank_cannot_do_is_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.call("sharded_refusals.standing", "no device on one rank", str(tmp_path))
    for standing in answers:
        assert not standing.shared
        assert any("no such device" in reason for reason in standing.reasons), standing.reasons
        assert standing.rows == [3]


@sharing
def test_storage_that_comes_later_is_refused_and_changes_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    for said, raised, wrong in ranks.call("sharded_refusals.storage_later", str(tmp_path)):
        for words in (said, raised):
            assert "the host tier is shared between ranks" in words
            assert SHARE in words
        assert wrong == []


@sharing
def test_draft_that_comes_later_is_refused_and_changes_nothing(ranks: Ranks) -> None:
    for raised, names, wrong in ranks.call("sharded_refusals.draft_later"):
        assert "shared between ranks" in raised
        assert SHARE in raised
        assert names == ["kv"]
        assert wrong == []


@sharing
@pytest.mark.parametrize(
    "setup",
    [Setup("dsa"), Setup("dsa", "layer_first"), Setup("dsa", without_index=(0, 1, 3))],
    ids=str,
)
def test_whole_pages_of_a_shared_tier_are_refused(ranks: Ranks, setup: Setup) -> None:
    """Nobody reads a page that has one rank's layers alone."""
    for told in ranks.call("sharded_refusals.whole_pages", setup):
        assert len(told) == 12
        for accessor, words in told.items():
            assert accessor.partition(".")[2] in words
            assert SHARE in words


@sharing
def test_embedding_with_a_load_is_refused_and_the_load_goes_on(ranks: Ranks) -> None:
    for said, wrong in ranks.call("sharded_refusals.embedding_forward"):
        assert "forward_batch_embedding" in said
        assert SHARE in said
        assert wrong == []
