"""Hooks go into SGLang all together, or not at all."""

import logging
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

from kvburst.settings import NUMBERS, SWITCHES, Settings
from kvburst.sglang_plugin import targets
from kvburst.sglang_plugin.status import Status, all_off

if TYPE_CHECKING:
    from kvburst.sglang_plugin.hooks import Hook
    from kvburst.sglang_plugin.plugin import Plugin

logger = logging.getLogger("kvburst")


class Registered(Protocol):
    """What came of it."""

    def status(self) -> Status: ...


class StoodDown:
    """Nothing was registered. Says why, once, as an error in the log."""

    def __init__(self, wrong: Sequence[str]) -> None:
        self._wrong = tuple(wrong)
        say_off(wrong)

    def status(self) -> Status:
        return all_off(*self._wrong)


def say_off(wrong: Sequence[str]) -> None:
    logger.error("kvburst is off, SGLang runs as it is: %s", "; ".join(wrong))


def install(settings: Settings) -> Registered:
    """Register the hooks that `settings` need, and check them once SGLang has applied them.

    What is not as expected is one error in the log, and SGLang is left alone.
    """
    sglang = version("sglang")
    problem = targets.version_problem(sglang)
    if problem is not None:
        return StoodDown([problem])
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry

        from kvburst.sglang_plugin.hooks import hooks_of
        from kvburst.sglang_plugin.plugin import Plugin
    except ImportError as error:
        return StoodDown([f"SGLang {sglang} is not as it was: {error}"])
    known = sglang_knows()
    plugin = Plugin(settings.without(known), sglang, known)
    hooks = hooks_of(plugin)
    wrong = targets.problems([*(hook.target for hook in hooks), *targets.SHAPES])
    wrong += [
        f"{hook.target.path} is hooked by another plugin already, no hook would be applied"
        for hook in hooks
        if hook.target.path in HookRegistry._patched
    ]
    if wrong:
        return StoodDown(wrong)
    for hook in hooks:
        HookRegistry.register(hook.target.path, hook.function, hook.kind)
    _check_when_applied(plugin, hooks)
    return plugin


def sglang_knows() -> frozenset[str]:
    """Variables of the plugin's that SGLang has itself."""
    from sglang.srt.environ import Envs

    return frozenset(name for name in (*SWITCHES.values(), *NUMBERS.values()) if name in vars(Envs))


def _check_when_applied(plugin: "Plugin", hooks: "list[Hook]") -> None:
    """SGLang logs a hook that it could not apply and goes on; half of these must not be."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    own = vars(HookRegistry)["apply_hooks"]

    def apply_and_check() -> None:
        HookRegistry.apply_hooks = own
        HookRegistry.apply_hooks()
        missing = [
            hook.target.path for hook in hooks if hook.target.path not in HookRegistry._patched
        ]
        if missing:
            wrong = [f"SGLang could not hook {path}" for path in missing]
            plugin.stand_down(wrong)
            say_off(wrong)

    HookRegistry.apply_hooks = apply_and_check
