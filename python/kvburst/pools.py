"""Torch tensors described as pools: where a (layer, page) lies on each tier.

Nothing here copies. A ``DevicePool`` describes the tensors of one kind of KV buffer on the device,
a ``HostPool`` the buffer that mirrors it on the host, and a ``Pool`` pairs them. All three are
values that keep their tensors alive; what is refused is refused while describing, with a
``LayoutError`` that names the argument, the value and the bound. They may be used from any thread.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch

from kvburst._core import DeviceTier, HostTier, LayoutError, PoolLayout
from kvburst.geometries import PoolSpec, check_layer_ids
from kvburst.host_memory import allocate_host

HostLayout = Literal["page_first_direct", "layer_first"]

# So many bytes of memory as a one-dimensional uint8 tensor, which owns them.
Memory = Callable[[int], torch.Tensor]


class Pinned(Protocol):
    """Host memory that is registered with a device for as long as this lives."""

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """(address, bytes) of each registration."""


# Registers such a tensor's memory with a device; no registration ends within a multiple of so many
# bytes.
Pin = Callable[[torch.Tensor, int], Pinned]


@dataclass(frozen=True, eq=False)
class DevicePool:
    """The device side of one pool: a tensor of ``pages * page_bytes`` packed bytes for each layer.

    ``page_size`` is in slots; ``page_bytes`` are the bytes of one page of one layer; ``layer_ids``
    are model layers, strictly increasing, one for each of ``layers``. The tensors are referenced,
    not copied, and may be views, of any dtype and of any number of allocations; their bytes must
    lie one after the other from the view's first on.
    """

    name: str
    page_size: int
    page_bytes: int
    pages: int
    layer_ids: tuple[int, ...]
    layers: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        check_layer_ids(f"pool {self.name!r}: layer_ids", self.layer_ids)
        if len(self.layers) != len(self.layer_ids):
            raise LayoutError(
                f"pool {self.name!r}: {len(self.layers)} layers for {len(self.layer_ids)} layer_ids"
            )
        first = self.layers[0]
        for layer, tensor in zip(self.layer_ids, self.layers, strict=True):
            what = f"pool {self.name!r}: layer {layer}"
            if tensor.dtype != first.dtype or tensor.device != first.device:
                raise LayoutError(
                    f"{what}: {tensor.dtype} on {tensor.device} differs from layer"
                    f" {self.layer_ids[0]}'s {first.dtype} on {first.device}"
                )
            if tensor.shape[0] != first.shape[0]:
                raise LayoutError(
                    f"{what}: shape {tuple(tensor.shape)} has {tensor.shape[0]} in its first"
                    f" dimension, layer {self.layer_ids[0]} has {first.shape[0]}"
                )
            _check_packed(what, tensor)
            if _bytes_of(tensor) != self.pages * self.page_bytes:
                raise LayoutError(
                    f"{what}: {_bytes_of(tensor)} bytes are not {self.pages} pages of"
                    f" {self.page_bytes} bytes"
                )

    @classmethod
    def from_layers(
        cls,
        name: str,
        layers: Sequence[torch.Tensor] | torch.Tensor,
        *,
        page_size: int,
        layer_ids: Sequence[int] | None = None,
    ) -> "DevicePool":
        """From tensors ``[slots, ...]``, one a layer, or one tensor ``[layers, slots, ...]``.

        ``slots`` must be a multiple of ``page_size``. Without ``layer_ids`` the layers are 0, 1, 2
        and so on. A packed draft layer is one more tensor in the list.
        """
        tensors = _layer_list(name, layers, "[slots, ...]")
        _check_at_least_one(name, "page_size", page_size)
        slots = tensors[0].shape[0]
        if slots % page_size:
            raise LayoutError(
                f"pool {name!r}: layers: {slots} slots is not a multiple of page_size {page_size}"
            )
        return cls._from_pages(name, tensors, page_size, slots // page_size, layer_ids)

    @classmethod
    def from_paged_layers(
        cls,
        name: str,
        layers: Sequence[torch.Tensor] | torch.Tensor,
        *,
        page_size: int,
        layer_ids: Sequence[int] | None = None,
    ) -> "DevicePool":
        """From tensors ``[pages, ...]``, one a layer, or one tensor ``[layers, pages, ...]``.

        For buffers whose page is not token by token, such as index-K, whose page holds all keys
        and then all scales. ``page_size`` says how many slots a page stands for.
        """
        tensors = _layer_list(name, layers, "[pages, ...]")
        _check_at_least_one(name, "page_size", page_size)
        return cls._from_pages(name, tensors, page_size, tensors[0].shape[0], layer_ids)

    @classmethod
    def key_value(
        cls,
        keys: Sequence[torch.Tensor] | torch.Tensor,
        values: Sequence[torch.Tensor] | torch.Tensor,
        *,
        page_size: int,
        layer_ids: Sequence[int] | None = None,
    ) -> "tuple[DevicePool, DevicePool]":
        """The pools ``k`` and ``v``, each from what ``from_layers`` takes; their rows may differ
        in width."""
        return (
            cls.from_layers("k", keys, page_size=page_size, layer_ids=layer_ids),
            cls.from_layers("v", values, page_size=page_size, layer_ids=layer_ids),
        )

    @classmethod
    def allocate(
        cls,
        spec: PoolSpec,
        *,
        pages: int,
        page_size: int,
        one_allocation: bool = True,
        memory: Memory = allocate_host,
    ) -> "DevicePool":
        """New zeroed uint8 tensors for ``spec``, by default in plain host memory.

        With ``one_allocation`` all layers but those in ``spec.own_allocation`` are evenly spaced
        in one, which lets a copy span them; without it every layer has its own.
        """
        _check_at_least_one(spec.name, "pages", pages)
        _check_at_least_one(spec.name, "page_size", page_size)
        page_bytes = spec.page_bytes(page_size)
        shape = (pages, page_bytes) if spec.paged else (pages * page_size, spec.row_bytes)
        shared = [i for i in spec.layer_ids if one_allocation and i not in spec.own_allocation]
        tensors = {
            layer: memory(pages * page_bytes).view(shape)
            for layer in spec.layer_ids
            if layer not in shared
        }
        if shared:
            together = memory(len(shared) * pages * page_bytes).view(len(shared), *shape)
            tensors.update(zip(shared, together.unbind(0), strict=True))
        return cls(
            name=spec.name,
            page_size=page_size,
            page_bytes=page_bytes,
            pages=pages,
            layer_ids=spec.layer_ids,
            layers=tuple(tensors[layer] for layer in spec.layer_ids),
        )

    @classmethod
    def _from_pages(
        cls,
        name: str,
        layers: tuple[torch.Tensor, ...],
        page_size: int,
        pages: int,
        layer_ids: Sequence[int] | None,
    ) -> "DevicePool":
        _check_at_least_one(name, "pages", pages)
        page_bytes = _bytes_of(layers[0]) // pages
        _check_at_least_one(name, "page_bytes", page_bytes)
        return cls(
            name=name,
            page_size=page_size,
            page_bytes=page_bytes,
            pages=pages,
            layer_ids=tuple(range(len(layers)) if layer_ids is None else layer_ids),
            layers=layers,
        )

    @property
    def slots(self) -> int:
        """Token slots of the pool."""
        return self.pages * self.page_size

    @property
    def allocations(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of each distinct piece of memory that the layers lie in, in layer
        order: torch's storages, but for those that it puts together of several pieces."""
        pieced = _expandable_segments(self.layers[0].device)
        return tuple(dict.fromkeys(_allocation(tensor, pieced) for tensor in self.layers))

    def tier(self) -> DeviceTier:
        """The native description. It holds addresses only: keep this pool as long as it is used."""
        return DeviceTier(
            layers=[tensor.data_ptr() for tensor in self.layers],
            pages=self.pages,
            page_bytes=self.page_bytes,
            allocations=self.allocations,
        )


