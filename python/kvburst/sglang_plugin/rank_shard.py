"""The hooks of ranks that keep one host copy of each layer between them."""

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvburst._core import BurstError, LayoutError
from kvburst.exchange.side_stream import SideStreamExchange
from kvburst.sglang_plugin.devices import stream_of
from kvburst.sglang_plugin.layer_done import BurstLayers
from kvburst.sglang_plugin.plugin import Attachment, Plugin
from kvburst.sglang_plugin.shard_decision import decide
from kvburst.sglang_plugin.shard_pools import UNSET, ShardedPools

logger = logging.getLogger("kvburst")

NO_STORAGE = (
    "the host tier is shared between ranks, and a storage backend reads whole pages, which no rank"
    f" has; {UNSET}"
)


class RankSharding:
    """Each passes through for what is not shared."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._building: ShardedPools | None = None

    # --- the pools -----------------------------------------------------------------------------

    def init_hicache(
        self, original: Callable[..., None], cache: Any, server_args: Any, params: Any
    ) -> None:
        if self._plugin.disabled:
            original(cache, server_args, params)
            return
        sharing = decide(cache, params, self._plugin.settings)
        if sharing.pools is None and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.info("the host tier is not shared between ranks: %s", "; ".join(sharing.reasons))
        self._building = sharing.pools
        try:
            original(cache, server_args, params)
        finally:
            self._building = None
        self._plugin.attach(cache, sharing)

    def build_mla(self, original: Callable[..., None], pool: Any, *args: Any, **named: Any) -> None:
        if self._building is None or type(pool) is not MLATokenToKVPoolHost:
            original(pool, *args, **named)
        else:
            self._building.build_mla(original, pool, *args, **named)

    def build_index(
        self, original: Callable[..., None], pool: Any, *args: Any, **named: Any
    ) -> None:
        if self._building is None or type(pool) is not DSAIndexerPoolHost:
            original(pool, *args, **named)
        else:
            self._building.build_index(original, pool, *args, **named)

    # --- forwards ------------------------------------------------------------------------------

    def set_consumer(self, result: None, counter: Any, index: int) -> None:
        """Every rank launches the forward of the same batch next.

        One that consumes no load may read what an earlier one has loaded, which none came for.
        """
        transfers = self._plugin.transfers_of(counter)
        if transfers is None or transfers.exchange is None:
            return
        slot = counter.events[index] if index >= 0 else None
        transfers.exchange.set_consumer(slot.load if isinstance(slot, BurstLayers) else -1)
        if index < 0:
            transfers.exchange.flush()

    def step(self, cache: Any) -> None:
        """What no forward has asked for must not stay for ever, nor lock its pages for as long.

        By the time of a step SGLang has launched the forward of every load that it has started; if
        not, there is none. Every rank steps alike.
        """
        attachment = self._of_cache(cache)
        if attachment is not None and attachment.transfers.exchange is not None:
            attachment.transfers.exchange.flush()

    def run_batch(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """The side stream's gate, before the first kernel of any forward."""
        for transfers in self._plugin.all_transfers():
            if isinstance(transfers.exchange, SideStreamExchange):
                stream = stream_of(transfers.device, scheduler.forward_stream)
                transfers.exchange.forward_gate(stream or transfers.device.current_stream())

    def embedding(self, worker: Any, batch: Any) -> None:
        """SGLang sets no consumer for these, so their forward would read what is not there."""
        # Workers of drafts have none.
        counter = vars(worker).get("hicache_layer_transfer_counter")
        transfers = self._plugin.transfers_of(counter)
        if transfers is not None and transfers.exchange and batch.hicache_consumer_index >= 0:
            raise BurstError(
                "forward_batch_embedding: an embedding's forward does not wait for the layers of"
                f" load {batch.hicache_consumer_index}, which ranks exchange; {UNSET}"
            )

    # --- what a shared tier cannot have --------------------------------------------------------

    def add_pool(self, controller: Any, entry: Any) -> None:
        attachment = self._plugin.of_engine(controller.l2_transfer_engine)
        if attachment is not None and attachment.transfers.shared:
            raise LayoutError(
                f"register_host_pool_entry: pool {entry.name.value!r} comes when the host tier is"
                f" already shared between ranks; {UNSET}"
            )

    def attach_storage(self, controller: Any, *args: Any, **kwargs: Any) -> None:
        # A controller attaches its first storage before it is complete, and before the vote's end.
        engine = vars(controller).get("l2_transfer_engine")
        attachment = None if engine is None else self._plugin.of_engine(engine)
        if attachment is not None and attachment.transfers.shared:
            raise LayoutError(f"attach_storage_backend: {NO_STORAGE}")

    def attach_storage_to_cache(
        self, original: Callable[..., tuple[bool, str]], cache: Any, *args: Any, **kwargs: Any
    ) -> tuple[bool, str]:
        attachment = self._of_cache(cache)
        if attachment is not None and attachment.transfers.shared:
            return False, NO_STORAGE
        return original(cache, *args, **kwargs)

    def _of_cache(self, cache: Any) -> Attachment | None:
        group = cache.host_pool_group
        return None if group is None else self._plugin.of_group(group)
