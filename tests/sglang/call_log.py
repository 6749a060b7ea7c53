"""Every Python function of SGLang's that is entered while pages go to the host and come back."""

import gc
import sys
import threading
from pathlib import Path
from types import FrameType

import on_cpu
import sglang
from ranks import Context
from scenarios import round_trip
from setups import Setup

SGLANG = str(Path(sglang.__file__).parent)


def recorded(context: Context, setup: Setup) -> tuple[list[str], list[str]]:
    """The functions in order, SGLang's copies on the CPU among them, and the threads afterwards."""
    calls: list[str] = []

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith((SGLANG, on_cpu.__file__)):
            calls.append(f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}")

    round_trip(context, setup)  # Whatever is imported or cached at first use.
    gc.collect()
    gc.disable()  # It calls destructors whenever it likes.
    sys.setprofile(record)
    try:
        round_trip(context, setup)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls, sorted(thread.name for thread in threading.enumerate())


def hooks(_: Context) -> list[str]:
    """What SGLang was asked to hook in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return sorted({*HookRegistry._hooks, *HookRegistry._patched})


def loaded_modules(_: Context) -> list[str]:
    """Of the plugin's own, without those that tests import."""
    return sorted(name for name in sys.modules if name.startswith("kvburst.sglang_plugin."))
