"""Bandwidth of scattered pages on the device ``host``, against one plain ``memcpy``.

A burst of pages goes from host to device memory (load) or back (backup), one copy for every page
of every layer: nothing is merged, and no copy has more than one row. The baseline is one
``memcpy`` of as many bytes, in one piece, between the same two blocks of memory. Both are timed by
the clock on the wall, a burst from its submission until its finish event has been synchronized:
planning, the hand-over to the stream's thread and its wake-up count against ours. Beside it stands
the bandwidth between the burst's own start and finish events.
"""

import ctypes
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
import typer
from harness import (
    JsonFile,
    Outputs,
    PlotFile,
    Quick,
    Row,
    Value,
    new_app,
    one_line_errors,
    progress,
    report,
    take_turns,
    whole_number,
    whole_numbers,
)

from kvburst import CopyLimits, HostDevice, KVBurstError, PlanOptions
from kvburst._core import BurstIssuer, BurstPages, DeviceTier, HostTier, PoolLayout
from kvburst._indices import index_view
from kvburst.host_memory import allocate_host

Pattern = Literal["scattered", "contiguous"]
Direction = Literal["load", "backup"]

BENCHMARK = "copy_bandwidth"
PATTERNS: tuple[Pattern, ...] = ("scattered", "contiguous")
DIRECTIONS: tuple[Direction, ...] = ("load", "backup")
PAGE_SLOTS = 64
MIB = 1 << 20

# The budget: pages of 40 KiB, scattered, in either direction.
BUDGET_PAGE_BYTES = 40 << 10
BUDGET_RATIO = 0.9


@dataclass(frozen=True)
class Blocks:
    """The memory of the two tiers, twice as large as a burst, so that its pages can lie anywhere.

    Written to before anything is measured: no copy pays for a page fault.
    """

    device: torch.Tensor
    host: torch.Tensor

    @classmethod
    def allocate(cls, burst_bytes: int) -> "Blocks":
        return cls(*(allocate_host(2 * burst_bytes) for _ in range(2)))

    def ends(self, direction: Direction) -> tuple[torch.Tensor, torch.Tensor]:
        """Destination and source."""
        return (self.device, self.host) if direction == "load" else (self.host, self.device)


