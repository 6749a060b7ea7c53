"""The plugin of one process: which caches it is attached to, and what it counts."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvburst._core import KVBurstError, LayoutError, __version__
from kvburst.agreement import AgreementError
from kvburst.settings import Settings
from kvburst.sglang_plugin import devices
from kvburst.sglang_plugin.agreement import CacheAgreement, minimum
from kvburst.sglang_plugin.eligibility import Verdict, Verdicts, agree, decide
from kvburst.sglang_plugin.facts import gather, rides_on
from kvburst.sglang_plugin.layer_done import BurstLayers
from kvburst.sglang_plugin.metrics import Metrics, is_available
from kvburst.sglang_plugin.pools import spaces_of
from kvburst.sglang_plugin.ranges import Ranges, new_ranges
from kvburst.sglang_plugin.shard_decision import Sharing, rank_shard
from kvburst.sglang_plugin.shard_pools import UNSET, ShardedPools
from kvburst.sglang_plugin.status import Counters, Status, all_off
from kvburst.sglang_plugin.transfers import Direction, Plans, Transfers

logger = logging.getLogger("kvburst")


@dataclass
class Attachment:
    """What stands behind one cache's controller."""

    transfers: Transfers
    nodes: Sequence[int] = ()
    """Of what the controller is handing over right now, for messages."""
    move_indices: Any = None
    """SGLang's own way with the indices of what it hands over, while that is put off."""

    @contextmanager
    def handing_over(self, operations: Sequence[Any]) -> Iterator[None]:
        self.nodes = [node for operation in operations for node in operation.node_ids]
        try:
            yield
        finally:
            self.nodes = ()
            self.move_indices = None


