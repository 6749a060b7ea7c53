"""What stands behind SGLang's L2 transfers: issuers in place of its copy loops."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Literal

import torch

from kvburst._core import (
    BurstError,
    BurstIssuer,
    BurstPages,
    CopyPlanner,
    KVBurstError,
    LayerGate,
    LayoutError,
    PageError,
    PlanOptions,
    Stream,
)
from kvburst._indices import deferred_view, index_view
from kvburst.exchange import RankShard
from kvburst.exchange.exchange import Exchange
from kvburst.exchange.load import ExchangedLoad
from kvburst.sglang_plugin.devices import TransferDevice
from kvburst.sglang_plugin.layer_done import last_layers
from kvburst.sglang_plugin.operations import FinishEvent, Operation, Part
from kvburst.sglang_plugin.pools import Space
from kvburst.sglang_plugin.ranges import Ranges, no_range
from kvburst.sglang_plugin.shard_pools import UNSET
from kvburst.sglang_plugin.status import Counters
from kvburst.stats import BurstStats

logger = logging.getLogger("kvburst")

Direction = Literal["load", "backup"]


@dataclass(frozen=True)
class Plans:
    """How bursts are made."""

    gate_slots: int
    """Loads that may be under way at a time."""
    transfer_layers: int
    chunk_pages: int = 0


class _Lane:
    """One direction of one space: collects a burst's pages and submits it.

    With `shard` what a load brings of other ranks' layers is exchanged.
    """

    def __init__(
        self,
        space: Space,
        device: TransferDevice,
        direction: Direction,
        plans: Plans,
        shard: RankShard | None = None,
    ) -> None:
        layouts = [pool.layout for pool in space.pools]
        load = direction == "load"
        options = PlanOptions(ramp=_spans_layers(space), chunk_pages=plans.chunk_pages)
        self.space = space
        self.device = device
        # Drafts come as transfers of their own in loads; a backup moves them with the target.
        self.members = [member for member in space.members if load or not member.is_draft]
        self.gate = LayerGate(device, layouts, slots=plans.gate_slots) if load else None
        self.last_layers: tuple[int | None, ...] = ()
        self.exchange: Exchange | None = None
        inline = not load or (shard is not None and shard.exchange == "side_stream")
        mode: Literal["thread", "inline"] = "inline" if inline else "thread"
        if self.gate is not None and shard is not None:
            self.exchange = shard.open(space.pools, device, self.gate, mode)
        if load:
            planner = CopyPlanner(layouts, direction="load", limits=device.limits, options=options)
            self.last_layers = last_layers(planner.groups, plans.transfer_layers)
        self.issuer = BurstIssuer(
            device,
            layouts,
            direction=direction,
            gate=self.gate,
            options=options,
            mode=mode,
            memory=space.pools,
        )
        self.pages = BurstPages(layouts, direction=direction, page_size=space.page_size)
        self.kept: list[torch.Tensor] = []
        self.newest: Part | None = None

    def mine(self, transfers: Sequence[Any]) -> list[Any]:
        return [t for t in transfers if any(member.same(t) for member in self.members)]

    def rounds(self, transfers: Sequence[Any]) -> list[tuple[Any, ...]] | None:
        """Of the lane's own transfers, those that move the same pages: one a member.

        More than one round where SGLang moves to several places at once, such as a node's state
        and a request's. None if a member has fewer than another.
        """
        by_member = [[t for t in transfers if member.same(t)] for member in self.members]
        if len({len(own) for own in by_member}) > 1:
            return None
        return list(zip(*by_member, strict=True))

    def append(self, transfers: Sequence[Any]) -> None:
        """Collect the pages of one round, which are the same in each of it. Raises PageError."""
        first = transfers[0]
        for transfer in transfers:
            for name in ("host_indices", "device_indices"):
                count = getattr(transfer, name).numel()
                if count != getattr(first, name).numel():
                    raise PageError(
                        f"{name}: {count} slots for {type(transfer.host_pool).__name__}, but"
                        f" {getattr(first, name).numel()} for pool {self.space.name!r}, whose"
                        " pages it moves"
                    )
        host = index_view("host_indices", first.host_indices)
        if first.device_indices.device.type == "cpu":
            device = index_view("device_indices", first.device_indices)
            self.pages.append(device=device, host=host)
        else:
            self.kept.append(first.device_indices)
            device = deferred_view("device_indices", first.device_indices)
            self.pages.append_deferred(device=device, host=host)

    def submit(self, nodes: Sequence[int], stream: Stream, fence: Stream | None) -> Part | None:
        """None: there was nothing to submit. Blocks while a load has no gate slot."""
        page_ids: torch.Tensor | None = None
        if self.exchange is not None and self.pages.num_pages:
            self.exchange.make_room(0 if self.newest is None else self.newest.burst.id + 1)
            page_ids = self._page_ids_on_device()
        burst = self.issuer.submit(self.pages, nodes, stream=stream, fence=fence)
        if burst is None:
            return None
        exchanged: ExchangedLoad | None = None
        if self.exchange is not None:
            exchanged = self.exchange.begin(burst, stream, fence, page_ids)
        # What a forward waits for in an exchange is not the gate's to measure.
        gate = self.gate if self.exchange is None else None
        self.newest = Part(burst, gate, self.last_layers, self.exchange, exchanged)
        return self.newest

    def _page_ids_on_device(self) -> torch.Tensor | None:
        """Of indices that lie there, by torch's current stream; None: they were on the host."""
        if not self.kept:
            return None
        size = self.space.page_size
        return torch.cat([each[::size] for each in self.kept]).to(torch.int64) // size

    def forget(self) -> None:
        """Drop what is collected and not submitted."""
        self.pages.truncate(0)
        self.kept = []


