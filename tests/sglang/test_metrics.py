"""The plugin's metrics are served where SGLang's are."""

import json
from pathlib import Path

import pytest
from conftest import Server
from ranks import Ranks
from setups import Setup

LOADS = 3
PAGES = 4
RANKS = 2
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


@pytest.mark.parametrize("ranks", [Server("board", RANKS)], indirect=True, ids=str)
def test_what_ranks_moved_and_agreed_on_is_scraped(ranks: Ranks, tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    metered = ranks.call("metered.scraped", Setup("mla"), str(tmp_path), LOADS)
    families = list(text_string_to_metric_families(metered[0].text))
    samples = [sample for family in families for sample in family.samples]

    def value(name: str, rank: int, **labels: str) -> float:
        (found,) = (
            sample.value
            for sample in samples
            if sample.name == name
            and {"tp_rank": str(rank), **labels}.items() <= sample.labels.items()
        )
        return float(found)

    for rank in range(RANKS):
        for direction, bursts in (("load", LOADS), ("backup", 1)):
            of = {"direction": direction}
            assert value("kvburst_caller_seconds_count", rank, **of) == bursts
            assert value("kvburst_copy_seconds_count", rank, **of) == bursts
            assert value("kvburst_pages_total", rank, **of) == bursts * PAGES
            copies = metered[rank].copies[direction]
            assert value("kvburst_copies_total", rank, **of) == copies > 0
        assert value("kvburst_gate_stall_seconds_count", rank) == LOADS
        assert value("kvburst_overlap_ratio_count", rank) == LOADS
        assert 0 <= value("kvburst_overlap_ratio_sum", rank) <= LOADS
        assert value("kvburst_agreements_total", rank) == metered[rank].agreements_in_all
        assert metered[rank].agreements > 0
        assert value("kvburst_agreement_seconds_count", rank) >= metered[rank].agreements
        assert value("kvburst_agreement_seconds_sum", rank) > 0
        assert value("kvburst_failures_total", rank) == metered[rank].failures_in_all
    exported = {family.name for family in families}
    assert "sglang:load_back_duration_seconds" in exported
    for metric in _on_the_dashboard():
        assert metric in {sample.name for sample in samples}


def _on_the_dashboard() -> set[str]:
    """Names of metrics in the expressions of its panels."""
    text = DASHBOARD.read_text()
    expressions = [
        target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]
    ]
    assert expressions
    words = {word for each in expressions for word in _words(each)}
    return {word for word in words if word.startswith("kvburst_")}


def _words(expression: str) -> list[str]:
    return "".join(
        letter if letter.isalnum() or letter == "_" else " " for letter in expression
    ).split()
