"""Who keeps which layer on the host, when ranks share one copy of each.

Under tensor parallelism every rank holds the same MLA latent KV and the same index-K, so one host
copy serves them all: each layer of each pool has one *owner*, which alone backs it up, keeps it and
loads it; the others get it from there (`exchange`). What is shared out are layers, not pages: the
cache above, its page ids and its decisions stay the same on every rank.

Everything here is arithmetic: the same arguments give the same answer on every rank, and nothing
talks to another one. Where ranks must agree, what they agree *by* is passed in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvburst._core import LayoutError
from kvburst.geometries import check_layer_ids

Owner = Literal["round_robin", "rank0"]
ExchangeOrder = Literal["forward_stream", "side_stream"]

# The least over all ranks of what each passes; every rank calls it alike. Blocks.
Minimum = Callable[[int], int]
# What every rank passed, in the order of ranks; every rank calls it alike. Blocks.
GatherReasons = Callable[[tuple[str, ...]], Sequence[tuple[str, ...]]]


@dataclass(frozen=True)
class Ownership:
    """The owner of each layer of each pool, among ``ranks`` ranks.

    ``pools`` are the model layers of each pool, strictly increasing. ``owner`` "round_robin" deals
    them out one by one. A pool goes on where the one before it ended, so that the ranks that get
    one layer more are not always the same; where it ended evenly, one rank further, so that the
    layer that a forward needs first is not one rank's to load in every pool. "rank0" leaves all
    with rank 0, for comparison. No rank has more than ``ceil(layers / ranks)`` layers of a pool
    that is dealt out.
    """

    ranks: int
    pools: tuple[tuple[int, ...], ...]
    owner: Owner = "round_robin"
    _owners: tuple[Mapping[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise LayoutError(f"ranks: {self.ranks} is below 1")
        if not self.pools:
            raise LayoutError("pools: 0 pools, at least 1 is needed")
        if self.owner not in get_args(Owner):
            raise LayoutError(f"owner: {self.owner!r} must be 'round_robin' or 'rank0'")
        owners: list[dict[int, int]] = []
        dealt = following = 0
        for number, layers in enumerate(self.pools):
            check_layer_ids(f"pools[{number}]", layers)
            if self.owner == "rank0":
                owners.append(dict.fromkeys(layers, 0))
                continue
            if number > 0 and dealt % self.ranks == following % self.ranks == 0:
                following += 1
            owners.append({layer: (following + at) % self.ranks for at, layer in enumerate(layers)})
            dealt += len(layers)
            following += len(layers)
        object.__setattr__(self, "_owners", tuple(owners))

    def owner_of(self, pool: int, layer: int) -> int:
        """The rank that keeps model layer ``layer`` of pool number ``pool``."""
        self._check_pool(pool)
        try:
            return self._owners[pool][layer]
        except KeyError:
            raise LayoutError(
                f"layer: {layer} is none of the {len(self.pools[pool])} of pools[{pool}]"
            ) from None

    def layers_of(self, rank: int, pool: int) -> tuple[int, ...]:
        """The model layers of pool number ``pool`` that ``rank`` keeps, in order; row *i* of its
        host buffer is the *i*-th of them."""
        self._check_pool(pool)
        self._check_rank(rank)
        return tuple(layer for layer, owner in self._owners[pool].items() if owner == rank)

    def row_of(self, pool: int, layer: int) -> int:
        """The row of the layer in its owner's host buffer."""
        return self.layers_of(self.owner_of(pool, layer), pool).index(layer)

    def page_bytes_of(self, rank: int, page_bytes: Sequence[int]) -> int:
        """Bytes of one page of all layers and pools that ``rank`` keeps; ``page_bytes`` are those
        of one page of one layer, for each pool."""
        self._check_page_bytes(page_bytes)
        return sum(
            nbytes * len(self.layers_of(rank, pool)) for pool, nbytes in enumerate(page_bytes)
        )

    def whole_page_bytes(self, page_bytes: Sequence[int]) -> int:
        """The same for a rank that keeps everything."""
        self._check_page_bytes(page_bytes)
        return sum(
            nbytes * len(layers) for nbytes, layers in zip(page_bytes, self.pools, strict=True)
        )

    def capacity(
        self,
        rank: int,
        page_bytes: Sequence[int],
        host_bytes: int,
        *,
        keep_capacity: bool = False,
    ) -> int | None:
        """Pages that ``rank`` could keep in ``host_bytes`` bytes; None: any number, it owns none.

        With ``keep_capacity`` as many as without sharding, in less memory. Page ids are the same on
        every rank, so what counts is the least of all ranks: ``agreed_capacity``.
        """
        if host_bytes < 0:
            raise LayoutError(f"host_bytes: {host_bytes} is below 0")
        own = self.page_bytes_of(rank, page_bytes)
        if keep_capacity:
            return host_bytes // self.whole_page_bytes(page_bytes)
        return host_bytes // own if own else None

    def _check_pool(self, pool: int) -> None:
        if not 0 <= pool < len(self.pools):
            raise LayoutError(f"pool: {pool} is out of range, there are {len(self.pools)} pools")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise LayoutError(f"rank: {rank} is out of range, there are {self.ranks} ranks")

    def _check_page_bytes(self, page_bytes: Sequence[int]) -> None:
        if len(page_bytes) != len(self.pools):
            raise LayoutError(f"page_bytes: {len(page_bytes)} values for {len(self.pools)} pools")
        for number, nbytes in enumerate(page_bytes):
            if nbytes < 1:
                raise LayoutError(f"page_bytes[{number}]: {nbytes} is below 1")