def _spans_layers(space: Space) -> bool:
    """Whether a copy of some pool can span layers.

    If none can, there is nothing to gain from issuing layers together, and waits would be longer.
    """
    return any(len(pool.device.allocations) < len(pool.device.layers) for pool in space.pools)


def _not_described(direction: Direction, transfers: Sequence[Any]) -> str:
    pools = ", ".join(sorted({type(transfer.host_pool).__name__ for transfer in transfers}))
    return (
        f"{direction} of {pools}: these are not the pools that were shared between ranks, and"
        f" SGLang cannot copy them; {UNSET}"
    )


class Transfers:
    """Loads and backups of one cache. Belongs to the scheduler thread."""

    def __init__(
        self,
        spaces: Sequence[Space],
        device: TransferDevice,
        directions: Sequence[Direction],
        plans: Plans,
        counters: Counters,
        ranges: Ranges = no_range,
        *,
        measured: bool = False,
        shard: RankShard | None = None,
        log_every: int = 0,
    ) -> None:
        if shard is not None and len(spaces) > 1:
            names = [space.name for space in spaces]
            raise LayoutError(f"pools: {names} do not move the same pages, ranks cannot share them")
        self.device = device
        self.shared = shard is not None
        """Whether other ranks keep some of the layers; then nothing can be left to SGLang."""
        self._counters = counters
        self._ranges = ranges
        self._log_every = log_every
        # For `finished`, if that is asked.
        self._under_way: deque[Operation] | None = deque() if measured else None
        self._lanes = {
            direction: [_Lane(space, device, direction, plans, shard) for space in spaces]
            for direction in directions
        }

    @property
    def exchange(self) -> Exchange | None:
        """Where a load's layers come from that other ranks keep; None: this one keeps all."""
        loads = self._lanes.get("load", [])
        return loads[0].exchange if loads else None

    @property
    def pool_names(self) -> tuple[str, ...]:
        lanes = next(iter(self._lanes.values()))
        return tuple(pool.name for lane in lanes for pool in lane.space.pools)

    def keep(self, directions: Sequence[Direction]) -> None:
        """Leave the other direction to SGLang."""
        self._lanes = {each: lanes for each, lanes in self._lanes.items() if each in directions}

    def moves(self, direction: Direction) -> bool:
        return direction in self._lanes

    def submit(
        self,
        direction: Direction,
        transfers: Sequence[Any],
        nodes: Sequence[int],
        fence: Stream | None,
    ) -> Operation | None:
        """Hand SGLang's transfers over, behind what is on the current stream and on `fence`.

        None if they are not all of the pools' that are described; then nothing was done. Raises
        PageError, with nothing handed over, on indices that are wrong.
        """
        with self._ranges(f"submit a {direction}"):
            operation = self._submit(direction, transfers, nodes, fence)
        if operation is not None and self._under_way is not None:
            self._under_way.append(operation)
        return operation

    def finished(self) -> list[BurstStats]:
        """Of operations that have ended since the last call, in the order of their submission."""
        found: list[BurstStats] = []
        while self._under_way and FinishEvent(self._under_way[0]).reached():
            found += self._under_way.popleft().stats()
        return found

    def _submit(
        self,
        direction: Direction,
        transfers: Sequence[Any],
        nodes: Sequence[int],
        fence: Stream | None,
    ) -> Operation | None:
        begin = perf_counter_ns()
        taken = self._by_lane(direction, transfers)
        if taken is None:
            if self.shared:
                raise BurstError(_not_described(direction, transfers))
            self._counters.left_to_sglang += 1
            return None
        try:
            for lane, rounds in taken:
                for together in rounds:
                    lane.append(together)
        except KVBurstError:
            for lane, _ in taken:
                lane.forget()
            raise
        stream = self.device.current_stream()
        lanes = self._lanes[direction]
        behind = [lane.newest.moved for lane in lanes if lane.newest is not None]
        parts = []
        kept: list[torch.Tensor] = []
        pages = 0
        for lane, _ in taken:
            part = lane.submit(nodes, stream, fence)
            kept += lane.kept
            lane.kept = []
            if part is not None:
                pages += part.burst.num_pages
                parts.append(part)
        if direction == "load":
            self._counters.bursts_loaded += bool(parts)
            self._counters.pages_loaded += pages
            self._say_exchanged(bool(parts))
        else:
            self._counters.bursts_backed_up += bool(parts)
            self._counters.pages_backed_up += pages
        return Operation(
            parts,
            self.device,
            self._counters,
            kept,
            behind=behind,
            caller_us=(perf_counter_ns() - begin) / 1000,
            ranges=self._ranges,
        )

    def drain(self) -> None:
        """Block until all that was handed over is in place.

        Of a shared tier what no forward has asked for is exchanged first: every rank must call it.
        """
        if self.exchange is not None:
            self.exchange.drain()
        for lane in self._all_lanes():
            lane.issuer.drain()

    def stop(self, timeout: float) -> None:
        """End the threads, and wait for what they have issued.

        Raises BurstError if one is stuck in the driver for `timeout` seconds, and if other ranks do
        not come as long for what no forward has asked for of a shared tier.
        """
        for lane in self._all_lanes():
            if not lane.issuer.stop(timeout):
                raise BurstError(
                    f"pool {lane.space.name!r}: its issuer is still stuck in the driver after"
                    f" {timeout} s"
                )
        if self.exchange is not None and not self.exchange.stop(timeout):
            raise BurstError(
                f"stop: after {timeout} s other ranks have not come for the rest of a sharded load"
            )
        self.drain()

    def _say_exchanged(self, loaded: bool) -> None:
        """Every so many loads, if that is asked: what ranks have sent each other so far."""
        loads = self._counters.bursts_loaded
        if loaded and self._log_every and self.exchange and loads % self._log_every == 0:
            stats = self.exchange.stats
            logger.info(
                "shared host tier: %d loads of %d pages; this rank has sent %d bytes and received"
                " %d, in %d broadcasts",
                loads,
                self._counters.pages_loaded,
                stats.sent_bytes,
                stats.received_bytes,
                stats.broadcasts,
            )

    def _all_lanes(self) -> list[_Lane]:
        return [lane for lanes in self._lanes.values() for lane in lanes]

    def _by_lane(
        self, direction: Direction, transfers: Sequence[Any]
    ) -> list[tuple[_Lane, Sequence[tuple[Any, ...]]]] | None:
        """Each lane's rounds; None if a transfer is nobody's, or a round is not complete."""
        taken: list[tuple[_Lane, Sequence[tuple[Any, ...]]]] = []
        left = len(transfers)
        for lane in self._lanes[direction]:
            own = lane.mine(transfers)
            if not own:
                continue
            rounds = lane.rounds(own)
            if rounds is None:
                return None
            taken.append((lane, rounds))
            left -= len(own)
        return None if left else taken
