"""What the environment asks the SGLang plugin for."""

import os
import subprocess
import sys

import pytest

from kvburst import sglang_plugin
from kvburst.settings import NUMBERS, SWITCHES, Settings, SettingsError
from kvburst.sglang_plugin.registration import StoodDown

ACKS = "SGLANG_ENABLE_HICACHE_ASYNC_ACK_SYNC"
IDLE = "SGLANG_ENABLE_HICACHE_IDLE_SYNC_SKIP"
TIMER = "SGLANG_HICACHE_EVENTS_TIMER_STEPS"
LOADS = "SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE"
CHUNK = "SGLANG_HICACHE_D2H_ISSUE_CHUNK_PAGES"
SHARD = "SGLANG_ENABLE_HICACHE_RANK_SHARD"
STAGING = "SGLANG_HICACHE_RANK_SHARD_STAGING_MB"
EXCHANGE = "KVBURST_RANK_SHARD_EXCHANGE"


def test_nothing_set_asks_for_nothing() -> None:
    settings = Settings.from_environment({})
    assert settings == Settings()
    assert not settings.async_loads
    assert not settings.planned_backups
    assert not settings.pools_in_one_piece
    assert settings.transport is None
    assert not settings.anything


def test_kvburst_asks_for_loads_and_backups_and_not_for_another_memory_layout() -> None:
    settings = Settings.from_environment({"KVBURST": "1"})
    assert settings.async_loads
    assert settings.planned_backups
    assert settings.chunk_pages == 0
    assert not settings.pools_in_one_piece


def test_a_variable_of_its_own_turns_on_one_feature_alone() -> None:
    loads = Settings.from_environment({LOADS: "1"})
    assert (loads.async_loads, loads.planned_backups) == (True, False)
    backups = Settings.from_environment({CHUNK: "64"})
    assert (backups.async_loads, backups.planned_backups) == (False, True)
    assert backups.chunk_pages == 64
    pools = Settings.from_environment({"KVBURST_ONE_PIECE_POOLS": "1"})
    assert (pools.async_loads, pools.planned_backups) == (False, False)
    assert pools.pools_in_one_piece


def test_a_variable_set_to_0_turns_its_feature_off_under_kvburst() -> None:
    settings = Settings.from_environment({"KVBURST": "1", LOADS: "0"})
    assert (settings.async_loads, settings.planned_backups) == (False, True)
    settings = Settings.from_environment({"KVBURST": "1", CHUNK: "0"})
    assert (settings.async_loads, settings.planned_backups) == (True, False)


def test_kvburst_set_to_0_leaves_features_to_their_own_variables() -> None:
    settings = Settings.from_environment({"KVBURST": "0", LOADS: "1"})
    assert (settings.async_loads, settings.planned_backups) == (True, False)


def test_kvburst_does_not_ask_for_a_shared_tier() -> None:
    settings = Settings.from_environment({"KVBURST": "1"})
    assert not settings.shared_tier
    assert settings.exchange == "forward_stream"
    assert settings.staging_bytes == 32 << 20


def test_shared_tier_asks_for_loads_and_backups_that_are_not_turned_off() -> None:
    settings = Settings.from_environment({SHARD: "1"})
    assert settings.shared_tier
    assert settings.async_loads
    assert settings.planned_backups
    assert settings.transport is None
    assert settings.anything
    settings = Settings.from_environment({SHARD: "1", LOADS: "0", CHUNK: "0"})
    assert (settings.async_loads, settings.planned_backups) == (False, False)
    assert not Settings.from_environment({SHARD: "0"}).anything


def test_companions_of_a_shared_tier_ask_for_nothing_alone() -> None:
    companions = {
        "SGLANG_HICACHE_RANK_SHARD_KEEP_CAPACITY": "1",
        STAGING: "8",
        "SGLANG_HICACHE_RANK_SHARD_LOG_EVERY": "1",
        "SGLANG_HICACHE_RANK_SHARD_VERIFY_EVERY": "1",
        EXCHANGE: "side_stream",
    }
    settings = Settings.from_environment(companions)
    assert not settings.anything
    assert settings.staging_bytes == 8 << 20
    assert settings.exchange == "side_stream"


@pytest.mark.parametrize("megabytes", ["1", "4096"])
def test_staging_within_its_bounds_is_taken(megabytes: str) -> None:
    settings = Settings.from_environment({STAGING: megabytes})
    assert settings.staging_bytes == int(megabytes) << 20


