"""The plugin of one process: which caches it is attached to, and what it counts."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvburst._core import KVBurstError, __version__
from kvburst.agreement import AgreementError
from kvburst.settings import Settings
from kvburst.sglang_plugin import devices
from kvburst.sglang_plugin.agreement import CacheAgreement
from kvburst.sglang_plugin.eligibility import Verdict, Verdicts, agree, decide
from kvburst.sglang_plugin.facts import gather, rides_on
from kvburst.sglang_plugin.layer_done import BurstLayers
from kvburst.sglang_plugin.metrics import Metrics, is_available
from kvburst.sglang_plugin.pools import spaces_of
from kvburst.sglang_plugin.ranges import Ranges, new_ranges
from kvburst.sglang_plugin.status import Counters, Status, all_off
from kvburst.sglang_plugin.transfers import Direction, Plans, Transfers

logger = logging.getLogger("kvburst")

# A rank without the plugin answers with the next collective of SGLang's own. None of those is as
# long, so that gloo ends both ranks; with the same length they would go on, a step apart.
_NUMBERS_A_VOTE = 64


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

    def attach(self, cache: Any) -> None:
        """Take over the transfers of a cache whose pools are complete, where all ranks can.

        A collective: every rank attaches its cache here, and with the same result.
        """
        controller = cache.cache_controller
        if self.disabled or controller is None:
            return
        if self.metrics is None and cache.metrics_collector is not None and is_available():
            self.metrics = Metrics(cache.metrics_collector.labels)
        transfers, local = self._prepare(cache)
        if cache.tp_world_size > 1:
            logger.info("agreeing on features; every rank must have kvburst and its variables")
        self.features = agree(local, partial(_minimum, cache))
        directions = _directions(self.features)
        if transfers is not None and directions:
            transfers.keep(directions)
            attachment = Attachment(transfers)
            self._by_engine[controller.l2_transfer_engine] = attachment
            self._by_group[controller.mem_pool_host] = attachment
            if "load" in directions:
                # In the counter that is there: by now it is registered with pools and workers.
                counter = controller.layer_done_counter
                counter.events = [BurstLayers(event) for event in counter.events]
        agreement = self._agreement(cache)
        self._transport = "" if agreement is None else agreement.transport
        if agreement is not None:
            self._agreements[cache] = agreement
        self._say(transfers)

    def _agreement(self, cache: Any) -> CacheAgreement | None:
        """How the ranks of a cache agree; None, on all of them: as SGLang does."""
        if not self.features["agreement"].on:
            return None
        try:
            agreement = CacheAgreement(cache, self.settings, self.counters)
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

    def _prepare(self, cache: Any) -> tuple[Transfers | None, Verdicts]:
        """What this rank could do, and all that it takes: after the agreement nothing may fail."""
        facts = gather(cache, self.sglang_knows, self.one_piece_pools)
        verdicts = decide(self.settings, facts)
        directions = _directions(verdicts)
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

    def _transfers(self, cache: Any, directions: Sequence[Direction]) -> Transfers:
        controller = cache.cache_controller
        device = devices.new_device(torch.device(controller.mem_pool_device.device))
        layers = controller.transfer_layer_id_max
        spaces = spaces_of(controller.mem_pool_host.entries, rides_on(cache), layers)
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
        )

    def _say(self, transfers: Transfers | None) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
            return
        features = "; ".join(_told(name, verdict) for name, verdict in self.features.items())
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


def _told(name: str, verdict: Verdict) -> str:
    return f"{name} on" if verdict.on else f"{name} off: {', '.join(verdict.reasons)}"


def _minimum(cache: Any, values: Sequence[int]) -> list[int]:
    """Over the ranks that hold the same tree."""
    tensor = torch.zeros(_NUMBERS_A_VOTE, dtype=torch.int64)
    tensor[: len(values)] = torch.tensor(list(values))
    cache._all_reduce_attn_groups(tensor, torch.distributed.ReduceOp.MIN)
    return [int(value) for value in tensor[: len(values)]]
