"""The page of a report: plain HTML and CSS, pictures within, no script."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from harness import UNATTENDED_WIDTH, number

JsonRow = Mapping[str, Any]

STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; --good: #2ca02c; --bad: #d62728; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.7rem; margin-bottom: 0; }
h2 { margin: 2.5rem 0 0.2rem; }
nav a { margin-right: 1rem; }
img { width: 100%; background: white; border: 1px solid var(--line); border-radius: 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 0.2rem 0.6rem; text-align: right; white-space: nowrap; }
th { border-bottom: 1px solid var(--line); font-weight: 600; vertical-align: bottom; }
th.metric { border-left: 1px solid var(--line); text-align: center; }
td.first { border-left: 1px solid var(--line); }
th.word, td.word { text-align: left; }
tbody tr:hover { background: #8882; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: 0.5rem 0; }
dt { color: var(--dim); }
dd { margin: 0; overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: 12px; }
summary { cursor: pointer; margin: 0.6rem 0; }
ul.budgets { list-style: none; padding: 0; }
.dim { color: var(--dim); }
.kept::before { content: "\\2713\\00a0"; color: var(--good); }
.missed::before { content: "\\2717\\00a0"; color: var(--bad); }
.failed { border-left: 4px solid var(--bad); padding-left: 1rem; }
.simulated { border: 1px solid var(--line); border-radius: 1em; padding: 0 0.6em; font-size: 12px; }
"""


@dataclass(frozen=True)
class Part:
    """What one benchmark came to. ``rows`` as its JSON has them, ``picture`` an SVG; ``failure`` is
    why there is neither."""

    name: str
    title: str
    words: str
    rows: Sequence[JsonRow]
    picture: bytes | None
    printed: str
    seconds: float
    failure: str | None = None


def page(parts: Sequence[Part], machine: Mapping[str, Any], date: str, *, quick: bool) -> str:
    """The whole HTML document."""
    body = "\n".join(
        [
            "<h1>kvburst: what was measured</h1>",
            f"<p class='dim'>{escape(date)}{', quick run' if quick else ''}</p>",
            _machine(machine),
            _budgets(parts, quick),
            "<nav>"
            + "".join(f"<a href='#{p.name}'>{escape(p.title)}</a>" for p in parts)
            + "</nav>",
            *(_part(part) for part in parts),
        ]
    )
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        # No request for an icon that is not there.
        "<link rel='icon' href='data:,'>\n"
        f"<title>kvburst: what was measured</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _machine(machine: Mapping[str, Any]) -> str:
    shown = dict(machine) | {"memory": f"{machine['memory_bytes'] / 2**30:.0f} GiB"}
    del shown["memory_bytes"]
    items = "".join(
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>"
        for key, value in shown.items()
    )
    return f"<dl>{items}</dl>"


def _budgets(parts: Sequence[Part], quick: bool) -> str:
    """What the benchmarks said of their budgets."""
    said = [
        (verdict, part.title, words) for part in parts for verdict, words in _verdicts(part.printed)
    ]
    if not said:
        return ""
    items = "".join(
        f"<li class='{verdict}'>{escape(title)}: {escape(words)}</li>"
        for verdict, title, words in said
    )
    doubt = "<p class='dim'>A quick run has too few samples to judge by.</p>" if quick else ""
    return f"<h2>Budgets</h2>{doubt}<ul class='budgets'>{items}</ul>"


def _verdicts(printed: str) -> Iterator[tuple[str, str]]:
    """Of notes such as "budget kept: ...", which go on over the next line where they are long."""
    lines = printed.splitlines()
    for at, line in enumerate(lines):
        for verdict in ("kept", "missed"):
            if line.startswith(f"budget {verdict}: "):
                words = [line.removeprefix(f"budget {verdict}: ")]
                for before, after in zip(lines[at:], lines[at + 1 :], strict=False):
                    if not _wrapped(before, after):
                        break
                    words.append(after)
                yield verdict, " ".join(each.strip() for each in words)


