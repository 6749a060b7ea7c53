"""Schedules bursts and keeps their acks, in the shape of SGLang's `HiCacheController`."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter_ns
from typing import Literal

import torch

from kvburst._core import (
    Burst,
    BurstError,
    BurstIssuer,
    BurstPages,
    HostDevice,
    LayerGate,
    LayoutError,
    PageError,
    PlanOptions,
    Stream,
)
from kvburst._indices import StreamIndices, deferred_view, index_view
from kvburst.acks import Ack, AckQueue
from kvburst.layer_done import LayerDoneCounter
from kvburst.page_allocator import PageAllocator
from kvburst.pools import Pool
from kvburst.stats import BurstRecorder, ControllerStats

# How long an interpreter that exits waits for the threads of a controller.
_FAREWELL_SECONDS = 4.0


@dataclass(frozen=True)
class PoolTransfer:
    """Pages of one pool that differ from those of the operation it comes with.

    As many as the operation's; they are the caller's to keep until the ack is retired.
    """

    name: str
    """Of any pool but the first."""
    host_indices: torch.Tensor
    device_indices: torch.Tensor


_TIERS: tuple[Literal["device", "host"], ...] = ("device", "host")


class _Holds:
    """Reserves the pages of bursts on both tiers, from `load` or `write` until the ack retires."""

    def __init__(self, device_allocator: PageAllocator, host_allocator: PageAllocator) -> None:
        self._allocators = (device_allocator, host_allocator)
        # Resets of the allocators that the pages belong to: after another, they are nobody's.
        self._of_queued = (0, 0)
        self._of_burst: dict[int, tuple[int, int]] = {}

    def hold(self, pages: BurstPages, first: int) -> None:
        """The pages collected from position `first` on; on both tiers or on none."""
        on_device, on_host = self._allocators
        device_reset = on_device.hold(pages, tier="device", first=first)
        try:
            self._of_queued = (device_reset, on_host.hold(pages, tier="host", first=first))
        except PageError:
            on_device.release(pages, tier="device", reset=device_reset, first=first)
            raise

    def submitted(self, burst: Burst) -> None:
        self._of_burst[burst.id] = self._of_queued

    def release_queued(self, pages: BurstPages) -> None:
        for tier, allocator, reset in zip(_TIERS, self._allocators, self._of_queued, strict=True):
            allocator.release(pages, tier=tier, reset=reset, first=0)

    def release(self, ack: Ack) -> None:
        resets = self._of_burst.pop(ack.burst.id)
        if ack.burst.abandoned:
            return  # Copies may still come, and nothing says when the last one has.
        for tier, allocator, reset in zip(_TIERS, self._allocators, resets, strict=True):
            allocator.release(ack.burst, tier=tier, reset=reset)


class _Lane:
    """One direction: pages are collected, submitted as a burst, and held until its ack retires."""

    def __init__(
        self,
        issuer: BurstIssuer,
        pages: BurstPages,
        pool_names: Sequence[str],
        holds: _Holds,
        recorder: BurstRecorder,
    ) -> None:
        self.issuer = issuer
        self.acks = AckQueue(recorder.retired, holds.release)
        self.recorder = recorder
        self._pages = pages
        self._pool_names = pool_names
        self._holds = holds
        self._node_ids: list[int] = []
        self._kept: list[torch.Tensor] = []
        self._caller_ns = 0
        self._alloc_ns = 0

    @property
    def queued_pages(self) -> int:
        return self._pages.num_pages

    def allocate_and_add(
        self,
        allocator: PageAllocator,
        name: str,
        indices: torch.Tensor | StreamIndices,
        node_id: int,
        extra_pools: Sequence[PoolTransfer],
    ) -> torch.Tensor | None:
        """Queue pages that exist on one tier together with new ones on the other.

        Returns the new ones' slots, or None if that tier is full. Queues all of them or none.
        """
        begin = perf_counter_ns()
        tensor = indices.indices if isinstance(indices, StreamIndices) else indices
        slots = tensor.numel()
        if slots % allocator.page_size != 0:
            raise PageError(
                f"{name}: {slots} slots is not a multiple of page_size {allocator.page_size}"
            )
        allocating = perf_counter_ns()
        new = allocator.alloc(slots)
        allocated = perf_counter_ns()
        if new is None:
            return None
        try:
            if name == "host_indices":
                self._add(new, tensor, node_id, extra_pools)
            elif isinstance(indices, StreamIndices) or tensor.device.type != "cpu":
                self._add_deferred(tensor, new, node_id, extra_pools)
            else:
                self._add(tensor, new, node_id, extra_pools)
        except PageError:
            allocator.free(new)
            raise
        self._alloc_ns += allocated - allocating
        self._caller_ns += perf_counter_ns() - begin - (allocated - allocating)
        return new

    def _add(
        self,
        device_indices: torch.Tensor,
        host_indices: torch.Tensor,
        node_id: int,
        extra_pools: Sequence[PoolTransfer],
    ) -> None:
        own = [
            (
                extra.name,
                index_view(f"{extra.name} device_indices", extra.device_indices),
                index_view(f"{extra.name} host_indices", extra.host_indices),
            )
            for extra in extra_pools
        ]
        before = self._pages.num_pages
        added = self._pages.append(
            device=index_view("device_indices", device_indices),
            host=index_view("host_indices", host_indices),
            own=own,
        )
        self._added(before, added, node_id)

    def _add_deferred(
        self,
        device_indices: torch.Tensor,
        host_indices: torch.Tensor,
        node_id: int,
        extra_pools: Sequence[PoolTransfer],
    ) -> None:
        if extra_pools:
            raise PageError(
                f"{extra_pools[0].name}: device_indices lie on the device, so no pool can have "
                "pages of its own"
            )
        before = self._pages.num_pages
        added = self._pages.append_deferred(
            device=deferred_view("device_indices", device_indices),
            host=index_view("host_indices", host_indices),
        )
        self._added(before, added, node_id)
        self._kept.append(device_indices)

    def _added(self, before: int, added: int, node_id: int) -> None:
        if added == 0:
            return
        try:
            self._holds.hold(self._pages, before)
        except PageError:
            self._pages.truncate(before)
            raise
        self._node_ids.append(node_id)

    def submit(self, device: HostDevice, page_size: int, fence: Stream | None) -> Burst | None:
        """Hand what is queued over as one burst; None if nothing is."""
        begin = perf_counter_ns()
        burst = self.issuer.submit(
            self._pages, self._node_ids, stream=device.current_stream(), fence=fence
        )
        if burst is None:
            return None
        self._node_ids = []
        self._holds.submitted(burst)
        tokens = burst.num_pages * page_size
        caller_ns = self._caller_ns + perf_counter_ns() - begin
        self.acks.append(
            Ack(
                burst,
                tokens,
                dict.fromkeys(self._pool_names, tokens),
                caller_us=caller_ns / 1000,
                alloc_us=self._alloc_ns / 1000,
                kept=tuple(self._kept),
            )
        )
        self._kept = []
        self._caller_ns = self._alloc_ns = 0
        return burst

    def reset(self) -> None:
        """Drop what is queued, wait for what is under way, retire it."""
        self._holds.release_queued(self._pages)
        self._pages.truncate(0)
        self._node_ids = []
        self._kept = []
        self._caller_ns = self._alloc_ns = 0
        self.issuer.drain()
        self.acks.clear()


def _stop(issuers: Sequence[BurstIssuer], timeout: float) -> bool:
    """Within `timeout` seconds for all of them; whether every thread has ended."""
    deadline = monotonic() + timeout
    ended = [issuer.stop(max(0.0, deadline - monotonic())) for issuer in issuers]
    return all(ended)


class BurstController:
    """Moves pages between the tiers in bursts, for a cache that decides which.

    `write` and `load` allocate on the other tier and return its slots; what they queue leaves as
    one burst at `start_writing` and `start_loading`. All pools move the same pages, but for those
    given their own (`PoolTransfer`). A forward waits for a load layer by layer
    (`layer_done_counter`), the cache for its ack. Until an ack is retired, the burst's pages on
    both tiers stay reserved, even if their owner frees them.

    pools: the first is the one whose pages `write` and `load` are given; all of one page size.
    device: where streams, events and copies come from.
    device_allocator, host_allocator: the tiers' pages; shared with the cache, of the scheduler
        thread.
    options: how bursts are cut into copies.
    check: "slots" reads every index, "pages" only the first of each page.
    gate_slots: loads that may be under way at a time.
    mode: "thread" hands bursts to a native thread a direction, and the scheduler thread goes on;
        "inline" issues them on the scheduler thread.
    write_policy: under "write_back" backups are issued inline whatever the mode, since whoever
        evicts waits for them.
    cpus: processors that the threads may run on; none named: any.

    `load_fence_stream` and `write_fence_stream` may be set to the stream that forwards run on: a
    burst is then ordered behind all that is on it at submission as well. Without that, a load may
    overwrite pages that a forward launched on another stream than the current one still writes.

    All methods belong to the scheduler thread. Index tensors are CPU tensors of int32 or int64, one
    token slot an element, whole pages; they are copied, and may be reused or freed as soon as a
    call returns. Bad ones raise PageError, and nothing has moved or been allocated. The pools'
    tensors are kept alive; a controller that is dropped waits for its copies, some seconds at most.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        device: HostDevice,
        *,
        device_allocator: PageAllocator,
        host_allocator: PageAllocator,
        options: PlanOptions | None = None,
        check: Literal["pages", "slots"] = "pages",
        gate_slots: int = 3,
        mode: Literal["thread", "inline"] = "thread",
        write_policy: Literal["write_through", "write_back"] = "write_through",
        cpus: Sequence[int] = (),
    ) -> None:
        if not pools:
            raise LayoutError("pools: 0 pools, at least 1 is needed")
        self.pools = tuple(pools)
        self.device = device
        self.device_allocator = device_allocator
        self.host_allocator = host_allocator
        self.page_size = self._common_page_size()
        self._check_capacities()

        options = PlanOptions() if options is None else options
        layouts = [pool.layout for pool in pools]
        self._gate = LayerGate(device, layouts, slots=gate_slots)

        def lane(
            direction: Literal["backup", "load"],
            gate: LayerGate | None,
            mode: Literal["thread", "inline"],
        ) -> _Lane:
            return _Lane(
                BurstIssuer(
                    device,
                    layouts,
                    direction=direction,
                    gate=gate,
                    options=options,
                    mode=mode,
                    cpus=cpus,
                    memory=self.pools,
                ),
                BurstPages(layouts, direction=direction, page_size=self.page_size, check=check),
                [pool.name for pool in pools],
                _Holds(device_allocator, host_allocator),
                BurstRecorder(gate if mode == "thread" else None),
            )

        if write_policy not in ("write_through", "write_back"):
            raise LayoutError(
                f"write_policy: {write_policy!r} must be 'write_through' or 'write_back'"
            )
        self._backups = lane("backup", None, "inline" if write_policy == "write_back" else mode)
        self._loads = lane("load", self._gate, mode)
        self._issuers = (self._backups.issuer, self._loads.issuer)
        self.layer_done_counter = LayerDoneCounter(self._gate, device)
        self.load_fence_stream: Stream | None = None
        self.write_fence_stream: Stream | None = None
        # Threads end before the interpreter does, also if nobody calls `stop`.
        weakref.finalize(self, _stop, self._issuers, _FAREWELL_SECONDS)

    def _common_page_size(self) -> int:
        page_size = self.pools[0].page_size
        sizes = [(f"pool '{pool.name}'", pool.page_size) for pool in self.pools]
        sizes += [(a.name, a.page_size) for a in (self.device_allocator, self.host_allocator)]
        for name, size in sizes:
            if size != page_size:
                raise LayoutError(
                    f"{name}: page_size {size} must be {page_size}, that of "
                    f"pool '{self.pools[0].name}'"
                )
        return page_size

    def _check_capacities(self) -> None:
        for pool in self.pools:
            for allocator, pages in (
                (self.device_allocator, pool.layout.device_pages),
                (self.host_allocator, pool.layout.host_pages),
            ):
                if allocator.pages > pages:
                    raise LayoutError(
                        f"{allocator.name}: {allocator.pages} pages, but pool '{pool.name}' "
                        f"has {pages}"
                    )

    # --- backups ---------------------------------------------------------------------------

    def write(
        self,
        device_indices: torch.Tensor | StreamIndices,
        priority: int | None = None,
        node_id: int = -1,
        extra_pools: Sequence[PoolTransfer] = (),
    ) -> torch.Tensor | None:
        """Back up pages, at once: returns their slots on the host, or None if it is full.

        `priority` is accepted for SGLang's sake: all that is queued leaves together. No pages: an
        empty tensor, no burst and no ack. Indices on a GPU, or `StreamIndices`, are read by the
        issuer; wrong ones then fail the burst.
        """
        host_indices = self._backups.allocate_and_add(
            self.host_allocator, "device_indices", device_indices, node_id, extra_pools
        )
        if host_indices is not None:
            self.start_writing()
        return host_indices

    def start_writing(self) -> None:
        """Submit queued backups as one burst, behind what is on the current stream."""
        self._backups.submit(self.device, self.page_size, self.write_fence_stream)

    # --- loads -----------------------------------------------------------------------------

    def load(
        self,
        host_indices: torch.Tensor,
        priority: int | None = None,
        node_id: int = -1,
        extra_pools: Sequence[PoolTransfer] = (),
    ) -> torch.Tensor | None:
        """Queue pages to load: returns their slots on the device, or None if it is full.

        They are on their way after `start_loading`. No pages: an empty tensor, and nothing queued.
        """
        return self._loads.allocate_and_add(
            self.device_allocator, "host_indices", host_indices, node_id, extra_pools
        )

    def start_loading(self) -> int:
        """Submit queued loads as one burst, behind what is on the current stream.

        Returns its id, for `layer_done_counter`, or -1 if nothing is queued. Blocks while all gate
        slots are taken by loads that still copy; `has_free_load_back_slot` says whether it would on
        any rank.
        """
        if self._loads.queued_pages == 0:
            return -1
        burst_id = self.layer_done_counter.update_producer()
        burst = self._loads.submit(self.device, self.page_size, self.load_fence_stream)
        assert burst is not None
        assert burst.id == burst_id
        self.layer_done_counter.submitted(burst_id)
        return burst_id

    def is_load_back_event_done(self, burst_id: int) -> bool:
        """Whether all of a load is in place; true for a negative id.

        Raises BurstError if the load failed.
        """
        return burst_id < 0 or self._gate.is_done(burst_id)

    def has_free_load_back_slot(self) -> bool:
        """Whether another load may be started; the same on every rank.

        Counts acks, which every rank retires alike, and never local events.
        """
        return len(self.ack_load_queue) < self.layer_done_counter.num_counters

    # --- acks ------------------------------------------------------------------------------

    @property
    def ack_write_queue(self) -> AckQueue:
        return self._backups.acks

    @property
    def ack_load_queue(self) -> AckQueue:
        return self._loads.acks

    def poll(self) -> list[Ack]:
        """Retire the acks of complete bursts, oldest first, backups before loads; never blocks."""
        return self.ack_write_queue.retire_complete() + self.ack_load_queue.retire_complete()

    def has_inflight_device_transfers(self) -> bool:
        """Whether queued or unretired transfers still use pages."""
        return bool(
            self._backups.queued_pages
            or self._loads.queued_pages
            or self.ack_write_queue
            or self.ack_load_queue
        )

    # --- lifecycle -------------------------------------------------------------------------

    def drain(self) -> None:
        """Block until every burst submitted so far is in place, on this rank.

        Raises BurstError if a thread was left behind by `stop`.
        """
        for issuer in self._issuers:
            issuer.drain()

    def reset(self) -> None:
        """Forget what is queued, wait for what is under way and retire it. Blocks.

        Page ownership is untouched: what `load` allocated for queued pages is still the caller's to
        free.
        """
        self._backups.reset()
        self._loads.reset()
        self.layer_done_counter.reset()

    def stop(self, timeout: float = 10.0) -> None:
        """End the threads once what is submitted is issued, within `timeout` seconds.

        After that bursts are issued inline. Raises BurstError if a thread is stuck in the driver
        for longer: what is not issued has then failed, and submissions raise. May be called again.
        """
        if not timeout >= 0:
            raise LayoutError(f"timeout: {timeout} seconds must be at least 0")
        if not _stop(self._issuers, timeout):
            raise BurstError(
                f"stop: an issuer is still stuck in the driver after {timeout} s, it is left behind"
            )

    def stats(self) -> ControllerStats:
        """What the bursts retired so far took."""
        return ControllerStats(
            loads=self._loads.recorder.stats(), backups=self._backups.recorder.stats()
        )
