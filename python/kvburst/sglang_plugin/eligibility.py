"""Which features a server gets, and why it does not get the others: a pure function of facts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvburst.settings import SWITCHES, Settings

FEATURES = ("async_loads", "planned_backups", "one_piece_pools", "rank_shard", "agreement")

LAYOUTS = ("page_first_direct", "layer_first")
"""Of host pools in which a page of a layer is contiguous."""


@dataclass(frozen=True)
class Facts:
    """What matters about one server, as this rank sees it."""

    io_backend: str
    layout: str
    """Of the host pools."""
    page_size: int
    """In slots, of the tree."""
    allocator_page_size: int
    """In slots, of the allocator of device slots: it aligns what it hands out to that."""
    unified_memory: bool
    kv_sharded: bool
    """Whether each rank holds other pages than the next."""
    sglang_knows: frozenset[str]
    """Variables of the plugin that this SGLang has itself."""
    pools_refused: str | None
    """Why its pools cannot be described, or the device cannot be used."""
    one_piece_pools: int
    """Device pools that were allocated in one piece."""
    ranks: int
    """That hold the same tree."""
    stages: int
    """Of the pipeline."""
    not_shared: tuple[str, ...] = ()
    """Why its ranks do not share their host tier, although that is asked for."""


@dataclass(frozen=True)
class Verdict:
    """Whether a feature is on, and if not, why."""

    on: bool
    reasons: tuple[str, ...] = ()


Verdicts = Mapping[str, Verdict]


def decide(settings: Settings, facts: Facts) -> Verdicts:
    """The verdict on each feature, on this rank.

    What only a shared tier asks for is on only where there is one.
    """
    shard = SWITCHES["rank_shard"]
    shared = _verdict(settings.shared_tier, shard, settings.rank_shard, facts, facts.not_shared)
    if not shared.on:
        settings = settings.without({shard})
    copies = _copy_reasons(facts)
    return {
        "async_loads": _verdict(
            settings.async_loads,
            "SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE",
            settings.async_load_enqueue,
            facts,
            copies,
        ),
        "planned_backups": _verdict(
            settings.planned_backups,
            "SGLANG_HICACHE_D2H_ISSUE_CHUNK_PAGES",
            settings.d2h_issue_chunk_pages,
            facts,
            copies,
        ),
        "one_piece_pools": _verdict(
            settings.pools_in_one_piece,
            "KVBURST_ONE_PIECE_POOLS",
            settings.one_piece_pools,
            facts,
            () if facts.one_piece_pools else ("no device pool was allocated that way",),
        ),
        "rank_shard": shared,
        "agreement": _verdict(
            settings.transport is not None,
            "SGLANG_ENABLE_HICACHE_ASYNC_ACK_SYNC",
            settings.async_ack_sync,
            facts,
            _agreement_reasons(facts),
        ),
    }


def agree(
    verdicts: Verdicts, minimum: Callable[[Sequence[int]], Sequence[int]]
) -> dict[str, Verdict]:
    """The verdicts that hold on every rank: a feature is on where it is on everywhere.

    ``minimum`` reduces a vector of as many numbers as there are features, the same on all ranks.
    """
    everywhere = minimum([int(verdict.on) for verdict in verdicts.values()])
    return {
        name: Verdict(False, ("it is off on another rank",))
        if verdict.on and not agreed
        else verdict
        for (name, verdict), agreed in zip(verdicts.items(), everywhere, strict=True)
    }


def _verdict(
    asked: bool,
    variable: str,
    own: object,
    facts: Facts,
    against: tuple[str, ...],
) -> Verdict:
    if variable in facts.sglang_knows:
        return Verdict(False, (f"SGLang has {variable} itself",))
    if not asked:
        return Verdict(False, (f"{variable} is {'not set' if own is None else own}",))
    return Verdict(not against, against)


def _agreement_reasons(facts: Facts) -> tuple[str, ...]:
    """Why SGLang keeps its own collective."""
    if facts.stages > 1:
        return (f"SGLang hands its counts through {facts.stages} pipeline stages itself",)
    if facts.ranks == 1:
        return ("one rank has nobody to agree with",)
    return ()


def _copy_reasons(facts: Facts) -> tuple[str, ...]:
    """Why SGLang keeps its own copies, in both directions."""
    reasons = []
    if facts.io_backend != "direct":
        reasons.append(f"the io backend is {facts.io_backend!r}, it must be 'direct'")
    if facts.layout not in LAYOUTS:
        reasons.append(f"the host layout is {facts.layout!r}, it must be {' or '.join(LAYOUTS)}")
    if facts.unified_memory:
        reasons.append(
            "unified memory waits on the device for finish events of SGLang's own, which a burst"
            " issued by a thread does not have yet"
        )
    if facts.kv_sharded:
        reasons.append("KV pages are spread over the ranks")
    if facts.allocator_page_size != facts.page_size:
        reasons.append(
            f"the device allocator aligns slots to {facts.allocator_page_size}, pages are"
            f" {facts.page_size} slots"
        )
    if not reasons and facts.pools_refused is not None:
        reasons.append(facts.pools_refused)
    return tuple(reasons)
