"""The forward of a rank whose layers come from others, computed from when each layer was in place.

Where an exchange runs over something slower than it stands for, its real time would drown all else.
So what is known is put together on paper: when each owner's copies were done, what the modelled
link charges for a broadcast, how long a layer computes. All ranks run the same forward, and each
layer starts on all of them together: each of its collectives makes them wait for each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvburst._core import BurstPages, CopyPlanner, LinkModel, PoolLayout
from kvburst._indices import index_view
from kvburst.links import ExchangeLink
from kvburst.ownership import Ownership


@dataclass(frozen=True)
class ModelledForward:
    """Milliseconds from the hand-over, or of something between."""

    stalls_ms: float
    """That the forward stood still for layers whose owner's copies were not done."""
    exchange_ms: float
    """Of the forward's stream, for all broadcasts."""
    layer_0_ms: float
    """When the first layer was in place on every rank."""
    ends_ms: float


def charges_us(
    owned: Ownership, page_bytes: Sequence[int], pages: int, staging_bytes: int, link: ExchangeLink
) -> list[float]:
    """Microseconds of the exchange of each model layer, all pools; `page_bytes` of one layer."""
    layers = max(layers[-1] for layers in owned.pools) + 1
    charged = [0.0] * layers
    for nbytes, of_pool in zip(page_bytes, owned.pools, strict=True):
        at_once = max(1, staging_bytes // nbytes)
        counts = [min(at_once, pages - first) for first in range(0, pages, at_once)]
        one_layer = sum(link.microseconds(count * nbytes) for count in counts)
        for layer in of_pool:
            charged[layer] += one_layer
    return charged


def modelled_forward(
    arrivals_ms: Sequence[Mapping[int, float]],
    charged_us: Sequence[float],
    compute_ms: float,
    launched_ms: float,
) -> ModelledForward:
    """`arrivals_ms`: for each rank, when the layers that it owns are in place, from the hand-over;
    `charged_us`: each layer's exchange; `compute_ms`: of one layer; `launched_ms`: when the forward
    could begin."""
    now, stalls, exchange, layer_0 = launched_ms, 0.0, 0.0, launched_ms
    for layer, charge in enumerate(charged_us):
        ready = max((of_rank.get(layer, 0.0) for of_rank in arrivals_ms), default=0.0)
        stalls += max(0.0, ready - now)
        now = max(now, ready) + charge / 1e3
        exchange += charge / 1e3
        if layer == 0:
            layer_0 = now
        now += compute_ms
    return ModelledForward(stalls, exchange, layer_0, now)


@dataclass(frozen=True)
class PlannedLoad:
    """When a load's layers are in place and its last copy is done, in milliseconds from its start,
    by the plan and a link model alone: no thread is late, and the queue has no bound."""

    arrivals_ms: Mapping[int, float]
    copies_ms: float
    last_issue_ms: float
    """When the last copy was issued."""


def planned_load(
    layouts: Sequence[PoolLayout],
    device_slots: torch.Tensor,
    host_slots: torch.Tensor,
    page_size: int,
    link: LinkModel,
) -> PlannedLoad:
    """A load of these slots, in the order of its layer groups."""
    pages = BurstPages(layouts, direction="load", page_size=page_size)
    pages.append(
        device=index_view("device_slots", device_slots), host=index_view("host_slots", host_slots)
    )
    planner = CopyPlanner(layouts, direction="load")
    plan = planner.plan(pages)
    us_per_byte = link.byte_scale / link.gigabytes_per_second / 1e3
    issued = done = 0.0
    arrivals = {}
    for number, group in enumerate(planner.groups):
        for batch in plan.batches(number):
            for _, _, width, height, _, _ in batch:
                issued += link.tall_issue_us if height > 1 else link.issue_us
                done = max(done, issued) + width * height * us_per_byte
        for layer in group.completes:
            arrivals[layer] = done / 1e3
    return PlannedLoad(arrivals, done / 1e3, issued / 1e3)
