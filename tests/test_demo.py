"""The demo: every byte is compared, and a byte that is wrong is found and named."""

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kvburst._core import KVBurstError
from kvburst.demo import HOST_CANARY, SCRIBBLE, Demo, num_ticks
from kvburst.demo_options import DemoOptions, Groups, Layout, Mode
from kvburst.demo_report import as_json, progress, show
from kvburst.demo_result import DemoResult, Span
from kvburst.demo_timeline import COPYING, LAYER, STALL, cells, check_plot, layer_ruler, plot
from kvburst.geometries import GEOMETRIES
from kvburst.links import LINKS

# 78 layers of latent KV, 21 of index-K.
SMALL = DemoOptions(geometry="mla-dsa-78", pages=3, forward=0.0)
KV_LAYERS, INDEX_K_LAYERS = 78, 21


def run(**changes: object) -> DemoResult:
    return Demo(dataclasses.replace(SMALL, **changes)).run()  # type: ignore[arg-type]


def run_until_loaded(demo: Demo, before_load: Callable[[Demo], None] = lambda demo: None) -> None:
    demo.fill()
    demo.back_up()
    demo.rehearse()
    demo.scribble()
    before_load(demo)
    demo.load_under_forward(compute_ms=0.0)


def printed(result: DemoResult, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def result() -> DemoResult:
    return run()


@pytest.fixture(scope="module")
def simulated() -> DemoResult:
    return run(link="h100")


# --- bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", [known.name for known in GEOMETRIES])
def test_every_geometry_comes_back_bit_exact(geometry: str) -> None:
    assert run(geometry=geometry, pages=2).mismatches == ()


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
@pytest.mark.parametrize("one_allocation", [True, False])
@pytest.mark.parametrize("groups", ["ramp", "neighbours", "none"])
def test_every_layout_allocation_and_grouping_is_bit_exact(
    layout: Layout, one_allocation: bool, groups: Groups
) -> None:
    outcome = run(layout=layout, one_allocation=one_allocation, groups=groups)
    assert outcome.mismatches == ()


@pytest.mark.parametrize("mode", ["thread", "inline"])
@pytest.mark.parametrize("groups", ["ramp", "none"])
def test_every_mode_is_bit_exact_under_a_forward(mode: Mode, groups: Groups) -> None:
    outcome = run(mode=mode, groups=groups, link="h100", forward=1.0)
    assert outcome.mismatches == ()


@pytest.mark.parametrize("link", LINKS)
def test_a_modelled_link_moves_real_bytes(link: str) -> None:
    outcome = run(link=link)
    assert outcome.mismatches == ()
    assert outcome.load.bytes_moved > 0


def test_another_seed_moves_other_bytes_between_other_pages() -> None:
    demos = [Demo(dataclasses.replace(SMALL, pages=8, seed=seed)) for seed in (0, 0, 1)]
    for demo in demos:
        run_until_loaded(demo)
        demo.controller.stop()
    first, again, other = ([demo.pools[0].host.tensor, demo.targets] for demo in demos)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_pages_come_back_to_places_where_they_were_not() -> None:
    demo = Demo(SMALL)
    run_until_loaded(demo)
    sources, targets, held = (
        set(slots.tolist()) for slots in (demo.sources, demo.targets, demo.held)
    )
    assert len(sources) == len(targets) == SMALL.pages * demo.geometry.page_size
    assert not sources & targets
    assert not held & (sources | targets)
    demo.controller.stop()


def test_checked_bytes_are_all_snapshots_and_both_tiers() -> None:
    outcome = run()
    in_one_page = outcome.geometry.bytes_per_page
    pages = 2 * outcome.device_pages + outcome.host_pages
    assert outcome.checked_bytes == pages * in_one_page


def test_byte_changed_on_the_host_is_found_in_snapshot_device_and_host() -> None:
    demo = Demo(SMALL)
    host_page = 0

    def corrupt(demo: Demo) -> None:
        nonlocal host_page
        host_page = int(demo.on_host[0]) // demo.geometry.page_size
        demo.pools[0].host.tensor[host_page, 41, 1000] ^= 0xFF

    run_until_loaded(demo, before_load=corrupt)
    wrong = list(demo.compare())

    device_page = int(demo.targets[0]) // demo.geometry.page_size
    assert [(each.seen_in, each.pool, each.layer, each.page, each.byte) for each in wrong] == [
        ("snapshot", "kv", 41, device_page, 1000),
        ("device", "kv", 41, device_page, 1000),
        ("host", "kv", 41, host_page, 1000),
    ]
    assert all(each.wrong_bytes == 1 and each.found == each.expected ^ 0xFF for each in wrong)
    assert f"pool 'kv', layer 41, page {device_page}: 1 bytes differ" in str(wrong[0])
    demo.controller.stop()


def test_device_page_of_others_that_changes_is_found() -> None:
    demo = Demo(SMALL)
    run_until_loaded(demo)
    page = int(demo.held[0]) // demo.geometry.page_size
    demo.pools[1].device.layers[20].view(demo.device_pages, -1)[page, 5] ^= 1
    layer = demo.pools[1].device.layer_ids[20]
    (wrong,) = demo.compare()
    assert (wrong.seen_in, wrong.pool, wrong.layer, wrong.page, wrong.byte) == (
        "device",
        "index_k",
        layer,
        page,
        5,
    )
    demo.controller.stop()


def test_host_page_of_others_that_changes_is_found() -> None:
    demo = Demo(SMALL)
    run_until_loaded(demo)
    used = {slot // demo.geometry.page_size for slot in demo.on_host.tolist()}
    page = next(page for page in range(demo.host_pages) if page not in used)
    demo.pools[0].host.tensor[page, 7, 0] = HOST_CANARY ^ 1
    (wrong,) = demo.compare()
    assert (wrong.seen_in, wrong.layer, wrong.page) == ("host", 7, page)
    assert (wrong.expected, wrong.found) == (HOST_CANARY, HOST_CANARY ^ 1)
    demo.controller.stop()


def test_forward_that_does_not_wait_reads_what_was_scribbled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control of the snapshots: without the gate they must not be right."""
    demo = Demo(SMALL)
    device = demo.device
    last = demo.geometry.num_layers - 1

    def not_waiting(demo: Demo) -> None:
        # The load is held behind the scheduler's stream until the last layer is about to run.
        stall = device.stall(device.current_stream())

        def wait_until(layer: int) -> None:
            device.current_stream().synchronize()
            if layer == last:
                stall.release()

        monkeypatch.setattr(demo.controller.layer_done_counter, "wait_until", wait_until)

    run_until_loaded(demo, before_load=not_waiting)
    wrong = list(demo.compare())
    assert {each.seen_in for each in wrong} == {"snapshot"}
    assert {each.layer for each in wrong if each.pool == "kv"} >= set(range(last))
    assert {each.found for each in wrong} == {SCRIBBLE}
    demo.controller.stop()


# --- copies --------------------------------------------------------------------------------


def test_backup_is_one_copy_a_page_and_pool(result: DemoResult) -> None:
    assert result.backup.copies == SMALL.pages * 2
    assert result.backup.one_per_page_and_layer == SMALL.pages * (KV_LAYERS + INDEX_K_LAYERS)
    assert result.backup.fallbacks == {}


def test_load_takes_a_ninth_of_the_copies(result: DemoResult) -> None:
    most = SMALL.pages * (KV_LAYERS / 9 + INDEX_K_LAYERS / 4)
    assert result.load.copies <= most
    assert result.load.bytes_moved == SMALL.pages * result.geometry.bytes_per_page


def test_groups_none_is_one_copy_per_page_and_layer_in_both_directions() -> None:
    outcome = run(groups="none")
    for transfer in (outcome.backup, outcome.load):
        assert transfer.copies == SMALL.pages * (KV_LAYERS + INDEX_K_LAYERS)


def test_separate_allocations_take_more_copies_and_say_why() -> None:
    outcome = run(one_allocation=False)
    for transfer in (outcome.backup, outcome.load):
        assert transfer.copies <= transfer.one_per_page_and_layer
        assert "layers in separate allocations" in transfer.fallbacks
    assert outcome.backup.copies > SMALL.pages * 2
    assert "load: " in printed(outcome)
    assert "layers in separate allocations" in printed(outcome)


def test_chunked_backup_makes_more_calls() -> None:
    whole, chunked = run(pages=8), run(pages=8, chunk_pages=2)
    assert chunked.backup.calls == 4 * whole.backup.calls
    assert chunked.backup.copies == whole.backup.copies
    assert chunked.bit_exact


# --- what is shown -------------------------------------------------------------------------


def test_overlap_ratio_is_what_was_not_paid_for(result: DemoResult) -> None:
    def ratio(caller_us: float, stalls_ms: float, copying_ms: float) -> float:
        stats = dataclasses.replace(
            result.load.stats, caller_us=caller_us, copies_took_ms=copying_ms
        )
        load = dataclasses.replace(result.load, stats=stats)
        return dataclasses.replace(result, load=load, stalls_ms=stalls_ms).overlap_ratio

    assert ratio(caller_us=500.0, stalls_ms=1.5, copying_ms=8.0) == pytest.approx(0.75)
    assert ratio(caller_us=0.0, stalls_ms=0.0, copying_ms=8.0) == 1.0
    assert ratio(caller_us=9000.0, stalls_ms=0.0, copying_ms=8.0) == 0.0


def test_layers_run_one_after_the_other_behind_their_waits() -> None:
    timeline = run(link="h100", forward=3.0).timeline
    assert len(timeline.layers) == len(timeline.stalls) == KV_LAYERS
    edges = [
        edge
        for stall, layer in zip(timeline.stalls, timeline.layers, strict=True)
        for edge in (stall.start, stall.end, layer.start, layer.end)
    ]
    assert edges == sorted(edges)
    assert 0.0 == timeline.hand_over.start < timeline.hand_over.end <= timeline.launch.start
    assert timeline.end >= timeline.layers[-1].end  # launching takes real time, even so


def test_json_has_the_agreed_keys(result: DemoResult) -> None:
    content = json.loads(json.dumps(as_json(result), allow_nan=False))
    assert content["bit_exact"] is True
    assert content["pages"] == SMALL.pages
    assert content["layers"] == KV_LAYERS
    assert content["mode"] == "thread"
    assert content["link"] == "none"
    assert content["simulated"] is False
    assert content["caller_us"] > 0
    assert 0 <= content["overlap_ratio"] <= 1
    by_direction = content["transfers"]
    assert set(by_direction) == {"backup", "load"}
    for key in ("copies_issued", "copies_one_per_page_and_layer"):
        assert content[key] == sum(each[key] for each in by_direction.values())


def test_numbers_of_a_burst_are_the_controllers(result: DemoResult) -> None:
    content = as_json(result)
    for transfer in (result.backup, result.load):
        shown = content["transfers"][transfer.direction]["stats"]
        assert shown["caller_us"] == transfer.stats.caller_us > 0
        assert shown["issue_us"] == transfer.stats.issue_us > 0
        assert transfer.stats.copies == transfer.copies
        assert transfer.stats.bytes == transfer.bytes_moved
    assert content["caller_us"] == result.load.stats.caller_us


def test_controller_measures_stalls_where_a_thread_issues(result: DemoResult) -> None:
    assert result.load.stats.stalls_ms is not None
    assert result.load.stats.overlap_ratio is not None
    inline = run(mode="inline")
    assert inline.load.stats.stalls_ms is None
    assert as_json(inline)["transfers"]["load"]["stats"]["overlap_ratio"] is None


def test_what_is_simulated_says_so_everywhere(simulated: DemoResult, tmp_path: Path) -> None:
    assert as_json(simulated)["simulated"] is True
    assert as_json(simulated)["link"] == "h100"
    text = printed(simulated)
    for row in ("copies took", "GB/s", "caller time", "forward waited", "overlap ratio"):
        assert f"{row} (simulated)" in text
    assert "link h100 (simulated)" in text
    assert "rows in memory are 1/128" in text
    picture = tmp_path / "timeline.svg"
    plot([simulated], picture)
    assert "link h100 (simulated)" in picture.read_text()


def test_what_is_measured_is_not_called_simulated(result: DemoResult, tmp_path: Path) -> None:
    picture = tmp_path / "timeline.svg"
    plot([result], picture)
    for shown in (printed(result), picture.read_text(), json.dumps(as_json(result)["link"])):
        assert "simulated" not in shown


def test_verdict_names_the_first_wrong_pages() -> None:
    demo = Demo(SMALL)
    demo.fill()
    good = run()
    run_until_loaded(demo)
    demo.pools[0].host.tensor.fill_(0)
    bad = dataclasses.replace(good, mismatches=tuple(demo.compare()))
    assert not bad.bit_exact
    assert len(bad.mismatches) > 8
    text = printed(bad, width=200)
    assert "NOT bit-exact" in text
    assert "host: pool 'kv', layer 0, page 0:" in text
    assert f"and {len(bad.mismatches) - 8:,} more" in text
    demo.controller.stop()


@pytest.mark.parametrize("width", [40, 80, 300])
def test_timeline_keeps_to_the_width(result: DemoResult, width: int) -> None:
    lines = printed(result, width).splitlines()
    bars = [line for line in lines if line.startswith(("scheduler", "transfer", "forward   "))]
    assert len(bars) == 3
    assert all(len(line) <= width for line in lines)


def test_terminal_without_blocks_gets_letters(result: DemoResult) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=80, color_system=None)
    show(result, console)
    console.file.flush()
    assert "transfer  " in raw.getvalue().decode("ascii")


def test_cells_show_what_took_most_of_each() -> None:
    bars = ((STALL, Span(0.0, 2.6)), (LAYER, Span(2.6, 4.0)), (COPYING, Span(6.0, 6.4)))
    assert cells(bars, end=8.0, width=8) == [STALL, STALL, STALL, LAYER] + [None] * 4


def test_layer_numbers_stand_below_their_layers_where_there_is_room() -> None:
    assert layer_ruler([float(layer) for layer in range(25)], end=25.0, width=50) == (
        "0" + " " * 19 + "10" + " " * 18 + "20" + " " * 6 + "24"
    )
    assert layer_ruler([0.0] * 25, end=25.0, width=50) == "0"


def test_picture_is_drawn_for_several_runs(
    result: DemoResult, simulated: DemoResult, tmp_path: Path
) -> None:
    picture = tmp_path / "timeline.png"
    plot([result, simulated], picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(KVBurstError, match=r"pip install 'kvburst\[plot\]'"):
        check_plot(Path("timeline.png"))


def test_unknown_picture_format_is_refused() -> None:
    with pytest.raises(KVBurstError, match=r"--plot: 'timeline.xyz' ends in none of .*\.png"):
        check_plot(Path("timeline.xyz"))


def test_progress_is_silent_where_nobody_looks() -> None:
    console = Console(file=io.StringIO())
    with progress(console, 2) as tick:
        tick("a step")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_progress_shows_each_step_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with progress(console, 2) as tick:
        tick("a first step")
        tick("a second step")
    assert isinstance(console.file, io.StringIO)
    assert "a first step" in console.file.getvalue()
    assert "100%" in console.file.getvalue()


def test_ticks_add_up() -> None:
    ticks: list[str] = []
    Demo(SMALL, ticks.append).run()
    assert len(ticks) == num_ticks(SMALL)


# --- bad options ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pages": 0}, "--pages: 0 is below 1"),
        ({"chunk_pages": -1}, "--chunk-pages: -1 is below 0"),
        ({"seed": -1}, "--seed: -1 is below 0"),
        ({"seed": 1 << 32}, "--seed: 4294967296 is above 4294967295"),
        ({"pages": 8, "device_pages": 16}, "--device-pages: 16 is not above 16, twice --pages"),
        ({"forward": -0.5}, "--forward: -0.5 is not a number of at least 0"),
        ({"forward": float("inf")}, "--forward: inf is not a number of at least 0"),
        ({"forward": float("nan")}, "--forward: nan is not a number of at least 0"),
    ],
)
def test_options_out_of_bounds_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(KVBurstError, match=f"^{message}"):
        dataclasses.replace(SMALL, **changes)  # type: ignore[arg-type]


def test_unknown_geometry_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KVBurstError, match="geometry: 'gpt-2' is unknown; known are deepseek-v3"):
        Demo(DemoOptions(geometry="gpt-2"))


def test_more_pages_than_memory_are_refused_before_any_is_taken() -> None:
    message = r"--pages: 100000000 pages of deepseek-v3 need .* GiB .* above the .* GiB"
    with pytest.raises(KVBurstError, match=message):
        Demo(DemoOptions(pages=100_000_000))
