"""The main job as an experiment: pages go to the host and come back while a forward runs.

Random pages are backed up, the device is scribbled over, and the pages are loaded back to other
places while a stand-in forward waits for each layer and takes a snapshot of it right after its
wait. At the end every byte is compared: of the snapshots, which is what a forward would have read;
of both tiers; and of pages that nobody was to touch. ``demo_report`` shows what came out.
"""

import dataclasses
import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvburst._core import (
    ComputeDevice,
    CopyLimits,
    HostDevice,
    KVBurstError,
    PlanOptions,
)
from kvburst.acks import Ack, AckQueue
from kvburst.agreement import Agreement, AgreementGroups
from kvburst.controller import BurstController
from kvburst.cuda import CudaDevice, memory_device, tier_memory
from kvburst.demo_flight import landing_events, new_recorder, record_forward
from kvburst.demo_forward import StandInForward
from kvburst.demo_options import DemoOptions, Groups, Mode
from kvburst.demo_result import DemoResult, Direction, Mismatch, Place, Span, Timeline, Transfer
from kvburst.exchange import Channel, RankShard
from kvburst.geometries import Geometry, geometry
from kvburst.host_memory import GIB, memory_budget
from kvburst.links import LINKS
from kvburst.ownership import Ownership
from kvburst.page_allocator import PageAllocator
from kvburst.pools import DevicePool, HostPool, Pool
from kvburst.timeline import Flight
from kvburst.watched_channel import WatchedChannel

SCRIBBLE = 0xAA
HOST_CANARY = 0xC5
# With a link model the time is modelled and only the bytes are real; rows this much smaller keep
# the machine's own memory from being slower than the link it plays, or from holding its cores.
MODELLED_ROW_SCALE = 128

# Told the name of the step that one unit of work belongs to, when that unit is done.
Tick = Callable[[str], None]


def num_ticks(options: DemoOptions) -> int:
    """How often ``Demo.run`` calls ``tick``."""
    return 2 * sum(len(pool.layer_ids) for pool in geometry(options.geometry).pools) + 4


def _alone() -> None:
    """There is nobody to wait for."""


@dataclass(frozen=True)
class Seat:
    """Which of several ranks a run is, and how it keeps step with the others.

    `channel`: to the ranks with which it shares its host tier; None: it keeps every layer itself.
    `groups`: the ranks that retire the same bursts; None: it retires its own when they are done.
    `together` returns once every rank has called it, `longest` the most of what they pass.
    """

    rank: int = 0
    channel: Channel | None = None
    groups: AgreementGroups | None = None
    together: Callable[[], None] = _alone
    longest: Callable[[float], float] = lambda mine: mine


