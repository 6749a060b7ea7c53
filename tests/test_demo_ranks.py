"""The demo on several ranks: every byte of every rank, and one host copy between them."""

import io
import json
import multiprocessing
import signal
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvburst import demo_ranks_report as report
from kvburst._core import HostDevice, KVBurstError
from kvburst.cli import app
from kvburst.demo import Demo
from kvburst.demo_flight import new_recorder
from kvburst.demo_options import DemoOptions
from kvburst.demo_ranks import (
    RankResult,
    _interrupted_afterwards,
    alone,
    check_sharding,
    num_rank_ticks,
    run_ranks,
)
from kvburst.geometries import geometry

RANKS = 3
OPTIONS = DemoOptions(geometry="mla-dsa-78", pages=3, forward=0.0, ranks=RANKS, shard=True)


@pytest.fixture(scope="module")
def ticks() -> list[str]:
    return []


@pytest.fixture(scope="module")
def ranks(ticks: list[str]) -> list[RankResult]:
    return run_ranks(OPTIONS, ticks.append)


def test_every_byte_of_every_rank_is_right(ranks: list[RankResult]) -> None:
    assert [rank.rank for rank in ranks] == list(range(RANKS))
    assert report.bit_exact(ranks)


def test_host_bytes_of_all_ranks_are_those_of_one_that_keeps_everything(
    ranks: list[RankResult],
) -> None:
    one = Demo(alone(OPTIONS)).run()
    assert sum(rank.result.host_bytes for rank in ranks) == one.host_bytes
    for pool in geometry(OPTIONS.geometry).pools:
        rows = [rank.rows[pool.name] for rank in ranks]
        assert sum(rows) == len(pool.layer_ids)
        assert max(rows) == ceil(len(pool.layer_ids) / RANKS)


def test_every_rank_gets_from_the_others_what_it_does_not_keep(ranks: list[RankResult]) -> None:
    pools = geometry(OPTIONS.geometry).pools
    for rank in ranks:
        assert rank.exchange_bytes == OPTIONS.pages * sum(
            pool.page_bytes(64) * (len(pool.layer_ids) - rank.rows[pool.name]) for pool in pools
        )


def test_progress_ticks_as_often_as_it_says(ranks: list[RankResult], ticks: list[str]) -> None:
    assert len(ticks) == num_rank_ticks(OPTIONS)


def test_table_has_a_row_for_each_rank_and_the_verdict(ranks: list[RankResult]) -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    report.show(ranks, console)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert f"{RANKS} ranks, one host copy of each layer" in printed
    assert "bit-exact" in printed
    assert "…" not in printed


def test_times_of_gloo_are_called_no_gpus_in_table_and_picture(ranks: list[RankResult]) -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    report.show(ranks, console)
    assert isinstance(console.file, io.StringIO)
    printed = " ".join(console.file.getvalue().split())
    assert "exchanged by gloo on this CPU" in printed
    assert "copies, waits and overlap are no GPU's" in printed
    assert f"kvburst demo --ranks {RANKS} --shard --link h100 --forward 16" in printed

    def title(options: DemoOptions) -> str:
        return new_recorder(options, HostDevice(), rank=0).flight().title

    assert "times of this CPU and of no GPU" in title(OPTIONS)
    for other in (replace(OPTIONS, link="h100"), alone(OPTIONS)):
        assert "gloo" not in title(other)


def test_modelled_exchange_is_charged_and_said_to_be_simulated() -> None:
    options = DemoOptions(
        geometry="mla-dsa-78", pages=16, ranks=2, shard=True, link="h100", forward=3.0
    )
    first, second = run_ranks(options)
    assert report.bit_exact([first, second])
    assert first.modelled is not None
    assert second.modelled is not None
    assert first.modelled.forward == second.modelled.forward
    # 78 + 21 broadcasts of 10 us, and 15 MB at 300 GB/s.
    assert first.modelled.forward.exchange_ms == pytest.approx(0.99 + 0.18, abs=0.01)
    console = Console(file=io.StringIO(), width=80, color_system=None)
    report.show([first, second], console)
    assert isinstance(console.file, io.StringIO)
    assert "simulated: exchange over NVLink: 300 GB/s" in console.file.getvalue()
    assert "…" not in console.file.getvalue()