class Bursts:
    """Bursts of one scenario: the device block holds layer after layer, the host block page after
    page, and each burst moves the same pages, half of those that there are."""

    def __init__(
        self,
        blocks: Blocks,
        *,
        page_bytes: int,
        layers: int,
        burst_bytes: int,
        pattern: Pattern,
        direction: Direction,
    ) -> None:
        self.pages = burst_bytes // (page_bytes * layers)
        self.num_bytes = self.pages * page_bytes * layers
        self._blocks = blocks
        self._direction: Direction = direction
        self._shape = (page_bytes, layers, 2 * self.pages)
        self._device = HostDevice(limits=CopyLimits(tall_copies=False))
        layout = self._layout()
        self._indices = tuple(_slots(self.pages, pattern, seed) for seed in (1, 2))
        self._collected = BurstPages([layout], direction=direction, page_size=PAGE_SLOTS)
        self._issuer = BurstIssuer(
            self._device,
            [layout],
            direction=direction,
            options=PlanOptions(ramp=False, merge_neighbours=False),
        )
        self._between_events: list[float] = []

    def run(self) -> float:
        """Moves one burst and returns its GB/s by the wall clock."""
        on_device, on_host = self._indices
        self._collected.append(
            device=index_view("device", on_device), host=index_view("host", on_host)
        )
        stream = self._device.current_stream()
        begin = time.perf_counter_ns()
        burst = self._issuer.submit(self._collected, [], stream=stream)
        if burst is None:
            raise KVBurstError("a burst of no pages")
        burst.finish_event.synchronize()
        end = time.perf_counter_ns()
        if burst.error is not None:
            raise KVBurstError(burst.error)
        milliseconds = burst.start_event.elapsed_time(burst.finish_event)
        self._between_events.append(self.num_bytes / milliseconds / 1e6)
        return self.num_bytes / (end - begin)

    def between_events(self, rounds: int) -> list[float]:
        """GB/s of the last ``rounds`` bursts, from their start events to their finish events."""
        return self._between_events[-rounds:]

    def check(self) -> None:
        """Runs a burst over random bytes and raises unless every byte has arrived."""
        page_bytes, layers, pages = self._shape
        destination, source = self._blocks.ends(self._direction)
        source.view(torch.int64).random_()
        destination.zero_()
        self.run()
        device = self._blocks.device[: layers * pages * page_bytes].view(layers, pages, page_bytes)
        host = self._blocks.host[: layers * pages * page_bytes].view(pages, layers, page_bytes)
        on_device, on_host = (each[::PAGE_SLOTS] // PAGE_SLOTS for each in self._indices)
        for layer in range(layers):
            if not torch.equal(device[layer][on_device], host[:, layer][on_host]):
                raise KVBurstError(f"{self._direction}: layer {layer} did not arrive as it left")

    def memcpy(self) -> float:
        """The baseline: one copy of as many bytes between the same blocks, in GB/s."""
        destination, source = (each.data_ptr() for each in self._blocks.ends(self._direction))
        begin = time.perf_counter_ns()
        ctypes.memmove(destination, source, self.num_bytes)
        return self.num_bytes / (time.perf_counter_ns() - begin)

    def _layout(self) -> PoolLayout:
        page_bytes, layers, pages = self._shape
        size = page_bytes * layers * pages
        device, host = self._blocks.device.data_ptr(), self._blocks.host.data_ptr()
        return PoolLayout(
            name="kv",
            layer_ids=range(layers),
            device=DeviceTier(
                layers=[device + layer * pages * page_bytes for layer in range(layers)],
                pages=pages,
                page_bytes=page_bytes,
                allocations=[(device, size)],
            ),
            host=HostTier(
                address=host,
                size=size,
                pages=pages,
                page_bytes=page_bytes,
                page_stride=layers * page_bytes,
                layer_stride=page_bytes,
                rows=range(layers),
            ),
        )


def _slots(pages: int, pattern: Pattern, seed: int) -> torch.Tensor:
    """The token slots of ``pages`` of twice as many pages."""
    random = torch.Generator().manual_seed(seed)
    chosen = (
        torch.arange(pages)
        if pattern == "contiguous"
        else torch.randperm(2 * pages, generator=random)[:pages]
    )
    return (chosen[:, None] * PAGE_SLOTS + torch.arange(PAGE_SLOTS)).flatten()


app = new_app("Bandwidth of scattered pages on the device host, against one plain memcpy.")


@app.command()
def copy_bandwidth(
    page_bytes: Annotated[
        str, typer.Option(metavar="N,N,...", help="Bytes of a page of one layer.")
    ] = "8192,40960,131072",
    layers: Annotated[
        int, typer.Option(parser=whole_number(1, 1000), metavar="N", help="Layers; 1 to 1000.")
    ] = 78,
    burst_mib: Annotated[
        int,
        typer.Option(
            parser=whole_number(16, 65536),
            metavar="N",
            help="MiB of a burst, 16 to 65536, well above the caches; four times as much is"
            " allocated.",
        ),
    ] = 256,
    rounds: Annotated[
        int, typer.Option(parser=whole_number(1, 100_000), metavar="N", help="Bursts a scenario.")
    ] = 21,
    quick: Quick = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Move scattered and contiguous pages on the device host, against one plain memcpy.

    \b
    One copy for every page of every layer, nothing merged. The budget is 0.9 of memcpy for
    scattered pages of 40 KiB.

    \b
    Examples:
      python benchmarks/copy_bandwidth.py
      python benchmarks/copy_bandwidth.py --page-bytes 256,1024,4096 --json bandwidth.json
    """
    burst_bytes = (16 if quick else burst_mib) * MIB
    most = burst_bytes // layers
    sizes = whole_numbers("--page-bytes", page_bytes, least=1, most=most)
    outputs = Outputs(json_file, plot_file)
    rounds = 3 if quick else rounds
    # Torch prepares and checks the bytes; its threads would still spin while bursts are timed.
    torch.set_num_threads(1)
    scenarios = [
        (size, pattern, direction)
        for size in sizes
        for pattern in PATTERNS
        for direction in DIRECTIONS
    ]
    rows: list[Row] = []
    with one_line_errors(), progress(len(scenarios) * (rounds + 1)) as tick:
        blocks = Blocks.allocate(burst_bytes)
        for size, pattern, direction in scenarios:
            step = f"{size} bytes, {pattern}, {direction}"
            bursts = Bursts(
                blocks,
                page_bytes=size,
                layers=layers,
                burst_bytes=burst_bytes,
                pattern=pattern,
                direction=direction,
            )
            bursts.check()
            samples = take_turns(
                {"memcpy": bursts.memcpy, "burst": bursts.run},
                rounds,
                tick=partial(tick, step),
            )
            scenario: dict[str, Value] = {
                "device": "host",
                "layers": layers,
                "groups": "none",
                "page_bytes": size,
                "pages": bursts.pages,
                "pattern": pattern,
                "direction": direction,
            }
            measured = {
                "bandwidth_gbps": samples["burst"],
                "bandwidth_between_events_gbps": bursts.between_events(rounds),
            }
            rows += [
                Row.of(
                    BENCHMARK,
                    scenario,
                    metric,
                    "GB/s",
                    ours,
                    baseline=samples["memcpy"],
                    better="higher",
                )
                for metric, ours in measured.items()
            ]
    report(rows, outputs, title="Bandwidth against one memcpy", notes=_notes(rows))


def _notes(rows: list[Row]) -> list[str]:
    judged = [
        row.ratio
        for row in rows
        if row.metric == "bandwidth_gbps"
        and row.scenario["page_bytes"] == BUDGET_PAGE_BYTES
        and row.scenario["pattern"] == "scattered"
        and row.ratio is not None
    ]
    notes = ["groups none: one copy of one row for every page of every layer, nothing merged"]
    if judged:
        worst = min(judged)
        verdict = "kept" if worst >= BUDGET_RATIO else "missed"
        notes.append(
            f"budget {verdict}: pages of 40 KiB, scattered, reach {worst:.2f} of one memcpy"
            f" (budget: at least {BUDGET_RATIO})"
        )
    return notes


if __name__ == "__main__":
    app()
