"""What issuing a burst costs: per burst, layer and copy, and what of it the scheduler thread pays.

``copies`` counts the copies of a burst. ``issue_us`` is from the hand-over of its index tensors
until its last copy is issued, whoever issues it; ``issue_us_per_layer`` is that for each layer of
each pool, ``issue_us_per_copy`` for each copy. ``caller_us`` is what the calling thread pays: all
of it in mode ``inline``, the hand-over alone in mode ``thread``.

Groups: ``none`` is one plain copy for every page of every layer, handed over in one batch a layer
(``copies_per_call`` 1: one call a copy). ``neighbours`` merges pages that lie side by side on both
tiers, a layer at a time; of loads only, since a backup has all layers in one group. ``ramp``, what
the library does unless told otherwise, lets one copy move one page of 1, 2, 4, ... 16 layers, and
of all of them in a backup. The baseline works the peer's way, from Python (see ``peers_way``): it
issues as ``none`` does, on the calling thread. It calls no device, and is charged the price of a
copy that the link model names; the bursts meet the model itself, which really holds the thread. On
the device ``cuda`` it is SGLang's own direct copies, where ``sgl_kernel`` can be imported; on the
devices ``cuda`` and ``stand-in`` there is no baseline else, but for the copies.

One thing is changed at a time: every other one stays as it is in the first table. A burst of the
pattern ``trace`` has the pages that a cache chose under a real request trace, and those rows are
percentiles over all recorded bursts (``pages`` is their median); see ``page_patterns``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from harness import (
    JsonFile,
    Outputs,
    PlotFile,
    Row,
    machine,
    new_app,
    new_console,
    one_line_errors,
    progress,
    whole_number,
    whole_numbers,
    write_json,
)
from issue_latency_view import UNATTENDED_WIDTH, Section, draw, show
from issuing import Groups, Mode, Setting, Way, measure
from issuing_devices import DEVICES, LAYOUTS, IssuingDevice
from page_patterns import PATTERNS, RECORDED, Bursts, made_up, read_bursts, recorded
from peers_way import like_the_peers

from kvburst.geometries import GEOMETRIES, geometry
from kvburst.links import LINKS, LinkName
from kvburst.replay.recording import Recording

T = TypeVar("T")

BENCHMARK = "issue_latency"
GROUPS: tuple[Groups, ...] = ("none", "neighbours", "ramp")
MODES: tuple[Mode, ...] = ("inline", "thread")
# In smaller bursts torch's calls are most of what the peer's way takes.
PEERS_PAGES = 1024

ONE_CALL_A_COPY = Way("none", "inline", 1)
ALL_WAYS = tuple(Way(groups, mode) for groups in GROUPS for mode in MODES)
INLINE_WAYS = tuple(way for way in ALL_WAYS if way.mode == "inline")


@dataclass(frozen=True)
class Plan:
    """Everything to measure: settings by section, each with the ways that are compared in it."""

    title: str
    settings: tuple[Setting, ...]
    ways: tuple[Way, ...]

    def ways_of(self, setting: Setting) -> list[Way]:
        """In a backup all layers are one group, so that there is no merging of neighbours alone."""
        loads = setting.direction == "load"
        return [way for way in self.ways if loads or way.groups != "neighbours"]


def plans(
    base: Setting, pages: Sequence[int], chunks: Sequence[int], geometries: Sequence[str]
) -> list[Plan]:
    """One thing at a time, of ``base``."""
    device = DEVICES[base.device]
    what = f"{device.name}, link {base.link} (simulated)" if device.link else device.name
    if device.simulated and not device.link:
        what += " (no GPU)"
    others = [pattern for pattern in PATTERNS if pattern != base.pattern]
    patterns = (base, *(replace(base, pattern=pattern) for pattern in others))
    backup = replace(base, direction="backup")
    return [
        Plan(
            f"Pages of a load, device {what}",
            tuple(replace(base, pages=count) for count in pages),
            (ONE_CALL_A_COPY, *ALL_WAYS) if device.call_a_copy else ALL_WAYS,
        ),
        Plan(f"Which pages a load moves, device {what}", patterns, INLINE_WAYS),
        Plan(
            f"Which pages a backup moves, device {what}",
            tuple(replace(each, direction="backup") for each in patterns),
            INLINE_WAYS,
        ),
        Plan(
            f"How the device's layers lie, device {what}",
            tuple(replace(each, layout=layout) for each in (base, backup) for layout in LAYOUTS),
            INLINE_WAYS,
        ),
        Plan(
            f"Pages that a backup hands over in a call, device {what}",
            tuple(replace(backup, chunk_pages=chunk) for chunk in chunks),
            (Way("ramp", "inline"), Way("ramp", "thread")),
        ),
        Plan(
            f"Models, device {what}",
            tuple(replace(base, geometry=name) for name in geometries),
            (Way("none", "inline"), Way("ramp", "thread")),
        ),
    ]


def _in_words(device: IssuingDevice) -> str:
    return f"{device.name} (needs {device.needs})" if device.needs else device.name


app = new_app("What issuing a burst costs, per burst, layer and copy.")


@app.command()
def issue_latency(
    device_names: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="NAME,...",
            help="Where bursts are issued: " + "; ".join(map(_in_words, DEVICES.values())) + ".",
        ),
    ] = ",".join(name for name, device in DEVICES.items() if not device.needs),
    link: Annotated[LinkName, typer.Option(help="What a copy costs on the device host.")] = "h100",
    pages: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Pages of a burst; 64,256,1024,4096 if left out."),
    ] = None,
    chunks: Annotated[
        str,
        typer.Option(
            "--chunk-pages", metavar="N,...", help="Most pages in a call of a backup; 0: no bound."
        ),
    ] = "0,64,256",
    geometries: Annotated[
        str,
        typer.Option(
            "--geometry",
            metavar="NAME,...",
            help="A model's pools; the first is that of all tables.",
        ),
    ] = ",".join(["mla-dsa-78-full", "mla-dsa-78", "deepseek-v3", "llama-3.1-70b-tp8"]),
    bursts_file: Annotated[
        Path,
        typer.Option(
            "--bursts",
            metavar="FILE",
            help="Pages of the pattern trace: what kvburst replay --record wrote (.kvb), or a trace"
            " to replay now.",
            show_default="400 recorded bursts of a public trace",
        ),
    ] = RECORDED,
    most_bursts: Annotated[
        int,
        typer.Option(
            parser=whole_number(1, 1_000_000), metavar="N", help="Recorded bursts, the last ones."
        ),
    ] = 400,
    rounds: Annotated[
        int, typer.Option(parser=whole_number(1, 100_000), metavar="N", help="Bursts a scenario.")
    ] = 20,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Less than a minute, with fewer rounds and sizes: to see that it runs."
        ),
    ] = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Issue bursts on devices that say what a copy costs, against arrays rebuilt in Python.

    \b
    Examples:
      python benchmarks/issue_latency.py --quick --plot issue_latency.png
      python benchmarks/issue_latency.py --device null --pages 1024 --json issue_latency.json
      kvburst replay conversation_trace.jsonl.gz --plan-only --record bursts.kvb
      python benchmarks/issue_latency.py --bursts bursts.kvb
      python benchmarks/issue_latency.py --device cuda --quick
    """
    usual = "64,256,1024" if quick else "64,256,1024,4096"
    burst_pages = whole_numbers("--pages", usual if pages is None else pages, least=1, most=65536)
    burst_chunks = whole_numbers("--chunk-pages", chunks, least=0, most=65536)
    outputs = Outputs(json_file, plot_file)
    most_bursts = 6 if quick else most_bursts
    devices = _chosen("--device", device_names, DEVICES)
    shapes = _chosen("--geometry", geometries, {each.name: each.name for each in GEOMETRIES})
    # Where it is one of them, the size of the budgets.
    usual_size = 256 if quick else 1024
    base_pages = usual_size if usual_size in burst_pages else burst_pages[-1]
    with one_line_errors():
        recording = read_bursts(bursts_file)
        every = [
            plan
            for device in devices
            for plan in plans(
                Setting(device.name, link, geometry=shapes[0], pages=base_pages),
                burst_pages,
                burst_chunks,
                shapes,
            )
        ]
        measured_on = machine()

        def keep(rows: Sequence[Row]) -> None:
            write_json(rows, measured_on, outputs.json_file)

        sections, peers_ns = _run(every, recording, None if quick else rounds, most_bursts, keep)
    console = new_console(UNATTENDED_WIDTH)
    show(sections, measured_on, console, notes=_notes(devices, link, peers_ns, bursts_file))
    rows = [row for section in sections for row in section.rows]
    if outputs.plot_file is not None:
        draw(rows, outputs.plot_file)


