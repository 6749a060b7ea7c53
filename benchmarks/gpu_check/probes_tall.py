"""Copies of several rows where rows cross from one piece of memory into another, or lie far apart.

A plan keeps each copy within one allocation and one registration, and within the device's pitch,
since nobody documents more. Every way is tried, and what arrived is compared.
"""

import ctypes
from collections.abc import Callable, Mapping
from ctypes import byref, c_int, c_size_t, c_uint64
from dataclasses import dataclass

from cuda_calls import DEVICE, HOST, SUCCESS, Copy3D, CopyOf2D, memory

from gpu_check.probe import Answer, HostMemory, Note, Probe, ProbeCalls, listed, put

MAX_PITCH = 11
WIDTH = 4096
MIB = 1 << 20
# Far above what a driver cuts out of one piece.
ALLOCATION = 32 * MIB
BREAKS_CONTEXT = "breaks-context"


@dataclass(frozen=True)
class TwoRows:
    """Two rows of ``width`` bytes on either side, these many bytes apart."""

    device: int
    device_pitch: int
    host: int
    host_pitch: int
    width: int = WIDTH

    def device_rows(self) -> tuple[int, int]:
        return self.device, self.device + self.device_pitch

    def host_rows(self) -> tuple[int, int]:
        return self.host, self.host + self.host_pitch


def load_2d(calls: ProbeCalls, rows: TwoRows, stream: int) -> int:
    pitches = (rows.device_pitch, rows.host_pitch)
    return calls.load_2d(rows.device, rows.host, rows.width, 2, *pitches, stream)


def backup_2d(calls: ProbeCalls, rows: TwoRows, stream: int) -> int:
    copy = CopyOf2D()
    copy.srcMemoryType, copy.srcDevice, copy.srcPitch = DEVICE, rows.device, rows.device_pitch
    copy.dstMemoryType, copy.dstHost, copy.dstPitch = HOST, rows.host, rows.host_pitch
    copy.WidthInBytes, copy.Height = rows.width, 2
    return calls.copy_2d(copy, stream)


def load_batch(calls: ProbeCalls, rows: TwoRows, stream: int) -> int:
    copy = Copy3D(
        rows.device,
        rows.host,
        rows.width,
        2,
        dst_row=rows.device_pitch,
        src_row=rows.host_pitch,
        dst_layer=2,
        src_layer=2,
    )
    return calls.batch_3d([copy], stream)


def backup_batch(calls: ProbeCalls, rows: TwoRows, stream: int) -> int:
    copy = Copy3D(
        rows.host,
        rows.device,
        rows.width,
        2,
        dst_row=rows.host_pitch,
        src_row=rows.device_pitch,
        dst_layer=2,
        src_layer=2,
    )
    return calls.batch_3d([copy], stream)


Way = Callable[[ProbeCalls, TwoRows, int], int]

WAYS: Mapping[str, tuple[Way, bool]] = {
    "2D load": (load_2d, True),
    "2D backup": (backup_2d, False),
    "3D batch load": (load_batch, True),
    "3D batch backup": (backup_batch, False),
}


def try_all(calls: ProbeCalls, rows: TwoRows, note: Note, where: str) -> Answer:
    """works, refused, wrong-bytes, or mixed; with what every way did."""
    stream = calls.stream()
    found: dict[str, str] = {}
    for name, (way, load) in WAYS.items():
        note(f"{where}: {listed(found | {name: 'not back yet'})}")
        found[name], alive = try_one(calls, rows, way, load, stream)
        if not alive:
            return Answer(BREAKS_CONTEXT, f"{where}: {listed(found)}; the rest was not asked")
    return Answer(word_of(found), f"{where}: {listed(found)}")


def try_one(
    calls: ProbeCalls, rows: TwoRows, way: Way, load: bool, stream: int
) -> tuple[str, bool]:
    """What it came to, and whether the driver still answers."""
    content = [bytes([17]) * rows.width, bytes([34]) * rows.width]
    nothing = bytes(rows.width)
    for index in range(2):
        on_host, on_device = (content[index], nothing) if load else (nothing, content[index])
        put(rows.host_rows()[index], on_host)
        calls.write(rows.device_rows()[index], on_device, stream)
    code = way(calls, rows, stream)
    if code != SUCCESS:
        return f"refused, {calls.describe(code)}", True
    code = calls.synchronize(stream)
    if code != SUCCESS:
        return f"accepted, then {calls.describe(code)}", False
    for index in range(2):
        found = (
            calls.read(rows.device_rows()[index], rows.width, stream)
            if load
            else memory(rows.host_rows()[index], rows.width).raw
        )
        if found != content[index]:
            return f"accepted, row {index} has wrong bytes", True
    return "works", True


def word_of(found: Mapping[str, str]) -> str:
    results = list(found.values())
    if any("wrong bytes" in result for result in results):
        return "wrong-bytes"
    if all(result == "works" for result in results):
        return "works"
    return "refused" if all(result.startswith("refused") for result in results) else "mixed"


