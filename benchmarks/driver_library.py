"""Which library plays the driver. The one that stands in for it in the tests is built if need be:
its times are this machine's, and say nothing of a GPU."""

import os
import sys
from pathlib import Path
from typing import Literal

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from stand_in import build_in_cache

CudaName = Literal["cuda", "stand-in"]


def driver_library(name: CudaName) -> str | None:
    """What to load: KVBURST_LIBCUDA, if the environment has it, or the stand-in; None: the
    system's."""
    named = os.environ.get("KVBURST_LIBCUDA")
    if named or name == "cuda":
        return named
    return str(build_in_cache().current)
