"""What was found, as one file that is whole at any moment, and as a short table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpu_check.plan import DeviceName, Step
from gpu_check.whole_file import replace_file

State = Literal["done", "failed", "timed out", "killed", "stopped", "left out", "not run"]
# Anything else is something to look into.
WELL: tuple[State, ...] = ("done", "left out")
MOST_ROWS = 40


@dataclass(frozen=True)
class Outcome:
    """How a step ended; ``reason`` is empty if it is done."""

    step: str
    state: State
    seconds: float = 0.0
    reason: str = ""


@dataclass
class Document:
    """Rewritten after each step, and while one runs.

    ``meaningless``: a library stood in for the driver, so that times say nothing of any GPU.
    """

    device: DeviceName
    machine: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def meaningless(self) -> bool:
        return self.device == "stand-in"

    def take(self, step: Step) -> None:
        """What the step has written so far, if anything that is whole."""
        if step.result is None or not step.result.exists():
            return
        try:
            content: dict[str, Any] = json.loads(step.result.read_text())
        except json.JSONDecodeError:
            return
        self.machine |= content.get("machine", {})
        self.found[step.name] = content

    def close(self, step: Step, outcome: Outcome) -> None:
        """A probe that did not come back has an answer all the same."""
        self.take(step)
        self.outcomes.append(outcome)
        if step.probe and outcome.state in ("killed", "timed out"):
            word = "crashed" if outcome.state == "killed" else "hung"
            last = [each["evidence"] for each in self.answers_of(step.name)]
            self.found[step.name] = {
                "answers": [
                    {
                        "probe": step.name,
                        "asks": step.asks,
                        "answer": word,
                        "evidence": "; ".join([*last, outcome.reason]),
                    }
                ]
            }

    def rows_of(self, step: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.found.get(step, {}).get("rows", [])
        return rows

    def answers_of(self, step: str) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.found.get(step, {}).get("answers", [])
        return answers

    def write(self, file: Path) -> None:
        """In the shape of the benchmarks, with ``steps`` and ``answers`` beside ``rows``."""
        head = {"machine": self.machine, "device": self.device, "meaningless": self.meaningless}
        parts: dict[str, Sequence[Mapping[str, Any]]] = {
            "steps": [asdict(outcome) for outcome in self.outcomes],
            "answers": [each for step in self.found for each in self.answers_of(step)],
            "rows": [row for step in self.found for row in self.rows_of(step)],
        }
        text = json.dumps(head)[:-1]
        for name, entries in parts.items():
            lines = ",\n".join(json.dumps(entry) for entry in entries)
            text += f',\n"{name}": [\n{lines}\n]'
        replace_file(file, text + "}\n")

    # --- the table -------------------------------------------------------------------------

    def table(self, steps: Sequence[Step]) -> str:
        lines = [f"kvburst on {self.machine.get('gpu', self.device)}"]
        if self.meaningless:
            lines.append("MEANINGLESS NUMBERS: a library stands in for the driver, there is no GPU")
        lines += [f"  {key}: {self.machine[key]}" for key in self.machine if key in SHOWN]
        lines += ["", *self._outcomes(steps)]
        answers = [each for step in self.found for each in self.answers_of(step)]
        if answers:
            lines += ["", "what no document says"]
        for each in answers:
            lines.append(f"  {each['probe']}: {each['answer']}")
            lines += [f"    {each['asks']}", f"    {each['evidence']}"]
        for step in steps:
            lines += _shown(step.name, self.rows_of(step.name))
        lines += ["", self.verdict()]
        return "\n".join(lines) + "\n"

    def verdict(self) -> str:
        """Whether all steps so far were done, in a line, and which were not."""
        missing = [each for each in self.outcomes if each.state != "done"]
        if not missing:
            return f"all {len(self.outcomes)} steps done"
        names = ", ".join(f"{each.step} ({each.state})" for each in missing)
        return f"{len(missing)} of {len(self.outcomes)} steps failed or were left out: {names}"

    def _outcomes(self, steps: Sequence[Step]) -> list[str]:
        """A line for each step but for probes that came back, which have their answers below, and
        for what was not run, which has a line for each reason."""
        probes = {step.name for step in steps if step.probe}
        asked = [each for each in self.outcomes if each.step in probes]
        lines = []
        skipped: dict[str, list[str]] = {}
        for each in self.outcomes:
            if each.step in probes and each.state == "done":
                continue
            if each.state == "not run":
                skipped.setdefault(each.reason, []).append(each.step)
                continue
            reason = f": {each.reason}" if each.reason else ""
            lines.append(f"  {each.step:28} {each.seconds:5.0f} s  {each.state}{reason}")
        back = sum(each.state == "done" for each in asked)
        if asked:
            seconds = sum(each.seconds for each in asked)
            lines.append(f"  {'probes':28} {seconds:5.0f} s  {back} of {len(asked)} came back")
        lines += [f"  not run, {why}: {', '.join(names)}" for why, names in skipped.items()]
        return lines


SHOWN = ("driver", "copy_calls", "kernels", "link", "cpu", "torch", "kvburst")


def _shown(step: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each scenario with the medians of its metrics, and how many times better than the
    baseline they are. What all scenarios have in common stands above."""
    if not rows:
        return []
    scenarios: dict[str, dict[str, Any]] = {}
    for row in rows:
        scenarios.setdefault(json.dumps(row["scenario"]), {})[row["metric"]] = row
    common = {
        key: value
        for key, value in rows[0]["scenario"].items()
        if len(scenarios) > 1 and all(row["scenario"].get(key) == value for row in rows)
    }
    keys = [key for key in rows[0]["scenario"] if key not in common]
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    table = [[*keys, *metrics]]
    for text, of in scenarios.items():
        values = json.loads(text)
        cells = [str(values.get(key, "")) for key in keys]
        table.append([*cells, *(_cell(of.get(metric)) for metric in metrics)])
    more = len(table) - 1 - MOST_ROWS
    table = table[: 1 + MOST_ROWS]
    widths = [max(len(line[at]) for line in table) for at in range(len(table[0]))]
    lines = ["", f"{step}: " + ", ".join(f"{key} {value}" for key, value in common.items())]
    for line in table:
        padded = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  " + "  ".join(padded).rstrip())
    if more > 0:
        lines.append(f"  and {more} more scenarios in the JSON")
    return lines


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    ratio = f" ({row['ratio']:.2f}x)" if "ratio" in row else ""
    return f"{row['median']:.4g} {row['unit']}{ratio}"


def write_table(document: Document, steps: Sequence[Step], file: Path) -> str:
    text = document.table(steps)
    replace_file(file, text)
    return text
