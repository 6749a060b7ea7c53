"""`kvburst demo --ranks N --timeline FILE`: one file of all ranks, on one clock, that shows what is
done at the same time."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trace_events import faults
from typer.testing import CliRunner

from kvburst.cli import app
from kvburst.demo_options import DemoOptions
from kvburst.demo_ranks import run_ranks
from kvburst.flight_plot import plot
from kvburst.geometries import geometry
from kvburst.ownership import Ownership
from kvburst.timeline import (
    AGREEMENT,
    EXCHANGE,
    FORWARD,
    GATE,
    ISSUERS,
    LAUNCH,
    SCHEDULER,
    STREAMS,
    Flight,
    Span,
    as_trace_events,
)

RANKS = 4
# A layer of the forward is as long as the copies of all: some milliseconds, and long enough for the
# next layer to be exchanged under it.
OPTIONS = DemoOptions(
    geometry="mla-dsa-78", pages=48, forward=80.0, link="h100", ranks=RANKS, shard=True
)
WAITS = tuple(f"wait_until({layer})" for layer in range(geometry(OPTIONS.geometry).num_layers))


@pytest.fixture(scope="module")
def flights() -> list[Flight]:
    flights = [rank.result.flight for rank in run_ranks(OPTIONS, record=True)]
    return [flight for flight in flights if flight is not None]


def spans(flight: Flight, track: str) -> list[Span]:
    """In order, those that take time."""
    found = [span for span in flight.spans if span.track == track and span.end_us is not None]
    return sorted(found, key=lambda span: span.start_us)


def overlapping(some: Sequence[Span], others: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    for one in some:
        for other in others:
            assert one.end_us is not None
            assert other.end_us is not None
            if one.start_us < other.end_us and other.start_us < one.end_us:
                yield one, other


def test_file_of_all_ranks_is_what_trace_viewers_read(flights: list[Flight]) -> None:
    content = json.loads(json.dumps(as_trace_events(flights)))
    assert list(faults(content)) == []
    names = [e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"]
    assert [name.split(":")[0] for name in names] == [f"rank {rank}" for rank in range(RANKS)]
    assert all("(simulated: link h100)" in name for name in names)


def test_every_rank_shows_all_that_takes_part(flights: list[Flight]) -> None:
    layers = geometry(OPTIONS.geometry).num_layers
    for flight in flights:
        for track in (SCHEDULER, AGREEMENT, ISSUERS["load"], STREAMS["load"]):
            assert spans(flight, track), track
        for track in (GATE, FORWARD):
            assert len(spans(flight, track)) == layers
        waits = [span for span in spans(flight, SCHEDULER) if span.name.startswith("wait_until(")]
        assert [span.details["layer"] for span in waits] == list(range(layers))
        # Each of them within the launch of the forward.
        (launch,) = (s for s in spans(flight, SCHEDULER) if s.name == "launch the forward")
        assert len(list(overlapping([launch], waits))) == layers


def test_broadcasts_are_those_of_the_owners_in_the_order_of_layers(flights: list[Flight]) -> None:
    pools = [pool.layer_ids for pool in geometry(OPTIONS.geometry).pools]
    owned = Ownership(RANKS, tuple(pools))
    wanted = [
        owned.owner_of(number, layer)
        for layer in range(geometry(OPTIONS.geometry).num_layers)
        for number, layers in enumerate(pools)
        if layer in layers
    ]
    for flight in flights:
        assert [span.details["source"] for span in spans(flight, EXCHANGE)] == wanted


def early_arrivals(flights: Sequence[Flight]) -> int:
    """Broadcasts that were over on some rank before their source had begun to send."""
    early = 0
    for broadcast in zip(*(spans(flight, EXCHANGE) for flight in flights), strict=True):
        source = broadcast[int(broadcast[0].details["source"])]
        early += any((span.end_us or 0) < source.start_us for span in broadcast)
    return early


def test_ranks_are_on_one_clock(flights: list[Flight]) -> None:
    """Nothing arrives before it has been sent, which a clock of a rank's own would show."""
    assert early_arrivals(flights) == 0


def test_a_rank_with_a_clock_of_its_own_would_be_seen(flights: list[Flight]) -> None:
    """The control of the test above: each rank counted from its own start, and one a bit late."""
    by = spans(flights[1], EXCHANGE)[-1].start_us - spans(flights[1], EXCHANGE)[0].start_us
    late = tuple(
        replace(span, start_us=span.start_us + by, end_us=span.end_us and span.end_us + by)
        for span in flights[1].spans
    )
    assert early_arrivals([flights[0], replace(flights[1], spans=late), *flights[2:]]) > 0


def test_layers_are_exchanged_while_earlier_ones_compute(flights: list[Flight]) -> None:
    for flight in flights:
        assert list(overlapping(spans(flight, EXCHANGE), spans(flight, FORWARD)))


def test_spans_that_follow_each_other_do_not_overlap() -> None:
    """The control of the test above."""
    before, after = Span(FORWARD, "a", 0.0, 2.0), Span(EXCHANGE, "b", 2.0, 3.0)
    assert list(overlapping([before], [after])) == []
    assert list(overlapping([before], [replace(after, start_us=1.9)])) != []


def test_nobody_records_unless_asked(flights: list[Flight]) -> None:
    ranks = run_ranks(replace(OPTIONS, pages=2, forward=0.0, ranks=2))
    assert [rank.result.flight for rank in ranks] == [None, None]


def test_command_writes_the_file_and_the_picture(tmp_path: Path) -> None:
    """Of ranks that share nothing: they agree, and exchange nothing."""
    written, picture = tmp_path / "ranks.json", tmp_path / "ranks.png"
    options = ["demo", "--ranks", "2", "--pages", "2", "--forward", "0", "--quiet"]
    files = ["--timeline", str(written), "--plot", str(picture)]
    result = CliRunner().invoke(app, [*options, *files])
    assert (result.exit_code, result.output) == (0, "")
    content: dict[str, Any] = json.loads(written.read_text())
    assert list(faults(content)) == []
    tracks = [e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"]
    assert tracks.count(AGREEMENT) == 2
    assert EXCHANGE not in tracks
    landed = [e for e in content["traceEvents"] if e["name"].endswith(" is there")]
    assert {e["pid"] for e in landed} == {1, 2}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_picture_keeps_the_hand_over_apart_from_the_launch(
    flights: list[Flight], tmp_path: Path
) -> None:
    def words(shown: list[Flight]) -> str:
        picture = tmp_path / "ranks.svg"
        plot(shown, picture)
        return picture.read_text()

    both = words(flights)
    assert "<!-- hand-over -->" in both
    assert "<!-- launches the forward's layers -->" in both
    without = [
        replace(flight, spans=tuple(s for s in flight.spans if s.name not in (LAUNCH, *WAITS)))
        for flight in flights
    ]
    assert "<!-- hand-over -->" in words(without)
    assert "<!-- launches the forward's layers -->" not in words(without)


def test_picture_of_an_unknown_kind_is_refused_before_ranks_are_started(tmp_path: Path) -> None:
    options = ["demo", "--ranks", "2", "--plot", str(tmp_path / "a.xyz")]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2
    assert "ends in none of" in result.output
