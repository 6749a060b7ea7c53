"""What an exchange does to the timeline of a load-back, by the plan and the links alone."""

from dataclasses import replace

import pytest
import torch

from kvburst import Pool
from kvburst.exchange.timeline import (
    ModelledForward,
    PlannedLoad,
    charges_us,
    modelled_forward,
    planned_load,
)
from kvburst.geometries import Geometry, geometry
from kvburst.links import LINKS, NVLINK, ExchangeLink
from kvburst.ownership import Ownership
from kvburst.pools import DevicePool, HostPool

PAGES = 1024
FULL = geometry("mla-dsa-78")
STAGING = 32 << 20


def small(full: Geometry) -> Geometry:
    """Rows of a byte or so; the link charges for the geometry's."""
    pools = tuple(replace(pool, row_bytes=max(1, pool.row_bytes // 128)) for pool in full.pools)
    return replace(full, pools=pools, page_size=4)


SMALL = small(FULL)


def planned(owned: Ownership, rank: int) -> PlannedLoad:
    pools = []
    for number, spec in enumerate(SMALL.pools):
        device = DevicePool.allocate(spec, pages=PAGES, page_size=SMALL.page_size)
        stored = owned.layers_of(rank, number)
        pools.append(
            Pool.pair(device, HostPool.allocate(device, pages=PAGES, stored_layers=stored))
        )
    random = torch.Generator().manual_seed(rank)
    slots = [
        (torch.randperm(PAGES, generator=random)[:, None] * 4 + torch.arange(4)).reshape(-1)
        for _ in range(2)
    ]
    link = LINKS["h100"].model(byte_scale=FULL.bytes_per_page / SMALL.bytes_per_page)
    return planned_load([pool.layout for pool in pools], *slots, SMALL.page_size, link)


def overlap(ranks: int) -> tuple[float, ModelledForward, list[PlannedLoad]]:
    """Of a forward of three times what the slowest rank's copies take."""
    owned = Ownership(ranks, tuple(pool.layer_ids for pool in FULL.pools))
    plans = [planned(owned, rank) for rank in range(ranks)]
    copies = max(plan.copies_ms for plan in plans)
    page_bytes = [pool.page_bytes(FULL.page_size) for pool in FULL.pools]
    charged = charges_us(owned, page_bytes, PAGES, STAGING, NVLINK)
    if ranks == 1:
        charged = [0.0] * len(charged)
    forward = modelled_forward(
        [plan.arrivals_ms for plan in plans], charged, 3 * copies / FULL.num_layers, 0.0
    )
    return 1 - forward.stalls_ms / copies, forward, plans


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_overlap_of_a_shared_tier_is_within_a_tenth_of_one_that_is_not_shared(ranks: int) -> None:
    alone, _, _ = overlap(1)
    shared, _, _ = overlap(ranks)
    assert alone > 0.85
    assert shared > alone - 0.1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_layer_0_is_ready_on_every_rank_before_any_issues_its_last_copy(ranks: int) -> None:
    _, forward, plans = overlap(ranks)
    assert forward.layer_0_ms < min(plan.last_issue_ms for plan in plans)


def test_ranks_copy_less_each_the_more_share() -> None:
    took = [max(plan.copies_ms for plan in overlap(ranks)[2]) for ranks in (1, 2, 4)]
    assert took[0] > 1.5 * took[1] > 2 * took[2]


# --- on paper ------------------------------------------------------------------------------------


def test_forward_stands_still_until_the_owner_has_the_layer_and_then_pays_for_its_exchange() -> (
    None
):
    forward = modelled_forward([{0: 5.0}, {1: 6.0}], [1000.0, 1000.0], 2.0, 1.0)
    # 1 launched; 5 layer 0 in place, 6 exchanged, 8 computed; layer 1 was in place, 9, 11.
    assert forward == ModelledForward(stalls_ms=4.0, exchange_ms=2.0, layer_0_ms=6.0, ends_ms=11.0)


def test_layer_of_two_pools_with_two_owners_waits_for_the_later() -> None:
    assert modelled_forward([{0: 5.0}, {0: 7.0}], [0.0], 1.0, 0.0).stalls_ms == 7.0


def test_charges_are_a_collective_for_every_staging_buffer_and_the_bytes_once() -> None:
    owned = Ownership(2, ((0, 1), (1,)))
    link = ExchangeLink(gigabytes_per_second=1.0, collective_us=10.0, source="")
    charged = charges_us(owned, [1000, 500], pages=5, staging_bytes=2000, link=link)
    assert charged == pytest.approx([3 * 10 + 5, 3 * 10 + 5 + 2 * 10 + 2.5])
