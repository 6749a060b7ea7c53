"""What tests of the agreement and ranks tell each other. Needs no SGLang."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Agreed:
    """What an `agreeing.work` decided and left."""

    log: list[str]
    """Every operation, its result, and the pages that were free after it."""
    retired: dict[str, list[str]]
    """The acks taken off each queue, in order."""
    prefixes: list[str]
    """What the tree has in the end."""
    bytes: str
    """A digest of both tiers in the end."""
    wrong: list[str]
    """What forwards read that was not there."""
    steps: int
    transport: str
    """Of the plugin; empty: SGLang agreed itself."""
    agreements: int
    reasons: tuple[str, ...]
    """Why the plugin did not."""


@dataclass(frozen=True)
class Stored:
    """What a `storing.storage_comes_and_goes` has moved."""

    popped: list[str]
    """Of storage's queues, in order."""
    put: dict[str, int]
    """Into each of the queues."""
    wrong: list[str]
    """What was to come back from storage and did not, or not as it was; what was taken twice."""
    leaked: int
    """Slots of the host tier that nobody has any more, or two have."""
    transport: str
    agreements: int


@dataclass(frozen=True)
class Metered:
    """What a `metered.scraped` has moved."""

    text: str
    """What the first rank served, of all ranks."""
    copies: dict[str, int]
    """In each direction, as this rank's device has counted them."""
    agreements: int
    """Of the cache that is metered."""
    agreements_in_all: int
    failures_in_all: int
    """Of the process, whose earlier tests count as well."""
