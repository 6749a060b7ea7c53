"""What tests of a host tier that ranks share, and ranks, tell each other. Needs no SGLang."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HostTier:
    """What one rank keeps on the host."""

    pages: int
    nbytes: int
    """Of the tensors."""
    rows: list[list[str]]
    """Of each buffer, the layers whose bytes are in its rows; "?" for none that was backed up."""
    layers: list[str]
    """That the rank has on the device."""


@dataclass(frozen=True)
class Waited:
    """What was not in memory: before anybody waited, after, and what later forwards got wrong."""

    before: list[str]
    after: list[str]
    later: list[str]


@dataclass(frozen=True)
class Gated:
    """A batch was run while no copy of its load could."""

    blocked: bool
    """Whether SGLang's own `run_batch` was not entered before the copies ran."""
    wrong: list[str]
    """In memory when it was. Nobody has waited for a layer."""


@dataclass(frozen=True)
class Standing:
    """What became of the tier of a server that asked for sharing it."""

    shared: bool
    reasons: tuple[str, ...]
    logged: list[str]
    """Lines that say it is not shared."""
    rows: list[int]
    """Layers that this rank keeps of each host buffer."""


@dataclass(frozen=True)
class Told:
    """What a rank was told of one load."""

    forward: str
    """By the forward; "nothing" if it was not."""
    layers_read: int
    """Before that."""
    wrong: list[str]
    """In those layers."""
    step: str
    """By the scheduler's steps afterwards."""
    seconds: float
    """Until it had been told both."""