def _run(
    every: Sequence[Plan],
    recording: Recording,
    rounds: int | None,
    most_bursts: int,
    keep: Callable[[Sequence[Row]], None],
) -> tuple[list[Section], list[float]]:
    """All sections, quickly if no rounds are given; and what a copy cost the peer's way where
    bursts are large, in nanoseconds. After each section ``keep`` gets all rows so far, which are
    worth keeping should the next fail or take too long."""
    peers_ns: list[float] = []
    sections = []
    with progress(sum(len(plan.settings) for plan in every)) as tick:
        for plan in every:
            rows: list[Row] = []
            for setting in plan.settings:
                bursts = _bursts(setting, recording, most_bursts)
                n = len(bursts.each)
                if setting.pattern != "trace":
                    n = DEVICES[setting.device].quick_rounds if rounds is None else rounds
                measured, ns = measure(BENCHMARK, setting, plan.ways_of(setting), bursts, n)
                rows += measured
                if bursts.median_pages >= PEERS_PAGES:
                    peers_ns += ns
                tick(plan.title)
            sections.append(Section(plan.title, tuple(rows)))
            keep([row for section in sections for row in section.rows])
    return sections, peers_ns


def _bursts(setting: Setting, recording: Recording, most: int) -> Bursts:
    if setting.pattern == "trace":
        return recorded(recording, setting.direction, most)
    random = torch.Generator().manual_seed(0)
    return made_up(setting.pattern, setting.pages, geometry(setting.geometry).page_size, random)


