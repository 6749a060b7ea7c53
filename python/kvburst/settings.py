"""What the environment asks the SGLang plugin for, read once."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from kvburst.ownership import ExchangeOrder

_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")


class SettingsError(ValueError):
    """A variable has a value that cannot be meant; the message names both."""


@dataclass(frozen=True)
class Settings:
    """The variables that the plugin knows. None: not set.

    ``KVBURST=1`` asks for every feature that its own variable does not turn off; a feature's own
    variable turns on that feature alone. What changes how memory is laid out or who holds what in
    it, KVBURST does not ask for. A tier that ranks share needs loads and backups as bursts, and
    asks for both.
    """

    everything: bool = False
    """KVBURST."""
    async_load_enqueue: bool | None = None
    """SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE: loads are issued on a thread of their own."""
    d2h_issue_chunk_pages: int | None = None
    """SGLANG_HICACHE_D2H_ISSUE_CHUNK_PAGES: backups by plan, in batches of so many pages."""
    one_piece_pools: bool | None = None
    """KVBURST_ONE_PIECE_POOLS: all layers of a device pool in one allocation."""
    async_ack_sync: bool | None = None
    """SGLANG_ENABLE_HICACHE_ASYNC_ACK_SYNC: ranks agree by a collective that no step waits for."""
    idle_sync_skip: bool | None = None
    """SGLANG_ENABLE_HICACHE_IDLE_SYNC_SKIP: no collective while nothing is outstanding."""
    events_timer_steps: int | None = None
    """SGLANG_HICACHE_EVENTS_TIMER_STEPS: the time of these steps is logged each so many."""
    rank_shard: bool | None = None
    """SGLANG_ENABLE_HICACHE_RANK_SHARD: ranks keep one host copy of each layer between them."""
    rank_shard_keep_capacity: bool | None = None
    """SGLANG_HICACHE_RANK_SHARD_KEEP_CAPACITY: as many pages as without, in less memory."""
    rank_shard_staging_mb: int | None = None
    """SGLANG_HICACHE_RANK_SHARD_STAGING_MB: MiB of device memory that are exchanged at a time."""
    rank_shard_log_every: int | None = None
    """SGLANG_HICACHE_RANK_SHARD_LOG_EVERY: what was exchanged is logged each so many loads."""
    rank_shard_verify_every: int | None = None
    """SGLANG_HICACHE_RANK_SHARD_VERIFY_EVERY: accepted, without effect: ranks compare the host
    pages of every load before anything is exchanged."""
    rank_shard_exchange: ExchangeOrder | None = None
    """KVBURST_RANK_SHARD_EXCHANGE: where layers are exchanged."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Settings":
        """Read the variables. Raises SettingsError on a value that is none of those allowed."""

        def switch(field: str) -> bool | None:
            return _switch(environment, SWITCHES[field])

        def number(field: str) -> int | None:
            return _number(environment, NUMBERS[field])

        return cls(
            everything=_switch(environment, "KVBURST") or False,
            async_load_enqueue=switch("async_load_enqueue"),
            d2h_issue_chunk_pages=number("d2h_issue_chunk_pages"),
            one_piece_pools=switch("one_piece_pools"),
            async_ack_sync=switch("async_ack_sync"),
            idle_sync_skip=switch("idle_sync_skip"),
            events_timer_steps=number("events_timer_steps"),
            rank_shard=switch("rank_shard"),
            rank_shard_keep_capacity=switch("rank_shard_keep_capacity"),
            rank_shard_staging_mb=number("rank_shard_staging_mb"),
            rank_shard_log_every=number("rank_shard_log_every"),
            rank_shard_verify_every=number("rank_shard_verify_every"),
            rank_shard_exchange=_exchange(environment),
        )

    def __post_init__(self) -> None:
        least, most = STAGING_MB
        if not least <= self.staging_bytes >> 20 <= most:
            raise SettingsError(
                f"{NUMBERS['rank_shard_staging_mb']}: '{self.rank_shard_staging_mb}' must be"
                f" {least} to {most} (MiB)"
            )

    @property
    def async_loads(self) -> bool:
        """Whether loads as bursts are asked for: on a thread of their own, or for a shared tier."""
        return self._asked(self.async_load_enqueue)

    @property
    def planned_backups(self) -> bool:
        """Whether backups by plan are asked for."""
        chunk = self.d2h_issue_chunk_pages
        return self._asked(None if chunk is None else chunk > 0)

    @property
    def chunk_pages(self) -> int:
        """Pages in a batch of a backup; 0: no batches."""
        return self.d2h_issue_chunk_pages or 0

    @property
    def shared_tier(self) -> bool:
        """Whether ranks are to keep one host copy of each layer between them."""
        return self.rank_shard or False

    @property
    def exchange(self) -> ExchangeOrder:
        """Where the layers of a shared tier are exchanged."""
        return self.rank_shard_exchange or "forward_stream"

    @property
    def staging_bytes(self) -> int:
        """Bytes of device memory that are exchanged at a time."""
        megabytes = self.rank_shard_staging_mb
        return (32 if megabytes is None else megabytes) << 20

    @property
    def pools_in_one_piece(self) -> bool:
        """Whether that is asked for; KVBURST does not, since it changes how memory is laid out."""
        return self.one_piece_pools or False

    @property
    def transport(self) -> Literal["blocking", "pipelined", "board"] | None:
        """How ranks are to agree; None: by SGLang's own collective, which each step waits for."""
        if self.async_ack_sync is not None:
            return "pipelined" if self.async_ack_sync else None
        if self.everything:
            return "board"
        return "blocking" if self.idle_sync_skip else None

    @property
    def skip_idle(self) -> bool:
        """Whether no round is to take place while nothing is outstanding; only where asked for."""
        return self.idle_sync_skip or False

    @property
    def timer_steps(self) -> int:
        """Steps between lines in the log about their time; 0: none."""
        return self.events_timer_steps or 0

    @property
    def anything(self) -> bool:
        """Whether anything is asked for that is done in SGLang."""
        return self.anything_at_steps or self.pools_in_one_piece

    @property
    def anything_at_steps(self) -> bool:
        """Whether anything but the pools is."""
        return (
            self.async_loads
            or self.planned_backups
            or self.transport is not None
            or self.timer_steps > 0
        )

    def without(self, variables: Collection[str]) -> "Settings":
        """As if these were not set: somebody else reads them."""
        unset: dict[str, None] = {
            field: None
            for field, variable in (*SWITCHES.items(), *NUMBERS.items())
            if variable in variables
        }
        return replace(self, **unset)  # type: ignore[arg-type]

    def _asked(self, own: bool | None) -> bool:
        return self.everything or self.shared_tier if own is None else own


