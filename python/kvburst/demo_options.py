"""What ``kvburst demo`` is asked to do. Apart from the demo itself, so that the command line knows
the names and the defaults without importing torch."""

import math
from dataclasses import dataclass
from typing import Literal

from kvburst._core import KVBurstError
from kvburst.links import LinkName

Layout = Literal["page_first_direct", "layer_first"]
Groups = Literal["ramp", "neighbours", "none"]
Mode = Literal["thread", "inline"]
DeviceName = Literal["host", "cuda"]

MAX_SEED = (1 << 32) - 1
MAX_CHUNK_PAGES = (1 << 31) - 1
# Processes, each of which holds all memory of a run of its own.
MAX_RANKS = 16
# Pages that move if nobody says how many. With a link rows in memory are small, and there may be as
# many pages as a long prompt has.
DEFAULT_PAGES = 32
DEFAULT_MODELLED_PAGES = 1024


@dataclass(frozen=True)
class DemoOptions:
    """Sizes are in pages. ``device_pages`` 0 leaves them to the demo, ``chunk_pages`` 0 is no
    bound, ``link`` None is the device's own; only ``host`` can play another. ``forward`` is a
    multiple of the time that the grouped copies of the load take. ``ranks`` above 1 are processes,
    which with ``shard`` keep one copy of each layer between them.

    Raises ``KVBurstError`` naming the command's option, the value and the bound.
    """

    device: DeviceName = "host"
    geometry: str = "deepseek-v3"
    pages: int = DEFAULT_PAGES
    device_pages: int = 0
    layout: Layout = "page_first_direct"
    one_allocation: bool = True
    groups: Groups = "ramp"
    mode: Mode = "thread"
    link: LinkName | None = None
    forward: float = 3.0
    chunk_pages: int = 0
    seed: int = 0
    ranks: int = 1
    shard: bool = False

    def __post_init__(self) -> None:
        _check_at_least("--pages", self.pages, 1)
        _check_at_least("--chunk-pages", self.chunk_pages, 0)
        _check_at_least("--seed", self.seed, 0)
        for option, value, bound in (
            ("--seed", self.seed, MAX_SEED),
            ("--chunk-pages", self.chunk_pages, MAX_CHUNK_PAGES),
        ):
            if value > bound:
                raise KVBurstError(f"{option}: {value} is above {bound}")
        _check_at_least("--ranks", self.ranks, 1)
        if self.ranks > MAX_RANKS:
            raise KVBurstError(f"--ranks: {self.ranks} is above {MAX_RANKS}")
        if self.shard and self.ranks == 1:
            raise KVBurstError("--shard: needs --ranks of at least 2, it is 1")
        if self.ranks > 1 and self.device != "host":
            raise KVBurstError(
                f"--ranks: {self.ranks} run on device host, on {self.device} the demo has one rank"
            )
        if self.device_pages != 0 and self.device_pages <= 2 * self.pages:
            raise KVBurstError(
                f"--device-pages: {self.device_pages} is not above {2 * self.pages}, twice --pages:"
                " pages come back to other places than they left, and some are left alone"
            )
        if self.link is not None and self.device != "host":
            raise KVBurstError(
                f"--link: {self.link} is simulated, which device {self.device} cannot be; leave one"
                " of --link and --device out"
            )
        if not math.isfinite(self.forward) or self.forward < 0:
            raise KVBurstError(f"--forward: {self.forward} is not a number of at least 0")


def _check_at_least(option: str, value: int, bound: int) -> None:
    if value < bound:
        raise KVBurstError(f"{option}: {value} is below {bound}")
