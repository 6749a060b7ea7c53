"""The devices that bursts are issued on, and the memory, or none, that their pools lie in.

``null`` takes every copy and moves nothing: what is left is planning and issuing, and no driver is
counted. ``host`` with a link model charges the issuing thread for every copy, as a driver does, and
moves real bytes, scaled down: what it says is simulated. A device that calls a real driver is one
more entry of ``DEVICES``, whose ``ground`` allocates on it and pins the host's side.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from peers_way import Pool, pools_at_no_address

from kvburst._core import CopyLimits, DeviceTier, HostDevice, HostTier, NullDevice, PoolLayout
from kvburst.geometries import Geometry
from kvburst.host_memory import allocate_host
from kvburst.links import LINKS, LinkName

Layout = Literal["one-allocation", "per-layer"]

LAYOUTS: tuple[Layout, ...] = ("one-allocation", "per-layer")
# Modelled bytes take their time whatever is really moved, so rows in memory are small: a page of a
# layer keeps this part of its bytes.
ROW_SCALE = 1024


@dataclass(frozen=True)
class Wanted:
    """What a scenario needs of a device: pools of a geometry, over so many pages of both tiers."""

    geometry: Geometry
    tier_pages: int
    layout: Layout
    limits: CopyLimits
    link: LinkName


@dataclass(frozen=True)
class Ground:
    """A device, pools on it, and what must be kept alive for them.

    ``copy_us``: microseconds that the device is said to charge for a copy, which the peer's way,
    that calls no device, is charged as well. None where nobody says so, as of a real driver: then
    there is no baseline, and the bursts of groups ``none`` stand beside the others.
    """

    device: HostDevice | NullDevice
    layouts: tuple[PoolLayout, ...]
    copy_us: float | None
    memory: tuple[object, ...] = ()


@dataclass(frozen=True)
class IssuingDevice:
    """``link``: whether a link model makes its times, so that they are simulated. ``call_a_copy``:
    whether a call for every copy says something of it; a model that sleeps for each would be late
    every time. ``quick_rounds``: bursts of a scenario where seconds are all there is."""

    name: str
    words: str
    link: bool
    call_a_copy: bool
    quick_rounds: int
    ground: Callable[[Wanted], Ground]


def absent_layouts(wanted: Wanted) -> tuple[PoolLayout, ...]:
    """Of memory that is not there, which planning does not mind."""
    pools = shapes_of(wanted.geometry, wanted.tier_pages)
    return tuple(_layout(pool, wanted) for pool in pools)


def _null(wanted: Wanted) -> Ground:
    return Ground(NullDevice(limits=wanted.limits), absent_layouts(wanted), copy_us=0.0)


def _host(wanted: Wanted) -> Ground:
    link = LINKS[wanted.link]
    layouts, memory = [], []
    real = moved = 0
    for spec in wanted.geometry.pools:
        page_bytes = max(1, round(spec.page_bytes(wanted.geometry.page_size) / ROW_SCALE))
        layers = len(spec.layer_ids)
        device = allocate_host(layers * wanted.tier_pages * page_bytes)
        host = allocate_host(layers * wanted.tier_pages * page_bytes)
        pool = Pool(
            name=spec.name,
            layers=layers,
            pages=wanted.tier_pages,
            page_bytes=page_bytes,
            device=device.data_ptr(),
            host=host.data_ptr(),
        )
        memory += [device, host]
        layouts.append(_layout(pool, wanted))
        real += layers * spec.page_bytes(wanted.geometry.page_size)
        moved += layers * page_bytes
    device_with_link = HostDevice(link=link.model(real / moved), limits=wanted.limits)
    return Ground(device_with_link, tuple(layouts), link.issue_us, tuple(memory))


DEVICES: Mapping[str, IssuingDevice] = {
    each.name: each
    for each in (
        IssuingDevice(
            name="null",
            words="takes every copy, moves nothing: no driver counted",
            link=False,
            call_a_copy=True,
            quick_rounds=10,
            ground=_null,
        ),
        IssuingDevice(
            name="host",
            words="charges the issuing thread what a link model says, 1,024 copies queued at most",
            link=True,
            call_a_copy=False,
            quick_rounds=2,
            ground=_host,
        ),
    )
}


def shapes_of(geometry: Geometry, tier_pages: int) -> tuple[Pool, ...]:
    """The pools of a geometry, in no memory."""
    return pools_at_no_address(
        [
            (spec.name, len(spec.layer_ids), spec.page_bytes(geometry.page_size))
            for spec in geometry.pools
        ],
        tier_pages,
    )


def _layout(
    pool: Pool, wanted: Wanted, registrations: Sequence[tuple[int, int]] = ()
) -> PoolLayout:
    """Device layers in one allocation, or said to have one each; host pages page first, in so many
    pinned ranges where the device asks for them."""
    layer_bytes = pool.pages * pool.page_bytes
    layers = [pool.device + layer * layer_bytes for layer in range(pool.layers)]
    specs = {spec.name: spec for spec in wanted.geometry.pools}
    return PoolLayout(
        name=pool.name,
        layer_ids=specs[pool.name].layer_ids,
        device=DeviceTier(
            layers=layers,
            pages=pool.pages,
            page_bytes=pool.page_bytes,
            allocations=(
                [(pool.device, pool.size)]
                if wanted.layout == "one-allocation"
                else [(layer, layer_bytes) for layer in layers]
            ),
        ),
        host=HostTier(
            address=pool.host,
            size=pool.size,
            pages=pool.pages,
            page_bytes=pool.page_bytes,
            page_stride=pool.layers * pool.page_bytes,
            layer_stride=pool.page_bytes,
            rows=range(pool.layers),
            registrations=registrations,
        ),
    )
