"""Metrics for Prometheus beside those that SGLang exports, with its own labels."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from kvburst.sglang_plugin.status import Counters
from kvburst.stats import BurstStats

DIRECTION = "direction"

_SHORT = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.5)
"""Seconds of the scheduler thread: microseconds where all is well, a collective's where not."""
_LONG = (1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds of a forward, or of copies."""
_RATIO = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)

COUNTED: Mapping[str, str] = {
    "failures": "Bursts that failed.",
    "left_to_sglang": "Loads and backups that SGLang copied itself although the feature is on.",
    "agreements": "Rounds in which this rank agreed with the others.",
}
"""Of the plugin's counters, those that are exported."""


def is_available() -> bool:
    return find_spec("prometheus_client") is not None


class Metrics:
    """One process's; made once, since names are registered once. Belongs to the scheduler thread.

    Where SGLang serves metrics of several processes, prometheus_client writes to the files that
    SGLang has named in the environment by then, and what serves those serves these.
    """

    def __init__(self, labels: Mapping[str, Any]) -> None:
        from prometheus_client import Counter, Histogram

        self._labels = {name: str(value) for name, value in labels.items()}
        names = tuple(self._labels)
        directed = (*names, DIRECTION)

        def histogram(
            name: str, text: str, buckets: Sequence[float], labelled: Sequence[str] = names
        ) -> Any:
            return Histogram(f"kvburst_{name}", text, labelled, buckets=buckets)

        self._stalls = histogram(
            "gate_stall_seconds", "Time that a forward stood at the gate for a load.", _LONG
        ).labels(**self._labels)
        self._overlap = histogram(
            "overlap_ratio", "The part of a load's copies that held nobody up, 0 to 1.", _RATIO
        ).labels(**self._labels)
        self._agreement = histogram(
            "agreement_seconds", "Scheduler's time in a step to agree with other ranks.", _SHORT
        ).labels(**self._labels)
        self._caller = histogram(
            "caller_seconds", "Scheduler's time to hand a burst over.", _SHORT, directed
        )
        self._copying = histogram(
            "copy_seconds", "From a burst's first copy to its last.", _LONG, directed
        )
        self._moved = {
            what: Counter(f"kvburst_{what}", text, directed)
            for what, text in {
                "pages": "Pages moved, counted once for all pools and layers.",
                "copies": "Copies handed to the device.",
                "bytes": "Bytes handed to the device.",
            }.items()
        }
        self._counted = {
            name: Counter(f"kvburst_{name}", text, names).labels(**self._labels)
            for name, text in COUNTED.items()
        }
        self._before = dict.fromkeys(COUNTED, 0)

    def burst(self, stats: BurstStats) -> None:
        """One that has ended, and has not failed."""
        labels = {**self._labels, DIRECTION: stats.direction}
        self._caller.labels(**labels).observe(stats.caller_us / 1e6)
        self._copying.labels(**labels).observe(stats.copies_took_ms / 1e3)
        self._moved["pages"].labels(**labels).inc(stats.pages)
        self._moved["copies"].labels(**labels).inc(stats.copies)
        self._moved["bytes"].labels(**labels).inc(stats.bytes)
        if stats.stalls_ms is not None:
            self._stalls.observe(stats.stalls_ms / 1e3)
        if stats.overlap_ratio is not None:
            self._overlap.observe(stats.overlap_ratio)

    def agreed(self, microseconds: float) -> None:
        """In one step."""
        self._agreement.observe(microseconds / 1e6)

    def count(self, counters: Counters) -> None:
        """What was added since the last call."""
        now = {
            "failures": counters.failures,
            "left_to_sglang": counters.left_to_sglang,
            "agreements": counters.agreements,
        }
        for name, value in now.items():
            self._counted[name].inc(value - self._before[name])
        self._before = now
