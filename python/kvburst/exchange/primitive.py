"""The one primitive of the exchange: a layer's pages, from the rank that owns it to all others."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvburst._core import ComputeDevice, CudaDevice, Device, LayoutError, Stream
from kvburst.exchange.channel import Channel, current_for_torch
from kvburst.pools import Pool

_logger = logging.getLogger("kvburst")


@dataclass(frozen=True)
class ExchangeStats:
    """Since the start, on this rank. Bytes are those of pages."""

    broadcasts: int
    sent_bytes: int
    received_bytes: int


class _Rows(Protocol):
    """Moves rows `[rows, row_bytes]` between their places and packed memory."""

    def gather(
        self, packed: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, stream: Stream
    ) -> None: ...

    def scatter(
        self, rows: torch.Tensor, packed: torch.Tensor, ids: torch.Tensor, stream: Stream
    ) -> None: ...


class _TorchRows:
    """At once on the CPU, on the stream elsewhere."""

    def gather(
        self, packed: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, stream: Stream
    ) -> None:
        with current_for_torch(stream, rows):
            torch.index_select(rows, 0, ids, out=packed)

    def scatter(
        self, rows: torch.Tensor, packed: torch.Tensor, ids: torch.Tensor, stream: Stream
    ) -> None:
        with current_for_torch(stream, rows):
            rows.index_copy_(0, ids, packed)


class _DeviceRows:
    """On a stream, by the device itself. On `host` nothing else could: torch's operations are on
    none of its streams."""

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device

    def gather(
        self, packed: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, stream: Stream
    ) -> None:
        self._device.gather(
            stream, packed.data_ptr(), rows.data_ptr(), ids.data_ptr(), len(ids), rows.shape[1]
        )

    def scatter(
        self, rows: torch.Tensor, packed: torch.Tensor, ids: torch.Tensor, stream: Stream
    ) -> None:
        self._device.scatter(
            stream, rows.data_ptr(), packed.data_ptr(), ids.data_ptr(), len(ids), rows.shape[1]
        )


def _rows_of(device: Device, channel: Channel) -> _Rows:
    """The device's own where it can and where the channel is on streams. Where a GPU has no
    kernels, torch's, and the log says why."""
    if channel.on_stream and isinstance(device, ComputeDevice) and device.moves_rows:
        return _DeviceRows(device)
    if isinstance(device, CudaDevice) and not device.moves_rows:
        _logger.warning(
            "torch gathers and scatters the layers that ranks exchange; staging kernels: %s",
            device.kernels,
        )
    return _TorchRows()


class LayerBroadcast:
    """Gathers, broadcasts and scatters pages of one layer of one pool, a staging buffer at a time.

    The source is an argument of every call. Pages go in the order in which they are named, and each
    rank names its own: the *i*-th page of the source becomes the *i*-th of every other rank,
    wherever that lies there.
    """

    def __init__(
        self, pools: Sequence[Pool], device: Device, channel: Channel, staging_bytes: int
    ) -> None:
        for pool in pools:
            if staging_bytes < pool.device.page_bytes:
                raise LayoutError(
                    f"staging_bytes: {staging_bytes} has no room for one page of pool "
                    f"{pool.name!r}, {pool.device.page_bytes} bytes"
                )
        self._channel = channel
        self._rows = _rows_of(device, channel)
        self._staging = channel.staging(staging_bytes, pools[0].device.layers[0].device)
        # By pool, then by model layer: its pages as rows.
        self._layers = tuple(
            {
                layer: tensor.view(-1).view(torch.uint8).view(pool.device.pages, -1)
                for layer, tensor in zip(pool.device.layer_ids, pool.device.layers, strict=True)
            }
            for pool in pools
        )
        self._broadcasts = 0
        self._bytes = {True: 0, False: 0}

    def has_layer(self, pool: int, layer: int) -> bool:
        return layer in self._layers[pool]

    def send(
        self, pool: int, layer: int, page_ids: torch.Tensor, source: int, stream: Stream
    ) -> None:
        """Every rank calls it alike, but for `page_ids`: as many, each its own (int64,
        contiguous, on the pool's device). Enqueues on `stream`, or blocks, as the channel does."""
        rows = self._layers[pool][layer]
        row_bytes = rows.shape[1]
        mine = source == self._channel.rank
        for ids in torch.split(page_ids, self._staging.numel() // row_bytes):
            packed = self._staging[: len(ids) * row_bytes].view(len(ids), row_bytes)
            if mine:
                self._rows.gather(packed, rows, ids, stream)
            self._channel.broadcast(packed, source, stream)
            if not mine:
                self._rows.scatter(rows, packed, ids, stream)
            self._broadcasts += 1
            self._bytes[mine] += packed.numel()

    @property
    def stats(self) -> ExchangeStats:
        return ExchangeStats(self._broadcasts, self._bytes[True], self._bytes[False])
