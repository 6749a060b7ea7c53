"""The devices that bursts are issued on, and the memory, or none, that their pools lie in.

``null`` takes every copy and moves nothing: what is left is planning and issuing, and no driver is
counted. ``host`` with a link model charges the issuing thread for every copy, as a driver does, and
moves real bytes, scaled down: what it says is simulated. ``stand-in`` calls the library that plays
the driver in the tests, which shows that the path to a driver runs, and nothing of what a driver
costs. ``cuda`` is a GPU of this machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from cuda_devices import host_memory, open_device
from driver_library import CudaName
from peers_way import Pool, pools_at_no_address
from sgl_kernel_way import SglKernelWay, Side, load_sgl_kernel

from kvburst._core import (
    CopyLimits,
    Device,
    DeviceTier,
    HostDevice,
    HostTier,
    NullDevice,
    PoolLayout,
)
from kvburst.geometries import Geometry
from kvburst.host_memory import allocate_host
from kvburst.links import LINKS, LinkName

Layout = Literal["one-allocation", "per-layer"]

LAYOUTS: tuple[Layout, ...] = ("one-allocation", "per-layer")
# Modelled bytes take their time whatever is really moved, so rows in memory are small: a page of a
# layer keeps this part of its bytes.
ROW_SCALE = 1024
# A driver is paid by the copy, hardly by the byte: with rows of a sixteenth the 32,768 pages of the
# recorded bursts fit into a GPU, and issuing rarely waits for the link.
CUDA_ROW_SCALE = 16


@dataclass(frozen=True)
class Wanted:
    """What a scenario needs of a device: pools of a geometry, over so many pages of both tiers."""

    geometry: Geometry
    tier_pages: int
    layout: Layout
    link: LinkName


@dataclass(frozen=True)
class Ground:
    """Pools, what must be kept alive for them, and devices that reach them: one for each limits.

    ``copy_us``: microseconds that the device is said to charge for a copy, which the peer's way,
    that calls no device, is charged as well. None where nobody says so, as of a real driver: then
    the baseline is ``sgl_kernel``, where that can be imported; and where not there is none, and the
    bursts of groups ``none`` stand beside the others.
    """

    device: Callable[[CopyLimits], Device]
    layouts: tuple[PoolLayout, ...]
    copy_us: float | None
    memory: tuple[object, ...] = ()
    sgl_kernel: SglKernelWay | None = None


@dataclass(frozen=True)
class IssuingDevice:
    """``link``: whether a link model makes its times; ``simulated``: whether anything but a real
    device does. ``call_a_copy``: whether a call for every copy says something of it; a model that
    sleeps for each would be late every time. ``quick_rounds``: bursts of a scenario where seconds
    are all there is. ``needs``: what not every machine has; unless asked for it is left out."""

    name: str
    words: str
    link: bool
    simulated: bool
    call_a_copy: bool
    quick_rounds: int
    ground: Callable[[Wanted], Ground]
    needs: str = ""


def absent_layouts(wanted: Wanted) -> tuple[PoolLayout, ...]:
    """Of memory that is not there, which planning does not mind."""
    pools = shapes_of(wanted.geometry, wanted.tier_pages)
    return tuple(_layout(pool, wanted) for pool in pools)


def _null(wanted: Wanted) -> Ground:
    return Ground(lambda limits: NullDevice(limits=limits), absent_layouts(wanted), copy_us=0.0)


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
    model = link.model(real / moved)
    return Ground(
        lambda limits: HostDevice(link=model, limits=limits),
        tuple(layouts),
        link.issue_us,
        tuple(memory),
    )


def _cuda(wanted: Wanted, name: CudaName, row_scale: int) -> Ground:
    """Memory of the GPU, and pinned memory of the host."""
    device = open_device(name)
    layouts: list[PoolLayout] = []
    memory: list[object] = []
    sides: list[Side] = []
    page_size = wanted.geometry.page_size
    for spec in wanted.geometry.pools:
        row_bytes = max(1, round(spec.row_bytes / row_scale))
        layers, page_bytes = len(spec.layer_ids), page_size * row_bytes
        nbytes = layers * wanted.tier_pages * page_bytes
        on_device, on_host = device.tensor(nbytes), host_memory(nbytes)
        pinned = device.pin(on_host, layers * page_bytes)
        pool = Pool(
            name=spec.name,
            layers=layers,
            pages=wanted.tier_pages,
            page_bytes=page_bytes,
            device=on_device.data_ptr(),
            host=on_host.data_ptr(),
        )
        layouts.append(_layout(pool, wanted, pinned.ranges))
        memory += [on_device, on_host, pinned]
        sides.append(
            Side(
                device=on_device.view(layers, wanted.tier_pages * page_size, row_bytes),
                host=on_host.view(wanted.tier_pages, layers, page_size, row_bytes),
            )
        )
    device.synchronize()
    kernel = load_sgl_kernel()
    return Ground(
        lambda limits: open_device(name, limits=limits),
        tuple(layouts),
        None,
        tuple(memory),
        None if kernel is None else SglKernelWay(kernel, tuple(sides), page_size, device),
    )


DEVICES: Mapping[str, IssuingDevice] = {
    each.name: each
    for each in (
        IssuingDevice(
            name="null",
            words="takes every copy, moves nothing: no driver counted",
            link=False,
            simulated=False,
            call_a_copy=True,
            quick_rounds=10,
            ground=_null,
        ),
        IssuingDevice(
            name="host",
            words="charges the issuing thread what a link model says, 1,024 copies queued at most",
            link=True,
            simulated=True,
            call_a_copy=False,
            quick_rounds=2,
            ground=_host,
        ),
        IssuingDevice(
            name="stand-in",
            words="a library that plays the driver: its times say nothing of a GPU",
            link=False,
            simulated=True,
            call_a_copy=False,
            quick_rounds=2,
            ground=partial(_cuda, name="stand-in", row_scale=ROW_SCALE),
            needs="a C++ compiler",
        ),
        IssuingDevice(
            name="cuda",
            words=f"GPU 0, pinned host memory, rows of 1/{CUDA_ROW_SCALE} of their bytes; the"
            " baseline, where it can be imported, is sgl_kernel's direct copies",
            link=False,
            simulated=False,
            call_a_copy=True,
            quick_rounds=10,
            ground=partial(_cuda, name="cuda", row_scale=CUDA_ROW_SCALE),
            needs="a GPU",
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
