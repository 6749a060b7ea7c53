"""Schedules bursts and keeps their acks, in the shape of SGLang's `HiCacheController`."""

import weakref
from collections.abc import Sequence
from time import monotonic
from typing import Literal

import torch

from kvburst._core import (
    BurstError,
    BurstIssuer,
    BurstPages,
    Device,
    KVBurstError,
    LayerGate,
    LayoutError,
    PlanOptions,
    Stream,
)
from kvburst._indices import StreamIndices
from kvburst.acks import Ack, AckQueue
from kvburst.agreement import AckCounter, Agreement
from kvburst.burst_lane import BurstLane, PoolTransfer
from kvburst.cuda import memory_device
from kvburst.exchange.primitive import ExchangeStats
from kvburst.exchange.shard import RankShard
from kvburst.layer_done import LayerDoneCounter
from kvburst.page_allocator import PageAllocator
from kvburst.pools import Pool
from kvburst.stats import BurstRecorder, ControllerStats

# How long an interpreter that exits waits for the threads of a controller.
_FAREWELL_SECONDS = 4.0


def _stop(issuers: Sequence[BurstIssuer], timeout: float) -> bool:
    """Within `timeout` seconds for all of them; whether every thread has ended."""
    deadline = monotonic() + timeout
    ended = [issuer.stop(max(0.0, deadline - monotonic())) for issuer in issuers]
    return all(ended)


