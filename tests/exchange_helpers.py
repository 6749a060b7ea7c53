"""Ranks as threads of one process, each with a controller over its own pools."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvburst import BurstController, HostDevice, PageAllocator, Pool, Stream
from kvburst.exchange import Channel, RankShard
from kvburst.exchange.in_process import InProcessGroup
from kvburst.ownership import Ownership
from kvburst.pools import DevicePool, HostPool

PAGE = 2
"""Slots."""
ROWS = {"kv": 24, "index_k": 8}
"""Bytes of a slot and layer."""
LAYERS = {"kv": tuple(range(10)), "index_k": (0, 3, 5, 9)}
"""An index layer fewer than a forward has, and not the first of each rank."""
SHARD_KEYS = ("exchange", "staging_bytes", "capturing")


@dataclass(frozen=True)
class Rank:
    """One rank: its device, its pools, its controller."""

    rank: int
    device: HostDevice
    pools: Sequence[Pool]
    device_pages: PageAllocator
    host_pages: PageAllocator
    controller: BurstController
    stream: Stream
    """Of its forwards."""

    def page(self, pool: int, layer: int, page: int) -> torch.Tensor:
        """The bytes of a device page of one layer; a view."""
        device = self.pools[pool].device
        tensor = device.layers[device.layer_ids.index(layer)]
        return tensor[page * PAGE : (page + 1) * PAGE]

    def forward(self, burst: int) -> None:
        """Waits for every layer of a load, as a forward does, on the current stream."""
        counter = self.controller.layer_done_counter
        counter.set_consumer(burst)
        for layer in range(counter.num_layers):
            counter.wait_until(layer)

    def settle(self) -> None:
        self.controller.drain()
        self.device.synchronize()


def make_rank(
    device: HostDevice,
    channel: Channel | None,
    *,
    rank: int = 0,
    pages: int = 16,
    host_pages: int = 24,
    owner: str = "round_robin",
    **options: object,
) -> Rank:
    """Without a channel: a rank by itself, which keeps everything."""
    owned = None
    shard = None
    if channel is not None:
        owned = Ownership(channel.ranks, tuple(LAYERS.values()), owner)
        shard = RankShard(
            owned, channel, **{key: options.pop(key) for key in SHARD_KEYS if key in options}
        )
    pools = []
    for number, (name, layer_ids) in enumerate(LAYERS.items()):
        memory = torch.zeros(len(layer_ids), pages * PAGE, ROWS[name], dtype=torch.uint8)
        on_device = DevicePool.from_layers(name, memory, page_size=PAGE, layer_ids=layer_ids)
        stored = None if owned is None else owned.layers_of(channel.rank, number)
        on_host = HostPool.allocate(on_device, pages=host_pages, stored_layers=stored)
        pools.append(Pool.pair(on_device, on_host))
    device_pages = PageAllocator(name="device", pages=pages, page_size=PAGE, order="lifo")
    on_host_pages = PageAllocator(name="host", pages=host_pages, page_size=PAGE, order="fifo")
    controller = BurstController(
        pools,
        device,
        device_allocator=device_pages,
        host_allocator=on_host_pages,
        shard=shard,
        **{"check": "slots", **options},
    )
    stream = device.new_stream()
    return Rank(rank, device, pools, device_pages, on_host_pages, controller, stream)


def pages_of(slots: torch.Tensor) -> list[int]:
    return (slots[::PAGE] // PAGE).tolist()


def slots_of(pages: Sequence[int]) -> torch.Tensor:
    first = torch.tensor(list(pages), dtype=torch.int64) * PAGE
    return (first[:, None] + torch.arange(PAGE)).reshape(-1)


class Threads:
    """Runs one function a rank, each on a thread of its own."""

    def __init__(self, ranks: int, body: Callable[[int], object], seconds: float = 60) -> None:
        self.results: list[object] = [None] * ranks
        self.errors: list[BaseException | None] = [None] * ranks
        self._seconds = seconds

        def run(rank: int) -> None:
            try:
                self.results[rank] = body(rank)
            except BaseException as error:
                self.errors[rank] = error

        self._threads = [
            threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> list[object]:
        """What they returned; raises the first error."""
        for thread in self._threads:
            thread.join(self._seconds)
            assert not thread.is_alive(), "a rank is still blocked"
        for error in self.errors:
            if error is not None:
                raise error
        return self.results


def make_ranks(device: HostDevice, ranks: int, **options: object) -> list[Rank]:
    """All in this process, exchanging on streams."""
    group = InProcessGroup(ranks, timeout=10)
    return Threads(
        ranks, lambda rank: make_rank(device, group.channel(rank, device), rank=rank, **options)
    ).join()
