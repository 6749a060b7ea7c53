"""Reading traces: what a request is, and what is refused by file, line and field."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from replay_helpers import line, write_trace

from kvburst.replay.contents import leading_pages_seen, page_contents
from kvburst.replay.trace import Request, TraceError, read_trace

GOOD = {"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}


def refusal(path: Path, *lines: str | bytes) -> str:
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    return str(caught.value)


def test_plain_and_gzipped_traces_are_the_same(tmp_path: Path) -> None:
    plain = write_trace(tmp_path / "plain", [GOOD, line([1, 2, 3])])
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(plain) == read_trace(packed)
    assert read_trace(plain)[0] == Request(1, 27.0, 700, 5, (0, 7))


def test_limit_stops_before_what_comes_after_it(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(json.dumps(GOOD) + "\nbroken\n")
    assert len(read_trace(path, limit=1)) == 1


def test_blank_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("\n" + json.dumps(GOOD) + "\n\n" + json.dumps(GOOD) + "\n\n")
    assert [request.line for request in read_trace(path)] == [2, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_length": 0}, "input_length: 0 is below 1"),
        ({"input_length": -5}, "input_length: -5 is below 1"),
        ({"input_length": 1 << 40}, "input_length: 1099511627776 is above 16777216 tokens"),
        ({"input_length": 700.0}, "input_length: 700.0 is not a whole number"),
        ({"input_length": True}, "input_length: True is not a whole number"),
        ({"output_length": -1}, "output_length: -1 is below 0"),
        ({"output_length": "5"}, "output_length: '5' is not a whole number"),
        ({"output_length": None}, "output_length: None is not a whole number"),
        ({"timestamp": -1}, "timestamp: -1 is not a time from 0 on"),
        ({"timestamp": float("nan")}, "timestamp: nan is not a time from 0 on"),
        ({"timestamp": float("inf")}, "timestamp: inf is not a time from 0 on"),
        ({"timestamp": "soon"}, "timestamp: 'soon' is not a number"),
        ({"hash_ids": 3}, "hash_ids: 3 is not a list"),
        ({"hash_ids": [0]}, "hash_ids: 1 ids, input_length 700 needs 2, one for every 512 tokens"),
        ({"hash_ids": [0, 1, 2]}, "hash_ids: 3 ids, input_length 700 needs 2"),
        ({"hash_ids": [0, -1]}, "hash_ids[1]: -1 is not a whole number from 0 to"),
        ({"hash_ids": [0, 1 << 48]}, "hash_ids[1]: 281474976710656 is not a whole number from 0"),
        ({"hash_ids": [0, "a" * 99]}, "hash_ids[1]: 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."),
    ],
)
def test_bad_field_is_named_by_file_line_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "trace"
    said = refusal(path, json.dumps(GOOD), json.dumps({**GOOD, **change}))
    assert said.startswith(f"{path}:2: {message}")


@pytest.mark.parametrize("name", list(GOOD))
def test_missing_field_is_named(tmp_path: Path, name: str) -> None:
    fields = {key: value for key, value in GOOD.items() if key != name}
    assert refusal(tmp_path / "t", json.dumps(fields)) == f"{tmp_path / 't'}:1: {name}: is missing"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: "),
        ("[" * 100_000, "is not JSON: "),
        ("9" * 10_000, "is not JSON: "),
        (b"\xff\xfe\xfd", "is not JSON: "),
        ("[1, 2]", "is not a JSON object"),
        ("null", "is not a JSON object"),
    ],
)
def test_line_that_is_no_object_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "trace"
    assert refusal(path, json.dumps(GOOD), "", text).startswith(f"{path}:3: {message}")


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    assert refusal(path, text) == f"{path}: holds no request"


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    with pytest.raises(TraceError, match=re.escape(f"{path}: cannot be read: No such file")):
        read_trace(path)
    with pytest.raises(TraceError, match=re.escape(f"{tmp_path}: cannot be read: ")):
        read_trace(tmp_path)


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(json.dumps(line([i])).encode() + b"\n" for i in range(999)))
    path = tmp_path / "trace.gz"
    assert refusal(path, packed[:-20]).startswith(f"{path}: cannot be read: ")
    middle = len(packed) // 2
    broken = packed[:middle] + bytes(64) + packed[middle + 64 :]
    assert str(path) in refusal(path, broken)


def test_equal_prefixes_have_equal_pages_and_generated_ones_are_their_own() -> None:
    ending = Request(1, 0, 512 + 130, 128, (5, 6))
    longer = Request(2, 0, 1024, 64, (5, 7))
    a, b = page_contents(ending, 0, 64), page_contents(longer, 1, 64)
    assert a[:8] == b[:8] == list(range(40, 48))
    # Two whole pages of the begun block; the one that input and output share is generated.
    assert a[8:10] == [48, 49]
    assert len(a) == (512 + 130 + 128) // 64
    assert b[8:16] == list(range(56, 64))
    assert len(b) == 17
    generated = [*a[10:], *b[16:]]
    assert all(each < 0 for each in generated)
    assert len(set(generated)) == len(generated)


def test_pages_of_earlier_requests_are_counted_from_the_front() -> None:
    request = Request(1, 0, 1024 + 100, 0, (1, 2, 3))
    assert leading_pages_seen(request, {2, 3}, 64) == 0
    assert leading_pages_seen(request, {1, 3}, 64) == 8
    assert leading_pages_seen(request, {1, 2, 3}, 64) == 17
