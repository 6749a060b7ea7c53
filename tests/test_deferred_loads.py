"""Loads whose device indices lie on the device, and are still to be written when they leave."""

import pytest
import torch

from kvburst._core import BurstError, BurstIssuer, BurstPages, HostDevice, LayerGate
from kvburst._indices import deferred_view, index_view
from kvburst.pools import DevicePool, HostPool, Pool

PAGE_SIZE = 4
LAYERS = 6


class Rig:
    """One pool with all pages distinct on the host, and an issuer on a thread."""

    def __init__(self) -> None:
        self.device = HostDevice()
        self.kv = torch.zeros(LAYERS, 8 * PAGE_SIZE, 16, dtype=torch.uint8)
        on_device = DevicePool.from_layers("kv", self.kv, page_size=PAGE_SIZE)
        on_host = HostPool.allocate(on_device, pages=8)
        on_host.tensor.copy_(torch.randint(1, 256, on_host.tensor.shape))
        self.pool = Pool.pair(on_device, on_host)
        layouts = [self.pool.layout]
        self.gate = LayerGate(self.device, layouts, slots=3)
        self.issuer = BurstIssuer(
            self.device, layouts, direction="load", gate=self.gate, mode="thread", memory=self.pool
        )
        self.pages = BurstPages(layouts, direction="load", page_size=PAGE_SIZE)
        self.forward = self.device.new_stream()
        self.indices = torch.zeros(2 * PAGE_SIZE, dtype=torch.int64)

    def write_indices(self, pages: list[int]) -> torch.Tensor:
        """Enqueue on the forward's stream that the device indices become those of `pages`."""
        late = slots(pages)
        self.device.copy(
            self.forward, self.indices.data_ptr(), late.data_ptr(), late.numel() * late.itemsize
        )
        return late

    def load(self, host_pages: list[int]) -> int:
        host_indices = slots(host_pages)
        self.pages.append_deferred(
            device=deferred_view("device_indices", self.indices),
            host=index_view("host_indices", host_indices),
        )
        burst = self.issuer.submit(self.pages, [7], stream=self.forward)
        assert burst is not None
        return burst.id

    def found(self, page: int) -> torch.Tensor:
        return self.kv[:, page * PAGE_SIZE : (page + 1) * PAGE_SIZE].reshape(LAYERS, -1)


def slots(pages: list[int]) -> torch.Tensor:
    first = torch.tensor(pages) * PAGE_SIZE
    return (first[:, None] + torch.arange(PAGE_SIZE)).flatten()


def test_load_goes_where_the_indices_say_once_the_stream_has_written_them() -> None:
    rig = Rig()
    stall = rig.device.stall(rig.forward)
    kept = rig.write_indices([5, 2])
    burst = rig.load([3, 6])
    assert not rig.gate.is_done(burst)
    assert not rig.kv.any()
    stall.release()
    for layer in range(LAYERS):
        rig.gate.wait(burst, layer)
    assert torch.equal(rig.found(5), rig.pool.host.tensor[3])
    assert torch.equal(rig.found(2), rig.pool.host.tensor[6])
    assert not rig.found(0).any()
    assert kept.numel() == 2 * PAGE_SIZE


@pytest.mark.parametrize(
    ("pages", "said"), [([5, 5], "page 5 is a destination"), ([5, 9], "out of range|beyond")]
)
def test_indices_that_turn_out_wrong_fail_the_burst_before_anything_moves(
    pages: list[int], said: str
) -> None:
    rig = Rig()
    kept = rig.write_indices(pages)
    burst = rig.load([3, 6])
    with pytest.raises(BurstError, match=said) as failed:
        rig.gate.wait(burst, 0)
    assert "node_ids [7]" in str(failed.value)
    rig.issuer.drain()
    assert not rig.kv.any()
    assert kept.numel() == 2 * PAGE_SIZE
