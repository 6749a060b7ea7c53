"""A controller over two small pools, streams that are held up, and threads that block."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from kvburst import (
    BurstController,
    ComputeDevice,
    DevicePool,
    HostPool,
    PageAllocator,
    Pool,
    Stream,
)
from kvburst._core import BurstEvent
from kvburst.cuda import tier_memory

Mode = Literal["thread", "inline"]

PAGE = 4
"""Slots."""
LAYERS = 8
ROW = 16
"""Bytes of a slot and layer."""


@dataclass(frozen=True)
class Rig:
    """Pools "kv", of 8 layers, and "index_k", of layers 0, 3 and 6, which move the same pages."""

    device: ComputeDevice
    controller: BurstController
    pools: Sequence[Pool]
    device_pages: PageAllocator
    host_pages: PageAllocator

    # --- pages -----------------------------------------------------------------------------

    def take(self, pages: int = 1) -> torch.Tensor:
        """Slots of device pages, which must be there."""
        slots = self.device_pages.alloc(pages * PAGE)
        assert slots is not None
        return slots

    def on_host(self, value: int, pages: int = 1) -> torch.Tensor:
        """Slots of new host pages, all bytes of which are `value`."""
        slots = self.host_pages.alloc(pages * PAGE)
        assert slots is not None
        self.write_host(slots, value)
        return slots

    def write_host(self, slots: torch.Tensor, value: int) -> None:
        """At once, on this thread."""
        for pool in self.pools:
            pool.host.tensor[_page_ids(slots)] = value

    def write_device(self, slots: torch.Tensor, value: int) -> None:
        """At once, on this thread."""
        for pool in self.pools:
            for layer in pool.device.layers:
                layer[slots] = value

    def forward_writes(self, stream: Stream, slots: torch.Tensor, value: int) -> None:
        """What a forward on `stream` does to device pages."""
        for pool in self.pools:
            bytes_ = pool.device.page_bytes
            for layer in pool.device.layers:
                for first, count in _runs(_page_ids(slots)):
                    address = layer.data_ptr() + first * bytes_
                    self.device.fill(stream, address, value, count * bytes_)

    def found_on_device(self, slots: torch.Tensor) -> set[int]:
        """Every byte value in these pages, all pools and layers."""
        return {
            value
            for pool in self.pools
            for layer in pool.device.layers
            for value in layer[slots].unique().tolist()
        }

    def found_on_host(self, slots: torch.Tensor) -> set[int]:
        return {
            value
            for pool in self.pools
            for value in pool.host.tensor[_page_ids(slots)].unique().tolist()
        }

    # --- bursts ----------------------------------------------------------------------------

    def load(self, host: torch.Tensor, node_id: int = -1) -> tuple[int, torch.Tensor]:
        """Submit a load of its own. Returns its id and the device slots."""
        target = self.controller.load(host, node_id=node_id)
        assert target is not None
        return self.controller.start_loading(), target

    def wait(self, burst: int, layer: int, stream: Stream | None = None) -> None:
        self.controller.layer_done_counter.events[burst].wait(layer, stream)

    def settle(self) -> None:
        """Everything submitted is in place, and all streams are idle."""
        self.controller.drain()
        self.device.synchronize()

    @contextmanager
    def held(self, stream: Stream | None = None) -> Iterator[None]:
        """Hold `stream` (default: the current one), and with it what is ordered behind it."""
        stall = self.device.stall(stream or self.device.current_stream())
        try:
            yield
        finally:
            stall.release()


def make_rig(
    device: ComputeDevice, mode: Mode = "thread", *, pages: int = 32, **options: object
) -> Rig:
    """`pages` on either tier; `options` are the controller's."""
    pools = []
    for name, layer_ids in (("kv", range(LAYERS)), ("index_k", (0, 3, 6))):
        memory = tier_memory(device)
        layers = memory.device(len(layer_ids) * pages * PAGE * ROW)
        on_device = DevicePool.from_layers(
            name,
            layers.view(len(layer_ids), pages * PAGE, ROW),
            page_size=PAGE,
            layer_ids=list(layer_ids),
        )
        on_host = HostPool.allocate(on_device, pages=pages, pin=memory.pin)
        pools.append(Pool.pair(on_device, on_host))
    device_pages = PageAllocator(name="device tier", pages=pages, page_size=PAGE, order="lifo")
    host_pages = PageAllocator(name="host tier", pages=pages, page_size=PAGE, order="fifo")
    controller = BurstController(
        pools,
        device,
        device_allocator=device_pages,
        host_allocator=host_pages,
        mode=mode,
        **{"check": "slots", **options},
    )
    return Rig(device, controller, pools, device_pages, host_pages)


def page_slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def _page_ids(slots: torch.Tensor) -> list[int]:
    return (slots[::PAGE] // PAGE).tolist()


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """First page and length of each run of neighbours: a stream's queue takes only so much."""
    runs: list[tuple[int, int]] = []
    for page in sorted(pages):
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


# --- threads that block --------------------------------------------------------------------------


@dataclass
class Blocking:
    """Runs `body` on a thread, which is expected to block in it."""

    body: Callable[[], object]
    error: BaseException | None = None
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.body()
        except BaseException as error:
            self.error = error

    def blocks(self) -> bool:
        quiesce()
        return self._thread.is_alive()

    def join(self) -> None:
        """It returns now, within half a minute on any machine; raises what it raised."""
        self._thread.join(30)
        assert not self._thread.is_alive(), "still blocked"
        if self.error is not None:
            raise self.error


def quiesce() -> None:
    """Return when all that can run without the calling thread has run.

    What has not happened by then is held up, and not merely late.
    """
    quiet = 0
    while quiet < 5:
        quiet = quiet + 1 if _others_sleep() else 0
        os.sched_yield()


def is_reached(event: BurstEvent) -> bool:
    """Whether it is, once all that can run has run. A driver may be so late that only the question
    makes it do the work, so it is asked twice."""
    quiesce()
    event.query()
    quiesce()
    return event.query()


def thread_state(task: Path) -> str:
    """The kernel's letter for what a thread does; "S" if it sleeps."""
    return (task / "stat").read_text().rpartition(") ")[2][0]


def _others_sleep() -> bool:
    own = str(threading.get_native_id())
    for task in Path("/proc/self/task").iterdir():
        try:
            if task.name != own and thread_state(task) != "S":
                return False
        except (FileNotFoundError, ProcessLookupError):
            pass  # It has ended meanwhile.
    return True
