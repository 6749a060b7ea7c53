"""The command."""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_check.document import Document
from gpu_check.plan import BENCHMARKS, DEVICES, TESTS, Options, Step, default_work, steps
from gpu_check.runner import Runner

WORDS = """\
Build kvburst, run its tests on the GPU of this machine, and measure and probe what no document
says. Every question is a process of its own with a time limit; what was found is in the files at
any moment, and the last table names what is missing, and why. Uses no network."""

MORE = """\
files in --out:
  gpu_check.json     machine, steps, answers of the probes, rows of the measurements
  gpu_check.txt      the table that is printed last
  gpu_check.log      what every step has printed
  issue_latency.json rows of benchmarks/issue_latency.py on the same device

written elsewhere: the build in --work; with --device stand-in also the library that plays the
driver, in ~/.cache/kvburst-stand-in ($XDG_CACHE_HOME/kvburst-stand-in if that is set)

needs: Python 3.10 or later with torch (for a GPU, its CUDA build), pybind11, scikit-build-core,
cmake, ninja, pytest, hypothesis, typer, rich, matplotlib, and a C++20 compiler. nvcc and
compute-sanitizer are used where they are on the PATH. KVBURST_CUDA=ON refuses to build without
nvcc.

exit status: 0 if all was run and nothing failed, 1 if a step failed or was not run (one whose
subject is not on this machine is left out, and no failure), 2 for a bad option

examples:
  benchmarks/gpu_check.sh --out /tmp/answers
  benchmarks/gpu_check.sh --only copy_cost,bandwidth --installed
  benchmarks/gpu_check.sh --device stand-in --quick    tries the script itself, without a GPU"""


# Of nvcc and compute-sanitizer, which an installer does not put on the PATH.
TOOLKIT = Path("/usr/local/cuda/bin")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description=WORDS,
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="cuda",
        help="stand-in: a library plays the driver; all numbers are meaningless (default: cuda)",
    )
    out = os.environ.get("OUT")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path(out) if out else None,
        help="where the files go (default: $OUT, else a new folder that is printed)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        default=8.0,
        help="for everything; what is not begun by then is skipped by name (default: 8)",
    )
    parser.add_argument("--only", metavar="NAME,...", help="steps to run; --list names them")
    parser.add_argument("--list", action="store_true", help="name the steps, and run none")
    parser.add_argument(
        "--installed",
        action="store_true",
        help="measure the kvburst that this Python has; build nothing",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few rounds: to see that it runs"
    )
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        default=default_work(),
        help="where kvburst is built, for the next run too (default: %(default)s)",
    )
    given = parser.parse_args(arguments)
    if not given.minutes > 0:
        parser.error(f"argument --minutes: {given.minutes:g} must be above 0")
    for option, folder in (("out", given.out), ("work", given.work)):
        if folder is not None and not folder.absolute().parent.is_dir():
            parser.error(f"argument --{option}: {str(folder.parent)!r} is not a folder")
    options = Options(
        given.device,
        _new_folder() if given.out is None and not given.list else (given.out or Path()).absolute(),
        given.work.absolute(),
        quick=given.quick,
        installed=given.installed,
    )
    known = {step.name: step for step in steps(options)}
    if given.list:
        for step in known.values():
            print(f"{step.name:28} at most {step.seconds:3.0f} s  {step.asks}")
        return 0
    wanted = list(known) if given.only is None else given.only.split(",")
    for name in wanted:
        if name not in known:
            parser.error(f"argument --only: {name!r} is not one of {', '.join(known)}")
    chosen = [step for step in known.values() if step.name in wanted]
    return _run(options, chosen, time.monotonic() + 60 * given.minutes)


def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvburst-gpu-check-out-"))


def _run(options: Options, chosen: Sequence[Step], deadline: float) -> int:
    options.out.mkdir(exist_ok=True)
    options.work.mkdir(exist_ok=True)
    (options.out / "gpu_check.log").unlink(missing_ok=True)
    runner = Runner(Document(options.device), options.out, deadline, environment(options))
    well = runner.run(chosen)
    print(f"written: {options.out}")
    return 0 if well else 1


def environment(options: Options) -> dict[str, str]:
    """Of every step: it imports what was built, the benchmarks, and the tests' stand-in driver."""
    paths = [] if options.installed else [str(options.site)]
    paths += [str(BENCHMARKS), str(TESTS), str(TESTS / "stand_in_cuda")]
    before = os.environ.get("PYTHONPATH")
    programs = os.environ.get("PATH", os.defpath)
    if TOOLKIT.is_dir():
        programs += f"{os.pathsep}{TOOLKIT}"
    return {
        **os.environ,
        "PATH": programs,
        "PYTHONPATH": os.pathsep.join([*paths, before] if before else paths),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
