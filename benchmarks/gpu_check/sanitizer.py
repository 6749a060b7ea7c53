"""Runs a command under NVIDIA's compute-sanitizer, where there is one and a GPU to check."""

import argparse
import os
import shutil
import sys

from gpu_check.plan import DEVICES, LEFT_OUT

FOUND = 86
TOOL = "compute-sanitizer"


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_check.sanitizer")
    parser.add_argument("--device", choices=DEVICES, required=True)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    if given.device == "stand-in":
        print("the stand-in driver has a checker of its own")
        sys.exit(LEFT_OUT)
    tool = shutil.which(TOOL)
    if tool is None:
        print(f"{TOOL} is not on the PATH")
        sys.exit(LEFT_OUT)
    # Calls that fail are known to who makes them, and some are tries.
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", str(FOUND)]
    os.execv(tool, [tool, *options, *given.command])


if __name__ == "__main__":
    main()
