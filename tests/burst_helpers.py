"""Pools of random bytes between canaries, and what must be in them after a burst."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvburst import Burst, BurstController, ComputeDevice, PageAllocator, Pool
from kvburst.cuda import tier_memory
from kvburst.geometries import PoolSpec
from kvburst.pools import DevicePool, HostLayout, HostPool, Pinned

CANARY = 0xC7
SCRIBBLE = 0x5C
LAYOUTS: tuple[HostLayout, ...] = ("page_first_direct", "layer_first")

IndexForm = Callable[[torch.Tensor], torch.Tensor]


class CanaryMemory:
    """Gives memory of a device's two tiers, full of canaries and with more on either side."""

    MARGIN = 192

    def __init__(self, device: ComputeDevice) -> None:
        tiers = tier_memory(device)
        self.pin = tiers.pin
        self._device_memory = tiers.device
        self._pieces: list[torch.Tensor] = []
        self._pinned: list[Pinned] = []

    def device(self, nbytes: int) -> torch.Tensor:
        return self._between(self._device_memory(nbytes + 2 * self.MARGIN))

    def host(self, nbytes: int) -> torch.Tensor:
        return self._between(torch.empty(nbytes + 2 * self.MARGIN, dtype=torch.uint8))

    def _between(self, piece: torch.Tensor) -> torch.Tensor:
        self._pieces.append(piece.fill_(CANARY))
        return piece[self.MARGIN : -self.MARGIN]

    def registrations(self, *parts: torch.Tensor) -> list[tuple[int, int]]:
        """Host memory in parts that are registered one by one, as a caller does who pins it."""
        if self.pin is not None:
            self._pinned += [self.pin(part, part.nbytes) for part in parts]
        return [(part.data_ptr(), part.nbytes) for part in parts]

    def is_untouched_outside(self) -> bool:
        return all(
            bool((piece[: self.MARGIN] == CANARY).all())
            and bool((piece[-self.MARGIN :] == CANARY).all())
            for piece in self._pieces
        )


