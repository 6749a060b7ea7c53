"""Where SGLang is not installed these tests are skipped, and say so.

Where it is, they run in processes of their own (`ranks`), one set at a time. `KVBURST_TEST_RANKS`
says how many ranks share a host tier, 2 if it says nothing.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from ranks import Ranks

pytest.register_assert_rewrite("scenarios", "workload")

HERE = Path(__file__).parent
WITHOUT_SGLANG = (
    "SGLang is not installed here: tests/sglang/environment.sh makes an environment that has it"
)

# Every server takes part in SGLang's own check that ranks decide alike.
CHECKED = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}

# For a host tier that ranks share.
SHARE = "SGLANG_ENABLE_HICACHE_RANK_SHARD"
SHARING_RANKS = int(os.environ.get("KVBURST_TEST_RANKS", "2"))

SWITCHES: Mapping[str, Mapping[str, str]] = {
    "stock": {},
    "refusals": {},
    "off": {},
    "everything": {"KVBURST": "1"},
    "loads": {"SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE": "1"},
    "backups": {"SGLANG_HICACHE_D2H_ISSUE_CHUNK_PAGES": "2"},
    "all-but-loads": {"KVBURST": "1", "SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE": "0"},
    "one-piece": {"KVBURST": "1", "KVBURST_ONE_PIECE_POOLS": "1"},
    "board": {"KVBURST": "1", **CHECKED},
    "pipelined": {"KVBURST": "1", "SGLANG_ENABLE_HICACHE_ASYNC_ACK_SYNC": "1", **CHECKED},
    "idle-skip": {"SGLANG_ENABLE_HICACHE_IDLE_SYNC_SKIP": "1", **CHECKED},
    "sharing": {"KVBURST": "1", SHARE: "1", **CHECKED},
    "sharing-keep": {
        SHARE: "1",
        "SGLANG_HICACHE_RANK_SHARD_KEEP_CAPACITY": "1",
        "SGLANG_HICACHE_RANK_SHARD_STAGING_MB": "1",
        "SGLANG_ENABLE_HICACHE_ASYNC_ACK_SYNC": "1",
        "KVBURST_ONE_PIECE_POOLS": "1",
        **CHECKED,
    },
    # Of two pairs, which decide apart.
    "sharing-pairs": {"KVBURST": "1", SHARE: "1"},
    "sharing-side": {SHARE: "1", "KVBURST_RANK_SHARD_EXCHANGE": "side_stream"},
    "all-but-agreement": {
        "KVBURST": "1",
        "SGLANG_ENABLE_HICACHE_ASYNC_ACK_SYNC": "0",
        "SGLANG_HICACHE_EVENTS_TIMER_STEPS": "5",
    },
}
"""By name; "stock" and "refusals" are without the plugin, "off" with it and without a switch."""
WITHOUT_PLUGIN = ("stock", "refusals")


@dataclass(frozen=True, order=True)
class Server:
    """Which processes a test needs."""

    switches: str
    world: int = 1

    def __str__(self) -> str:
        return f"{self.switches}-{self.world}"


@dataclass
class _Running:
    """The processes that run now: of one server, since each holds a gigabyte."""

    server: Server | None = None
    ranks: Ranks | None = None

    def of(self, server: Server) -> Ranks:
        if self.server != server or self.ranks is None:
            self.stop()
            self.server = server
            plugin = server.switches not in WITHOUT_PLUGIN
            self.ranks = Ranks(server.world, SWITCHES[server.switches], plugin=plugin)
        return self.ranks

    def stop(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        self.server = self.ranks = None


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[Server], Ranks]]:
    """The processes of a server; those of another end."""
    running = _Running()
    yield running.of
    running.stop()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, ranks_of: Callable[[Server], Ranks]) -> Ranks:
    return ranks_of(request.param)


def _sglang_is_installed() -> bool:
    # Not found by importing: this folder is named like the package.
    try:
        return bool(version("sglang"))
    except PackageNotFoundError:
        return False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips them, or brings those together that need the same processes."""
    ours = [item for item in items if HERE in item.path.parents]
    if not _sglang_is_installed():
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=WITHOUT_SGLANG))
        return

    def server(item: pytest.Item) -> str:
        callspec = getattr(item, "callspec", None)
        return str(callspec.params.get("ranks", "")) if callspec else ""

    others = [item for item in items if item not in set(ours)]
    items[:] = others + sorted(ours, key=server)
