"""One probe, in this process: ``python -m gpu_check.ask NAME --device NAME``. Needs neither kvburst
nor torch, so a build that fails keeps no question from being asked."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from driver_library import driver_library

from gpu_check.plan import DEVICES, PROBES
from gpu_check.probe import Answer, Probe, ProbeCalls
from gpu_check.probes_driver import DRIVER_PROBES
from gpu_check.probes_queue import QUEUE_PROBES
from gpu_check.probes_tall import TALL_PROBES
from gpu_check.whole_file import replace_file

STAND_IN_PITCH = 1 << 20

ALL_PROBES: Mapping[str, Probe] = {**TALL_PROBES, **QUEUE_PROBES, **DRIVER_PROBES}


def write(file: Path, probe: str, answer: Answer) -> None:
    asks = next(asks for name, _, asks in PROBES if name == probe)
    entry = {"probe": probe, "asks": asks, "answer": answer.word, "evidence": answer.evidence}
    replace_file(file, json.dumps({"answers": [entry]}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_check.ask")
    parser.add_argument("name", choices=list(ALL_PROBES))
    parser.add_argument("--device", choices=DEVICES, required=True)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()

    def note(evidence: str) -> None:
        """Written before what may be the end of this process."""
        write(given.json, given.name, Answer("unfinished", evidence))

    probe = ALL_PROBES[given.name]
    if given.device == "stand-in":
        # Its memory is this machine's: rows that are too far apart need not be 2 GiB apart.
        os.environ.setdefault("KVBURST_STAND_IN", f"max_pitch={STAND_IN_PITCH}")
    calls = ProbeCalls(driver_library(given.device))
    if calls.stand_in != (given.device == "stand-in"):
        sys.exit(f"device {given.device}: {calls.library} is the other kind (KVBURST_LIBCUDA)")
    if calls.stand_in and not probe.modelled:
        answer = Answer("not-modelled", "the stand-in driver does not have what this asks for")
    else:
        answer = probe.ask(calls, note)
    write(given.json, given.name, answer)
    print(f"{given.name}: {answer.word}: {answer.evidence}")


if __name__ == "__main__":
    main()