def with_plain_copies(
    calls: ProbeCalls, note: Note, answer: Answer, device: int, host: int
) -> Answer:
    """Also one plain copy of both rows to the device, unless the driver no longer answers."""
    if answer.word == BREAKS_CONTEXT:
        return answer
    note(f"{answer.evidence}; a plain copy of both rows: not back yet")
    stream = calls.stream()
    plain = {
        "plain async": calls.to_device(device, host, 2 * WIDTH, stream),
        "1D batch": calls.batch([(device, host, 2 * WIDTH)], stream),
    }
    words = {
        f"{name} of both rows": "accepted" if code == SUCCESS else calls.describe(code)
        for name, code in plain.items()
    }
    return Answer(answer.word, f"{answer.evidence}; {listed(words)}")


# --- the questions -------------------------------------------------------------------------


def across_allocations(calls: ProbeCalls, note: Note) -> Answer:
    """The one row at the end of the lower allocation, the other in the higher one."""
    low, high = sorted(calls.new_memory(ALLOCATION) for _ in range(2))
    first = low + ALLOCATION - WIDTH
    host = calls.pinned(2 * WIDTH)
    rows = TwoRows(first, high - first, host, WIDTH)
    gap = high - low - ALLOCATION
    return try_all(calls, rows, note, f"two cuMemAlloc, {gap} bytes between them")


def across_registrations(calls: ProbeCalls, note: Note) -> Answer:
    """Two registrations side by side; beside tall copies, a plain one from the one into the other,
    which is known to be refused."""
    host = HostMemory(2 * MIB)
    for half in (host.address, host.address + MIB):
        calls.must("cuMemHostRegister", calls.register(half, MIB))
    first = host.address + MIB - WIDTH
    device = calls.new_memory(4 * WIDTH)
    answer = try_all(calls, TwoRows(device, WIDTH, first, WIDTH), note, "two cuMemHostRegister")
    return with_plain_copies(calls, note, answer, device, first)


class Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of device 0."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_uint64),
        ("flags", c_uint64),
    )


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", c_int))


ON_DEVICE, PINNED, READ_WRITE = 1, 1, 3


def mapped_side_by_side(calls: ProbeCalls) -> tuple[int, int]:
    """Where two handles of that many bytes each are mapped, the second behind the first."""
    properties = AllocationProperties(type=PINNED, location=Location(ON_DEVICE, 0))
    unit = c_size_t()
    calls.must(
        "cuMemGetAllocationGranularity",
        calls.lib.cuMemGetAllocationGranularity(byref(unit), byref(properties), 0),
    )
    size = unit.value
    address = c_uint64()
    calls.must(
        "cuMemAddressReserve",
        calls.lib.cuMemAddressReserve(
            byref(address), c_size_t(2 * size), c_size_t(0), c_uint64(0), c_uint64(0)
        ),
    )
    for index in range(2):
        handle = c_uint64()
        calls.must(
            "cuMemCreate",
            calls.lib.cuMemCreate(byref(handle), c_size_t(size), byref(properties), c_uint64(0)),
        )
        calls.must(
            "cuMemMap",
            calls.lib.cuMemMap(
                c_uint64(address.value + index * size),
                c_size_t(size),
                c_size_t(0),
                handle,
                c_uint64(0),
            ),
        )
    access = Access(Location(ON_DEVICE, 0), READ_WRITE)
    calls.must(
        "cuMemSetAccess",
        calls.lib.cuMemSetAccess(address, c_size_t(2 * size), byref(access), c_size_t(1)),
    )
    return address.value, size


def across_vmm_handles(calls: ProbeCalls, note: Note) -> Answer:
    """As torch's expandable segments lie."""
    address, size = mapped_side_by_side(calls)
    host = calls.pinned(2 * WIDTH)
    first = address + size - WIDTH
    rows = TwoRows(first, WIDTH, host, WIDTH)
    answer = try_all(calls, rows, note, f"two cuMemCreate of {size} bytes, mapped side by side")
    return with_plain_copies(calls, note, answer, first, host)


def host_pitch(calls: ProbeCalls, note: Note) -> Answer:
    most = calls.attribute(MAX_PITCH)
    pitch = _above(most)
    host = HostMemory(pitch + WIDTH)
    note(f"registering {host.size} bytes")
    calls.must("cuMemHostRegister", calls.register(host.address, host.size))
    device = calls.new_memory(2 * WIDTH)
    rows = TwoRows(device, WIDTH, host.address, pitch)
    return try_all(calls, rows, note, f"maximum {most}, rows {pitch} bytes apart on the host")


def device_pitch(calls: ProbeCalls, note: Note) -> Answer:
    most = calls.attribute(MAX_PITCH)
    pitch = _above(most)
    device = calls.new_memory(pitch + WIDTH)
    host = calls.pinned(2 * WIDTH)
    rows = TwoRows(device, pitch, host, WIDTH)
    return try_all(calls, rows, note, f"maximum {most}, rows {pitch} bytes apart on the device")


def _above(most: int) -> int:
    """The next whole number of rows."""
    return (most // WIDTH + 1) * WIDTH


TALL_PROBES: Mapping[str, Probe] = {
    "tall-across-allocations": Probe(across_allocations),
    "tall-across-registrations": Probe(across_registrations),
    "tall-across-vmm-handles": Probe(across_vmm_handles, modelled=False),
    "host-pitch-above-maximum": Probe(host_pitch),
    "device-pitch-above-maximum": Probe(device_pitch),
}
