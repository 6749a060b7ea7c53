"""`kvburst replay --ranks N --shard`: a trace over host tiers of the same bytes, shared and not."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from replay_helpers import conversations, line, write_trace
from rich.console import Console
from typer.testing import CliRunner

from kvburst import KVBurstError
from kvburst.cli import app
from kvburst.geometries import geometry
from kvburst.replay import report
from kvburst.replay.options import ReplayOptions
from kvburst.replay.replay import Replay
from kvburst.replay.server import ServerCounts
from kvburst.replay.sharing import SharingReplay, host_size
from kvburst.replay.sharing_report import as_json


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl", conversations(seed=1, requests=80))


def options(trace: Path, **changes: Any) -> ReplayOptions:
    return ReplayOptions(trace, device_pages=60, plan_only=True, **changes)


def kvburst(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    result = CliRunner().invoke(app, ["replay", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


# --- how many pages the same bytes are -----------------------------------------------------


def test_rank_with_most_bytes_of_a_page_decides() -> None:
    shape = geometry("mla-dsa-78-full")
    size = host_size(shape, ranks=4, pages=4096)
    # 78 layers among 4 ranks: 20 of the latent KV and 19 of the index-K, or the other way round.
    whole, most = 64 * 78 * (656 + 132), 64 * (20 * 656 + 19 * 132)
    assert size.nbytes == 4096 * whole
    assert size.shared_pages == 4096 * whole // most == 16109


def test_ranks_beyond_the_layers_add_nothing() -> None:
    shape = geometry("deepseek-v3")
    assert host_size(shape, ranks=61, pages=10).shared_pages == 610
    assert host_size(shape, ranks=100, pages=10).shared_pages == 610


def test_one_rank_shares_with_nobody() -> None:
    assert host_size(geometry("mla-dsa-78"), ranks=1, pages=77).shared_pages == 77


# --- what the trace finds ------------------------------------------------------------------


def test_prefix_that_two_ranks_have_room_for_and_one_has_not(tmp_path: Path) -> None:
    """Three prompts of 8 pages and an answer of 1 go by, then the first comes again. 18 host pages
    keep the newest two of them, and 36 all three."""
    path = write_trace(tmp_path / "trace", [line([1]), line([2]), line([3]), line([1])])
    replay = SharingReplay(
        ReplayOptions(path, device_pages=9, plan_only=True, layers=2), ranks=2, host_pages=[18]
    )
    (compared,) = replay.run().compared
    assert (compared.size.pages, compared.size.shared_pages) == (18, 36)
    assert compared.unshared.tokens_hit_on_host == 0
    assert compared.unshared.tokens_prefilled_again == 8 * 64
    # A prompt's last token is always computed, and its page with it.
    assert compared.shared.tokens_hit_on_host == 7 * 64
    assert compared.shared.tokens_prefilled_again == 1 * 64


def test_sharing_among_one_rank_changes_nothing(trace: Path) -> None:
    (alone,) = SharingReplay(options(trace), ranks=1, host_pages=[80]).run().compared
    assert alone.shared == alone.unshared
    (among_two,) = SharingReplay(options(trace), ranks=2, host_pages=[80]).run().compared
    assert among_two.unshared == alone.unshared
    assert among_two.shared.tokens_prefilled_again < alone.shared.tokens_prefilled_again


def test_each_side_is_a_replay_of_so_many_host_pages(trace: Path) -> None:
    result = SharingReplay(options(trace), ranks=4, host_pages=[30, 60]).run()
    assert [each.size.shared_pages for each in result.compared] == [120, 240]
    for each in result.compared:
        for pages, counts in (
            (each.size.pages, each.unshared),
            (each.size.shared_pages, each.shared),
        ):
            assert Replay(options(trace, host_pages=pages)).run().server == counts


def test_steps_count_the_requests_of_all_runs(trace: Path) -> None:
    replay = SharingReplay(options(trace), ranks=2, host_pages=[30, 60])
    seen: list[int] = []
    replay.run(lambda counts: seen.append(counts.requests))
    assert seen == sorted(seen)
    assert seen[-1] == replay.total_requests == 4 * 80


# --- as JSON -------------------------------------------------------------------------------


def test_rows_say_how_many_times_better(trace: Path) -> None:
    result = SharingReplay(options(trace), ranks=2, host_pages=[80]).run()
    (compared,) = result.compared
    content = as_json(result)
    rows = {row["metric"]: row for row in content["rows"]}
    assert list(rows) == ["host_pages", "found_on_host", "prefilled_again", "prefilled"]
    for row in rows.values():
        ours, baseline = row["median"], row["baseline_median"]
        more = row["metric"] in ("host_pages", "found_on_host")
        assert row["ratio"] == (ours / baseline if more else baseline / ours) > 1
        assert row["scenario"]["host_bytes_of_a_rank"] == 80 * 8 * 1024
    assert rows["host_pages"]["median"] == 160
    assert rows["prefilled_again"]["median"] == compared.shared.tokens_prefilled_again
    # The rest is what a replay of that tier alone writes.
    alone = report.as_json(Replay(options(trace, host_pages=80)).run())
    assert content.keys() == alone.keys() | {"ranks", "shard", "rows"}
    assert {key: content[key] for key in alone if key != "seconds"} == {
        key: value for key, value in alone.items() if key != "seconds"
    }
    json.dumps(content)


def test_nothing_found_is_no_ratio(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace", [line([1]), line([2])])
    replay = SharingReplay(
        ReplayOptions(path, device_pages=9, plan_only=True), ranks=2, host_pages=[9]
    )
    rows = {row["metric"]: row for row in as_json(replay.run())["rows"]}
    assert rows["found_on_host"]["ratio"] is None
    assert rows["prefilled"]["ratio"] == 1


# --- the command ---------------------------------------------------------------------------

SHARD = ("--plan-only", "--device-pages", "60", "--ranks", "2", "--shard")


def test_command_compares_a_curve_of_host_sizes(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    status, out, err = kvburst(str(trace), *SHARD, "--json", str(file))
    assert (status, err) == (0, "")
    for words in ("between 2 ranks", "not shared", "8x", "960", "plan only: no bytes moved"):
        assert words in out
    rows = json.loads(file.read_text())["rows"]
    assert sorted({row["scenario"]["host_pages"] for row in rows}) == [60, 120, 240, 480]
    assert {row["scenario"]["host_to_device"] for row in rows} == {1, 2, 4, 8}


def test_host_pages_ask_for_one_size(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    arguments = (str(trace), *SHARD, "--host-pages", "50", "--quiet", "--json", str(file))
    assert kvburst(*arguments) == (0, "", "")
    content = json.loads(file.read_text())
    assert content["host_pages"] == 50
    assert {row["scenario"]["host_pages_shared"] for row in content["rows"]} == {100}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2"], "--ranks: all 2 would do the same; add --shard"),
        (["--ranks", "0", "--shard"], "--ranks: 0 is below 1"),
        (["--ranks", "2000", "--shard", "--plan-only"], "--ranks: 2000 is above 1024"),
        (["--shard", "--plan-only"], "--shard: needs --ranks of at least 2, it is 1"),
        (["--ranks", "2", "--shard"], "--shard: a replay of 2 ranks moves no bytes, add --plan-"),
        (
            ["--ranks", "2", "--shard", "--plan-only", "--geometry", "llama-3.1-70b"],
            "--shard: llama-3.1-70b: the pool is not replicated across ranks: 'k', 'v' differ ",
        ),
        (
            ["--ranks", "2", "--shard", "--plan-only", "--host-pages", "9000000"],
            "--host-pages: 9000000 are 18000000 when 2 ranks share them, above 16777216",
        ),
        ([*SHARD, "--record", "f"], "--record: with --shard there are several replays"),
        ([*SHARD, "--timeline", "f"], "--timeline: with --shard there are several replays"),
        ([*SHARD, "--device-pages", "0"], "--device-pages: 0 is below 1"),
        ([*SHARD, "--host-pages", "0"], "--host-pages: 0 is below 1"),
    ],
)
def test_bad_option_is_one_line(trace: Path, arguments: list[str], message: str) -> None:
    status, out, err = kvburst(str(trace), *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"kvburst replay: {message}")
    assert err.count("\n") == 1


def test_pools_whose_ranks_differ_are_refused_before_the_trace_is_replayed(trace: Path) -> None:
    with pytest.raises(KVBurstError, match="'k', 'v' differ from rank to rank"):
        SharingReplay(options(trace, geometry="llama-3.1-70b-tp8"), ranks=8, host_pages=[100])


def test_ctrl_c_ends_with_the_sizes_compared_so_far(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def impatient(console: Console, total: int) -> Iterator[Callable[[ServerCounts], None]]:
        def on_step(counts: ServerCounts) -> None:
            if counts.requests >= 3 * 80 + 20:
                signal.raise_signal(signal.SIGINT)

        yield on_step

    monkeypatch.setattr(report, "progress", impatient)
    file = tmp_path / "f.json"
    status, out, _ = kvburst(str(trace), *SHARD, "--json", str(file))
    assert status == 130
    assert "interrupted: 1 of 4 host sizes were compared" in out
    content = json.loads(file.read_text())
    assert content["interrupted"] is True
    assert {row["scenario"]["host_pages"] for row in content["rows"]} == {60}