@dataclass(frozen=True)
class Tiers:
    """Pools on a device and their controller. Free pages are scattered over both tiers."""

    device: ComputeDevice
    pools: Sequence[Pool]
    controller: BurstController
    device_pages: PageAllocator
    host_pages: PageAllocator
    memory: CanaryMemory

    @property
    def page_size(self) -> int:
        return self.controller.page_size

    def page_ids(self, slots: torch.Tensor) -> list[int]:
        return (slots[:: self.page_size] // self.page_size).tolist()

    def take_device(self, pages: int) -> torch.Tensor:
        """Slots of so many device pages, which must be there."""
        slots = self.device_pages.alloc(pages * self.page_size)
        assert slots is not None
        return slots

    def take_host(self, pages: int) -> torch.Tensor:
        slots = self.host_pages.alloc(pages * self.page_size)
        assert slots is not None
        return slots

    def settle(self) -> None:
        """Wait for the device and retire every ack, none of which may have failed."""
        self.controller.drain()
        self.device.synchronize()
        assert [ack.error for ack in self.controller.poll() if ack.error] == []
        assert not self.controller.has_inflight_device_transfers()


def make_pools(
    specs: Sequence[PoolSpec],
    memory: CanaryMemory,
    *,
    page_size: int,
    device_pages: int,
    host_pages: int,
    layout: HostLayout = "page_first_direct",
    one_allocation: bool = True,
    pinned: bool = True,
) -> list[Pool]:
    """The host tier is pinned, where the device needs that, unless the caller will."""
    pools = []
    for spec in specs:
        device = DevicePool.allocate(
            spec,
            pages=device_pages,
            page_size=page_size,
            one_allocation=one_allocation,
            memory=memory.device,
        )
        host = HostPool.allocate(
            device,
            pages=host_pages,
            layout=layout,
            memory=memory.host,
            pin=memory.pin if pinned else None,
        )
        pools.append(Pool.pair(device, host))
    return pools


def make_tiers(
    device: ComputeDevice, pools: Sequence[Pool], memory: CanaryMemory, **options: object
) -> Tiers:
    """`options` are the controller's."""
    page_size = pools[0].page_size
    device_count = min(pool.layout.device_pages for pool in pools)
    host_count = min(pool.layout.host_pages for pool in pools)
    device_pages = scattered("device tier", device_count, page_size, "lifo")
    host_pages = scattered("host tier", host_count, page_size, "fifo")
    controller = BurstController(
        pools,
        device,
        device_allocator=device_pages,
        host_allocator=host_pages,
        **{"check": "slots", **options},
    )
    return Tiers(device, pools, controller, device_pages, host_pages, memory)


def scattered(
    name: str, pages: int, page_size: int, order: Literal["lifo", "fifo"]
) -> PageAllocator:
    """Hands out pages in random order, and no two neighbours before half of them are taken."""
    allocator = PageAllocator(name=name, pages=pages, page_size=page_size, order=order)
    slots = allocator.alloc(allocator.size)
    assert slots is not None
    chance = random.Random(pages)
    even, odd = list(range(0, pages, 2)), list(range(1, pages, 2))
    chance.shuffle(even)
    chance.shuffle(odd)
    handed_out = even + odd
    for page in handed_out if order == "fifo" else reversed(handed_out):
        allocator.free(page_slots([page], page_size))
    return allocator


def page_slots(pages: Sequence[int], page_size: int) -> torch.Tensor:
    first = torch.tensor(pages, dtype=torch.int64) * page_size
    return (first[:, None] + torch.arange(page_size)).reshape(-1)


def fill_random(tensor: torch.Tensor, seed: int) -> None:
    """Overwrite all bytes of a tensor or view."""
    generator = torch.Generator().manual_seed(seed)
    count = tensor.numel() * tensor.element_size()
    words = torch.randint(
        -(1 << 63), (1 << 63) - 1, (count // 8 + 1,), dtype=torch.int64, generator=generator
    )
    tensor.copy_(words.view(torch.uint8)[:count].view(tensor.dtype).view(tensor.shape))


def device_bytes(pool: Pool, layer: int, pages: Sequence[int]) -> torch.Tensor:
    """A copy of the bytes `[pages, page_bytes]` of a model layer, found without the layout."""
    tensor = pool.device.layers[pool.device.layer_ids.index(layer)]
    rows = tensor.reshape(-1).view(torch.uint8).view(pool.device.pages, pool.device.page_bytes)
    return rows[list(pages)].cpu()


def host_bytes(pool: Pool, layer: int, pages: Sequence[int]) -> torch.Tensor:
    """The same of the host tier."""
    row = pool.host.rows[pool.host.layer_ids.index(layer)]
    axis = 1 if pool.host.layout == "page_first_direct" else 0
    return pool.host.tensor.select(axis, row)[list(pages)].view(torch.uint8).flatten(1)


def others(count: int, pages: Sequence[int]) -> list[int]:
    return sorted(set(range(count)) - set(pages))


def round_trip(
    tiers: Tiers, pages: int, *, form: IndexForm = lambda slots: slots
) -> tuple[Burst, Burst]:
    """Back up random pages, scribble over the device, load them to other pages, compare all bytes.

    `form` is applied to the indices of both calls. Returns the backup and the load.
    """
    for number, pool in enumerate(tiers.pools):
        for position, layer in enumerate(pool.device.layers):
            fill_random(layer, seed=1000 * number + position)
    every_page = range(tiers.device_pages.pages)
    before = [
        [device_bytes(pool, layer, every_page) for layer in pool.layout.stored_layers]
        for pool in tiers.pools
    ]

    sources = form(tiers.take_device(pages))
    host = tiers.controller.write(sources)
    assert host is not None
    (ack,) = tiers.controller.ack_write_queue
    backup = ack.burst
    tiers.settle()

    read, held = tiers.page_ids(sources), tiers.page_ids(host)
    unused = others(tiers.host_pages.pages, held)
    for pool, was in zip(tiers.pools, before, strict=True):
        for position, layer in enumerate(pool.layout.stored_layers):
            assert torch.equal(host_bytes(pool, layer, held), was[position][read])
            assert (host_bytes(pool, layer, unused) == CANARY).all()
            assert torch.equal(device_bytes(pool, layer, every_page), was[position])
        for layer_tensor in pool.device.layers:
            layer_tensor.fill_(SCRIBBLE)

    wanted = form(host)
    targets = tiers.controller.load(wanted)
    assert targets is not None
    load_id = tiers.controller.start_loading()
    (ack,) = tiers.controller.ack_load_queue
    load = ack.burst
    assert load.id == load_id
    for layer in range(tiers.controller.layer_done_counter.num_layers):
        tiers.controller.layer_done_counter.events[load_id].wait(layer)
    tiers.settle()

    restored = tiers.page_ids(targets)
    assert not set(restored) & set(read)
    source_of = dict(zip(held, read, strict=True))
    originals = [source_of[page] for page in tiers.page_ids(wanted)]
    untouched = others(tiers.device_pages.pages, restored)
    for pool, was in zip(tiers.pools, before, strict=True):
        for position, layer in enumerate(pool.layout.stored_layers):
            assert torch.equal(device_bytes(pool, layer, restored), was[position][originals])
            assert (device_bytes(pool, layer, untouched) == SCRIBBLE).all()
    assert tiers.memory.is_untouched_outside()
    return backup, load
