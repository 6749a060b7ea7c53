"""SGLang's host and device pools, described as pools of kvburst.

SGLang counts layers three ways. A *transfer layer* is what it waits for: model layers of this
pipeline stage, and the layer ids used here. An entry's ``layer_mapper`` turns it into the pool's
own *local layer*, if the pool has it. Where the local layer lies on either tier only the host
pool's class knows, so there is one description a class; subclasses may lie differently and are
refused.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, get_args

import torch
from sglang.srt.mem_cache.pool_host.common import _CUDA_HOST_REGISTERED_RANGES_ATTR
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import (
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvburst._core import LayoutError
from kvburst.pools import DevicePool, HostLayout, HostPool, Pool


class UnsupportedPoolError(LayoutError):
    """A pool of SGLang's that its own copies have to move."""


@dataclass(frozen=True)
class Member:
    """A transfer of SGLang's, by what it moves between."""

    host_pool: Any
    device_pool: Any
    is_draft: bool

    def same(self, transfer: Any) -> bool:
        """Whether an ``L2Transfer`` moves this."""
        return (
            transfer.host_pool is self.host_pool
            and transfer.device_pool is self.device_pool
            and transfer.is_draft == self.is_draft
        )


@dataclass(frozen=True)
class Space:
    """Pools that always move together, the same pages of each."""

    name: str
    page_size: int
    """Slots of a page."""
    pools: tuple[Pool, ...]
    members: tuple[Member, ...]
    """The first has the indices. Drafts are transfers of their own in loads alone."""


@dataclass(frozen=True)
class Row:
    """One local layer of a buffer: its host row and its device tensor."""

    layer: int
    """The transfer layer that it is loaded with."""
    row: int | None
    """None: another rank keeps it."""
    tensor: torch.Tensor


@dataclass(frozen=True)
class Buffer:
    """One host buffer, ``[pages, rows, ...]`` or ``[rows, pages, ...]``, and what it mirrors."""

    name: str
    layout: HostLayout
    host: torch.Tensor
    registered: torch.Tensor
    """The tensor that SGLang registered, of which `host` is a part."""
    paged: bool
    """Device tensors are ``[pages, ...]`` and not ``[slots, ...]``."""
    rows: tuple[Row, ...]
    drafts: tuple[Row, ...]


Describe: TypeAlias = Callable[[Any, int], Iterator[Buffer]]
"""The buffers of an entry with so many transfer layers."""


def spaces_of(
    entries: Sequence[Any],
    rides_on: dict[str, str],
    transfer_layers: int,
    describe: Describe | None = None,
) -> tuple[Space, ...]:
    """The pools of a host pool group, by whose pages they move.

    ``rides_on``: for pools that move the pages of another, its name. ``describe``: another way than
    that of the host pool's class. Raises LayoutError, or
    UnsupportedPoolError, which is one, naming the pool and what is against it.
    """
    by_name = {name_of(entry): entry for entry in entries}
    for name, entry in by_name.items():
        for other, earlier in by_name.items():
            if other != name and earlier.host_pool is entry.host_pool:
                raise UnsupportedPoolError(f"pools {other!r} and {name!r} share a host pool")
    groups: dict[str, list[Any]] = {
        name: [entry] for name, entry in by_name.items() if name not in rides_on
    }
    for name, source in rides_on.items():
        if name in by_name:
            if source not in groups:
                raise UnsupportedPoolError(
                    f"pool {name!r} moves the pages of {source!r}, which has none of its own"
                )
            groups[source].append(by_name[name])
    describe = _buffers if describe is None else describe
    return tuple(
        _space(name, members, transfer_layers, describe) for name, members in groups.items()
    )


def _space(name: str, entries: Sequence[Any], transfer_layers: int, describe: Describe) -> Space:
    page_size = entries[0].host_pool.page_size
    pools: list[Pool] = []
    members: list[Member] = []
    for entry in entries:
        if entry.host_pool.page_size != page_size:
            raise UnsupportedPoolError(
                f"pool {name_of(entry)!r}: page_size {entry.host_pool.page_size} must be"
                f" {page_size}, that of pool {name!r}, whose pages it moves"
            )
        members.append(Member(entry.host_pool, entry.device_pool, False))
        members += [
            Member(entry.host_pool, draft, True) for draft in entry.packed_draft_device_pools
        ]
        for buffer in describe(entry, transfer_layers):
            pools += _pools(buffer, page_size)
    return Space(name, page_size, tuple(pools), tuple(members))


def name_of(entry: Any) -> str:
    return str(entry.name.value)


