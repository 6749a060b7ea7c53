"""Ranks whose processes have ended are found out."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvburst.exchange.roll import Process, ended

FIELDS_BEHIND_THE_NAME = "R 1 " + "0 " * 17 + "4711 0"


def of_child(program: str) -> tuple[subprocess.Popen[str], Process]:
    """A child that runs `program` after it has said who it is."""
    code = (
        "from kvburst.exchange.roll import Process\n"
        "import sys\n"
        "own = Process.own()\n"
        "print(own.pid, own.started, flush=True)\n" + program
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    pid, started = child.stdout.readline().split()
    return child, Process(Process.own().seen_by, int(pid), started)


def test_own_process_has_not_ended() -> None:
    own = Process.own()
    assert own.pid == os.getpid()
    assert not own.has_ended()
    assert ended([own], within=0) == []


def test_process_that_ends_is_found_before_anybody_reaps_it() -> None:
    child, process = of_child("sys.stdin.readline()")
    assert not process.has_ended()
    assert child.stdin is not None
    child.stdin.close()
    assert ended([Process.own(), process], within=30) == [1]
    assert Path(f"/proc/{process.pid}").exists()  # It waits to be reaped.
    child.wait()
    assert ended([process], within=0) == [0]


def test_number_that_is_used_again_is_another_process() -> None:
    own = Process.own()
    assert replace(own, started="1").has_ended()


def test_nothing_is_said_of_a_process_that_cannot_be_seen() -> None:
    elsewhere = Process("another kernel", 1 << 22, "1")
    assert not elsewhere.has_ended()
    assert ended([elsewhere], within=0) == []


@pytest.mark.parametrize("name", ["python", "a) b (c", "x y"])
def test_name_of_the_program_confuses_nobody(tmp_path: Path, name: str) -> None:
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("boot\n")
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[1]")
    own = tmp_path / str(os.getpid())
    own.mkdir()
    (own / "stat").write_text(f"{os.getpid()} ({name}) {FIELDS_BEHIND_THE_NAME}\n")
    process = Process.own(tmp_path)
    assert process == Process("boot pid:[1]", os.getpid(), "4711")
    assert not process.has_ended(tmp_path)
    (own / "stat").write_text(f"{os.getpid()} ({name}) {FIELDS_BEHIND_THE_NAME.replace('R', 'Z')}")
    assert process.has_ended(tmp_path)
