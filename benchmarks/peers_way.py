"""The baseline of what a burst costs the thread that issues it: the peer's way, from Python.

For every layer and pool it rebuilds three arrays from the index tensors (destination addresses,
source addresses, sizes) and hands them over, one copy for every page of every layer. No driver is
called. It is ours, in vectorised torch, and says nothing about how fast the peer's own code is.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvburst._core import DeviceTier, HostTier, PoolLayout
from kvburst.geometries import geometry

Pattern = Literal["scattered", "contiguous"]

# fp8 MLA and index-K, both in every layer; the geometry's layer count is an argument here.
POOLS = {pool.name: pool for pool in geometry("mla-dsa-78-full").pools}
PAGE_SIZE = geometry("mla-dsa-78-full").page_size
# What a copy costs the peer's way; outside of it the baseline would not be the peer's.
PEER_NS = (20.0, 80.0)


@dataclass(frozen=True)
class Pool:
    """Where the layers of a pool would be, one allocation on the device, page-first on the host.
    No such memory exists: planning reads no byte of it."""

    name: str
    layers: int
    pages: int
    page_bytes: int
    device: int
    host: int

    @property
    def size(self) -> int:
        """Bytes of either tier."""
        return self.layers * self.pages * self.page_bytes

    def layout(self) -> PoolLayout:
        layer_bytes = self.pages * self.page_bytes
        return PoolLayout(
            name=self.name,
            layer_ids=range(self.layers),
            device=DeviceTier(
                layers=[self.device + layer * layer_bytes for layer in range(self.layers)],
                pages=self.pages,
                page_bytes=self.page_bytes,
                allocations=[(self.device, self.size)],
            ),
            host=HostTier(
                address=self.host,
                size=self.size,
                pages=self.pages,
                page_bytes=self.page_bytes,
                page_stride=self.layers * self.page_bytes,
                layer_stride=self.page_bytes,
                rows=range(self.layers),
            ),
        )


def pools_of(layers: int, pages: int) -> tuple[Pool, ...]:
    """The pools of the geometry with ``layers`` layers, at addresses that do not overlap."""
    return pools_at_no_address(
        [(spec.name, layers, spec.page_bytes(PAGE_SIZE)) for spec in POOLS.values()], pages
    )


def pools_at_no_address(
    shapes: Sequence[tuple[str, int, int]], pages: int, start: int = 1 << 40
) -> tuple[Pool, ...]:
    """Pools of a name, so many layers and bytes a page each, at addresses that do not overlap."""
    pools = []
    free = start
    for name, layers, page_bytes in shapes:
        size = layers * pages * page_bytes
        pools.append(
            Pool(
                name=name,
                layers=layers,
                pages=pages,
                page_bytes=page_bytes,
                device=free,
                host=free + size,
            )
        )
        free += 2 * size
    return tuple(pools)


@dataclass(frozen=True)
class Indices:
    """Token slots of the pages of one burst on both tiers, as a scheduler holds them."""

    device: torch.Tensor
    host: torch.Tensor

    @classmethod
    def of(cls, pages: int, available: int, pattern: Pattern, random: torch.Generator) -> "Indices":
        def slots() -> torch.Tensor:
            chosen = (
                torch.arange(pages)
                if pattern == "contiguous"
                else torch.randperm(available, generator=random)[:pages]
            )
            return (chosen[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()

        return cls(slots(), slots())


@dataclass(frozen=True)
class Issued:
    """Nanoseconds of the calling thread, in all and until the first copy was handed over."""

    ns: int
    first_copy_ns: int
    copies: int

    @property
    def ns_per_copy(self) -> float:
        return self.ns / self.copies


class PeersWay:
    """Three arrays for every layer and pool, from Python."""

    def __init__(self, pools: tuple[Pool, ...], direction: Literal["load", "backup"]) -> None:
        self._pools = pools
        self._to_device = direction == "load"
        self._handed_over = 0
        self._first = 0

    def issue(self, indices: Indices) -> Issued:
        """One copy for every page of every layer."""
        self._handed_over = 0
        begin = time.perf_counter_ns()
        for layer in range(max(pool.layers for pool in self._pools)):
            for pool in self._pools:
                if layer >= pool.layers:
                    continue
                layer_bytes = pool.pages * pool.page_bytes
                device_pages = indices.device[::PAGE_SIZE] // PAGE_SIZE
                host_pages = indices.host[::PAGE_SIZE] // PAGE_SIZE
                device = device_pages * pool.page_bytes + (pool.device + layer * layer_bytes)
                page_stride = pool.layers * pool.page_bytes
                host = host_pages * page_stride + (pool.host + layer * pool.page_bytes)
                sizes = torch.full_like(device, pool.page_bytes)
                if self._to_device:
                    self._hand_over(device, host, sizes)
                else:
                    self._hand_over(host, device, sizes)
        end = time.perf_counter_ns()
        return Issued(end - begin, self._first - begin, self._handed_over)

    def ns_per_copy(self, indices: Indices) -> float:
        return self.issue(indices).ns_per_copy

    def _hand_over(self, dst: torch.Tensor, src: torch.Tensor, sizes: torch.Tensor) -> None:
        """Where a driver would be called."""
        if self._handed_over == 0:
            self._first = time.perf_counter_ns()
        if dst.data_ptr() and src.data_ptr() and sizes.data_ptr():
            self._handed_over += sizes.numel()


def like_the_peers(ns_per_copy: float) -> str:
    """Whether what a copy cost is what it costs the peer."""
    least, most = PEER_NS
    like = "as" if least <= ns_per_copy <= most else "unlike"
    return (
        f"baseline: {ns_per_copy:.1f} ns a copy, {like} the peer's {least:g} to {most:g} (the peer:"
        " HiCache's own way, rebuilt from Python)"
    )
