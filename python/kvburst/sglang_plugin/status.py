"""What the plugin does in this process, in numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvburst.sglang_plugin.eligibility import FEATURES, Verdict


@dataclass
class Counters:
    """Counted by the scheduler thread and by forwards, since the process started."""

    bursts_loaded: int = 0
    """Loads handed to an issuer."""
    bursts_backed_up: int = 0
    pages_loaded: int = 0
    """Pages of the loads, counted once for all pools that share them."""
    pages_backed_up: int = 0
    left_to_sglang: int = 0
    """Loads and backups of a server with the feature on that SGLang copied itself."""
    agreements: int = 0
    """Rounds in which this rank agreed with the others on what all of them take."""
    failures: int = 0
    """Bursts that failed."""
    wait_us: float = 0.0
    """Microseconds that forwards stood at the gate, on the host."""


@dataclass(frozen=True)
class Status:
    """Of this process. The features are those of the cache attached last, agreed over its ranks."""

    features: Mapping[str, Verdict] = field(default_factory=dict)
    bursts_loaded: int = 0
    bursts_backed_up: int = 0
    pages_loaded: int = 0
    pages_backed_up: int = 0
    left_to_sglang: int = 0
    agreements: int = 0
    failures: int = 0
    wait_us: float = 0.0
    transport: str = ""
    """How ranks agree; empty: by SGLang's own collective."""


def all_off(*reasons: str) -> Status:
    return Status(dict.fromkeys(FEATURES, Verdict(False, reasons)))