def test_byte_that_is_wrong_on_one_rank_is_named_and_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, ranks: list[RankResult]
) -> None:
    demo = Demo(alone(OPTIONS))
    demo.fill()
    demo.back_up()
    demo.rehearse()
    demo.scribble()
    demo.load_under_forward(0.0)
    demo.pools[0].host.tensor[0, 0, 0] ^= 1
    (wrong,) = demo.compare()
    broken = list(ranks)
    from dataclasses import replace

    broken[1] = replace(ranks[1], result=replace(ranks[1].result, mismatches=(wrong,)))
    monkeypatch.setattr("kvburst.demo_ranks.run_ranks", lambda options, tick, record: broken)
    done = CliRunner().invoke(app, ["demo", "--ranks", "3", "--shard", "--quiet"])
    assert done.exit_code == 1
    assert "rank 1 NOT bit-exact" in done.stderr
    assert "rank 0" not in done.stderr


def test_command_writes_json_with_a_list_of_ranks(tmp_path: Path) -> None:
    written = tmp_path / "ranks.json"
    options = ["--geometry", "mla-dsa-78", "--pages", "2", "--forward", "0", "--json", str(written)]
    done = CliRunner().invoke(app, ["demo", "--ranks", "2", "--shard", *options])
    assert done.exit_code == 0, done.output
    content: dict[str, Any] = json.loads(written.read_text())
    assert content["bit_exact"] is True
    assert content["shard"] is True
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1]
    for rank in content["ranks"]:
        keys = {"host_bytes", "copies_issued", "exchange_bytes", "overlap_ratio"}
        assert rank.keys() >= keys
        assert rank["host_bytes"] > 0
        assert 0 <= rank["overlap_ratio"] <= 1


def test_ranks_that_share_nothing_keep_everything_each(tmp_path: Path) -> None:
    options = DemoOptions(geometry="mla-dsa-78", pages=2, forward=0.0, ranks=2)
    ranks = run_ranks(options)
    assert report.bit_exact(ranks)
    assert [rank.exchange_bytes for rank in ranks] == [0, 0]
    assert [rank.rows["kv"] for rank in ranks] == [78, 78]


def test_layers_that_differ_between_ranks_are_not_shared() -> None:
    with pytest.raises(KVBurstError, match="--shard: the pool is not replicated across ranks"):
        check_sharding(DemoOptions(geometry="llama-3.1-70b", ranks=2, shard=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shard"], "--shard: needs --ranks of at least 2, it is 1"),
        (["--ranks", "0"], "--ranks: 0 is below 1"),
        (["--ranks", "17"], "--ranks: 17 is above 16"),
        (["--ranks", "2", "--device", "cuda"], "--ranks: 2 run on device host"),
        (["--ranks", "two"], "'two' is not a whole number"),
        (["--ranks", "2", "--compare"], "--compare: is for one rank, --ranks is 2"),
        (["--ranks", "2", "--shard", "--geometry", "llama-3.1-70b"], "not replicated across ranks"),
        (["--ranks", "4", "--pages", "100000000"], "on 4 ranks need"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["demo", *arguments])
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())


# --- Ctrl-C --------------------------------------------------------------------------------------


def test_ctrl_c_while_ranks_are_started_is_heard_when_all_are_there() -> None:
    usual = signal.getsignal(signal.SIGINT)
    started: list[int] = []

    def start_two() -> None:
        with _interrupted_afterwards():
            for rank in range(2):
                signal.raise_signal(signal.SIGINT)
                started.append(rank)

    with pytest.raises(KeyboardInterrupt):
        start_two()
    assert started == [0, 1]
    assert signal.getsignal(signal.SIGINT) is usual


def test_ctrl_c_later_ends_every_rank() -> None:
    def interrupt(step: str) -> None:
        assert len(multiprocessing.active_children()) == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ranks(DemoOptions(pages=2, forward=0.0, ranks=2), interrupt)
    assert multiprocessing.active_children() == []