def _wrapped(line: str, following: str) -> bool:
    """Whether the line ends where its next word would not have fitted."""
    word = following.partition(" ")[0]
    return (
        word not in ("", "budget", "baseline:")
        and len(line.rstrip()) + 1 + len(word) > UNATTENDED_WIDTH
    )


def _part(part: Part) -> str:
    simulated = any(row.get("simulated") for row in part.rows) or "(simulated)" in part.printed
    mark = " <span class='simulated'>simulated in part</span>" if simulated else ""
    head = f"<h2 id='{part.name}'>{escape(part.title)}{mark}</h2><p>{escape(part.words)}</p>"
    if part.failure is not None:
        return f"{head}<div class='failed'><p>Failed:</p><pre>{escape(part.failure)}</pre></div>"
    picture = "" if part.picture is None else _picture(part)
    table = _table(part.rows) if part.rows else ""
    printed = escape(part.printed)
    return (
        f"{head}{picture}{table}"
        f"<details><summary>As it was printed ({part.seconds:.0f} s)</summary>"
        f"<pre>{printed}</pre></details>"
    )


def _picture(part: Part) -> str:
    data = base64.b64encode(part.picture or b"").decode()
    return f"<img alt='{escape(part.title)}' src='data:image/svg+xml;base64,{data}'>"


def _table(rows: Sequence[JsonRow]) -> str:
    """A line for each scenario, some columns for each metric; folded where it is long."""
    metrics = {row["metric"]: row["unit"] for row in rows}
    scenarios: dict[tuple[tuple[str, Any], ...], dict[str, JsonRow]] = {}
    for row in rows:
        scenarios.setdefault(tuple(row["scenario"].items()), {})[row["metric"]] = row
    names = list(rows[0]["scenario"])
    varying = [name for name in names if len({row["scenario"][name] for row in rows}) > 1]
    common = {name: rows[0]["scenario"][name] for name in names if name not in varying}
    compared = {row["metric"] for row in rows if "ratio" in row}

    top = f"<th colspan='{len(varying)}'></th>" if varying else ""
    for metric, unit in metrics.items():
        span = 4 if metric in compared else 3
        top += f"<th class='metric' colspan='{span}'>{escape(metric)}, {escape(unit)}</th>"
    second = "".join(
        f"<th class='{_kind(rows[0]['scenario'][name])}'>{escape(name.replace('_', ' '))}</th>"
        for name in varying
    )
    for metric in metrics:
        second += "<th>median</th><th>p90</th><th>p99</th>"
        second += "<th>times better</th>" if metric in compared else ""
    body = "".join(
        "<tr>"
        + "".join(
            f"<td class='{_kind(value)}'>{_value(value)}</td>"
            for name, value in scenario
            if name in varying
        )
        + "".join(_cells(found.get(metric), metric in compared) for metric in metrics)
        + "</tr>"
        for scenario, found in scenarios.items()
    )
    sizes = sorted({row["n"] for row in rows})
    samples = f"n {sizes[0]}" if len(sizes) == 1 else f"n {sizes[0]} to {sizes[-1]}"
    heading = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in common.items())
    table = (
        f"<p class='dim'>{escape(heading)}{', ' if heading else ''}{samples}</p>"
        f"<div class='scroll'><table><thead><tr>{top}</tr><tr>{second}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
    folded = len(scenarios) > 30
    words = f"<summary>All {len(scenarios)} scenarios</summary>"
    return f"<details>{words}{table}</details>" if folded else table


def _cells(row: JsonRow | None, compared: bool) -> str:
    if row is None:
        return "<td class='first'></td>" + "<td></td>" * (3 if compared else 2)
    cells = f"<td class='first'>{number(row['median'])}</td>"
    cells += f"<td>{number(row['p90'])}</td><td>{number(row['p99'])}</td>"
    if compared:
        cells += f"<td>{row['ratio']:,.2f}</td>" if "ratio" in row else "<td></td>"
    return cells


def _kind(value: object) -> str:
    return "word" if isinstance(value, str) else "number"


def _value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else escape(str(value))