@dataclass
class Plugin:
    """Belongs to the scheduler thread; its counters are written by forwards too."""

    settings: Settings
    sglang: str
    """Version."""
    sglang_knows: frozenset[str] = frozenset()
    counters: Counters = field(default_factory=Counters)
    one_piece_pools: int = 0
    ranges: Ranges = field(default_factory=new_ranges)
    metrics: Metrics | None = None
    """Where SGLang exports its own, and prometheus_client is there."""
    disabled: bool = False
    """Every hook passes through."""
    features: Verdicts = field(default_factory=lambda: all_off("no cache is attached yet").features)
    # By SGLang's object: it goes when that does.
    _by_engine: WeakKeyDictionary[Any, Attachment] = field(default_factory=WeakKeyDictionary)
    _by_group: WeakKeyDictionary[Any, Attachment] = field(default_factory=WeakKeyDictionary)
    _by_counter: WeakKeyDictionary[Any, Attachment] = field(default_factory=WeakKeyDictionary)
    _agreements: WeakKeyDictionary[Any, CacheAgreement] = field(default_factory=WeakKeyDictionary)
    _transport: str = ""

    def status(self) -> Status:
        return Status(
            features=dict(self.features), transport=self._transport, **asdict(self.counters)
        )

    def stand_down(self, wrong: Sequence[str]) -> None:
        """Every hook passes through from now on."""
        self.disabled = True
        self.features = all_off(*wrong).features

    def of_engine(self, engine: Any) -> Attachment | None:
        return None if self.disabled else self._by_engine.get(engine)

    def of_group(self, group: Any) -> Attachment | None:
        return None if self.disabled else self._by_group.get(group)

    def transfers_of(self, counter: Any) -> Transfers | None:
        """By the ``LayerDoneCounter``; None: of no cache."""
        attachment = None if self.disabled or counter is None else self._by_counter.get(counter)
        return None if attachment is None else attachment.transfers

    def all_transfers(self) -> list[Transfers]:
        return [attachment.transfers for attachment in self._by_engine.values()]

    def agreement_of(self, cache: Any) -> CacheAgreement | None:
        return None if self.disabled else self._agreements.get(cache)

    def report(self, cache: Any) -> None:
        """What this step brought, to whoever scrapes it."""
        if self.metrics is None:
            return
        attachment = self.of_engine(cache.cache_controller.l2_transfer_engine)
        if attachment is not None:
            for stats in attachment.transfers.finished():
                self.metrics.burst(stats)
        agreement = self.agreement_of(cache)
        if agreement is not None:
            self.metrics.agreed(agreement.spent_us())
        self.metrics.count(self.counters)

    def end_agreement(self, cache: Any) -> None:
        """Its cache takes no further step, on any rank."""
        agreement = self._agreements.pop(cache, None)
        if agreement is not None:
            agreement.close()

    def drain(self) -> None:
        """Block until all that was handed over is in place, whatever the cache."""
        for attachment in self._by_engine.values():
            attachment.transfers.drain()

    def attach(self, cache: Any, sharing: Sharing | None = None) -> None:
        """Take over the transfers of a cache whose pools are complete, where all ranks can.

        A collective: every rank attaches its cache here, and with the same result. Raises
        KVBurstError where the host tier is shared already and this rank cannot take part after all:
        SGLang's own copies would not know what to do with it.
        """
        controller = cache.cache_controller
        if self.disabled or controller is None:
            return
        if self.metrics is None and cache.metrics_collector is not None and is_available():
            self.metrics = Metrics(cache.metrics_collector.labels)
        transfers, local = self._prepare(cache, sharing)
        if cache.tp_world_size > 1:
            logger.info("agreeing on features; every rank must have kvburst and its variables")
        self.features = agree(local, partial(minimum, cache))
        directions = _directions(self.features)
        if transfers is not None and transfers.shared and len(directions) < 2:
            raise _too_late(_in_words(self.features))
        if transfers is not None and directions:
            transfers.keep(directions)
            attachment = Attachment(transfers)
            self._by_engine[controller.l2_transfer_engine] = attachment
            self._by_group[controller.mem_pool_host] = attachment
            if "load" in directions:
                # In the counter that is there: by now it is registered with pools and workers.
                counter = controller.layer_done_counter
                counter.events = [BurstLayers(event) for event in counter.events]
                self._by_counter[counter] = attachment
        agreement = self._agreement(cache, transfers)
        self._transport = "" if agreement is None else agreement.transport
        if agreement is not None:
            self._agreements[cache] = agreement
        self._say(transfers)

    def _agreement(self, cache: Any, transfers: Transfers | None) -> CacheAgreement | None:
        """How the ranks of a cache agree; None, on all of them: as SGLang does."""
        if not self.features["agreement"].on:
            return None
        try:
            exchange = None if transfers is None else transfers.exchange
            agreement = CacheAgreement(
                cache,
                self.settings,
                self.counters,
                (lambda: 0) if exchange is None else (lambda: exchange.loaded_digest),
            )
        except AgreementError as error:
            self._leave_agreement(str(error))
            return None
        if agreement.transport == "blocking" and not self.settings.skip_idle:
            agreement.close()
            self._leave_agreement(
                f"{self.settings.transport!r} does not fit the groups of this server, and a"
                " collective that each step waits for SGLang has itself"
            )
            return None
        return agreement

    def _leave_agreement(self, reason: str) -> None:
        self.features = {**self.features, "agreement": Verdict(False, (reason,))}

    def _prepare(self, cache: Any, sharing: Sharing | None) -> tuple[Transfers | None, Verdicts]:
        """What this rank could do, and all that it takes: after the agreement nothing may fail."""
        not_shared = () if sharing is None else sharing.reasons
        facts = gather(cache, self.sglang_knows, self.one_piece_pools, not_shared)
        verdicts = decide(self.settings, facts)
        directions = _directions(verdicts)
        if sharing is not None and sharing.pools is not None:
            if len(directions) < 2:
                raise _too_late(_in_words(verdicts))
            try:
                return self._transfers(cache, directions, sharing.pools), verdicts
            except KVBurstError as error:
                raise _too_late(str(error)) from error
        if not directions:
            return None, verdicts
        try:
            return self._transfers(cache, directions), verdicts
        except KVBurstError as error:
            refused = str(error)
        except Exception as error:  # SGLang's own copies do not need any description
            logger.exception("the pools of this server cannot be described")
            refused = f"its pools cannot be described: {error!r}"
        return None, decide(self.settings, replace(facts, pools_refused=refused))

    def _transfers(
        self, cache: Any, directions: Sequence[Direction], pools: ShardedPools | None = None
    ) -> Transfers:
        controller = cache.cache_controller
        device = devices.new_device(torch.device(controller.mem_pool_device.device))
        layers = controller.transfer_layer_id_max
        describe = None if pools is None else pools.describe
        spaces = spaces_of(controller.mem_pool_host.entries, rides_on(cache), layers, describe)
        plans = Plans(
            gate_slots=controller.layer_done_counter.num_counters,
            transfer_layers=layers,
            chunk_pages=self.settings.chunk_pages,
        )
        return Transfers(
            spaces,
            device,
            directions,
            plans,
            self.counters,
            self.ranges,
            measured=self.metrics is not None,
            shard=None if pools is None else rank_shard(cache, pools, self.settings),
            log_every=self.settings.rank_shard_log_every or 0,
        )

    def _say(self, transfers: Transfers | None) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
            return
        features = _in_words(self.features)
        if self._transport:
            features += f" ({self._transport})"
        pools = transfers.pool_names if transfers is not None else ()
        logger.info(
            "kvburst %s with SGLang %s: %s (pools: %s; chunk_pages %d)",
            __version__,
            self.sglang,
            features,
            ", ".join(pools) or "none described",
            self.settings.chunk_pages,
        )


def _directions(verdicts: Verdicts) -> list[Direction]:
    wanted: list[tuple[str, Direction]] = [("async_loads", "load"), ("planned_backups", "backup")]
    return [direction for feature, direction in wanted if verdicts[feature].on]


def _in_words(verdicts: Verdicts) -> str:
    return "; ".join(
        f"{name} on" if verdict.on else f"{name} off: {', '.join(verdict.reasons)}"
        for name, verdict in verdicts.items()
    )


def _too_late(why: str) -> LayoutError:
    return LayoutError(
        f"the host tier is shared between ranks already, and cannot be served: {why}; {UNSET}"
    )
