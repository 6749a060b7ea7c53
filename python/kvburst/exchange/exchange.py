"""What both orders of exchange share: the loads under way, what ranks agree on, and the gate."""

import hashlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from kvburst._core import (
    Burst,
    BurstError,
    Device,
    KVBurstError,
    LayerGate,
    LayoutError,
    PageError,
    Stream,
)
from kvburst.agreement import Agreement
from kvburst.exchange.channel import Channel
from kvburst.exchange.load import ExchangedLoad
from kvburst.exchange.primitive import ExchangeStats, LayerBroadcast
from kvburst.layer_done import LayerDoneCounter
from kvburst.ownership import Ownership
from kvburst.pools import Pool

_logger = logging.getLogger("kvburst")

# Errors of loads whose gate slot has moved on; a forward that comes later has long been told.
_FAILURES_REMEMBERED = 1024
# Odd, so that no bit of an earlier load's digest is lost at once.
_DIGEST_STEP = 0x9E3779B97F4A7C15


class Exchange(ABC):
    """Stands where the layer gate does, for a controller whose pools hold only a rank's own layers.

    Every rank calls `begin`, `make_room`, `set_consumer`, `wait`, `flush` and `stop` in the same
    order, as ranks of one scheduler do. Any thread may call, one at a time gets through; `wait`
    is the forward's. A load whose ranks disagree, or whose copies failed on one of them, raises in
    `wait` and carries the error in its ack; nobody is left waiting for it. A rank that does not
    come ends the wait of the others after the channel's timeout, and the exchange with it: all
    later loads raise.

    device: where streams and events come from.
    gate: of this rank's own copies.
    capturing: whether the current stream is being captured into a graph.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        device: Device,
        gate: LayerGate,
        ownership: Ownership,
        channel: Channel,
        *,
        staging_bytes: int,
        capturing: Callable[[], bool],
    ) -> None:
        _check_pools(pools, ownership, channel)
        self.device = device
        self.channel = channel
        self._gate = gate
        self._ownership = ownership
        self._primitive = LayerBroadcast(pools, device, channel, staging_bytes)
        self._memory_device = pools[0].device.layers[0].device
        self._capturing = capturing
        self._lock = threading.RLock()
        # By id, in the order of submission; those whose gate slot has not moved on.
        self._loads: dict[int, ExchangedLoad] = {}
        self._newest = -1
        self._failures: dict[int, str] = {}
        self._dead: str | None = None
        self.loaded_digest = 0
        """62 bits from the host pages of every load so far, in order: the same on all ranks."""
        self._check_agreed(pools, staging_bytes)

    def _check_agreed(self, pools: Sequence[Pool], staging_bytes: int) -> None:
        """Whatever decides which bytes are sent when must be the same on all."""
        plan = [
            type(self).__name__,
            staging_bytes,
            self._ownership,
            self._gate.num_slots,
            [(pool.name, pool.device.page_bytes, pool.page_size) for pool in pools],
        ]
        digest = int.from_bytes(hashlib.blake2b(repr(plan).encode(), digest_size=7).digest(), "big")
        lowest, highest = self.channel.minimum([digest, -digest]).result()
        if lowest != -highest:
            raise LayoutError(
                "exchange: ranks differ in pools, page_size, ownership, gate_slots, staging_bytes "
                f"or order; this one has {plan}"
            )

    # --- loads -----------------------------------------------------------------------------

    def begin(
        self,
        burst: Burst,
        producer: Stream,
        fence: Stream | None,
        page_ids: torch.Tensor | None = None,
    ) -> ExchangedLoad:
        """Takes charge of a load that has just been submitted, behind `producer` and `fence`.

        `page_ids`: of a load whose indices lie on the device, its device pages there, int64 and
        contiguous, the same for all pools, in the order of submission, and written by then on
        `producer`. Kept until the load is over.
        """
        with self._lock:
            # Before the fences: they are on their way to the device behind them otherwise.
            if page_ids is None:
                pages = self._device_pages(burst)
            else:
                pages = self._checked(burst, page_ids)
            fences = []
            for stream in (producer, fence):
                if stream is not None:
                    fences.append(self.device.new_event())
                    fences[-1].record(stream)
            load = ExchangedLoad(
                burst,
                pages,
                tuple(fences),
                self.device.new_event(),
                self._flush_through,
            )
            self._loads[burst.id] = load
            self._newest = burst.id
            self._announce(load)
            self._begun(load)
            return load

    def _announce(self, load: ExchangedLoad) -> None:
        """Tells the other ranks what this one loads. Does not wait for what they say."""
        if self._dead is not None:
            load.fail(self._dead)
            return
        digest = load.burst.host_digest
        self.loaded_digest = (self.loaded_digest * _DIGEST_STEP + digest) % (1 << 62)
        try:
            load.plan = self.channel.minimum([digest, -digest])
        except BurstError as error:
            self._die(load, f"load {load.id}: {error}")

    def _device_pages(self, burst: Burst) -> tuple[torch.Tensor, ...]:
        pages = []
        for pool in range(len(self._ownership.pools)):
            ids = torch.empty(burst.num_pages, dtype=torch.int64)
            burst.copy_page_ids(pool, tier="device", out=ids.data_ptr())
            pages.append(ids.to(self._memory_device, non_blocking=True))
        return tuple(pages)

    def _checked(self, burst: Burst, page_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For each pool, which all move the same pages."""
        right = page_ids.shape == (burst.num_pages,) and page_ids.dtype == torch.int64
        # Kernels read them by their address.
        if not (right and page_ids.is_contiguous()):
            raise PageError(
                f"page_ids: {page_ids.dtype} of shape {tuple(page_ids.shape)}, strides"
                f" {page_ids.stride()}, must be torch.int64, one for each of {burst.num_pages}"
                " pages, contiguous"
            )
        return (page_ids,) * len(self._ownership.pools)

    @abstractmethod
    def _begun(self, load: ExchangedLoad) -> None:
        """The load has been submitted."""

    @abstractmethod
    def set_consumer(self, burst: int) -> None:
        """The calling thread launches a forward that waits for this load; negative: for none.

        The one before has ended: what it left is exchanged. Its stream is the current one.
        """

    def consume(self, burst: int) -> None:
        """`set_consumer`, unless that load is consumed already: for whoever waits for a load
        without having said so. Every rank must call it alike."""
        self.set_consumer(burst)

    @abstractmethod
    def _wait(self, load: ExchangedLoad, layer: int, stream: Stream) -> None: ...

    @abstractmethod
    def _flush(self, loads: Sequence[ExchangedLoad]) -> None:
        """Exchanges what is left of these, which are in order and the oldest."""

    def make_room(self, burst: int) -> None:
        """Before load `burst` takes its gate slot, exchanges what is left of the one that has it,
        and of those before: a forward that never runs holds up nobody."""
        with self._lock:
            leaving = [load for load in self._loads.values() if load.id <= burst - self.num_slots]
            self._flush(leaving)
            for load in leaving:
                load.synchronize()
                if load.error is not None:
                    self._failures[load.id] = load.error
                del self._loads[load.id]
            while len(self._failures) > _FAILURES_REMEMBERED:
                del self._failures[next(iter(self._failures))]

    def flush(self) -> None:
        """Exchanges all that has been submitted and not been asked for. Blocks as the channel
        does."""
        with self._lock:
            self._flush(list(self._loads.values()))

    def drain(self) -> None:
        """Blocks until all that has been submitted is in place, or has failed."""
        with self._lock:
            loads = list(self._loads.values())
            self._flush(loads)
        for load in loads:
            load.synchronize()

    def _flush_through(self, load: ExchangedLoad) -> None:
        with self._lock:
            self._flush([each for each in self._loads.values() if each.id <= load.id])

    def stop(self, timeout: float) -> bool:
        """Takes part in what is left, so that no other rank waits for this one; whether that was
        done within `timeout` seconds. After that it is still waited for, on a thread of its own and
        as long as the channel allows."""
        if self._all_over():
            return True
        rest = threading.Thread(target=self.flush, name="kvburst-flush", daemon=True)
        rest.start()
        rest.join(timeout)
        return not rest.is_alive() and self._all_over()

    def _all_over(self) -> bool:
        return all(load.all_sent or load.given_up for load in list(self._loads.values()))

    def verified_by(self, agreement: Agreement) -> Agreement:
        """The same, with what has been loaded so far in the state that must not differ."""

        def digest() -> int:
            return (agreement.digest() + self.loaded_digest) % (1 << 62)

        return replace(agreement, digest=digest)

    def layer_done_counter(self) -> "ExchangedLayerDoneCounter":
        return ExchangedLayerDoneCounter(self)

    @property
    def stats(self) -> ExchangeStats:
        return self._primitive.stats

    # --- as a gate -------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return self._gate.num_layers

    @property
    def num_slots(self) -> int:
        return self._gate.num_slots

    def wait(self, burst: int, layer: int, stream: Stream | None = None) -> None:
        """Orders `stream` behind the layer, every pool's part of it, wherever it comes from."""
        if not 0 <= layer < self.num_layers:
            raise LayoutError(
                f"layer: {layer} is out of range, the gate has {self.num_layers} layers"
            )
        with self._lock:
            load = self._find(burst)
            if load is None:
                return
            if self._capturing():
                raise BurstError(
                    f"load {burst}: layer {layer} cannot be exchanged on a stream that is being "
                    "captured; wait for it before the capture"
                )
            self._wait(load, layer, self.device.current_stream() if stream is None else stream)
            load.raise_if_failed()

    def wait_for_slot(self, burst: int) -> None:
        self.make_room(burst)
        self._gate.wait_for_slot(burst)

    def find(self, burst: int) -> ExchangedLoad | None:
        """None once its gate slot has moved on, and the load is complete."""
        with self._lock:
            if burst in self._failures:
                return None
            return self._find(burst)

    def is_done(self, burst: int) -> bool:
        """Whether all of a load is in place, on this rank. Raises BurstError if it failed."""
        with self._lock:
            load = self._find(burst)
        if load is None:
            return True
        load.raise_if_failed()
        return load.done()

    def _find(self, burst: int) -> ExchangedLoad | None:
        if burst < 0 or burst > self._newest:
            raise BurstError(
                f"load {burst}: was not submitted by start_loading (the newest is {self._newest}), "
                "so no rank sends its layers"
            )
        if burst in self._failures:
            raise BurstError(self._failures[burst])
        return self._loads.get(burst)

    # --- sending ---------------------------------------------------------------------------

    def _agree(self, load: ExchangedLoad) -> None:
        """Before anything is sent: do all ranks load the same? Blocks until all have said so."""
        assert load.plan is not None, "a load that was not announced has been given up"
        try:
            lowest, highest = load.plan.result()
        except BurstError as error:
            self._die(load, f"load {load.id}: {error}")
            return
        if lowest != -highest:
            load.fail(
                f"load {load.id}: ranks do not load the same host pages (digests from {lowest} to"
                f" {-highest}, rank {self.channel.rank} has {load.burst.host_digest}); nothing was"
                " exchanged"
            )

    def _send_layer(self, load: ExchangedLoad, layer: int, stream: Stream) -> None:
        for pool in range(len(self._ownership.pools)):
            if not self._primitive.has_layer(pool, layer):
                continue
            source = self._ownership.owner_of(pool, layer)
            if source == self.channel.rank:
                self._order_behind_copies(load, layer, stream)
            try:
                self._primitive.send(pool, layer, load.page_ids[pool], source, stream)
            except KVBurstError as error:
                self._die(load, f"load {load.id}: layer {layer}: {error}")
                return
        load.next_layer = layer + 1

    def _order_behind_copies(self, load: ExchangedLoad, layer: int, stream: Stream) -> None:
        # If they failed, the others are not to wait for ever: they get what is there, and then the
        # error that this rank's burst carries.
        with suppress(BurstError):
            self._gate.wait(load.id, layer, stream if self.channel.on_stream else None)

    def _order_behind_fences(self, load: ExchangedLoad, stream: Stream) -> None:
        for fence in load.fences:
            if self.channel.on_stream:
                stream.wait_event(fence)
            else:
                fence.synchronize()

    def _finish(self, load: ExchangedLoad, stream: Stream) -> None:
        """All that will be sent of it is."""
        load.finish.record(stream)
        load.finish_recorded = True
        if load.given_up:
            return
        rank = self.channel.ranks if load.burst.error is None else self.channel.rank
        try:
            load.sent(self.channel.minimum([rank]), self.channel.ranks)
        except BurstError as error:
            self._die(load, f"load {load.id}: {error}")

    def _die(self, load: ExchangedLoad, why: str) -> None:
        """The ranks are out of step: nothing can be exchanged any more."""
        _logger.error("%s; nothing more is exchanged", why)
        load.fail(why)
        self._dead = f"exchange: ended by an earlier error: {why}"
        # A copy: the thread of a side stream comes here without the lock.
        for other in list(self._loads.values()):
            if not other.all_sent:
                other.fail(self._dead)