def _chosen(option: str, text: str, known: Mapping[str, T]) -> tuple[T, ...]:
    """The values of "a,b", each once. Refuses, naming the known ones."""
    for name in text.split(","):
        if name not in known:
            raise typer.BadParameter(
                f"{name!r} is not one of {', '.join(known)}", param_hint=option
            )
    return tuple(known[name] for name in dict.fromkeys(text.split(",")))


def _notes(
    devices: Sequence[IssuingDevice], link: LinkName, peers_ns: Sequence[float], bursts: Path
) -> list[str]:
    notes = [f"device {device.name}: {device.words}" for device in devices]
    if any(device.link for device in devices):
        notes += [
            f"link {link}: {LINKS[link].source}",
            "a full queue holds the issuing thread too: then the link's bandwidth is what is"
            " measured",
        ]
    notes += [
        "peer: HiCache's own way, three arrays rebuilt from Python for every layer and pool, one"
        " copy a page and"
        " layer, inline; on host its rebuilding as measured, and the link's price for each copy",
        f"trace: recorded bursts, {bursts.name}; pages is their median, and all medians are over"
        " them",
    ]
    if peers_ns:
        notes.append(like_the_peers(sorted(peers_ns)[len(peers_ns) // 2]))
    return notes


if __name__ == "__main__":
    app()
