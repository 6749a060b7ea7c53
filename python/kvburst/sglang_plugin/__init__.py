"""kvburst in SGLang: loads and backups of its hierarchical cache as bursts.

SGLang finds ``register`` by the entry point group ``sglang.srt.plugins`` and calls it in each of
its processes. Off by default; see `kvburst.settings` for the variables. Nothing outside this
package imports SGLang, and nothing in it is imported unless a variable asks for it.
"""

import os

from kvburst.settings import Settings
from kvburst.sglang_plugin.registration import Registered, install
from kvburst.sglang_plugin.status import Status, all_off

__all__ = ["Status", "register", "status"]

# SGLang's registry of hooks is one a process, and so is what was registered there.
_registered: list[Registered] = []


def register() -> None:
    """What SGLang calls: registers hooks for the features that the environment asks for, once.

    Raises SettingsError on a variable with a value that cannot be meant, which SGLang logs.
    """
    settings = Settings.from_environment(os.environ)
    if settings.anything and not _registered:
        _registered.append(install(settings))


def status() -> Status:
    """What the plugin does in this process: effective features, and counters."""
    if _registered:
        return _registered[-1].status()
    return all_off("no variable asks for it")
