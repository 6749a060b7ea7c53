"""A wait for a layer is one for all before it, whatever order their copies are issued in."""

import pytest
import torch

from kvburst._core import CopyPlanner, HostDevice
from kvburst.pools import DevicePool, HostPool, Pool
from kvburst.sglang_plugin.layer_done import last_layers


def pool(name: str, layer_ids: list[int]) -> Pool:
    device = DevicePool.from_layers(
        name, torch.zeros(len(layer_ids), 8, 4), page_size=4, layer_ids=layer_ids
    )
    return Pool.pair(device, HostPool.allocate(device, pages=2))


@pytest.mark.parametrize(
    "layers",
    [
        [list(range(78))],
        [list(range(78)), [0, 1, 2, *range(6, 78, 4)]],
        [list(range(78)), [2, 5, 70, 73, 76]],
        [[3, 7, 11], [0, 1, 2, 4, 5, 6, 8, 9, 10]],
        [[5], [0]],
    ],
)
def test_when_a_layer_is_waited_for_every_layer_before_it_has_been_issued(
    layers: list[list[int]],
) -> None:
    pools = [pool(f"pool{i}", ids) for i, ids in enumerate(layers)]
    planner = CopyPlanner(
        [each.layout for each in pools], direction="load", limits=HostDevice().limits
    )
    transfer_layers = max(max(ids) for ids in layers) + 3
    last = last_layers(planner.groups, transfer_layers)

    issued_at = {}  # by (pool, layer): the group that moves it
    for at, group in enumerate(planner.groups):
        for layer in group.layers:
            issued_at[group.pool, layer] = at
    recorded_at = {
        layer: at for at, group in enumerate(planner.groups) for layer in group.completes
    }
    for layer in range(transfer_layers):
        before = [at for (_, moved), at in issued_at.items() if moved <= layer]
        waits_for = last[layer]
        if waits_for is None:
            assert not before
        else:
            assert recorded_at[waits_for] == max(before)


def test_a_layers_own_event_would_not_do() -> None:
    """The control: with a second pool in fewer layers, layer 77 is there before layer 76 is."""
    pools = [pool("kv", list(range(78))), pool("index", [2, 5, 70, 73, 76])]
    planner = CopyPlanner(
        [each.layout for each in pools], direction="load", limits=HostDevice().limits
    )
    recorded_at = {
        layer: at for at, group in enumerate(planner.groups) for layer in group.completes
    }
    assert recorded_at[77] < recorded_at[76]
    assert last_layers(planner.groups, 78)[77] == 76
