"""What tests and ranks tell each other. Needs no SGLang."""

from dataclasses import dataclass, field
from typing import Literal

Model = Literal["mla", "dsa", "mha"]
Layout = Literal["page_first_direct", "layer_first"]
"""Those that `direct` copies know."""
Policy = Literal["write_through", "write_back"]


@dataclass(frozen=True)
class Setup:
    """A cache to build."""

    model: Model = "mla"
    layout: Layout | Literal["page_first"] = "page_first_direct"
    policy: Policy = "write_through"
    layers: int = 4
    pages: int = 32
    """On the device; the host has twice as many, and one."""
    io_backend: str = "direct"
    drafts: int = 0
    """Layers of a draft model, each a pool of its own on the device."""
    without_index: tuple[int, ...] = ()
    """Layers of a DSA model that have no index-K."""

    @property
    def page_size(self) -> int:
        return 64 if self.model == "dsa" else 16

    def __str__(self) -> str:
        layers = f"-{self.layers}-layers" if self.layers != 4 else ""
        drafts = f"-{self.drafts}-drafts" if self.drafts else ""
        holes = f"-{len(self.without_index)}-without-index" if self.without_index else ""
        return f"{self.model}-{self.layout}-{self.policy}{layers}{drafts}{holes}"


@dataclass(frozen=True)
class Moved:
    """What went through the plugin, and what through SGLang's own copies."""

    loads: int
    """Bursts."""
    backups: int
    pages_loaded: int
    pages_backed_up: int
    left_to_sglang: int
    failures: int
    stock_copies: int
    """Calls of SGLang's own copy functions."""


@dataclass(frozen=True)
class RoundTrip:
    """What a `scenarios.round_trip` has moved, and what was wrong with it."""

    pages: int
    """Of all prefixes, shared ones counted once."""
    loads: int
    backing_up: Moved
    loading: Moved
    wrong: list[str] = field(default_factory=list)
    """What a forward read that was not there."""
    touched: list[str] = field(default_factory=list)
    """What changed and should not have."""


@dataclass(frozen=True)
class ConfigurationTrip:
    """What a `configurations.round_trip` has moved."""

    nodes: int
    left_on_device: int
    """Nodes that were still there when they were to be loaded."""
    loaded: list[str]
    """Components that came back."""
    full_nodes: int
    """Nodes whose full-attention KV came back."""
    wrong: list[str]
    moved: Moved


@dataclass(frozen=True)
class HeldLoad:
    """What was seen while no copy of a load could run, and afterwards."""

    done_while_held: bool
    """What `is_load_back_event_done` said."""
    blocked: bool
    """Whether the forward did not end before the copies ran."""
    wrong: list[str]
    """What the forward read that was not there."""
    wrong_afterwards: list[str]


@dataclass(frozen=True)
class Worked:
    """What a `workload.work` decided and moved."""

    log: list[str]
    """Every operation, its result, and the pages that were free after it."""
    wrong: list[str]
    """What forwards read that was not there."""
    moved: Moved


@dataclass(frozen=True)
class Probed:
    """What a `small_model.probes` found."""

    prompts: int
    differ: list[int]
    """Prompts whose logits were not the same bits from the host as from the device."""
    logits: str
    """A digest of all of them, as they were from the host."""
    moved: Moved


@dataclass(frozen=True)
class Refused:
    """What a plugin did in an SGLang that it was not written for, and SGLang with it."""

    errors: list[str]
    """That the plugin logged."""
    raised: str
    newly_hooked: list[str]
    """Names behind which there is something else than before."""
    trip: RoundTrip
