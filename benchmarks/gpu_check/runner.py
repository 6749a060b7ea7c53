"""Runs steps one after the other, each in a process group of its own, against the clock.

Whatever ends a step, or all of them, what was found until then is in the document's file: it is
written after each step, and every time that a running step has written something.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from gpu_check.document import WELL, Document, Outcome, State, write_table
from gpu_check.plan import LEFT_OUT, Step

POLL_SECONDS = 0.25
# Between asking a step to end and killing it, and before one is given up that cannot be killed.
GRACE_SECONDS = 3.0
# A step that would have less than this is not begun.
FEWEST_SECONDS = 2.0
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Runner:
    """``deadline`` is of ``time.monotonic``. Files in ``out``: gpu_check.json, .txt and .log."""

    document: Document
    out: Path
    deadline: float
    environment: Mapping[str, str]
    echo: Callable[[str], None] = print
    _stopped: str = field(default="", init=False)

    def run(self, steps: Sequence[Step]) -> bool:
        """Whether all went well. Never raises for what a step does."""
        with self._stoppable():
            for step in steps:
                outcome = self._outcome(step)
                self.document.close(step, outcome)
                self.document.write(self._file("json"))
                write_table(self.document, steps, self._file("txt"))
                self._say(outcome)
        self.echo("\n" + write_table(self.document, steps, self._file("txt")))
        return all(outcome.state in WELL for outcome in self.document.outcomes)

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """A signal to end stops the running step, and begins no other."""

        def stop(number: int, frame: FrameType | None) -> None:
            self._stopped = f"stopped by {signal.Signals(number).name}"

        before = {number: signal.signal(number, stop) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _outcome(self, step: Step) -> Outcome:
        if self._stopped:
            return Outcome(step.name, "not run", reason=self._stopped)
        missing = [need for need in step.needs if self._state(need) != "done"]
        if missing:
            return Outcome(step.name, "not run", reason=f"needs {', '.join(missing)}")
        left = self.deadline - time.monotonic()
        if left < FEWEST_SECONDS:
            return Outcome(step.name, "not run", reason="the time for everything is over")
        return self._run(step, min(step.seconds, left))

    def _state(self, name: str) -> State:
        """Of a step that is not among those to run: nobody has asked for it, and it is there."""
        states = [outcome.state for outcome in self.document.outcomes if outcome.step == name]
        return states[0] if states else "done"

    def _run(self, step: Step, seconds: float) -> Outcome:
        if step.result is not None:
            step.result.parent.mkdir(parents=True, exist_ok=True)
            step.result.unlink(missing_ok=True)
        with open(self._file("log"), "ab") as log:
            log.write(f"\n=== {step.name}\n".encode())
            log.flush()
            start = log.tell()
            begin = time.monotonic()
            process = subprocess.Popen(
                step.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                preexec_fn=os.setpgrp,
            )
            try:
                in_time = self._watch(step, process, begin + seconds)
            finally:
                dead = _end(process)
        took = time.monotonic() - begin
        last = self._last_line(start)
        if self._stopped:
            return Outcome(step.name, "stopped", took, self._stopped)
        if not in_time:
            reason = f"not done after {seconds:.0f} s" + ("" if dead else ", and cannot be killed")
            return Outcome(step.name, "timed out", took, reason)
        if process.returncode < 0:
            reason = signal.Signals(-process.returncode).name
            return Outcome(step.name, "killed", took, f"{reason}; last line: {last}")
        if process.returncode == LEFT_OUT:
            return Outcome(step.name, "left out", took, last)
        if process.returncode:
            reason = f"exit status {process.returncode}; last line: {last}"
            return Outcome(step.name, "failed", took, reason)
        return Outcome(step.name, "done", took)

    def _watch(self, step: Step, process: "subprocess.Popen[bytes]", until: float) -> bool:
        """Whether it ended in time. What it writes is taken over as it goes."""
        seen = 0
        while True:
            try:
                process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            else:
                return True
            if step.result is not None and step.result.exists():
                written = step.result.stat().st_mtime_ns
                if written != seen:
                    seen = written
                    self.document.take(step)
                    self.document.write(self._file("json"))
            if self._stopped or time.monotonic() > until:
                return False

    def _file(self, suffix: str) -> Path:
        return self.out / f"gpu_check.{suffix}"

    def _last_line(self, start: int) -> str:
        with open(self._file("log"), "rb") as log:
            log.seek(start)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "it said nothing")

    def _say(self, outcome: Outcome) -> None:
        words = f": {outcome.reason}" if outcome.reason else ""
        for answer in self.document.answers_of(outcome.step):
            words += f": {answer['answer']}"
        self.echo(f"{outcome.step}: {outcome.state}, {outcome.seconds:.0f} s{words}")


def _end(process: "subprocess.Popen[bytes]") -> bool:
    """Of it and all that it started, nothing runs on. False if it cannot even be killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        if number == signal.SIGTERM:
            # Its children may be slower than itself.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return True
    return False
