"""The two tiers that a replay moves pages between: real memory, or a description of memory that is
not there, which is enough to plan copies by."""

import math
from dataclasses import dataclass

from kvburst._core import DeviceTier, HostTier, KVBurstError, PoolLayout
from kvburst.geometries import Geometry, PoolSpec, geometry
from kvburst.host_memory import memory_budget
from kvburst.pools import DevicePool, HostPool, Pool
from kvburst.replay.options import (
    DEFAULT_LAYERS,
    DEFAULT_PAGE_BYTES,
    PAGE_SIZE,
    ReplayOptions,
)

# Memory that is not there starts somewhere, and each buffer well behind the one before it.
_FIRST_ADDRESS = 1 << 32
_ALIGNMENT = 1 << 21


@dataclass(frozen=True)
class TierSizes:
    """In pages of ``page_size`` slots."""

    device_pages: int
    host_pages: int
    page_size: int


def geometry_of(options: ReplayOptions) -> Geometry:
    """The geometry that the options name, or one of a single pool with their layers and bytes."""
    if options.geometry is not None:
        return geometry(options.geometry)
    layers = DEFAULT_LAYERS if options.layers is None else options.layers
    page_bytes = DEFAULT_PAGE_BYTES if options.page_bytes is None else options.page_bytes
    return Geometry(
        name=f"{layers} layers of {page_bytes:,} bytes a page",
        page_size=PAGE_SIZE,
        pools=(PoolSpec("kv", page_bytes // PAGE_SIZE, tuple(range(layers))),),
        source="--layers and --page-bytes",
    )


def real_pools(shape: Geometry, sizes: TierSizes) -> tuple[Pool, ...]:
    """In this machine's memory: host pages page first, device layers in one allocation.

    Raises ``KVBurstError``, naming both numbers, if they do not fit.
    """
    needed = shape.bytes_per_page * (sizes.device_pages + sizes.host_pages)
    budget = memory_budget()
    if needed > budget.nbytes:
        raise KVBurstError(
            f"--device-pages, --host-pages: {sizes.device_pages} and {sizes.host_pages} pages of"
            f" {shape.bytes_per_page} bytes need {needed} bytes, above the budget of"
            f" {budget.nbytes} ({budget}); take fewer, or --plan-only"
        )
    pools = []
    for spec in shape.pools:
        device = DevicePool.allocate(spec, pages=sizes.device_pages, page_size=sizes.page_size)
        pools.append(Pool.pair(device, HostPool.allocate(device, pages=sizes.host_pages)))
    return tuple(pools)


def absent_layouts(shape: Geometry, sizes: TierSizes) -> tuple[PoolLayout, ...]:
    """The layouts that `real_pools` would have, at made-up addresses: for planning only."""
    places = _Places()
    return tuple(_absent(spec, sizes, places) for spec in shape.pools)


class _Places:
    def __init__(self) -> None:
        self._next = _FIRST_ADDRESS

    def take(self, nbytes: int) -> int:
        address = self._next
        self._next += math.ceil(nbytes / _ALIGNMENT + 1) * _ALIGNMENT
        return address


def _absent(spec: PoolSpec, sizes: TierSizes, places: _Places) -> PoolLayout:
    page_bytes = spec.page_bytes(sizes.page_size)
    layer_bytes = sizes.device_pages * page_bytes
    together = [layer for layer in spec.layer_ids if layer not in spec.own_allocation]
    shared = (places.take(len(together) * layer_bytes), len(together) * layer_bytes)
    own = {layer: (places.take(layer_bytes), layer_bytes) for layer in spec.own_allocation}
    addresses = {layer: shared[0] + i * layer_bytes for i, layer in enumerate(together)}
    addresses.update((layer, address) for layer, (address, _) in own.items())

    rows = len(spec.layer_ids)
    host_bytes = sizes.host_pages * rows * page_bytes
    return PoolLayout(
        name=spec.name,
        layer_ids=spec.layer_ids,
        device=DeviceTier(
            layers=[addresses[layer] for layer in spec.layer_ids],
            pages=sizes.device_pages,
            page_bytes=page_bytes,
            allocations=([shared] if together else []) + list(own.values()),
        ),
        host=HostTier(
            address=places.take(host_bytes),
            size=host_bytes,
            pages=sizes.host_pages,
            page_bytes=page_bytes,
            page_stride=rows * page_bytes,
            layer_stride=page_bytes,
            rows=range(rows),
        ),
    )
