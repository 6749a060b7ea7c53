"""One direction of a controller: pages are collected, submitted as a burst, held until its ack."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from time import perf_counter_ns
from typing import TYPE_CHECKING, Literal

import torch

from kvburst._core import Burst, BurstIssuer, BurstPages, PageError, Stream
from kvburst._indices import StreamIndices, deferred_view, index_view
from kvburst.acks import Ack, AckQueue
from kvburst.page_allocator import PageAllocator
from kvburst.stats import BurstRecorder

if TYPE_CHECKING:
    from kvburst.exchange.exchange import Exchange

_TIERS: tuple[Literal["device", "host"], ...] = ("device", "host")


@dataclass(frozen=True)
class PoolTransfer:
    """Pages of one pool that differ from those of the operation it comes with.

    As many as the operation's; they are the caller's to keep until the ack is retired.
    """

    name: str
    """Of any pool but the first."""
    host_indices: torch.Tensor
    device_indices: torch.Tensor


class _Holds:
    """Reserves the pages of bursts on both tiers, from `load` or `write` until the ack retires."""

    def __init__(self, device_allocator: PageAllocator, host_allocator: PageAllocator) -> None:
        self._allocators = (device_allocator, host_allocator)
        # Resets of the allocators that the pages belong to: after another, they are nobody's.
        self._of_queued = (0, 0)
        self._of_burst: dict[int, tuple[int, int]] = {}
        # Retired while the issuer is stuck in them: copies may still come, and nothing says when
        # the last one has. Their pages stay held, and their index tensors alive.
        self._stuck: list[Ack] = []

    def hold(self, pages: BurstPages, first: int) -> None:
        """The pages collected from position `first` on; on both tiers or on none."""
        on_device, on_host = self._allocators
        device_reset = on_device.hold(pages, tier="device", first=first)
        try:
            host_reset = on_host.hold(pages, tier="host", first=first)
        except PageError:
            on_device.release(pages, tier="device", reset=device_reset, first=first)
            raise
        resets = (device_reset, host_reset)
        if first > 0 and resets != self._of_queued:
            on_device.release(pages, tier="device", reset=device_reset, first=first)
            on_host.release(pages, tier="host", reset=host_reset, first=first)
            raise PageError(
                f"{on_device.name} or {on_host.name}: was cleared while {first} pages are queued, "
                "reset the controller first"
            )
        self._of_queued = resets

    def submitted(self, burst: Burst) -> None:
        self._of_burst[burst.id] = self._of_queued

    def release_queued(self, pages: BurstPages, first: int) -> None:
        for tier, allocator, reset in zip(_TIERS, self._allocators, self._of_queued, strict=True):
            allocator.release(pages, tier=tier, reset=reset, first=first)

    def release(self, ack: Ack) -> None:
        resets = self._of_burst.pop(ack.burst.id)
        if ack.burst.abandoned:
            self._stuck.append(ack)
            return
        for tier, allocator, reset in zip(_TIERS, self._allocators, resets, strict=True):
            allocator.release(ack.burst, tier=tier, reset=reset)


def _checked_node_id(node_id: int) -> int:
    node_id = index(node_id)
    if not -(1 << 63) <= node_id < 1 << 63:
        raise PageError(f"node_id: {node_id} does not fit in 64 bits")
    return node_id


class BurstLane:
    """One direction: from the pages of single operations to the burst's retired ack."""

    def __init__(
        self,
        issuer: BurstIssuer,
        pages: BurstPages,
        direction: Literal["backup", "load"],
        pool_names: Sequence[str],
        device_allocator: PageAllocator,
        host_allocator: PageAllocator,
        recorder: BurstRecorder,
        memory_device: torch.device,
        exchange: "Exchange | None" = None,
    ) -> None:
        holds = _Holds(device_allocator, host_allocator)
        self.issuer = issuer
        self.recorder = recorder
        # Pages first: whatever goes wrong with numbers, they must come back.
        self.acks = AckQueue(holds.release, recorder.retired)
        self._pages = pages
        self._direction = direction
        self._pool_names = pool_names
        self._holds = holds
        self._memory_device = memory_device
        self._exchange = exchange
        self._fills = host_allocator if direction == "backup" else device_allocator
        self._node_ids: list[int] = []
        self._kept: list[torch.Tensor] = []
        self._pages_before_last = 0
        self._kept_before_last = 0
        self._caller_ns = 0
        self._alloc_ns = 0

    @property
    def queued_pages(self) -> int:
        return self._pages.num_pages

    def add(
        self,
        indices: torch.Tensor | StreamIndices,
        node_id: int,
        extra_pools: Sequence[PoolTransfer],
    ) -> torch.Tensor | None:
        """Queue pages of the tier that is read, together with new ones of the tier that is filled.

        Returns the new ones' slots, or None if that tier is full. Queues all of them or none.
        """
        begin = perf_counter_ns()
        node_id = _checked_node_id(node_id)
        name = "device_indices" if self._direction == "backup" else "host_indices"
        deferred = isinstance(indices, StreamIndices)
        tensor = indices.indices if isinstance(indices, StreamIndices) else indices
        slots = tensor.numel()
        if slots % self._fills.page_size != 0:
            raise PageError(
                f"{name}: {slots} slots is not a multiple of page_size {self._fills.page_size}"
            )
        allocating = perf_counter_ns()
        new = self._fills.alloc(slots)
        allocated = perf_counter_ns()
        if new is None:
            return None
        self._pages_before_last = self._pages.num_pages
        self._kept_before_last = len(self._kept)
        try:
            if self._direction == "load":
                if deferred:
                    raise PageError(f"{name}: are read at once, they cannot be StreamIndices")
                self._append(new, tensor, extra_pools)
            elif deferred or tensor.device.type != "cpu":
                if tensor.device != self._memory_device:
                    raise PageError(
                        f"{name}: on device {tensor.device}, must be on the pools' "
                        f"{self._memory_device}"
                    )
                self._append_deferred(tensor, new, extra_pools)
            else:
                self._append(tensor, new, extra_pools)
            self._holds.hold(self._pages, self._pages_before_last)
        except BaseException:
            self._pages.truncate(self._pages_before_last)
            del self._kept[self._kept_before_last :]
            self._fills.undo_alloc(new)
            raise
        if self._pages.num_pages > self._pages_before_last:
            self._node_ids.append(node_id)
        self._alloc_ns += allocated - allocating
        self._caller_ns += perf_counter_ns() - begin - (allocated - allocating)
        return new

    def _append(
        self,
        device_indices: torch.Tensor,
        host_indices: torch.Tensor,
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
        self._pages.append(
            device=index_view("device_indices", device_indices),
            host=index_view("host_indices", host_indices),
            own=own,
        )

    def _append_deferred(
        self,
        device_indices: torch.Tensor,
        host_indices: torch.Tensor,
        extra_pools: Sequence[PoolTransfer],
    ) -> None:
        if extra_pools:
            raise PageError(
                f"{extra_pools[0].name}: device_indices lie on the device, so no pool can have "
                "pages of its own"
            )
        self._pages.append_deferred(
            device=deferred_view("device_indices", device_indices),
            host=index_view("host_indices", host_indices),
        )
        self._kept.append(device_indices)

    def undo_add(self, new: torch.Tensor) -> None:
        """Undo the last `add`, which returned `new`, before it is submitted."""
        if self._pages.num_pages > self._pages_before_last:
            self._holds.release_queued(self._pages, self._pages_before_last)
            self._pages.truncate(self._pages_before_last)
            self._node_ids.pop()
        del self._kept[self._kept_before_last :]
        self._fills.undo_alloc(new)

    def submit(self, stream: Stream, fence: Stream | None, page_size: int) -> Burst | None:
        """Hand what is queued over as one burst; None if nothing is."""
        begin = perf_counter_ns()
        burst = self.issuer.submit(self._pages, self._node_ids, stream=stream, fence=fence)
        if burst is None:
            return None
        self._holds.submitted(burst)
        exchanged = None
        if self._exchange is not None:
            exchanged = self._exchange.begin(burst, stream, fence)
        tokens = burst.num_pages * page_size
        caller_ns = self._caller_ns + perf_counter_ns() - begin
        self.acks.append(
            Ack(
                burst,
                tokens,
                dict.fromkeys(self._pool_names, tokens),
                caller_us=caller_ns / 1000,
                alloc_us=self._alloc_ns / 1000,
                submitted_ns=begin,
                kept=tuple(self._kept),
                exchanged=exchanged,
            )
        )
        self._forget_queued()
        return burst

    def reset(self) -> None:
        """Drop what is queued, wait for what is under way, retire it."""
        self._holds.release_queued(self._pages, 0)
        self._pages.truncate(0)
        self._forget_queued()
        self.issuer.drain()
        self.acks.clear()

    def _forget_queued(self) -> None:
        self._node_ids = []
        self._kept = []
        self._caller_ns = self._alloc_ns = 0
