"""What must not happen under a copy: memory is cleared, released, or handed to storage."""

from typing import Any

from kvburst.sglang_plugin.plugin import Attachment, Plugin

STOP_SECONDS = 10.0
"""How long a thread may be stuck in the driver before it is named and left behind."""


class Guard:
    """Hooks that come before SGLang's own functions. They block until all copies are done."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin

    def drain_all(self, *args: Any, **kwargs: Any) -> None:
        self._plugin.drain()

    def drain_controller(self, controller: Any, *args: Any, **kwargs: Any) -> None:
        # A controller attaches its first storage before it is complete, and has moved nothing.
        engine = vars(controller).get("l2_transfer_engine")
        if engine is not None:
            _drain(self._plugin.of_engine(engine))

    def drain_group(self, group: Any) -> None:
        _drain(self._plugin.of_group(group))

    def stop_group(self, group: Any) -> None:
        attachment = self._plugin.of_group(group)
        if attachment is not None:
            attachment.transfers.stop(STOP_SECONDS)

    def stop_cache(self, cache: Any) -> None:
        if cache.host_pool_group is not None:
            self.stop_group(cache.host_pool_group)


def _drain(attachment: Attachment | None) -> None:
    if attachment is not None:
        attachment.transfers.drain()