class BurstController:
    """Moves pages between the tiers in bursts, for a cache that decides which.

    `write` and `load` allocate on the other tier and return its slots. A `write` leaves at once;
    loads wait, and leave together as one burst at `start_loading`. All pools move the same pages,
    but for those given their own (`PoolTransfer`). A forward waits for a load layer by layer
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
    shard: the ranks that share the host tier, of which this one keeps its own layers only; the rest
        of a load it gets from the others (`kvburst.exchange`). All of them make the same calls.
    agreement: where several ranks keep the same cache: `poll` then retires what is complete on
        every rank. Every rank creates its controller at the same point. With `shard` every round
        also verifies that all ranks have loaded the same host pages.

    `load_fence_stream` and `write_fence_stream` may be set to the stream that forwards run on: a
    burst is then ordered behind all that is on it at submission as well. Without that, a load may
    overwrite pages that a forward launched on another stream than the current one still writes.

    All methods belong to the scheduler thread. Index tensors are int32 or int64, one token slot an
    element, whole pages. Those on the CPU are copied, and may be reused or freed as soon as a call
    returns; bad ones raise PageError, and nothing has moved or been allocated. (For indices that a
    stream is still to write see `StreamIndices`.) A device that fails does not raise here: the
    burst's ack carries the error, and whoever waits for its layers gets it. The pools' tensors are
    kept alive; a controller that is dropped waits for its copies, some seconds at most.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        device: Device,
        *,
        device_allocator: PageAllocator,
        host_allocator: PageAllocator,
        options: PlanOptions | None = None,
        check: Literal["pages", "slots"] = "pages",
        gate_slots: int = 3,
        mode: Literal["thread", "inline"] = "thread",
        write_policy: Literal["write_through", "write_back"] = "write_through",
        cpus: Sequence[int] = (),
        shard: RankShard | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        if not pools:
            raise LayoutError("pools: 0 pools, at least 1 is needed")
        self.pools = tuple(pools)
        self.device = device
        self.device_allocator = device_allocator
        self.host_allocator = host_allocator
        self._check_pools()
        self.page_size = self._common_page_size()
        self._check_capacities()

        options = PlanOptions() if options is None else options
        layouts = [pool.layout for pool in pools]
        self._gate = LayerGate(device, layouts, slots=gate_slots)
        self._exchange = None if shard is None else shard.open(self.pools, device, self._gate, mode)

        def lane(
            direction: Literal["backup", "load"],
            gate: LayerGate | None,
            mode: Literal["thread", "inline"],
        ) -> BurstLane:
            return BurstLane(
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
                direction,
                [pool.name for pool in pools],
                device_allocator,
                host_allocator,
                # What a forward waits for in an exchange is not the gate's to measure.
                BurstRecorder(gate if mode == "thread" and self._exchange is None else None),
                self.pools[0].device.layers[0].device,
                self._exchange if direction == "load" else None,
            )

        if write_policy not in ("write_through", "write_back"):
            raise LayoutError(
                f"write_policy: {write_policy!r} must be 'write_through' or 'write_back'"
            )
        self._backups = lane("backup", None, "inline" if write_policy == "write_back" else mode)
        self._loads = lane("load", self._gate, mode)
        self._issuers = (self._backups.issuer, self._loads.issuer)
        self.layer_done_counter = (
            LayerDoneCounter(self._gate, device)
            if self._exchange is None
            else self._exchange.layer_done_counter()
        )
        self.load_fence_stream: Stream | None = None
        self.write_fence_stream: Stream | None = None
        # Threads end before the interpreter does, also if nobody calls `stop`.
        weakref.finalize(self, _stop, self._issuers, _FAREWELL_SECONDS)
        if agreement is not None and self._exchange is not None:
            agreement = self._exchange.verified_by(agreement)
        queues = (self._backups.acks, self._loads.acks)
        self._reducer = (
            None
            if agreement is None
            else agreement.reducer(
                [AckCounter("backups", queues[0]), AckCounter("loads", queues[1])],
                idle=lambda: not any(queues),
            )
        )

    def _check_pools(self) -> None:
        names = [pool.name for pool in self.pools]
        for pool in self.pools:
            if names.count(pool.name) > 1:
                raise LayoutError(f"pools: {names.count(pool.name)} pools are named '{pool.name}'")
            memory, needed = pool.device.layers[0].device, memory_device(self.device)
            if memory != needed:
                raise LayoutError(
                    f"pool '{pool.name}': its layers are on {memory}, the device "
                    f"'{self.device.name}' copies from and to tensors on {needed}"
                )

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
        issuer; wrong ones then fail the burst, and where backups are issued inline this call blocks
        until the stream has written them. A submission that raises leaves nothing behind.
        """
        host_indices = self._backups.add(device_indices, node_id, extra_pools)
        if host_indices is not None:
            try:
                self.start_writing()
            except KVBurstError:
                self._backups.undo_add(host_indices)
                raise
        return host_indices

    def start_writing(self) -> None:
        """Submit queued backups as one burst, behind what is on the current stream.

        `write` has done so already: this is here because SGLang's trees call it, and does nothing.
        """
        self._backups.submit(self.device.current_stream(), self.write_fence_stream, self.page_size)

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
        The pages must hold what is to be loaded: of a backup whose ack is not retired, only once
        the current stream waits for it (`ack.finish_event.wait()`).
        """
        return self._loads.add(host_indices, node_id, extra_pools)

    def start_loading(self) -> int:
        """Submit queued loads as one burst, behind what is on the current stream.

        Returns its id, for `layer_done_counter`, or -1 if nothing is queued. Blocks while all gate
        slots are taken by loads that still copy; `has_free_load_back_slot` says whether it would on
        any rank.
        """
        if self._exchange is not None and self._loads.queued_pages:
            self._exchange.make_room(self.layer_done_counter.next_id)
        burst = self._loads.submit(
            self.device.current_stream(), self.load_fence_stream, self.page_size
        )
        if burst is None:
            return -1
        self.layer_done_counter.submitted(burst.id)
        return burst.id

    def is_load_back_event_done(self, burst_id: int) -> bool:
        """Whether all of a load is in place; true for a negative id.

        Raises BurstError if the load failed.
        """
        gate = self._gate if self._exchange is None else self._exchange
        return burst_id < 0 or gate.is_done(burst_id)

    def has_free_load_back_slot(self) -> bool:
        """Whether another load may be started; the same on every rank.

        Counts acks, which every rank retires alike, and never local events.
        """
        if len(self.ack_load_queue) < self.layer_done_counter.num_counters:
            return True
        if self._exchange is not None:
            # Loads that no forward has come for must not stay for ever.
            self._exchange.flush()
        return False

    # --- acks ------------------------------------------------------------------------------

    @property
    def ack_write_queue(self) -> AckQueue:
        return self._backups.acks

    @property
    def ack_load_queue(self) -> AckQueue:
        return self._loads.acks

    def poll(self) -> list[Ack]:
        """Retire the acks of complete bursts, oldest first, backups before loads.

        Never blocks, unless ranks agree: every rank then calls this at the same points, waits for
        the others as its transport does, and retires what is complete on all of them. A burst that
        failed on one rank raises AgreementError on every rank, once, before its ack is retired;
        polling again goes on. `ack_write_queue.clear()` on every rank, to flush before evicting,
        needs no agreement.
        """
        if self._reducer is None:
            return self.ack_write_queue.retire_complete() + self.ack_load_queue.retire_complete()
        backups, loads = self._reducer.collect()
        retired = self.ack_write_queue.retire(backups) + self.ack_load_queue.retire(loads)
        self._reducer.issue()
        return retired

    @property
    def loaded_digest(self) -> int:
        """62 bits from the host pages of every sharded load so far; 0 where no tier is shared.

        The same on all ranks, or they have not loaded the same pages.
        """
        return 0 if self._exchange is None else self._exchange.loaded_digest

    @property
    def exchange_stats(self) -> ExchangeStats | None:
        """What the ranks of a shared tier have sent each other; None where no tier is shared."""
        return None if self._exchange is None else self._exchange.stats

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

        A sharded load is exchanged first, so every rank must call it. Raises BurstError if a thread
        was left behind by `stop`.
        """
        if self._exchange is not None:
            self._exchange.drain()
        for issuer in self._issuers:
            issuer.drain()

    def reset(self) -> None:
        """Forget what is queued, wait for what is under way and retire it. Blocks.

        Page ownership is untouched: what `load` allocated for queued pages is still the caller's to
        free. Where ranks agree, every rank resets at the same point. Raises BurstError if a thread
        was left behind by `stop`.
        """
        self._backups.reset()
        self._loads.reset()
        self.layer_done_counter.reset()
        if self._reducer is not None:
            self._reducer.reset()

    def stop(self, timeout: float = 10.0) -> None:
        """End the threads once what is submitted is issued, within `timeout` seconds.

        Does not wait for the copies: `drain` does. Where ranks agree in pipeline stages it waits
        until the next stage has the numbers of the last `poll`, at most for the group's timeout.
        After that bursts are issued inline. Raises BurstError if a thread is stuck in the driver
        for longer: what is not issued has then failed, and submissions raise. What no forward has
        asked for of a sharded load is exchanged, and BurstError raised if other ranks do not come
        for it in time. May be called again.
        """
        if not timeout >= 0:
            raise LayoutError(f"timeout: {timeout} seconds must be at least 0")
        deadline = monotonic() + timeout
        ended = _stop(self._issuers, timeout)
        sent = self._exchange is None or self._exchange.stop(max(0.0, deadline - monotonic()))
        if not ended:
            raise BurstError(
                f"stop: an issuer is still stuck in the driver after {timeout} s, it is left behind"
            )
        if not sent:
            raise BurstError(
                f"stop: after {timeout} s other ranks have not come for the rest of a sharded load"
            )
        if self._reducer is not None:
            self._reducer.hand_over()

    def stats(self) -> ControllerStats:
        """What the bursts retired so far took."""
        return ControllerStats(
            loads=self._loads.recorder.stats(),
            backups=self._backups.recorder.stats(),
            agreement=None if self._reducer is None else self._reducer.stats(),
        )