@dataclass(frozen=True, eq=False)
class HostPool:
    """The host side of one pool: one buffer with a page of every stored layer.

    ``tensor`` is ``[pages, rows, ...]`` in layout ``page_first_direct`` and ``[rows, pages, ...]``
    in ``layer_first``; what follows the two are the ``page_bytes`` of one page of one layer,
    packed. ``rows`` holds the host row of each of ``layer_ids``, or None for a layer that is not
    stored here. ``registrations`` are the pinned ranges as (address, bytes); none for plain memory.
    ``pinned`` is what keeps them registered, where that is this pool's to do.
    """

    name: str
    layout: HostLayout
    layer_ids: tuple[int, ...]
    rows: tuple[int | None, ...]
    tensor: torch.Tensor
    registrations: tuple[tuple[int, int], ...] = ()
    pinned: Pinned | None = None

    def __post_init__(self) -> None:
        what = f"pool {self.name!r}: host tensor"
        _check_layout(self.name, self.layout)
        if self.tensor.dim() < 3:
            axes = "[pages, rows, ...]" if self._pages_axis == 0 else "[rows, pages, ...]"
            raise LayoutError(
                f"{what}: shape {tuple(self.tensor.shape)} has {self.tensor.dim()} dimensions,"
                f" layout {self.layout!r} needs at least 3: {axes}"
            )
        if self.tensor.device.type != "cpu":
            raise LayoutError(f"{what}: lies on {self.tensor.device}, it must lie on cpu")
        _check_at_least_one(self.name, "host pages", self.pages)
        used = [row for row in self.rows if row is not None]
        if used and max(used) >= self.num_rows:
            raise LayoutError(
                f"{what}: row {max(used)} is beyond the {self.num_rows} rows of shape"
                f" {tuple(self.tensor.shape)} in layout {self.layout!r}"
            )
        if self.num_rows:
            _check_packed(f"{what}: one page of one row", self.tensor[0, 0])

    @classmethod
    def allocate(
        cls,
        device: DevicePool,
        *,
        pages: int,
        layout: HostLayout = "page_first_direct",
        stored_layers: Sequence[int] | None = None,
        memory: Memory = allocate_host,
        pin: Pin | None = None,
    ) -> "HostPool":
        """A new buffer of ``pages`` pages for the layers of ``device``, or only ``stored_layers``.

        Rows follow the order of the layers without gaps, so no byte is held for a layer that is
        not stored. ``memory`` gives the bytes: by default ``allocate_host``, plain memory within
        the budget, interleaved over NUMA nodes with ``partial(allocate_host,
        numa_interleave=True)``. ``pin`` registers them with a device, as `CudaDevice.pin` does, in
        ranges that must cover the buffer; copies keep within one range each.
        """
        _check_layout(device.name, layout)
        _check_at_least_one(device.name, "host pages", pages)
        rows = _rows(device, stored_layers)
        count = sum(row is not None for row in rows)
        axes = (count, pages) if layout == "layer_first" else (pages, count)
        nbytes = count * pages * device.page_bytes
        buffer = memory(nbytes) if count else torch.empty(0, dtype=torch.uint8)
        pinned = pin(buffer, device.page_bytes) if pin and count else None
        return cls(
            name=device.name,
            layout=layout,
            layer_ids=device.layer_ids,
            rows=rows,
            tensor=buffer.view(*axes, device.page_bytes),
            registrations=tuple(pinned.ranges) if pinned else (),
            pinned=pinned,
        )

    @classmethod
    def from_tensor(
        cls,
        device: DevicePool,
        tensor: torch.Tensor,
        *,
        layout: HostLayout,
        stored_layers: Sequence[int] | None = None,
        registrations: Sequence[tuple[int, int]] = (),
    ) -> "HostPool":
        """A caller's buffer for the layers of ``device``: row *i* for the *i*-th stored layer.

        Views are taken by their strides (a range of rows, every second page); only one page of one
        row must be packed. A token-major layer-first buffer ``[rows, slots, ...]`` is passed as
        ``tensor.view(rows, pages, -1)``. Whether its pages are wide enough is checked when paired.
        """
        return cls(
            name=device.name,
            layout=layout,
            layer_ids=device.layer_ids,
            rows=_rows(device, stored_layers),
            tensor=tensor,
            registrations=tuple(registrations),
        )

    @property
    def _pages_axis(self) -> int:
        return 1 if self.layout == "layer_first" else 0

    @property
    def pages(self) -> int:
        """Pages of the host tier."""
        return self.tensor.shape[self._pages_axis]

    @property
    def num_rows(self) -> int:
        """Rows of the buffer, used or not."""
        return self.tensor.shape[1 - self._pages_axis]

    @property
    def page_bytes(self) -> int:
        """Bytes the buffer has for one page of one layer."""
        return math.prod(self.tensor.shape[2:]) * self.tensor.element_size()

    @property
    def stored_layers(self) -> tuple[int, ...]:
        """The model layers that have a row here."""
        pairs = zip(self.layer_ids, self.rows, strict=True)
        return tuple(layer for layer, row in pairs if row is not None)

    def whole_page(self, page: int) -> torch.Tensor:
        """One page of every layer, ``[rows, ...]``, for a storage tier behind the host: a view.

        Raises ``LayoutError`` where other ranks keep some of the layers.
        """
        elsewhere = [layer for layer in self.layer_ids if layer not in self.stored_layers]
        if elsewhere:
            raise LayoutError(
                f"pool {self.name!r}: a whole page is not here, {len(elsewhere)} of its"
                f" {len(self.layer_ids)} layers are kept elsewhere: a sharded tier has no L3 access"
            )
        if not 0 <= page < self.pages:
            raise LayoutError(
                f"pool {self.name!r}: page {page} is out of range, the host tier has"
                f" {self.pages} pages"
            )
        return self.tensor[page] if self._pages_axis == 0 else self.tensor[:, page]

    def tier(self) -> HostTier:
        """The native description. It holds addresses only: keep this pool as long as it is used."""
        outer, inner = (dim * self.tensor.element_size() for dim in self.tensor.stride()[:2])
        page_stride, layer_stride = (outer, inner) if self._pages_axis == 0 else (inner, outer)
        reach = (self.pages - 1) * page_stride + max(0, self.num_rows - 1) * layer_stride
        return HostTier(
            address=self.tensor.data_ptr(),
            size=reach + self.page_bytes if self.num_rows else 0,
            pages=self.pages,
            page_bytes=self.page_bytes,
            page_stride=page_stride,
            layer_stride=layer_stride,
            rows=self.rows,
            registrations=self.registrations,
        )