@pytest.mark.parametrize("megabytes", ["0", "4097"])
def test_staging_beyond_its_bounds_is_refused_by_name(megabytes: str) -> None:
    message = f"{STAGING}: '{megabytes}' must be 1 to 4096 "
    with pytest.raises(SettingsError, match=message):
        Settings.from_environment({STAGING: megabytes})


@pytest.mark.parametrize(
    ("environment", "transport", "skips"),
    [
        ({"KVBURST": "1"}, "board", False),
        ({ACKS: "1"}, "pipelined", False),
        ({"KVBURST": "1", ACKS: "1"}, "pipelined", False),
        ({"KVBURST": "1", IDLE: "1"}, "board", True),
        ({ACKS: "1", IDLE: "1"}, "pipelined", True),
        ({IDLE: "1"}, "blocking", True),
        ({IDLE: "0"}, None, False),
        ({LOADS: "1"}, None, False),
    ],
)
def test_how_ranks_agree_is_what_the_variables_ask_for(
    environment: dict[str, str], transport: str | None, skips: bool
) -> None:
    settings = Settings.from_environment(environment)
    assert settings.transport == transport
    assert settings.skip_idle == skips
    assert settings.anything == (transport is not None or LOADS in environment)


def test_acks_set_to_0_leave_it_to_sglang_whatever_else_is_set() -> None:
    settings = Settings.from_environment({"KVBURST": "1", ACKS: "0", IDLE: "1"})
    assert settings.transport is None
    assert settings.async_loads


def test_timing_steps_is_asked_for_by_itself() -> None:
    settings = Settings.from_environment({TIMER: "100"})
    assert settings.timer_steps == 100
    assert settings.anything_at_steps
    assert settings.transport is None
    assert not Settings.from_environment({TIMER: "0"}).anything
    assert Settings().timer_steps == 0


def test_variables_of_somebody_elses_are_as_if_not_set() -> None:
    settings = Settings.from_environment({"KVBURST": "1", IDLE: "1", TIMER: "9", CHUNK: "4"})
    left = settings.without({IDLE, TIMER, CHUNK})
    assert left == Settings(everything=True)
    assert settings.without(()) == settings


@pytest.mark.parametrize("field", SWITCHES)
def test_each_switch_fills_its_field(field: str) -> None:
    for text, value in (("1", True), ("true", True), ("0", False), ("False", False)):
        settings = Settings.from_environment({SWITCHES[field]: text})
        assert getattr(settings, field) is value


@pytest.mark.parametrize("field", NUMBERS)
def test_each_number_fills_its_field(field: str) -> None:
    settings = Settings.from_environment({NUMBERS[field]: " 17 "})
    assert getattr(settings, field) == 17
    assert getattr(Settings.from_environment({NUMBERS[field]: ""}), field) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVBURST", "yess"),
        (LOADS, "2"),
        ("KVBURST_ONE_PIECE_POOLS", "maybe"),
        (CHUNK, "-1"),
        (CHUNK, "1.5"),
        ("SGLANG_HICACHE_EVENTS_TIMER_STEPS", "often"),
        ("SGLANG_HICACHE_RANK_SHARD_STAGING_MB", "²"),
        (EXCHANGE, "both"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name) as refused:
        Settings.from_environment({name: value})
    assert repr(value) in str(refused.value)


def test_registering_again_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # With two sets of hooks two plugins would attach to every cache.
    installed: list[Settings] = []

    def install(settings: Settings) -> StoodDown:
        installed.append(settings)
        return StoodDown(["only counted"])

    monkeypatch.setattr(sglang_plugin, "_registered", [])
    monkeypatch.setattr(sglang_plugin, "install", install)
    monkeypatch.setenv("KVBURST", "1")
    sglang_plugin.register()
    sglang_plugin.register()
    assert len(installed) == 1


def test_without_a_variable_registering_imports_nothing_of_sglang() -> None:
    program = (
        "import sys, kvburst, kvburst.sglang_plugin as plugin\n"
        "plugin.register()\n"
        "assert not any(name.split('.')[0] == 'sglang' for name in sys.modules)\n"
        "print(plugin.status().features['async_loads'])\n"
    )
    unset = {*SWITCHES.values(), *NUMBERS.values(), "KVBURST", EXCHANGE}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "no variable asks for it" in done.stdout
