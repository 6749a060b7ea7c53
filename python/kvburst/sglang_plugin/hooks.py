"""The functions that SGLang calls in place of its own, or around them.

Each passes through where the plugin is not attached to the object it is called with.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import ismethod
from typing import Any

from sglang.srt.mem_cache.l2_transfer import TransferCompletion
from sglang.srt.plugins.hook_registry import HookType

from kvburst.sglang_plugin import lifecycle, targets
from kvburst.sglang_plugin.devices import stream_of
from kvburst.sglang_plugin.layer_done import BurstLayers
from kvburst.sglang_plugin.one_piece_pools import OnePiecePools
from kvburst.sglang_plugin.operations import FinishEvent, Operation, StartEvent
from kvburst.sglang_plugin.plugin import Attachment, Plugin
from kvburst.sglang_plugin.rank_shard import RankSharding
from kvburst.sglang_plugin.steps import Steps
from kvburst.sglang_plugin.targets import Target
from kvburst.sglang_plugin.transfers import Direction


@dataclass(frozen=True)
class Hook:
    target: Target
    kind: Any
    """SGLang's ``HookType``."""
    function: Callable[..., Any]


def hooks_of(plugin: Plugin) -> list[Hook]:
    """All that the settings need."""
    settings = plugin.settings
    copies = _Copies(plugin)
    hooks = (
        _sharing(plugin)
        if settings.shared_tier
        else [Hook(targets.ATTACH, HookType.AFTER, copies.attach)]
    )
    if settings.async_loads or settings.planned_backups:
        guard = lifecycle.Guard(plugin)
        hooks += [
            Hook(targets.LOAD, HookType.AROUND, copies.load),
            Hook(targets.BACKUP, HookType.AROUND, copies.backup),
            Hook(targets.START_LOADING, HookType.AROUND, copies.start_loading),
            Hook(targets.START_WRITING, HookType.AROUND, copies.start_writing),
            Hook(targets.MOVE_INDICES, HookType.AROUND, copies.move_indices),
            Hook(targets.UPDATE_PRODUCER, HookType.BEFORE, copies.update_producer),
            Hook(targets.RESET, HookType.BEFORE, guard.drain_controller),
            Hook(targets.ATTACH_STORAGE, HookType.BEFORE, guard.drain_controller),
            Hook(targets.DETACH_STORAGE, HookType.BEFORE, guard.drain_controller),
            Hook(targets.CLEAR_GROUP, HookType.BEFORE, guard.drain_group),
            Hook(targets.DESTROY_GROUP, HookType.BEFORE, guard.stop_group),
            Hook(targets.RELEASE_MEMORY, HookType.BEFORE, guard.drain_all),
            Hook(targets.RELEASE, HookType.BEFORE, guard.stop_cache),
        ]
    steps = Steps(plugin)
    if settings.anything_at_steps:
        hooks.append(Hook(targets.CHECK, HookType.AROUND, steps.check))
    if settings.transport is not None:
        hooks += [
            Hook(targets.SYNC, HookType.AROUND, steps.sync),
            Hook(targets.DRAIN_STORAGE, HookType.BEFORE, steps.drain_storage),
            Hook(targets.RESET_CACHE, HookType.BEFORE, steps.reset),
            Hook(targets.RELEASE, HookType.BEFORE, steps.release),
        ]
    if settings.pools_in_one_piece:
        pools = OnePiecePools(plugin)
        hooks += [
            Hook(targets.MLA_BUFFERS, HookType.AROUND, pools.mla),
            Hook(targets.MHA_BUFFERS, HookType.AROUND, pools.mha),
            Hook(targets.INDEX_BUFFERS, HookType.AROUND, pools.index_k),
        ]
    return hooks


def _sharing(plugin: Plugin) -> list[Hook]:
    sharding = RankSharding(plugin)
    hooks = [
        Hook(targets.ATTACH, HookType.AROUND, sharding.init_hicache),
        Hook(targets.BUILD_MLA, HookType.AROUND, sharding.build_mla),
        Hook(targets.BUILD_INDEX, HookType.AROUND, sharding.build_index),
        Hook(targets.CHECK, HookType.BEFORE, sharding.step),
        Hook(targets.SET_CONSUMER, HookType.AFTER, sharding.set_consumer),
        Hook(targets.EMBEDDING, HookType.BEFORE, sharding.embedding),
        Hook(targets.ADD_POOL, HookType.BEFORE, sharding.add_pool),
        Hook(targets.ATTACH_STORAGE, HookType.BEFORE, sharding.attach_storage),
        Hook(targets.ATTACH_CACHE_STORAGE, HookType.AROUND, sharding.attach_storage_to_cache),
    ]
    if plugin.settings.exchange == "side_stream":
        hooks.append(Hook(targets.RUN_BATCH, HookType.BEFORE, sharding.run_batch))
    return hooks


