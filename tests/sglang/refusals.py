"""The plugin meets an SGLang that it was not written for. Each case in a forked process of its own,
since what SGLang has hooked stays hooked."""

import logging
import multiprocessing
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from ranks import Context
from scenarios import round_trip
from setups import Refused, Setup
from sglang.srt.mem_cache.l2_transfer import L2TransferEngine
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvburst import sglang_plugin
from kvburst.sglang_plugin import registration, targets


@contextmanager
def renamed_target() -> Iterator[None]:
    L2TransferEngine.submit_h2d = L2TransferEngine.submit_host_to_device
    del L2TransferEngine.submit_host_to_device
    yield
    L2TransferEngine.submit_host_to_device = L2TransferEngine.submit_h2d


@contextmanager
def changed_signature() -> Iterator[None]:
    own = L2TransferEngine.submit_host_to_device

    def with_one_more(
        self: Any,
        transfers: list[Any],
        priority: int = 0,
        *,
        transfer_layer_id_max: int,
        start_event: Any = None,
        on_layer_done: Any = None,
    ) -> Any:
        return own(
            self,
            transfers,
            transfer_layer_id_max=transfer_layer_id_max,
            start_event=start_event,
            on_layer_done=on_layer_done,
        )

    L2TransferEngine.submit_host_to_device = with_one_more
    yield


@contextmanager
def other_version() -> Iterator[None]:
    with mock.patch.object(registration, "version", return_value="0.5.24"):
        yield


@contextmanager
def hooked_by_another() -> Iterator[None]:
    def look_on(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    target = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine.submit_device_to_host"
    HookRegistry.register(target, look_on, HookType.AROUND)
    HookRegistry.apply_hooks()
    yield


@contextmanager
def cannot_be_applied() -> Iterator[None]:
    """SGLang logs that, and goes on with the next hook."""
    own = HookRegistry._apply_target

    def fail_for_one(target: str, hooks: list[Any]) -> None:
        if target.endswith("start_loading"):
            raise RuntimeError("no")
        own(target, hooks)

    with mock.patch.object(HookRegistry, "_apply_target", fail_for_one):
        yield


@contextmanager
def bad_value() -> Iterator[None]:
    with mock.patch.dict(os.environ, {"KVBURST": "perhaps"}):
        yield


CASES: dict[str, Callable[[], Any]] = {
    "renamed target": renamed_target,
    "changed signature": changed_signature,
    "another version": other_version,
    "hooked by another plugin": hooked_by_another,
    "cannot be applied": cannot_be_applied,
    "bad value": bad_value,
}


def refused(context: Context, case: str, setup: Setup) -> Refused:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_answer, args=(theirs, context, case, setup), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(90), f"{case}: no answer"
        result: Refused = ours.recv()
        return result
    finally:
        process.kill()
        process.join()


def _answer(connection: Connection, context: Context, case: str, setup: Setup) -> None:
    connection.send(_refused(context, case, setup))


def _refused(context: Context, case: str, setup: Setup) -> Refused:
    errors: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvburst").addHandler(handler)
    before = _hooked()
    raised = ""
    with mock.patch.dict(os.environ, {"KVBURST": "1"}), CASES[case]():
        try:
            sglang_plugin.register()
        except ValueError as error:
            raised = str(error)
        HookRegistry.apply_hooks()
        newly = [path for path, function in _hooked().items() if before.get(path) is not function]
    trip = round_trip(context, setup)
    return Refused(errors, raised, newly, trip)


def _hooked() -> dict[str, object]:
    """What is behind every name that the plugin may hook."""
    found: dict[str, object] = {}
    for target in vars(targets).values():
        if isinstance(target, targets.Target):
            try:
                found[target.path] = pkgutil.resolve_name(target.path)
            except AttributeError:
                found[target.path] = None
    return found
