"""What issuing a copy costs the thread that issues it: by the driver's call, width and height.

Timed in the core, around the device's own call: no Python, no planning. A sample is at most 256
copies on a stream that was empty before, a quarter of the shortest queue that anybody has reported,
so that no call waits for room; the copies themselves run meanwhile. The baseline of a copy of many
rows is one plain copy for each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from harness import take_turns
from page_patterns import Direction

from gpu_check.bench import Bench, Tiers
from kvburst import CudaDevice, Stream

CopyTuple = tuple[int, int, int, int, int, int]

KIB = 1 << 10
WIDTHS = (8 * KIB, 42 * KIB, 128 * KIB)
HEIGHTS = (1, 8, 64)
MOST_COPIES = 256
DIRECTIONS: tuple[Direction, ...] = ("load", "backup")


@dataclass(frozen=True)
class Shape:
    """``call``: a driver call a copy (``plain``), or a call for all of them (``batch``)."""

    call: Literal["plain", "batch"]
    width: int
    height: int


SHAPES = tuple(
    Shape(call, width, height)
    for width in WIDTHS
    for height in HEIGHTS
    for call in ("plain", "batch")
)


def copies_of(shape: Shape, direction: Direction, tiers: Tiers) -> list[CopyTuple]:
    """As of pages that are packed on the host, and whose layers lie evenly spaced on the device."""
    page = shape.width * shape.height
    count = min(MOST_COPIES, tiers.host.nbytes // page)
    host_pitch, device_pitch = (shape.width, count * shape.width) if shape.height > 1 else (0, 0)
    copies = []
    for index in range(count):
        host = tiers.host.data_ptr() + index * page
        device = tiers.device.data_ptr() + index * shape.width
        if direction == "load":
            copies.append((device, host, shape.width, shape.height, device_pitch, host_pitch))
        else:
            copies.append((host, device, shape.width, shape.height, host_pitch, device_pitch))
    return copies


def sampler(
    device: CudaDevice, stream: Stream, direction: Direction, copies: list[CopyTuple]
) -> Callable[[], float]:
    """Microseconds a copy."""

    def sample() -> float:
        microseconds = device.transfer(stream, direction, copies)
        stream.synchronize()
        return microseconds / len(copies)

    return sample


def run(bench: Bench) -> None:
    devices = {"batch": bench.open(), "plain": bench.open(single_copies=True)}
    tiers = Tiers.of(devices["batch"], bench.size(1 << 30, 16 << 20))
    streams = {call: device.new_stream() for call, device in devices.items()}
    calls = ("plain", "batch") if devices["batch"].driver.batch_version else ("plain",)
    shapes = [shape for shape in SHAPES if shape.call in calls]
    for direction in DIRECTIONS:
        copies = {shape: copies_of(shape, direction, tiers) for shape in shapes}
        arms = {
            str(shape): sampler(devices[shape.call], streams[shape.call], direction, copies[shape])
            for shape in shapes
        }
        samples = take_turns(arms, bench.size(40, 3))
        for shape in shapes:
            one_by_one = [
                shape.height * each for each in samples[str(Shape("plain", shape.width, 1))]
            ]
            scenario = {
                "direction": direction,
                "call": shape.call,
                "width": shape.width,
                "height": shape.height,
                "copies": len(copies[shape]),
            }
            bench.results.add(
                bench.row(
                    scenario,
                    "issue_us_per_copy",
                    "us",
                    samples[str(shape)],
                    baseline=one_by_one,
                )
            )