class _Copies:
    """SGLang's copy loops, and what leads up to them."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin

    def attach(self, result: Any, cache: Any, *args: Any, **kwargs: Any) -> None:
        self._plugin.attach(cache)

    def start_loading(self, original: Callable[[Any], int], controller: Any) -> int:
        attachment = self._plugin.of_engine(controller.l2_transfer_engine)
        if attachment is None or not attachment.transfers.moves("load"):
            return original(controller)
        with attachment.handing_over(controller.load_queue):
            return original(controller)

    def start_writing(self, original: Callable[[Any], None], controller: Any) -> None:
        attachment = self._plugin.of_engine(controller.l2_transfer_engine)
        if attachment is None or not attachment.transfers.moves("backup"):
            return original(controller)
        with attachment.handing_over(controller.write_queue):
            return original(controller)

    def move_indices(
        self, original: Callable[..., Any], controller: Any, host_indices: Any, device_indices: Any
    ) -> Any:
        """SGLang waits here until device indices are on the host; the issuer's thread does later.

        Where SGLang turns out to copy after all, it is made up for.
        """
        attachment = self._plugin.of_engine(controller.l2_transfer_engine)
        if attachment is None or not attachment.nodes or device_indices.device.type == "cpu":
            return original(controller, host_indices, device_indices)
        attachment.move_indices = partial(original, controller)
        return host_indices, device_indices

    def update_producer(self, counter: Any) -> None:
        """Wait for the slot's last load, where SGLang asserts that it is done."""
        slot = counter.events[(counter.producer_index + 1) % counter.num_counters]
        if isinstance(slot, BurstLayers):
            slot.wait_until_free()

    def load(
        self,
        original: Callable[..., Any],
        engine: Any,
        transfers: list[Any],
        *,
        transfer_layer_id_max: int,
        start_event: Any = None,
        on_layer_done: Any = None,
    ) -> Any:
        # A retraction's restore has no slot: it waits for the finish.
        slot = on_layer_done.__self__ if ismethod(on_layer_done) else None
        attachment = self._plugin.of_engine(engine)
        operation = None
        if attachment is not None:
            fence = stream_of(attachment.transfers.device, engine.host_to_device_stream)
            operation, transfers = self._submit(attachment, "load", transfers, fence)
        if isinstance(slot, BurstLayers):
            slot.carry(operation)
        if operation is not None:
            return _completion(operation)
        return original(
            engine,
            transfers,
            transfer_layer_id_max=transfer_layer_id_max,
            start_event=start_event,
            on_layer_done=on_layer_done,
        )

    def backup(self, original: Callable[..., Any], engine: Any, transfers: list[Any]) -> Any:
        attachment = self._plugin.of_engine(engine)
        if attachment is not None:
            fence = stream_of(attachment.transfers.device, engine.device_to_host_stream)
            operation, transfers = self._submit(attachment, "backup", transfers, fence)
            if operation is not None:
                return _completion(operation)
        return original(engine, transfers)

    def _submit(
        self, attachment: Attachment, direction: Direction, transfers: list[Any], fence: Any
    ) -> tuple[Operation | None, list[Any]]:
        """The operation, or the transfers as SGLang's own copies need them.

        SGLang orders its transfer stream behind the scheduler's and the forward's, and that is
        what `fence`, the same stream, stands for.
        """
        if attachment.transfers.moves(direction):
            operation = attachment.transfers.submit(direction, transfers, attachment.nodes, fence)
            if operation is not None:
                return operation, transfers
        if attachment.move_indices is None:
            return None, transfers
        moved = [(t, *attachment.move_indices(t.host_indices, t.device_indices)) for t in transfers]
        return None, [t._replace(host_indices=h, device_indices=d) for t, h, d in moved]


def _completion(operation: Operation) -> Any:
    return TransferCompletion(StartEvent(operation), FinishEvent(operation), True)