class Demo:
    """One run, step by step: ``fill``, ``back_up``, ``rehearse``, ``scribble``,
    ``load_under_forward``, ``compare``, in this order and each once; ``run`` takes them all.

    ``sources`` are the device slots that are backed up, ``on_host`` and ``targets`` the slots where
    they went and came back to, ``held`` device slots that are somebody else's. Holds all memory of
    the run, about 6 times the bytes of the pages. Belongs to one thread; each step blocks until its
    work is done. With `record` a flight recorder watches the load.
    """

    def __init__(
        self,
        options: DemoOptions,
        tick: Tick = lambda step: None,
        seat: Seat | None = None,
        *,
        record: bool = False,
    ) -> None:
        self.options = options
        self.seat = Seat() if seat is None else seat
        self.shard: RankShard | None = None
        self.geometry = geometry(options.geometry)
        self.row_scale = 1 if options.link is None else MODELLED_ROW_SCALE
        self.device_pages = options.device_pages or 2 * options.pages + _spare(options.pages)
        self.host_pages = options.pages + _spare(options.pages)
        self._tick = tick
        self._random = torch.Generator().manual_seed(options.seed)

        real = _scaled(self.geometry, self.row_scale)
        self._byte_scale = self.geometry.bytes_per_page / real.bytes_per_page
        self.device = self._new_device(options.groups)
        self._recorder = new_recorder(options, self.device, self.seat.rank) if record else None
        if self.seat.channel is not None:
            self.shard = self._new_shard(self.seat.channel)
        self._check_memory(real)
        self._memory = tier_memory(self.device)
        self.pools = tuple(self._new_pool(real, number) for number in range(len(real.pools)))
        self._forward = StandInForward(self.pools, self.geometry.num_layers, self._memory)
        page_size = real.page_size
        self._device_allocator = PageAllocator(
            name="device", pages=self.device_pages, page_size=page_size, order="lifo"
        )
        self._host_allocator = PageAllocator(
            name="host", pages=self.host_pages, page_size=page_size, order="fifo"
        )
        # The same page of the cache lies elsewhere on the device of every rank.
        self._number_of_page = self._scatter(self._device_allocator, self.seat.rank)
        self._scatter(self._host_allocator)
        # Other requests' pages, which keep what they hold through all of it.
        self.held = self._take(self.device_pages - 2 * options.pages)
        self.sources = self._take(options.pages)
        self.on_host = torch.empty(0, dtype=torch.int64)
        self.targets = torch.empty(0, dtype=torch.int64)

        self.controller = self._new_controller(
            self.device, options.groups, options.mode, self.shard, self._new_agreement()
        )
        self._flight: Flight | None = None

    def run(self) -> DemoResult:
        """All steps. Does not raise for wrong bytes: see ``DemoResult.mismatches``."""
        try:
            self.fill()
            backup = self.back_up()
            grouped_ms, snapshots_ms = map(self.seat.longest, self.rehearse())
            self.scribble()
            self.seat.together()
            layers = self.geometry.num_layers
            compute_ms = max(0.0, self.options.forward * grouped_ms - snapshots_ms) / layers
            load, timeline = self.load_under_forward(compute_ms)
            mismatches = tuple(self.compare())
        finally:
            self.controller.stop()
            self.device.synchronize()  # nothing may be written once the snapshots are gone
        return DemoResult(
            options=self.options,
            device=_in_words(self.device),
            stand_in=isinstance(self.device, CudaDevice) and self.device.driver.stand_in,
            geometry=self.geometry,
            device_pages=self.device_pages,
            held_device_pages=self.device_pages - 2 * self.options.pages,
            host_pages=self.host_pages,
            row_scale=self.row_scale,
            backup=backup,
            load=load,
            grouped_ms=grouped_ms,
            stalls_ms=sum(span.end - span.start for span in timeline.stalls),
            forward_ms=timeline.layers[-1].end - timeline.stalls[0].start,
            timeline=timeline,
            host_bytes=sum(pool.host.tensor.nbytes for pool in self.pools),
            checked_bytes=sum(
                2 * snapshot.numel() + pool.host.tensor.numel()
                for pool, snapshot in zip(self.pools, self._forward.snapshots, strict=True)
            ),
            mismatches=mismatches,
            flight=self._flight,
        )

    def fill(self) -> None:
        """Random bytes in every device page, canary bytes in every host page."""
        for number, pool in enumerate(self.pools):
            pool.host.tensor.fill_(HOST_CANARY)
            for position in range(len(pool.device.layers)):
                _device_pages(pool, position).copy_(self._original(number, position))
                self._tick("filling the pools with random bytes")

    def back_up(self) -> Transfer:
        """The source pages go to the host."""
        host = self.controller.write(self.sources, node_id=1)
        if host is None:
            raise KVBurstError(f"backup: no room for {self.options.pages} host pages")
        self.on_host = host
        transfer = self._transfer(
            "backup", _retire(self.controller, self.controller.ack_write_queue)
        )
        self._tick("backing up")
        return transfer

    def rehearse(self) -> tuple[float, float]:
        """Milliseconds that the grouped copies of the load take, and those of all snapshots: the
        length of the forward is set by the one and contains the other."""
        device = self._new_device("ramp")
        controller = self._new_controller(device, "ramp", "inline")
        targets = controller.load(self.on_host)
        controller.start_loading()
        if targets is None:
            raise KVBurstError(f"load: no room for {self.options.pages} device pages")
        _retire(controller, controller.ack_load_queue)
        grouped_ms = controller.stats().loads.recent[-1].copies_took_ms
        self._device_allocator.free(targets)
        controller.stop()
        self._tick("rehearsing")
        return grouped_ms, self._forward.snapshots_ms(device)

    def scribble(self) -> None:
        """Every device page loses its bytes, but for those that others hold."""
        lost = torch.ones(self.device_pages, dtype=torch.bool)
        lost[self._pages(self.held)] = False
        lost = lost.to(self._forward.snapshots[0].device)
        for pool, snapshot in zip(self.pools, self._forward.snapshots, strict=True):
            for position in range(len(pool.device.layers)):
                _device_pages(pool, position)[lost] = SCRIBBLE
            snapshot.zero_()
        self._tick("scribbling over the device")

    def load_under_forward(self, compute_ms: float) -> tuple[Transfer, Timeline]:
        """The pages come back to other places; a forward of ``compute_ms`` a layer, snapshots not
        counted, waits for each layer before it reads it."""
        device, controller, recorder = self.device, self.controller, self._recorder
        stream, watcher = device.new_stream(), device.new_stream()
        origin, copied = device.new_event(), device.new_event()
        if recorder is not None:
            recorder.clear()
            recorder.watch(controller)

        origin.record(stream)
        begin = time.perf_counter_ns()
        targets = controller.load(self.on_host, node_id=1)
        burst = controller.start_loading()
        handed_over = time.perf_counter_ns()
        if targets is None:
            raise KVBurstError(f"load: no room for {self.options.pages} device pages")
        self.targets = targets
        launch = time.perf_counter_ns()
        forward = self._forward.launch(
            device, controller, burst, stream, compute_ms, recorder if self.shard else None
        )
        launched = time.perf_counter_ns()
        landed = []
        if recorder is not None and self.shard is None:
            landed = landing_events(device, controller, burst, device.new_stream())
        controller.ack_load_queue[0].finish_event.wait(watcher)
        copied.record(watcher)
        device.synchronize()
        transfer = self._transfer("load", _retire(controller, controller.ack_load_queue))
        if recorder is not None:
            record_forward(
                recorder,
                hand_over_ns=(begin, handed_over),
                launch_ns=(launch, launched),
                forward=forward,
                landed=landed,
            )
            self._flight = recorder.flight()
        self._tick("loading back under a forward")
        copied_ms = origin.elapsed_time(copied)
        return transfer, Timeline(
            hand_over=Span(0.0, (handed_over - begin) / 1e6),
            launch=Span((launch - begin) / 1e6, (launched - begin) / 1e6),
            copying=Span(copied_ms - transfer.stats.copies_took_ms, copied_ms),
            stalls=forward.stalls(origin),
            layers=forward.layers(origin),
        )

    def compare(self) -> Iterator[Mismatch]:
        """Every byte of the snapshots, the device and the host against what it must be."""
        held = self._pages(self.held)
        sources, targets = self._pages(self.sources), self._pages(self.targets)
        host_pages = self._pages(self.on_host)
        for number, pool in enumerate(self.pools):
            for position, layer in enumerate(pool.device.layer_ids):
                original = self._original(number, position)
                device = torch.full_like(original, SCRIBBLE)
                device[held] = original[held]
                device[targets] = original[sources]
                snapshot = self._forward.snapshots[number][position].cpu()
                on_device = _device_pages(pool, position).cpu()
                on_host = _host_pages(pool, position)
                yield from _mismatches("snapshot", pool.name, layer, device, snapshot)
                yield from _mismatches("device", pool.name, layer, device, on_device)
                if on_host is not None:
                    host = torch.full_like(on_host, HOST_CANARY)
                    host[host_pages] = original[sources]
                    yield from _mismatches("host", pool.name, layer, host, on_host)
                self._tick("comparing every byte")

    # --- parts ---------------------------------------------------------------------------

    def _new_device(self, groups: Groups) -> ComputeDevice:
        name, limits = self.options.link, CopyLimits(tall_copies=groups != "none")
        if self.options.device == "cuda":
            return CudaDevice(limits=limits)
        return HostDevice(
            link=None if name is None else LINKS[name].model(self._byte_scale), limits=limits
        )

    def _new_shard(self, channel: Channel) -> RankShard:
        pools = tuple(pool.layer_ids for pool in self.geometry.pools)
        if self._recorder is not None:
            channel = WatchedChannel(channel, self._recorder)
        return RankShard(Ownership(self.options.ranks, pools), channel)

    def _new_agreement(self) -> Agreement | None:
        if self.seat.groups is None:
            return None
        tell = None if self._recorder is None else self._recorder.agreed
        return Agreement(self.seat.groups, tell=tell)

    def _new_controller(
        self,
        device: ComputeDevice,
        groups: Groups,
        mode: Mode,
        shard: RankShard | None = None,
        agreement: Agreement | None = None,
    ) -> BurstController:
        options = PlanOptions(
            ramp=groups == "ramp",
            merge_neighbours=groups != "none",
            chunk_pages=self.options.chunk_pages,
        )
        return BurstController(
            self.pools,
            device,
            device_allocator=self._device_allocator,
            host_allocator=self._host_allocator,
            options=options,
            check="slots",
            mode=mode,
            shard=shard,
            agreement=agreement,
        )

    def _new_pool(self, real: Geometry, number: int) -> Pool:
        device = DevicePool.allocate(
            real.pools[number],
            pages=self.device_pages,
            page_size=real.page_size,
            one_allocation=self.options.one_allocation,
            memory=self._memory.device,
        )
        host = HostPool.allocate(
            device,
            pages=self.host_pages,
            layout=self.options.layout,
            pin=self._memory.pin,
            stored_layers=None
            if self.shard is None
            else self.shard.ownership.layers_of(self.seat.rank, number),
        )
        return Pool.pair(device, host)

    def _check_memory(self, real: Geometry) -> None:
        in_host_memory = memory_device(self.device).type == "cpu"
        pages = self.host_pages + (2 * self.device_pages if in_host_memory else 0)
        needed = real.bytes_per_page * pages * self.options.ranks
        budget = memory_budget()
        if needed > budget.nbytes:
            raise KVBurstError(
                f"--pages: {self.options.pages} pages of {self.options.geometry}"
                f"{f' on {self.options.ranks} ranks' if self.options.ranks > 1 else ''} need"
                f" {needed / GIB:.1f} GiB of host memory, above the"
                f" {budget.nbytes / GIB:.1f} GiB of it that may be taken"
            )

    def _scatter(self, allocator: PageAllocator, rank: int = 0) -> torch.Tensor:
        """Leaves the free list in random order, as a long-running server does, and in another on
        every rank. Returns each page's position in it."""
        pages, size = allocator.pages, allocator.page_size
        everything = allocator.alloc(pages * size)
        if everything is None:
            raise KVBurstError(f"{allocator.name}: {pages} pages are not all free")
        order = torch.randperm(pages, generator=self._random)
        if rank > 0:
            order = order[torch.randperm(pages, generator=torch.Generator().manual_seed(rank))]
        allocator.free(everything.view(pages, size)[order].flatten())
        return order.argsort()

    def _take(self, pages: int) -> torch.Tensor:
        slots = self._device_allocator.alloc(pages * self.geometry.page_size)
        if slots is None:
            raise KVBurstError(f"device: {pages} pages are not free")
        return slots

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        return slots[:: self.geometry.page_size] // self.geometry.page_size

    def _original(self, number: int, position: int) -> torch.Tensor:
        """What ``fill`` puts into a layer, ``[pages, page_bytes]``: made anew from the seed, so
        that nothing has to be kept. The same page of the cache has the same bytes on every rank."""
        device = self.pools[number].device
        nbytes = device.pages * device.page_bytes
        seed = (self.options.seed * 64 + number) * 4096 + position
        words = torch.empty(-(-nbytes // 8), dtype=torch.int64)
        words.random_(-(1 << 63), None, generator=torch.Generator().manual_seed(seed))
        pages = words.view(torch.uint8)[:nbytes].view(device.pages, device.page_bytes)
        return pages if self.options.ranks == 1 else pages[self._number_of_page]

    def _transfer(self, direction: Direction, ack: Ack) -> Transfer:
        """What the burst came to; its ack is retired."""
        stats = self.controller.stats()
        lane = stats.loads if direction == "load" else stats.backups
        counted = self.device.counters(direction)
        layers = [len(pool.host.stored_layers) for pool in self.pools]
        rows = [pool.row_bytes for pool in self.geometry.pools]
        page_bytes = self.geometry.page_size * sum(map(operator.mul, layers, rows))
        return Transfer(
            direction=direction,
            calls=counted.calls,
            copies=counted.copies,
            one_per_page_and_layer=self.options.pages * sum(layers),
            bytes=self.options.pages * page_bytes,
            bytes_moved=counted.bytes,
            fallbacks=dict(ack.burst.fallbacks),
            stats=lane.recent[-1],
        )


def _in_words(device: ComputeDevice) -> str:
    if not isinstance(device, CudaDevice):
        return device.name
    version = device.driver.version
    return (
        f"{device.name}, {device.gpu_name}, driver {device.driver.library}"
        f" {version // 1000}.{version % 1000 // 10}, {device.copy_calls}"
    )


def _retire(controller: BurstController, acks: AckQueue) -> Ack:
    """The oldest of them, which is the only one, once its burst is done on every rank that agrees.
    Blocks until then; raises if it failed."""
    acks[0].finish_event.synchronize()
    while not (retired := controller.poll()):
        pass  # a step of a scheduler; each waits for the other ranks
    (ack,) = retired
    if ack.error is not None:
        raise KVBurstError(ack.error)
    return ack


def _spare(pages: int) -> int:
    """Pages beyond those that move: what must not change."""
    return max(1, pages // 4)


def _scaled(full: Geometry, row_scale: int) -> Geometry:
    """The same pools with rows ``row_scale`` times smaller, rounded, of at least a byte."""
    return dataclasses.replace(
        full,
        pools=tuple(
            dataclasses.replace(pool, row_bytes=max(1, round(pool.row_bytes / row_scale)))
            for pool in full.pools
        ),
    )


def _device_pages(pool: Pool, position: int) -> torch.Tensor:
    return pool.device.layers[position].view(pool.device.pages, pool.device.page_bytes)


def _host_pages(pool: Pool, position: int) -> torch.Tensor | None:
    """None where another rank keeps the layer."""
    row = pool.host.rows[position]
    if row is None:
        return None
    tensor = pool.host.tensor
    return tensor[row] if pool.host.layout == "layer_first" else tensor[:, row]


def _mismatches(
    seen_in: Place,
    pool: str,
    layer: int,
    expected: torch.Tensor,
    found: torch.Tensor,
) -> Iterator[Mismatch]:
    if torch.equal(expected, found):
        return
    differs = expected != found
    for page in differs.any(dim=1).nonzero().flatten().tolist():
        wrong = differs[page].nonzero().flatten()
        byte = int(wrong[0])
        yield Mismatch(
            seen_in=seen_in,
            pool=pool,
            layer=layer,
            page=page,
            wrong_bytes=len(wrong),
            byte=byte,
            expected=int(expected[page, byte]),
            found=int(found[page, byte]),
        )
