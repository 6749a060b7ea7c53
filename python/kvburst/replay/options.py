"""What ``kvburst replay`` is asked to do. Imports no torch: the command line reads the defaults."""

from dataclasses import dataclass
from pathlib import Path

from kvburst._core import KVBurstError

PAGE_SIZE = 64
"""Slots of a page of the replay's own pool."""

DEFAULT_DEVICE_PAGES = 4096
DEFAULT_HOST_PAGES = 32768
DEFAULT_LAYERS = 8
DEFAULT_PAGE_BYTES = 1024
# Host pages for each device page, where a shared tier is compared: SGLang's --hicache-ratio, whose
# default is 2, and what lies around it.
SHARED_HOST_RATIOS = (1, 2, 4, 8)

# Far above any server, and low enough for all addresses of memory that is not there.
MAX_PAGES = 1 << 24
MAX_LAYERS = 1 << 10
MAX_PAGE_BYTES = 1 << 24
MAX_RANKS = 1 << 10


@dataclass(frozen=True)
class ReplayOptions:
    """``device_pages`` and ``host_pages`` size the tiers; ``limit`` None replays the whole trace.

    The pools are those of ``geometry``, or one of ``layers`` layers and ``page_bytes`` bytes a page
    of a layer: 8 layers of 1,024 bytes unless said otherwise. ``plan_only`` moves no bytes.

    Raises ``KVBurstError`` naming the command's option, the value and the bound.
    """

    trace: Path
    limit: int | None = None
    device_pages: int = DEFAULT_DEVICE_PAGES
    host_pages: int = DEFAULT_HOST_PAGES
    geometry: str | None = None
    layers: int | None = None
    page_bytes: int | None = None
    plan_only: bool = False

    def __post_init__(self) -> None:
        for option, value, bound in (
            ("--limit", self.limit, None),
            ("--device-pages", self.device_pages, MAX_PAGES),
            ("--host-pages", self.host_pages, MAX_PAGES),
            ("--layers", self.layers, MAX_LAYERS),
            ("--page-bytes", self.page_bytes, MAX_PAGE_BYTES),
        ):
            if value is not None and value < 1:
                raise KVBurstError(f"{option}: {value} is below 1")
            if value is not None and bound is not None and value > bound:
                raise KVBurstError(f"{option}: {value} is above {bound}")
        own_pool = self.layers is not None or self.page_bytes is not None
        if self.geometry is not None and own_pool:
            raise KVBurstError(
                f"--geometry: {self.geometry!r} has layers and page bytes of its own, leave out"
                " --layers and --page-bytes"
            )
        if self.page_bytes is not None and self.page_bytes % PAGE_SIZE:
            raise KVBurstError(
                f"--page-bytes: {self.page_bytes} is not a multiple of the {PAGE_SIZE} slots of a"
                " page"
            )
