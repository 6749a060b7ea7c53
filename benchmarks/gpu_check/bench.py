"""What the measurements share: the device, how much of everything, and where rows go."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cuda_devices import host_memory, open_device
from driver_library import CudaName
from harness import Better, Row, Value

from gpu_check.whole_file import replace_file
from kvburst import CudaDevice, DevicePool, HostPool, Pool
from kvburst._core import CopyLimits
from kvburst.cuda import tier_memory
from kvburst.geometries import PoolSpec

BENCHMARK = "gpu_check"


class LeftOutError(Exception):
    """What a step is about is not on this machine, or not in this build."""


@dataclass
class Results:
    """The file of one step: whole after each thing that is added."""

    file: Path
    machine: Mapping[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, *rows: Row) -> None:
        self.rows += rows
        self.write()

    def write(self) -> None:
        content: dict[str, Any] = {"machine": dict(self.machine)} if self.machine else {}
        content["rows"] = [row.as_json() for row in self.rows]
        replace_file(self.file, json.dumps(content))


@dataclass(frozen=True)
class Bench:
    """``quick``: as on the stand-in driver, sizes and rounds that only show that it runs."""

    step: str
    device_name: CudaName
    quick: bool
    results: Results

    @property
    def small(self) -> bool:
        return self.quick or self.device_name == "stand-in"

    def size(self, real: int, small: int) -> int:
        return small if self.small else real

    def open(self, *, limits: CopyLimits | None = None, single_copies: bool = False) -> CudaDevice:
        return open_device(self.device_name, limits=limits, single_copies=single_copies)

    def row(
        self,
        scenario: Mapping[str, Value],
        metric: str,
        unit: str,
        samples: Sequence[float],
        *,
        baseline: Sequence[float] | None = None,
        better: Better = "lower",
    ) -> Row:
        """A stand-in's times are marked as simulated: no GPU has taken them."""
        return Row.of(
            BENCHMARK,
            {"step": self.step, "device": self.device_name, **scenario},
            metric,
            unit,
            samples,
            baseline=baseline,
            better=better,
            simulated=self.device_name == "stand-in",
        )


@dataclass(frozen=True)
class Tiers:
    """Device memory, and as much pinned host memory; ``pinned`` keeps it so."""

    device: torch.Tensor
    host: torch.Tensor
    pinned: object

    @classmethod
    def of(cls, device: CudaDevice, nbytes: int) -> "Tiers":
        memory = device.tensor(nbytes)
        host = host_memory(nbytes)
        pinned = device.pin(host, nbytes)
        device.synchronize()  # zeroing is done
        return cls(memory, host, pinned)


def new_pools(
    device: CudaDevice, specs: Sequence[PoolSpec], pages: int, page_size: int
) -> tuple[Pool, ...]:
    """In memory of the device, and pinned."""
    memory = tier_memory(device)
    pools = []
    for spec in specs:
        on_device = DevicePool.allocate(
            spec, pages=pages, page_size=page_size, memory=memory.device
        )
        on_host = HostPool.allocate(on_device, pages=pages, memory=host_memory, pin=memory.pin)
        pools.append(Pool.pair(on_device, on_host))
    device.synchronize()
    return tuple(pools)
