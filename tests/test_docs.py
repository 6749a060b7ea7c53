"""The docs say what the code says: tables, messages, links and examples."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from kvburst import BurstController, HostDevice, PageAllocator

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import tables  # noqa: E402

TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Words of a message between its names and numbers, and too few of them to be looked for.
GAP = re.compile(r"…|(?<=failed in )")
FEWEST_LETTERS = 6


# --- tables --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", tables.FILES, ids=lambda file: file.name)
def test_tables_are_what_the_results_say(file: Path) -> None:
    """If this fails: python benchmarks/tables.py."""
    text = file.read_text()
    assert tables.TABLE.search(text), "no table"
    assert tables.filled(text, tables.newest_results()) == text


def test_outdated_table_is_found_and_mended() -> None:
    text = (ROOT / "README.md").read_text()
    old = re.sub(
        r"^\| one per page and layer \| .", "| one per page and layer | 0", text, flags=re.M
    )
    assert old != text
    assert tables.filled(old, tables.newest_results()) == text


def test_every_table_is_in_some_page_and_has_an_end() -> None:
    text = "".join(file.read_text() for file in tables.FILES)
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", text)) == set(tables.TABLES)
    assert len(tables.TABLE.findall(text)) == text.count("<!-- table: ")


def test_table_of_no_name_is_refused() -> None:
    text = "<!-- table: speed -->\n<!-- end of table -->"
    with pytest.raises(tables.KVBurstError, match="'speed' is none of copies-of-a-page"):
        tables.filled(text, tables.newest_results())


def test_results_say_where_they_were_measured_and_what_is_simulated() -> None:
    results = tables.newest_results()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d-[a-z0-9-]+", results.folder.name)
    for file in results.folder.glob("*.json"):
        content = json.loads(file.read_text())
        if file.stem in ("replay", "replay_shard", "demo"):
            continue
        assert content["machine"].keys() >= {"cpu", "cores", "load_average", "kvburst"}
        for row in content["rows"]:
            assert row["benchmark"] == file.stem
            scenario = row["scenario"]
            modelled = scenario.get("link", "none") != "none" and row["metric"] != "copies"
            modelled |= scenario.get("injected_ms", 0) > 0
            assert row.get("simulated", False) == modelled


# --- messages ------------------------------------------------------------------------------


def python_strings() -> str:
    """All literal text of the package, f-strings in their pieces, what is written apart joined."""
    found = []
    for file in sorted((ROOT / "python").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                pieces = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.append("".join(str(piece) for piece in pieces))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def native_strings() -> str:
    """The same of the core: what stands between two literals of a message is a value."""
    found = []
    for file in sorted((ROOT / "csrc").rglob("*.*")):
        if file.suffix in (".cpp", ".h", ".cu"):
            source = re.sub(r'"\s*\n?\s*"', "", file.read_text())
            found += re.findall(r'"((?:[^"\\\n]|\\.)*)"', source)
    return "\n".join(found)


def messages() -> list[str]:
    """The first cells of the tables of messages."""
    rows = re.findall(r"^\| ((?:`[^`]*`(?:, )?)+) \|", TROUBLESHOOTING.read_text(), re.MULTILINE)
    cells = [message for row in rows for message in re.findall(r"`([^`]*)`", row)]
    return [cell for cell in cells if " " in cell]


def fragments(message: str) -> list[str]:
    return [
        piece.strip(" :,'()")
        for piece in GAP.split(message)
        if len(re.findall(r"[a-z]", piece)) >= FEWEST_LETTERS
    ]


def test_every_message_that_is_explained_exists() -> None:
    sources = python_strings() + native_strings()
    explained = messages()
    assert len(explained) > 30
    unknown = [
        (message, piece)
        for message in explained
        for piece in fragments(message)
        if piece not in sources
    ]
    assert unknown == []


def test_a_message_that_nobody_prints_is_found() -> None:
    """The control of the test above."""
    assert fragments("the moon is … pages too full") == ["the moon is", "pages too full"]
    assert "pages too full" not in python_strings() + native_strings()


def test_every_log_line_is_explained() -> None:
    lines = []
    for file in sorted((ROOT / "python" / "kvburst").rglob("*.py")):
        if "sglang_plugin" not in file.parts:
            lines += re.findall(r"_?logger\.\w+\(\s*f?\"((?:[^\"\\])*)\"", file.read_text())
    for file in sorted((ROOT / "csrc").rglob("*.cpp")):
        lines += re.findall(r'attr\("warning"\)\(\s*"([^"]*)"', file.read_text())
    assert len(lines) >= 2
    text = TROUBLESHOOTING.read_text()
    for line in lines:
        pieces = [piece.strip(" :") for piece in re.split(r"%[\d.]*\w|\{[^}]*\}", line)]
        for piece in pieces:
            if len(piece) >= FEWEST_LETTERS:
                assert piece in text, line


def test_every_kind_of_error_is_explained() -> None:
    sources = [*(ROOT / "python" / "kvburst").rglob("*.py"), *ROOT.glob("python/kvburst/*.pyi")]
    found = {
        kind
        for file in sources
        if "sglang_plugin" not in file.parts
        for kind in re.findall(r"^class (\w+Error)\(", file.read_text(), re.MULTILINE)
    }
    assert len(found) > 5
    text = TROUBLESHOOTING.read_text()
    assert [kind for kind in sorted(found) if f"`{kind}`" not in text] == []


# --- links and examples --------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_way_of_porting_works() -> None:
    """All its pieces of code, one after the other, with something for every name in capitals."""
    code = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "porting.md").read_text(), re.M | re.S
    )
    device_pages = PageAllocator(name="device", pages=8, page_size=64, order="lifo")
    names: dict[str, object] = {
        "LAYERS": torch.zeros(3, 8 * 64, 16, dtype=torch.uint8),
        "HOST_PAGES": 4,
        "DEVICE": HostDevice(),
        "DEVICE_PAGES": device_pages,
        "HOST_PAGES_ALLOCATOR": PageAllocator(name="host", pages=4, page_size=64, order="fifo"),
        "NODE": 7,
        "DROP": lambda nodes: pytest.fail(f"failed: {nodes}"),
        "device_slots": device_pages.alloc(2 * 64),
        "layer": 2,
    }
    joined = "\n".join(code).replace("load(host_slots", "load(host")
    exec(compile(joined, "porting.md", "exec"), names)
    controller = names["controller"]
    assert isinstance(controller, BurstController)
    controller.drain()
    controller.poll()
    assert controller.stats().loads.bursts == 1
    assert not controller.has_inflight_device_transfers()
