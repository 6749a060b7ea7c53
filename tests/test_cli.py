"""The command line: what it prints, what it writes, and how it ends."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvburst._core import __version__
from kvburst.cli import app
from kvburst.demo import Demo, Tick
from kvburst.demo_options import DEFAULT_MODELLED_PAGES, DEFAULT_PAGES, DemoOptions

COLOUR = re.compile(r"\x1b\[(?:[\d;]*;)?[349]\d(?:;[\d;]*)?m")
SMALL = ["demo", "--pages", "2", "--forward", "0"]


def kvburst(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["demo", "--help"]])
def test_quick_answers_do_not_import_torch(arguments: list[str]) -> None:
    script = """
import sys
from kvburst.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_version_is_that_of_the_package() -> None:
    assert kvburst("--version") == (0, f"kvburst {__version__}\n", "")


def test_help_shows_examples_one_a_line() -> None:
    status, out, _ = kvburst("demo", "--help")
    assert status == 0
    assert "\n    kvburst demo --link h100 --compare --plot timeline.png\n" in out


def test_demo_prints_a_table_a_timeline_and_the_verdict() -> None:
    status, out, err = kvburst(*SMALL)
    assert status == 0, err
    for words in ("copies issued", "one per page and layer", "GB/s", "caller time", "scheduler"):
        assert words in out
    assert "bit-exact: " in out
    assert err == ""


