"""Request traces in Mooncake's format: JSON lines, plain or gzipped.

A line has ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens), and
``hash_ids``, one for every 512 tokens of the input, begun blocks included. Equal ids at the front
of two requests mean an equal prefix.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvburst._core import KVBurstError

BLOCK_TOKENS = 512
MAX_TOKENS = 1 << 24
"""Of one request. Today's longest contexts are a few million tokens."""
MAX_HASH_ID = (1 << 48) - 1

_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(KVBurstError):
    """A trace that cannot be read: names the file and, if one line is at fault, line and field."""


@dataclass(frozen=True)
class Request:
    """One line of a trace, ``line`` of its file. ``hash_ids[i]`` stands for the tokens
    ``512 * i`` and following of the input and for all before them."""

    line: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Of the input and the output."""
        return self.input_length + self.output_length


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """The first ``limit`` requests, or all, in the order of the file. Blank lines are skipped.

    Raises ``TraceError`` on a file that cannot be read, that holds no request, and on the first
    line that is not one.
    """
    requests: list[Request] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_unpacked(file), start=1):
                if len(requests) == limit:
                    break
                if line.strip():
                    requests.append(_request(f"{path}:{number}", number, line))
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TraceError(f"{path}: cannot be read: {reason}") from error
    if not requests:
        raise TraceError(f"{path}: holds no request")
    return requests


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    packed = file.read(2) == _GZIP_MAGIC
    file.seek(0)
    return iter(gzip.GzipFile(fileobj=file)) if packed else iter(file)


def _request(where: str, line: int, text: bytes) -> Request:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: is not a JSON object")
    input_length = _whole_number(where, fields, "input_length", 1)
    return Request(
        line=line,
        timestamp=_timestamp(where, fields),
        input_length=input_length,
        output_length=_whole_number(where, fields, "output_length", 0),
        hash_ids=_hash_ids(where, fields, input_length),
    )


def _field(where: str, fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise TraceError(f"{where}: {name}: is missing")
    return fields[name]


def _whole_number(where: str, fields: dict[str, Any], name: str, lowest: int) -> int:
    value = _field(where, fields, name)
    # JSON's true and false are ints to Python.
    if type(value) is not int:
        raise TraceError(f"{where}: {name}: {_short(value)} is not a whole number")
    if value < lowest:
        raise TraceError(f"{where}: {name}: {value} is below {lowest}")
    if value > MAX_TOKENS:
        raise TraceError(f"{where}: {name}: {_short(value)} is above {MAX_TOKENS} tokens")
    return value


def _timestamp(where: str, fields: dict[str, Any]) -> float:
    value = _field(where, fields, "timestamp")
    if type(value) not in (int, float):
        raise TraceError(f"{where}: timestamp: {_short(value)} is not a number")
    # Written so that NaN, which Python's JSON reads, is refused too.
    if not 0 <= value < float("inf"):
        raise TraceError(f"{where}: timestamp: {_short(value)} is not a time from 0 on")
    return float(value)


def _hash_ids(where: str, fields: dict[str, Any], input_length: int) -> tuple[int, ...]:
    value = _field(where, fields, "hash_ids")
    if not isinstance(value, list):
        raise TraceError(f"{where}: hash_ids: {_short(value)} is not a list")
    blocks = -(-input_length // BLOCK_TOKENS)
    if len(value) != blocks:
        raise TraceError(
            f"{where}: hash_ids: {len(value)} ids, input_length {input_length} needs {blocks},"
            f" one for every {BLOCK_TOKENS} tokens"
        )
    for position, hash_id in enumerate(value):
        if type(hash_id) is not int or not 0 <= hash_id <= MAX_HASH_ID:
            raise TraceError(
                f"{where}: hash_ids[{position}]: {_short(hash_id)} is not a whole number from 0 to"
                f" {MAX_HASH_ID}"
            )
    return tuple(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
