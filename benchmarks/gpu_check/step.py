"""One measurement, in this process: ``python -m gpu_check.step NAME --device NAME``."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from harness import machine

from gpu_check import bandwidth, caller, copy_cost, overlap, staging
from gpu_check.bench import Bench, LeftOutError, Results
from gpu_check.plan import DEVICES, LEFT_OUT
from kvburst._core import KVBurstError

# What no measurement needs must not keep it from being made.
SMI_SECONDS = 20.0


def device(bench: Bench) -> None:
    """The machine, as all benchmarks describe it, and what copies are made with on it."""
    opened = bench.open()
    version = opened.driver.version
    facts = {
        "gpu": opened.gpu_name,
        "driver": f"{opened.driver.library}, CUDA {version // 1000}.{version % 1000 // 10}",
        "copy_calls": opened.copy_calls,
    }
    if bench.device_name == "cuda":
        facts |= _nvidia_smi()
    bench.results.machine = machine() | facts
    bench.results.write()


def _nvidia_smi() -> dict[str, str]:
    """The link to the host, which nothing else says."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"link": "not known: nvidia-smi is not on the PATH"}
    query = "driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.sm,clocks.mem"
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SMI_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"link": f"not known: {error}"}
    return {"link": f"{query}: {(done.stdout or done.stderr).strip()}"}


MEASURED: Mapping[str, Callable[[Bench], None]] = {
    "device": device,
    "copy_cost": copy_cost.run,
    "bandwidth": bandwidth.run,
    "staging": staging.run,
    "caller": caller.run,
    "overlap": overlap.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.step")
    parser.add_argument("name", choices=list(MEASURED))
    parser.add_argument("--device", choices=DEVICES, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.device == "stand-in":
        # Accesses that nothing orders end this process with a status of their own.
        os.environ.setdefault("KVBURST_STAND_IN", "strict=1")
        torch.set_num_threads(1)
    bench = Bench(given.name, given.device, given.quick, Results(given.json))
    try:
        MEASURED[given.name](bench)
    except LeftOutError as left_out:
        print(left_out)
        return LEFT_OUT
    except KVBurstError as error:
        print(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
