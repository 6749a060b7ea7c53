"""What a trace viewer makes of a flight recorder's file."""

from collections.abc import Iterator
from typing import Any

Events = list[dict[str, Any]]


def faults(content: dict[str, Any]) -> Iterator[str]:
    """What a trace viewer would refuse or show wrongly, by the format's description ("Trace Event
    Format", JSON object form): nothing if all is well."""
    events: Events = content["traceEvents"]
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    open_until: dict[tuple[int, int], list[int]] = {}
    for event in sorted(
        (e for e in events if e["ph"] != "M"), key=lambda e: (e["ts"], -e.get("dur", 0))
    ):
        place = (event["pid"], event["tid"])
        name = f"{event['ph']} {event['name']!r} at {event['ts']}"
        if event["ph"] not in "Xistf":
            yield f"{name}: unknown phase"
        if event["pid"] not in processes or place not in threads:
            yield f"{name}: on a thread without a name"
        if not isinstance(event["ts"], (int, float)) or event["ts"] < 0:
            yield f"{name}: bad time"
        if event["ph"] == "i" and event.get("s") != "t":
            yield f"{name}: a mark of no scope"
        if event["ph"] != "X":
            continue
        if not event.get("dur", -1) >= 0:
            yield f"{name}: no duration"
            continue
        begin = round(1000 * event["ts"])
        end = begin + round(1000 * event["dur"])
        around = open_until.setdefault(place, [])
        # A viewer counts in nanoseconds, and drops what only overlaps.
        while around and around[-1] <= begin:
            around.pop()
        if around and end > around[-1]:
            yield f"{name}: ends after the span that it began in"
        around.append(end)
    yield from _flow_faults(events)


def _flow_faults(events: Events) -> Iterator[str]:
    flows: dict[object, Events] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
    begins = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] in "Xi"}
    for flow, steps in flows.items():
        phases = "".join(step["ph"] for step in sorted(steps, key=lambda step: step["ts"]))
        if phases[0] != "s" or phases[-1] != "f" or set(phases[1:-1]) - {"t"}:
            yield f"flow {flow!r}: phases {phases}"
        for step in steps:
            if (step["pid"], step["tid"], step["ts"]) not in begins:
                yield f"flow {flow!r}: a step at {step['ts']} where no span begins"
