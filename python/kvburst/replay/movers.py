"""What a cache needs from whoever moves its pages: `ByteMover` does it over a `BurstController`,
`PlanMover` takes the same pages from the same free lists and moves nothing.

Here pages are page ids, in lists; the library itself deals in slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from kvburst._core import BurstError, HostDevice
from kvburst.acks import AckQueue
from kvburst.controller import BurstController
from kvburst.page_allocator import PageAllocator
from kvburst.pools import Pool
from kvburst.replay.burst_log import DIRECTIONS, BurstLog
from kvburst.replay.tiers import TierSizes
from kvburst.timeline import SCHEDULER, FlightRecorder


class Mover(ABC):
    """Hands out the pages of both tiers and moves pages between them; logs every burst.

    The device's free list is last in, first out, the host's first in, first out, as in SGLang.
    Asking for more pages than are free is a mistake of the caller.
    """

    def __init__(self, sizes: TierSizes, log: BurstLog) -> None:
        self._page_size = sizes.page_size
        self._device_allocator = PageAllocator(
            name="device", pages=sizes.device_pages, page_size=sizes.page_size, order="lifo"
        )
        self._host_allocator = PageAllocator(
            name="host", pages=sizes.host_pages, page_size=sizes.page_size, order="fifo"
        )
        self._offsets = torch.arange(sizes.page_size)
        self._log = log
        self._loading: tuple[list[int], list[int]] = ([], [])

    @property
    def free_device_pages(self) -> int:
        return self._device_allocator.available_pages

    @property
    def free_host_pages(self) -> int:
        return self._host_allocator.available_pages

    def take_device(self, pages: int) -> list[int]:
        return self._pages(self._device_allocator.alloc(pages * self._page_size))

    def free_device(self, pages: Sequence[int]) -> None:
        self._device_allocator.free(self._slots(pages))

    def free_host(self, pages: Sequence[int]) -> None:
        self._host_allocator.free(self._slots(pages))

    def write(self, device: Sequence[int]) -> list[int]:
        """Starts a backup and returns the host pages that it goes to."""
        host = self._pages(self._write(self._slots(device)))
        self._log.add("backup", device, host)
        return host

    def load(self, host: Sequence[int]) -> list[int]:
        """Queues a load and returns the device pages that it will go to."""
        device = self._pages(self._load(self._slots(host)))
        self._loading[0].extend(device)
        self._loading[1].extend(host)
        return device

    def start_loading(self) -> None:
        """All queued loads leave as one burst."""
        if self._loading[0]:
            self._start_loading()
            self._log.add("load", *self._loading)
            self._loading = ([], [])

    def stop(self) -> None:
        """Waits for everything under way."""
        self.finish_loads()
        self.finish_backups()

    @property
    @abstractmethod
    def copies_issued(self) -> int:
        """Of all bursts so far."""

    @abstractmethod
    def finish_loads(self) -> None:
        """Blocks until what was loaded is in place."""

    @abstractmethod
    def finish_backups(self) -> None:
        """Blocks until what was written is in place."""

    @abstractmethod
    def _write(self, device_slots: torch.Tensor) -> torch.Tensor | None: ...

    @abstractmethod
    def _load(self, host_slots: torch.Tensor) -> torch.Tensor | None: ...

    @abstractmethod
    def _start_loading(self) -> None: ...

    def _slots(self, pages: Sequence[int]) -> torch.Tensor:
        first = torch.tensor(pages, dtype=torch.int64) * self._page_size
        return (first[:, None] + self._offsets).reshape(-1)

    def _pages(self, slots: torch.Tensor | None) -> list[int]:
        assert slots is not None, "more pages were asked for than are free"
        pages: list[int] = (slots[:: self._page_size] // self._page_size).tolist()
        return pages


class PlanMover(Mover):
    """Moves nothing, and is always done. Its copies are those that were planned."""

    @property
    def copies_issued(self) -> int:
        return sum(self._log.counts(each).copies.groups_with_ramp for each in DIRECTIONS)

    def finish_loads(self) -> None:
        pass

    def finish_backups(self) -> None:
        pass

    def _write(self, device_slots: torch.Tensor) -> torch.Tensor | None:
        return self._host_allocator.alloc(device_slots.numel())

    def _load(self, host_slots: torch.Tensor) -> torch.Tensor | None:
        return self._device_allocator.alloc(host_slots.numel())

    def _start_loading(self) -> None:
        pass


class ByteMover(Mover):
    """Moves the bytes of ``pools``, through a `BurstController` and nothing else."""

    def __init__(self, pools: Sequence[Pool], sizes: TierSizes, log: BurstLog) -> None:
        super().__init__(sizes, log)
        self._device = HostDevice()
        self._controller = BurstController(
            pools,
            self._device,
            device_allocator=self._device_allocator,
            host_allocator=self._host_allocator,
            check="slots",
        )
        self._burst = -1
        self._recorder: FlightRecorder | None = None

    def record(self, title: str) -> FlightRecorder:
        """A recorder that sees all that goes on from now on."""
        self._recorder = FlightRecorder(self._device, title)
        self._recorder.watch(self._controller)
        return self._recorder

    @property
    def copies_issued(self) -> int:
        """Counted inside the device."""
        return sum(self._device.counters(each).copies for each in DIRECTIONS)

    def finish_loads(self) -> None:
        """As a forward does: layer by layer."""
        gate = self._controller.layer_done_counter
        gate.set_consumer(self._burst)
        with self._recorded(f"wait for load {self._burst}"):
            for layer in range(gate.num_layers):
                gate.wait_until(layer)
            self._device.current_stream().synchronize()
        self._burst = -1
        _retire(self._controller.ack_load_queue)

    def finish_backups(self) -> None:
        _retire(self._controller.ack_write_queue)

    def stop(self) -> None:
        self._controller.stop()

    def _recorded(self, name: str) -> AbstractContextManager[None]:
        """A span of this thread, if somebody wants it and there is a load."""
        if self._recorder is None or self._burst < 0:
            return nullcontext()
        return self._recorder.on_thread(SCHEDULER, name)

    def _write(self, device_slots: torch.Tensor) -> torch.Tensor | None:
        return self._controller.write(device_slots)

    def _load(self, host_slots: torch.Tensor) -> torch.Tensor | None:
        return self._controller.load(host_slots)

    def _start_loading(self) -> None:
        self._burst = self._controller.start_loading()


def _retire(queue: AckQueue) -> None:
    while queue:
        ack = queue.pop(0)
        if ack.error is not None:
            raise BurstError(ack.error)