# Above any number of pages; int64, as what ranks agree by carries it.
_UNBOUNDED = (1 << 62) - 1


def agreed_capacity(capacity: int | None, minimum: Minimum) -> int:
    """Pages of the host tier on every rank: the least of what each could keep.

    Every rank calls it, with its own ``Ownership.capacity``. Raises LayoutError, on every rank,
    where that is not one page.
    """
    pages = minimum(_UNBOUNDED if capacity is None else capacity)
    if pages < 1:
        raise LayoutError(
            "host tier: a rank has no room for one page"
            + (f", this one for {capacity}" if capacity else "")
        )
    return pages


# --- whether a server's tier can be shared at all -----------------------------------------------


@dataclass(frozen=True)
class TierFacts:
    """What decides whether a server's host tier can be shared between its ranks.

    ``replicated`` says of each pool, by name, whether every rank of the (attention) TP group holds
    the same bytes. Sizes of groups are in ranks.
    """

    ranks: int
    replicated: Mapping[str, bool]
    host_layout: str = "page_first_direct"
    direct_copies: bool = True
    """Copies by address (`direct` I/O) and not by a kernel."""
    context_parallel: int = 1
    """Attention context parallelism, in prefill or decode."""
    pipeline_stages: int = 1
    nodes: int = 1
    """That the group spans."""
    storage_attached: bool = False
    """An L3 storage backend, which reads and writes whole pages."""
    decode_of_disaggregation: bool = False
    packed_fp4: bool = False
    exchange: ExchangeOrder = "forward_stream"
    threaded_loads: bool = True
    decode_context_parallel: int = 1
    """Decode context parallelism, which spreads the pages of a pool over ranks."""
    unified_memory: bool = False
    """Device pages are moved about behind the cache's back."""
    waits_for_no_layer: str | None = None
    """Forwards of a kind that never waits for what it reads, in words."""
    others: tuple[str, ...] = ()
    """Whatever else is against it, in words."""


def reasons_against_sharding(facts: TierFacts) -> tuple[str, ...]:
    """Why the tier cannot be shared, in words fit for one log line each; none: it can.

    The first is the one that would corrupt: a pool whose ranks hold different bytes.
    """
    different = [name for name, same in facts.replicated.items() if not same]
    reasons = (
        (
            bool(different) or not facts.replicated,
            "the pool is not replicated across ranks: "
            + (
                ", ".join(f"'{name}'" for name in different)
                + (" differs" if len(different) == 1 else " differ")
                + " from rank to rank (MHA, GQA, recurrent state), and one rank's copy would"
                " overwrite the others'"
                if different
                else "there is none"
            ),
        ),
        (facts.ranks < 2, f"the group has {facts.ranks} rank, there is nobody to share with"),
        (
            facts.host_layout not in ("page_first_direct", "layer_first"),
            f"host layout '{facts.host_layout}' has no page of a layer in one piece, use"
            " 'page_first_direct'",
        ),
        (not facts.direct_copies, "copies are made by a kernel, 'direct' I/O is needed"),
        (
            facts.context_parallel > 1,
            f"context parallelism over {facts.context_parallel} ranks splits the tokens of a pool",
        ),
        (
            facts.pipeline_stages > 1,
            f"{facts.pipeline_stages} pipeline stages keep different layers",
        ),
        (facts.nodes > 1, f"the group spans {facts.nodes} nodes"),
        (facts.storage_attached, "a storage backend reads whole pages, which no rank has"),
        (facts.decode_of_disaggregation, "a disaggregated decode server loads outside forwards"),
        (facts.packed_fp4, "FP4 pools keep values and scales of a layer apart"),
        (
            facts.exchange == "side_stream" and facts.threaded_loads,
            "exchange 'side_stream' needs loads issued inline, mode is 'thread'",
        ),
        (
            facts.decode_context_parallel > 1,
            f"decode context parallelism over {facts.decode_context_parallel} ranks spreads the"
            " pages of a pool",
        ),
        (facts.unified_memory, "unified memory moves pages, of which other ranks do not hear"),
        (
            facts.waits_for_no_layer is not None,
            f"{facts.waits_for_no_layer} wait for no layer, so nothing would be exchanged for them",
        ),
    )
    return (*(words for applies, words in reasons if applies), *facts.others)


def agreed_reasons(reasons: tuple[str, ...], gather: GatherReasons) -> tuple[str, ...]:
    """The reasons of all ranks, named by rank where only some have them: what is refused on a
    subset of ranks is refused on all. Every rank calls it."""
    of_ranks = list(gather(reasons))
    everybody = {words for words in reasons if all(words in of_rank for of_rank in of_ranks)}
    some = (
        f"rank {rank}: {words}"
        for rank, of_rank in enumerate(of_ranks)
        for words in of_rank
        if words not in everybody
    )
    return (*(words for words in reasons if words in everybody), *some)
