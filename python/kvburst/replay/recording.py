"""Bursts in a file, for tests and benchmarks: which pages moved, and no bytes.

The first line is a JSON object: ``format`` ("kvburst bursts"), ``version``, ``page_size`` in slots,
``device_pages`` and ``host_pages`` of the tiers, and ``bursts``, how many. What follows is one zlib
stream of little-endian 32-bit numbers, their lowest bytes first, then their second bytes, and so
on, which is what lets them be packed. They are: the number of pages of every burst, negative for a
backup; then, burst by burst, the device pages; then the host pages in the same way. Each page is
given as the difference from the one before it, and the first from 0.
"""

import json
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from kvburst._core import KVBurstError
from kvburst.replay.burst_log import BurstRecord

FORMAT = "kvburst bursts"
VERSION = 1
_HEADER_NUMBERS = ("version", "page_size", "device_pages", "host_pages", "bursts")
_PLANES = 4


class RecordingError(KVBurstError):
    """A file that is no recording, or not a whole one."""


@dataclass(frozen=True)
class Recording:
    """Bursts in order of submission, over tiers of so many pages of ``page_size`` slots."""

    page_size: int
    device_pages: int
    host_pages: int
    bursts: tuple[BurstRecord, ...]


def save_recording(path: Path, recording: Recording) -> None:
    """Writes a file, about 3 bytes a page."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "page_size": recording.page_size,
        "device_pages": recording.device_pages,
        "host_pages": recording.host_pages,
        "bursts": len(recording.bursts),
    }
    numbers = array("i")
    for burst in recording.bursts:
        pages = len(burst.device)
        numbers.append(-pages if burst.direction == "backup" else pages)
    for burst in recording.bursts:
        numbers.extend(_differences(burst.device))
    for burst in recording.bursts:
        numbers.extend(_differences(burst.host))
    if sys.byteorder == "big":
        numbers.byteswap()
    data = numbers.tobytes()
    planes = b"".join(data[plane::_PLANES] for plane in range(_PLANES))
    path.write_bytes(json.dumps(header).encode() + b"\n" + zlib.compress(planes, 9))


def load_recording(path: Path) -> Recording:
    """Reads what `save_recording` wrote. Raises ``RecordingError``, naming the file."""
    try:
        first, _, packed = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror}") from error
    header = _header(path, first)
    try:
        planes = zlib.decompress(packed)
    except zlib.error as error:
        raise RecordingError(f"{path}: is damaged: {error}") from error
    numbers = _numbers(path, planes)
    counts, at = numbers[: header["bursts"]], header["bursts"]
    total = sum(abs(count) for count in counts)
    if len(counts) != header["bursts"] or len(numbers) != at + 2 * total:
        raise RecordingError(
            f"{path}: is damaged: {len(numbers)} numbers, {header['bursts']} bursts of {total}"
            f" pages need {header['bursts'] + 2 * total}"
        )
    bursts = []
    for count in counts:
        pages = abs(count)
        device, host = numbers[at : at + pages], numbers[at + total : at + total + pages]
        bursts.append(
            BurstRecord(
                "backup" if count < 0 else "load",
                _pages(path, "device_pages", header["device_pages"], device),
                _pages(path, "host_pages", header["host_pages"], host),
            )
        )
        at += pages
    return Recording(
        header["page_size"], header["device_pages"], header["host_pages"], tuple(bursts)
    )


def _header(path: Path, line: bytes) -> dict[str, int]:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RecordingError(f"{path}: is not a recording of bursts")
    for name in _HEADER_NUMBERS:
        value = header.get(name)
        if type(value) is not int or value < 0:
            raise RecordingError(f"{path}: {name}: {value!r} is not a whole number from 0 on")
    if header["version"] != VERSION:
        raise RecordingError(f"{path}: version: {header['version']} is not {VERSION}")
    return {name: header[name] for name in _HEADER_NUMBERS}


def _numbers(path: Path, planes: bytes) -> "array[int]":
    count, rest = divmod(len(planes), _PLANES)
    if rest:
        raise RecordingError(f"{path}: is damaged: {len(planes)} bytes are no 32-bit numbers")
    data = bytearray(len(planes))
    for plane in range(_PLANES):
        data[plane::_PLANES] = planes[plane * count : (plane + 1) * count]
    numbers = array("i", bytes(data))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _differences(pages: Sequence[int]) -> Iterable[int]:
    return (page - before for page, before in zip(pages, [0, *pages[:-1]], strict=True))


def _pages(path: Path, tier: str, bound: int, differences: "array[int]") -> "array[int]":
    pages = array("i", accumulate(differences))
    for page in pages:
        if not 0 <= page < bound:
            raise RecordingError(f"{path}: is damaged: page {page}, {tier} is {bound}")
    return pages