def test_quiet_demo_prints_nothing(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    assert kvburst(*SMALL, "--quiet", "--json", str(file)) == (0, "", "")
    assert json.loads(file.read_text())["bit_exact"] is True


def test_options_reach_the_demo(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    options = (
        "--geometry llama-3.1-70b-tp8 --pages 3 --device-pages 9 --layout layer_first --separate"
        " --groups neighbours --mode inline --link h100-batch --forward 1.5 --chunk-pages 2"
        " --seed 7 --quiet"
    )
    status, _, err = kvburst("demo", *options.split(), "--json", str(file))
    assert status == 0, err
    content = json.loads(file.read_text())
    expected = {
        "geometry": "llama-3.1-70b-tp8",
        "pages": 3,
        "device_pages": 9,
        "layout": "layer_first",
        "one_allocation": False,
        "groups": "neighbours",
        "mode": "inline",
        "link": "h100-batch",
        "forward": 1.5,
        "chunk_pages": 2,
        "seed": 7,
        "simulated": True,
    }
    assert {key: content[key] for key in expected} == expected


def test_comparison_shows_the_plain_way_above(tmp_path: Path) -> None:
    file, picture = tmp_path / "demo.json", tmp_path / "timeline.svg"
    files = ("--json", str(file), "--plot", str(picture))
    status, out, err = kvburst(*SMALL, "--compare", "--link", "h100", *files)
    assert status == 0, err
    assert len(re.findall(r"<!-- hand-over [0-9.]+ ms -->", picture.read_text())) == 2
    for shown in (out, picture.read_text()):
        plain = shown.index("mode inline, groups none, link h100 (simulated)")
        assert plain < shown.index("mode thread, groups ramp, link h100 (simulated)")
    content = json.loads(file.read_text())
    assert (content["mode"], content["groups"]) == ("thread", "ramp")
    plain = content["compared_with"]
    assert (plain["mode"], plain["groups"]) == ("inline", "none")
    assert plain["copies_issued"] == plain["copies_one_per_page_and_layer"]


def test_link_makes_room_for_more_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[int] = []
    init = Demo.__init__

    def smaller(demo: Demo, options: DemoOptions, tick: Tick, *, record: bool) -> None:
        wanted.append(options.pages)
        init(demo, replace(options, pages=2), tick, record=record)

    monkeypatch.setattr(Demo, "__init__", smaller)
    for link in ([], ["--link", "h100"]):
        assert kvburst("demo", "--forward", "0", "--quiet", *link)[0] == 0
    assert wanted == [DEFAULT_PAGES, DEFAULT_MODELLED_PAGES]


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_wrong_byte_ends_with_status_1_and_names_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quiet: list[str]
) -> None:
    scribble = Demo.scribble

    def scribble_and_flip_a_host_byte(demo: Demo) -> None:
        scribble(demo)
        demo.pools[0].host.tensor[int(demo.on_host[0]) // 64, 12, 34] ^= 1

    monkeypatch.setattr(Demo, "scribble", scribble_and_flip_a_host_byte)
    file = tmp_path / "demo.json"
    status, out, err = kvburst(*SMALL, *quiet, "--json", str(file))
    assert status == 1
    assert "NOT bit-exact" in out + err
    assert "snapshot: pool 'kv', layer 12, page " in out + err
    assert json.loads(file.read_text())["bit_exact"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pages", "0"], "kvburst demo: --pages: 0 is below 1"),
        (["--pages", "many"], "'many' is not a whole number"),
        (["--geometry", "gpt-2"], "kvburst demo: geometry: 'gpt-2' is unknown; known are "),
        (["--layout", "page_first"], "'page_first' is not one of 'page_first_direct', "),
        (["--groups", "all"], "'all' is not one of 'ramp', 'neighbours', 'none'"),
        (
            ["--mode", "async"],
            "Invalid value for '--mode': 'async' is not one of 'thread', 'inline'",
        ),
        (["--link", "nvlink"], "'nvlink' is not one of 'none', 'h100', 'h100-batch'"),
        (["--device-pages", "4", "--pages", "2"], "--device-pages: 4 is not above 4"),
        (["--seed", "1.5"], "'1.5' is not a whole number"),
        (["--forward", "long"], "'long' is not a number"),
        (["--forward", "-1"], "kvburst demo: --forward: -1.0 is not a number of at least 0"),
        (["--json", "/no/such/folder/a.json"], "--json: '/no/such/folder' is not a folder"),
        (["--plot", "/no/such/folder/a.png"], "--plot: '/no/such/folder' is not a folder"),
        (["--plot", "a.xyz"], "kvburst demo: --plot: 'a.xyz' ends in none of "),
        (["--json", "/"], "kvburst demo: --json: '/' is a folder"),
    ],
)
def test_bad_option_ends_with_status_2_and_one_line(arguments: list[str], message: str) -> None:
    status, out, err = kvburst(*SMALL, *arguments)
    assert status == 2
    assert out == ""
    assert message in err.splitlines()[-1]
    assert arguments[0].removeprefix("--") in err.splitlines()[-1]
    assert "Traceback" not in err


def test_picture_is_written(tmp_path: Path) -> None:
    file = tmp_path / "timeline.png"
    status, _, err = kvburst(*SMALL, "--quiet", "--plot", str(file))
    assert status == 0, err
    assert file.read_bytes().startswith(b"\x89PNG")


def test_doctor_prints_and_writes_what_it_found(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    status, out, err = kvburst("doctor", "--json", str(file))
    assert status == 0, err
    assert "device host" in out
    content = json.loads(file.read_text())
    assert content["kvburst"] == __version__
    assert content["devices"]["host"]["present"] is True


def test_quiet_doctor_prints_nothing(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    assert kvburst("doctor", "--quiet", "--json", str(file)) == (0, "", "")
    assert json.loads(file.read_text())["kvburst"] == __version__


# --- in a pipe -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        SMALL,
        ["demo", "--ranks", "2", "--shard", "--pages", "2", "--forward", "0"],
        ["doctor"],
        ["replay", "TRACE", "--plan-only"],
        ["replay", "TRACE", "--plan-only", "--ranks", "2", "--shard"],
    ],
    ids=["demo", "demo of ranks", "doctor", "replay", "replay of ranks"],
)
def test_pipe_that_nobody_reads_ends_the_command_as_sigpipe_does(
    tmp_path: Path, arguments: list[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    request = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(request) + "\n")
    arguments = [str(trace) if each == "TRACE" else each for each in arguments]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvburst", *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


# --- in a shell ----------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path) -> Callable[[str], list[str]]:
    """What bash answers, line by line, where `kvburst` is a command and its completion loaded."""
    command = tmp_path / "kvburst"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvburst "$@"\n')
    command.chmod(0o755)

    def answer(script: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", f'eval "$(kvburst --show-completion bash)"; {script}'],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout.split()

    return answer


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kvburst re", ["replay"]),
        ("kvburst d", ["demo", "doctor"]),
        ("kvburst demo --geometry mla", ["mla-dsa-78", "mla-dsa-78-full"]),
        ("kvburst demo --link h", ["h100", "h100-batch"]),
        ("kvburst replay --pl", ["--plan-only"]),
    ],
)
def test_bash_completes(shell: Callable[[str], list[str]], typed: str, offered: list[str]) -> None:
    words = typed.split()
    asked = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}"
    assert shell(f'{asked}; _kvburst_completion kvburst; echo "${{COMPREPLY[@]}}"') == offered


def test_no_color_prints_no_colours_even_on_a_terminal() -> None:
    escapes = []
    for environment in ({}, {"NO_COLOR": "1"}):
        runner = CliRunner(env={"FORCE_COLOR": "1", **environment})
        result = runner.invoke(app, [*SMALL])
        assert result.exit_code == 0
        escapes.append(
            len(re.findall(r"\x1b\[(?:[\d;]*;)?(?:3|4|9)\d(?:;[\d;]*)?m", result.stdout))
        )
    coloured, plain = escapes
    assert coloured > 0
    assert plain == 0