@dataclass(frozen=True, eq=False)
class Pool:
    """One kind of KV buffer on both tiers, with the native ``layout`` that copies are planned by.

    Made by ``pair``. It keeps the tensors of both tiers alive as long as it lives.
    """

    device: DevicePool
    host: HostPool
    layout: PoolLayout

    @classmethod
    def pair(cls, device: DevicePool, host: HostPool) -> "Pool":
        """Pairs two tiers that describe the same layers.

        Raises ``LayoutError``, naming both values, when they do not, when the host page is narrower
        than the device page, and when layers or pages overlap.
        """
        if host.layer_ids != device.layer_ids:
            raise LayoutError(
                f"pool {device.name!r}: the host tier describes layers {list(host.layer_ids)},"
                f" the device tier {list(device.layer_ids)}"
            )
        layout = PoolLayout(
            name=device.name, layer_ids=device.layer_ids, device=device.tier(), host=host.tier()
        )
        return cls(device, host, layout)

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.device.page_size

    @property
    def num_layers(self) -> int:
        """Highest model layer id of the pool, plus one."""
        return self.layout.num_layers


def _expandable_segments(device: torch.device) -> list[tuple[int, int]]:
    """(address, bytes) of the GPU memory that torch has mapped piece by piece."""
    if device.type != "cuda":
        return []
    return [
        (segment["address"], segment["total_size"])
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if segment["is_expandable"]
    ]