class ExchangedLayerDoneCounter(LayerDoneCounter):
    """The gate as a forward sees it, where a layer may come from another rank."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, exchange.device)
        self._exchange = exchange

    def set_consumer(self, index: int) -> None:
        super().set_consumer(index)
        self._exchange.set_consumer(index)

    def reset(self) -> None:
        super().reset()
        self._exchange.set_consumer(-1)


def _check_pools(pools: Sequence[Pool], ownership: Ownership, channel: Channel) -> None:
    if ownership.ranks != channel.ranks:
        raise LayoutError(f"ownership: for {ownership.ranks} ranks, the group has {channel.ranks}")
    if len(ownership.pools) != len(pools):
        raise LayoutError(f"ownership: for {len(ownership.pools)} pools, there are {len(pools)}")
    for number, pool in enumerate(pools):
        if pool.device.layer_ids != ownership.pools[number]:
            raise LayoutError(
                f"pool {pool.name!r}: has layers {list(pool.device.layer_ids)}, the ownership"
                f" {list(ownership.pools[number])}"
            )
        own = ownership.layers_of(channel.rank, number)
        if pool.host.stored_layers != own:
            raise LayoutError(
                f"pool {pool.name!r}: its host tier stores layers"
                f" {list(pool.host.stored_layers)}, rank {channel.rank} owns {list(own)}"
            )
