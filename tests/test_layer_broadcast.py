"""A layer's pages from one rank to the other, gathered and scattered by a device's own means."""

import logging
from collections.abc import Sequence

import pytest
import torch
from burst_helpers import fill_random
from devices import to_device
from stand_in import LoadStandIn

from kvburst import ComputeDevice, CudaDevice, HostDevice, Pool, Stream
from kvburst.cuda import tier_memory
from kvburst.exchange.in_process import InProcessGroup
from kvburst.exchange.primitive import LayerBroadcast
from kvburst.pools import DevicePool, HostPool

PAGE_BYTES = 64


class Loopback:
    """Two ranks of one stream that share their staging memory: a broadcast has nothing to do."""

    on_stream = True
    numbers_apart = True
    ranks = 2

    def __init__(self, rank: int, staged: torch.Tensor) -> None:
        self.rank = rank
        self._staged = staged

    def staging(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return self._staged[:nbytes]

    def broadcast(self, staged: torch.Tensor, source: int, stream: Stream) -> None:
        assert staged.data_ptr() == self._staged.data_ptr()

    def minimum(self, values: Sequence[int]) -> object:
        raise AssertionError("no numbers are exchanged")


def make_pools(device: ComputeDevice) -> list[Pool]:
    memory = tier_memory(device)
    pools = []
    for name, layers, row in (("kv", (0, 1), 24), ("index_k", (1,), 12)):
        tensor = memory.device(len(layers) * 8 * 2 * row).view(len(layers), 16, row)
        on_device = DevicePool.from_layers(name, tensor, page_size=2, layer_ids=layers)
        pools.append(Pool.pair(on_device, HostPool.allocate(on_device, pages=8, pin=memory.pin)))
    return pools


def test_layer_goes_from_one_rank_to_the_other_on_the_stream(
    moving: ComputeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """With room for two pages at a time, so in several broadcasts."""
    staged = tier_memory(moving).device(2 * 48)
    ranks = [make_pools(moving) for _ in range(2)]
    ends = [
        LayerBroadcast(pools, moving, Loopback(rank, staged), len(staged))  # type: ignore[arg-type]
        for rank, pools in enumerate(ranks)
    ]
    ids = [to_device(moving, torch.tensor(pages)) for pages in ([5, 0, 3, 6, 1], [2, 7, 4, 0, 6])]
    stream = moving.new_stream()
    for number, pool in enumerate(ranks[0]):
        for position, layer in enumerate(pool.device.layer_ids):
            fill_random(pool.device.layers[position], seed=10 * number + layer)
            moving.synchronize()
            # One after the other, since the staging memory is one.
            for begin in range(0, 5, 1):
                for rank in (0, 1):
                    ends[rank].send(number, layer, ids[rank][begin : begin + 1], 0, stream)
    stream.synchronize()
    for ours, theirs in zip(*ranks, strict=True):
        for source, target in zip(ours.device.layers, theirs.device.layers, strict=True):
            by_page = [layer.view(8, -1) for layer in (source, target)]
            assert torch.equal(by_page[0][ids[0]], by_page[1][ids[1]])
            assert not by_page[1][[1, 3, 5]].any()
    assert caplog.records == []


def test_exchange_without_kernels_is_torchs_and_says_so_once(
    load_stand_in: LoadStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    driver = load_stand_in(11080)
    cuda = CudaDevice(driver=str(driver.path))
    caplog.clear()
    staged = cuda.tensor(96)
    ranks = [make_pools(cuda) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "kvburst"):
        end = LayerBroadcast(ranks[0], cuda, Loopback(0, staged), 96)  # type: ignore[arg-type]
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("torch gathers and scatters the layers that ranks exchange; ")
    assert said.endswith(f"staging kernels: {cuda.kernels}")
    fill_random(ranks[0][0].device.layers[0], seed=1)
    for _ in range(3):
        end.send(0, 0, torch.tensor([3, 1]), 0, cuda.new_stream())
    pages = ranks[0][0].device.layers[0].view(8, -1)
    assert torch.equal(staged.view(2, 48), pages[[3, 1]])
    assert driver.count("cuLaunchKernel") == 0
    assert len(caplog.records) == 1


def test_exchange_of_a_host_device_is_on_its_streams(caplog: pytest.LogCaptureFixture) -> None:
    device = HostDevice()
    pools = make_pools(device)
    channel = InProcessGroup(2).channel(0, device)
    LayerBroadcast(pools, device, channel, 96)
    assert caplog.records == []