def _buffers(entry: Any, transfer_layers: int) -> Iterator[Buffer]:
    host = entry.host_pool
    describe = _DESCRIPTIONS.get(type(host))
    if describe is None:
        raise UnsupportedPoolError(f"pool {name_of(entry)!r}: {type(host).__name__} is not known")
    for pool in (entry.device_pool, *entry.packed_draft_device_pools):
        # Pools of recurrent state have no such attribute.
        if getattr(pool, "host_transfer_translate", None) is not None:
            raise UnsupportedPoolError(f"pool {name_of(entry)!r}: its slots are virtual")
        if getattr(pool, "layer_shard_enabled", False):
            raise UnsupportedPoolError(f"pool {name_of(entry)!r}: its layers are spread over ranks")
    return describe(entry, transfer_layers)


def _local_layers(entry: Any, transfer_layers: int) -> list[tuple[int, int]]:
    """(transfer layer, local layer) of what a load moves."""
    mapped = ((layer, entry.layer_mapper(layer)) for layer in range(transfer_layers))
    return [(layer, local) for layer, local in mapped if local is not None]


def _draft_layers(entry: Any, transfer_layers: int) -> list[tuple[int, int, int]]:
    """(depth, transfer layer, local layer) of the packed drafts.

    SGLang loads draft `d` with transfer layer `d`, or with the last if there are fewer.
    """
    drafts = []
    for depth in range(len(entry.packed_draft_device_pools)):
        local = entry.layer_mapper(transfer_layers + depth)
        if local is None:
            raise UnsupportedPoolError(f"pool {name_of(entry)!r}: draft {depth} is never loaded")
        drafts.append((depth, min(depth, transfer_layers - 1), local))
    return drafts


def _kv_buffer(
    entry: Any,
    name: str,
    host: torch.Tensor,
    registered: torch.Tensor,
    transfer_layers: int,
    row_of: Callable[[int], int | None],
    tensor_of: Callable[[int], torch.Tensor],
) -> Buffer:
    """Of slots, with host rows and device tensors by local layer, drafts included."""
    rows = []
    for layer, local in _local_layers(entry, transfer_layers):
        row = row_of(local)
        if row is not None:
            rows.append(Row(layer, row, tensor_of(local)))
    drafts = []
    for depth, layer, local in _draft_layers(entry, transfer_layers):
        row = row_of(local)
        if row is None:
            raise UnsupportedPoolError(f"pool {name!r}: draft {depth} has no host row")
        drafts.append(Row(layer, row, tensor_of(local)))
    return Buffer(name, layout_of(entry), host, registered, False, tuple(rows), tuple(drafts))


def _mla(entry: Any, transfer_layers: int) -> Iterator[Buffer]:
    host = entry.host_pool
    _check_physical(entry)
    yield _kv_buffer(
        entry,
        name_of(entry),
        by_page(host, host.kv_buffer),
        host.kv_buffer,
        transfer_layers,
        host._host_layer_by_controller.get,
        lambda local: host.device_kv_buffers[host._buffer_index_by_layer[local]],
    )


def _mha(entry: Any, transfer_layers: int) -> Iterator[Buffer]:
    host = entry.host_pool
    _check_physical(entry)
    separate = isinstance(host.kv_buffer, tuple)
    for part, buffer, tensors in (
        ("k", host.k_buffer, host.device_k_buffers),
        ("v", host.v_buffer, host.device_v_buffers),
    ):
        yield _kv_buffer(
            entry,
            f"{name_of(entry)}.{part}",
            by_page(host, buffer),
            buffer if separate else host.kv_buffer,
            transfer_layers,
            lambda local: local if 0 <= local < host.layer_num else None,
            tensors.__getitem__,
        )


def _index_k(entry: Any, transfer_layers: int) -> Iterator[Buffer]:
    host = entry.host_pool
    rows = tuple(
        Row(layer, host._device_to_host_layer[local], buffer)
        for layer, local in _local_layers(entry, transfer_layers)
        if local in host._device_to_host_layer
        for buffer in [entry.device_pool.index_k_with_scale_buffer[local]]
    )
    drafts = tuple(
        Row(layer, host._draft_host_layer(local), pool.index_k_with_scale_buffer[0])
        for depth, layer, local in _draft_layers(entry, transfer_layers)
        for pool in [entry.packed_draft_device_pools[depth]]
    )
    buffer = host.index_k_with_scale_buffer
    yield Buffer(name_of(entry), layout_of(entry), buffer, buffer, True, rows, drafts)