SWITCHES = {
    "async_load_enqueue": "SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE",
    "one_piece_pools": "KVBURST_ONE_PIECE_POOLS",
    "async_ack_sync": "SGLANG_ENABLE_HICACHE_ASYNC_ACK_SYNC",
    "idle_sync_skip": "SGLANG_ENABLE_HICACHE_IDLE_SYNC_SKIP",
    "rank_shard": "SGLANG_ENABLE_HICACHE_RANK_SHARD",
    "rank_shard_keep_capacity": "SGLANG_HICACHE_RANK_SHARD_KEEP_CAPACITY",
}
"""Field of Settings and the variable it comes from: yes or no."""

NUMBERS = {
    "d2h_issue_chunk_pages": "SGLANG_HICACHE_D2H_ISSUE_CHUNK_PAGES",
    "events_timer_steps": "SGLANG_HICACHE_EVENTS_TIMER_STEPS",
    "rank_shard_staging_mb": "SGLANG_HICACHE_RANK_SHARD_STAGING_MB",
    "rank_shard_log_every": "SGLANG_HICACHE_RANK_SHARD_LOG_EVERY",
    "rank_shard_verify_every": "SGLANG_HICACHE_RANK_SHARD_VERIFY_EVERY",
}
"""The same for whole numbers from 0 on."""

STAGING_MB = (1, 4096)
"""The least and the most MiB that may be exchanged at a time."""

_EXCHANGE = "KVBURST_RANK_SHARD_EXCHANGE"

VARIABLES = ("KVBURST", *SWITCHES.values(), *NUMBERS.values(), _EXCHANGE)
"""All that are read."""


def _switch(environment: Mapping[str, str], name: str) -> bool | None:
    value = environment.get(name, "").strip().lower()
    if not value:
        return None
    if value not in _YES + _NO:
        raise SettingsError(f"{name}: {value!r} must be 1 or 0")
    return value in _YES


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "").strip()
    if not value:
        return None
    if not (value.isascii() and value.isdecimal()):
        raise SettingsError(f"{name}: {value!r} must be a whole number from 0 on")
    return int(value)


def _exchange(environment: Mapping[str, str]) -> ExchangeOrder | None:
    value = environment.get(_EXCHANGE, "").strip()
    if not value:
        return None
    if value not in get_args(ExchangeOrder):
        known = " or ".join(get_args(ExchangeOrder))
        raise SettingsError(f"{_EXCHANGE}: {value!r} must be {known}")
    return cast(ExchangeOrder, value)