def _allocation(tensor: torch.Tensor, pieced: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """What one copy may span around a layer. Of a storage in pieces no more than the layer: what a
    driver does with rows that cross from one piece into another is not documented."""
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    if any(address <= begin < address + size for address, size in pieced):
        return tensor.data_ptr(), _bytes_of(tensor)
    return begin, storage.nbytes()


def _rows(device: DevicePool, stored_layers: Sequence[int] | None) -> tuple[int | None, ...]:
    """A host row for each of the device's layers that is stored, in order, without gaps."""
    stored = set(device.layer_ids if stored_layers is None else stored_layers)
    unknown = sorted(stored - set(device.layer_ids))
    if unknown:
        raise LayoutError(
            f"pool {device.name!r}: stored_layers: layer {unknown[0]} is not one of the pool's"
            f" {list(device.layer_ids)}"
        )
    order = {layer: row for row, layer in enumerate(sorted(stored))}
    return tuple(order.get(layer) for layer in device.layer_ids)


def _layer_list(
    name: str, layers: Sequence[torch.Tensor] | torch.Tensor, shape: str
) -> tuple[torch.Tensor, ...]:
    tensors = tuple(layers.unbind(0) if isinstance(layers, torch.Tensor) else layers)
    if not tensors:
        raise LayoutError(f"pool {name!r}: layers: 0 layers, at least 1 is needed")
    for position, tensor in enumerate(tensors):
        if tensor.dim() < 2:
            raise LayoutError(
                f"pool {name!r}: layers[{position}]: shape {tuple(tensor.shape)} has"
                f" {tensor.dim()} dimensions, at least 2 are needed: {shape}"
            )
    return tensors


def _check_layout(name: str, layout: str) -> None:
    if layout == "page_first":
        raise LayoutError(
            f"pool {name!r}: layout: 'page_first' interleaves the layers of a page token by token,"
            " so no page of a layer is one piece; use 'page_first_direct'"
        )
    if layout not in get_args(HostLayout):
        known = " or ".join(repr(known) for known in get_args(HostLayout))
        raise LayoutError(f"pool {name!r}: layout: {layout!r} is not {known}")


def _check_packed(what: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        packed = tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(tensor.dim()))
        raise LayoutError(
            f"{what}: its rows are not packed: shape {tuple(tensor.shape)} has strides"
            f" {tensor.stride()}, packed ones are {packed}; describe the tensor that this views"
        )


def _check_at_least_one(name: str, argument: str, value: int) -> None:
    if value < 1:
        raise LayoutError(f"pool {name!r}: {argument}: {value} is below 1")


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