def _state(entry: Any, transfer_layers: int) -> Iterator[Buffer]:
    """Recurrent state: a page is one request's, and side state comes with its first layer.

    A page of one slot lies alike in both page-first layouts.
    """
    host = entry.host_pool
    layers = _local_layers(entry, transfer_layers)
    drafts = _draft_layers(entry, transfer_layers)
    buffers = [
        (f"conv{i}", buffer, host.conv_device_layers[i])
        for i, buffer in enumerate(host.conv_buffer)
    ]
    if host.temporal_state_elem_size > 0:
        buffers.insert(0, ("temporal", host.temporal_buffer, host.temporal_device_layers))
    for part, buffer, tensors in buffers:
        yield Buffer(
            f"{name_of(entry)}.{part}",
            "page_first_direct",
            buffer,
            buffer,
            False,
            tuple(Row(layer, local, tensors[local]) for layer, local in layers),
            tuple(Row(layer, local, tensors[local]) for _, layer, local in drafts),
        )
    first = [layer for layer, local in layers if local == 0]
    for i, (state, buffer) in enumerate(
        zip(host.slot_state_device_tensors, host.slot_state_buffers, strict=True)
    ):
        yield Buffer(
            f"{name_of(entry)}.side{i}",
            "page_first_direct",
            buffer.view(buffer.shape[0], 1, -1),
            buffer,
            False,
            tuple(Row(layer, 0, state) for layer in first),
            (),
        )


_DESCRIPTIONS: dict[type[Any], Describe] = {
    MLATokenToKVPoolHost: _mla,
    MHATokenToKVPoolHost: _mha,
    AsymmetricMHATokenToKVPoolHost: _mha,
    DSAIndexerPoolHost: _index_k,
    MambaPoolHost: _state,
}


def _check_physical(entry: Any) -> None:
    host = entry.host_pool
    if host.dcp_size != 1:
        raise UnsupportedPoolError(
            f"pool {name_of(entry)!r}: its slots are spread over ranks (DCP)"
        )
    if not host.device_rows_packed:
        raise UnsupportedPoolError(f"pool {name_of(entry)!r}: its device rows are not packed")
    if host.kv_buffer is None:
        raise UnsupportedPoolError(f"pool {name_of(entry)!r}: it has no host buffer")


def layout_of(entry: Any) -> HostLayout:
    layout = entry.host_pool.layout
    if layout not in get_args(HostLayout):
        raise UnsupportedPoolError(
            f"pool {name_of(entry)!r}: host layout {layout!r} must be"
            f" {' or '.join(get_args(HostLayout))}"
        )
    return cast(HostLayout, layout)


def by_page(host: Any, buffer: torch.Tensor) -> torch.Tensor:
    """A token-major layer-first buffer ``[rows, slots, ...]`` as ``[rows, pages, ...]``."""
    if host.layout != "layer_first":
        return buffer
    return buffer.view(buffer.shape[0], buffer.shape[1] // host.page_size, -1)


def _pools(buffer: Buffer, page_size: int) -> list[Pool]:
    """One pool of the target's layers, and one for each draft, which shares a transfer layer."""
    host_rows = buffer.host.shape[0 if buffer.layout == "layer_first" else 1]
    rows = (row.row for row in (*buffer.rows, *buffer.drafts))
    covered = sorted(row for row in rows if row is not None)
    if covered != list(range(host_rows)):
        raise UnsupportedPoolError(
            f"pool {buffer.name!r}: loads move host rows {covered}, backups all of {host_rows}"
        )
    parts = [(buffer.name, buffer.rows)] if buffer.rows else []
    parts += [(f"{buffer.name}.draft{i}", (row,)) for i, row in enumerate(buffer.drafts)]
    return [_pool(buffer, name, rows, page_size) for name, rows in parts]


def _pool(buffer: Buffer, name: str, rows: tuple[Row, ...], page_size: int) -> Pool:
    layers = [row.layer for row in rows]
    tensors = [row.tensor for row in rows]
    if buffer.paged:
        device = DevicePool.from_paged_layers(name, tensors, page_size=page_size, layer_ids=layers)
    else:
        whole = tensors[0].shape[0] // page_size * page_size
        device = DevicePool.from_layers(
            name, [each[:whole] for each in tensors], page_size=page_size, layer_ids=layers
        )
    host = HostPool(
        name=name,
        layout=buffer.layout,
        layer_ids=tuple(layers),
        rows=tuple(row.row for row in rows),
        tensor=buffer.host,
        registrations=_registrations(buffer.registered),
    )
    if host.page_bytes != device.page_bytes:
        raise UnsupportedPoolError(
            f"pool {name!r}: a page of a layer has {host.page_bytes} bytes on the host and"
            f" {device.page_bytes} on the device"
        )
    return Pool.pair(device, host)


def _registrations(buffer: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """The pinned ranges as SGLang noted them on the tensor; a plain tensor has no note."""
    return tuple(getattr(buffer, _CUDA_HOST_REGISTERED_RANGES_ATTR, ()))
