"""What else the driver says when it is asked: attributes, captures, large batches, images."""

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from ctypes import byref, c_size_t, c_void_p
from functools import partial
from pathlib import Path

from cuda_calls import RELAXED, SUCCESS, CallError, Copy3D, memory

from gpu_check.probe import Answer, HostMemory, Note, Probe, ProbeCalls, listed, put

ATTRIBUTES = {
    "MAX_PITCH": 11,
    "ASYNC_ENGINE_COUNT": 40,
    "UNIFIED_ADDRESSING": 41,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 91,
    "HOST_REGISTER_SUPPORTED": 99,
    "COMPUTE_CAPABILITY_MAJOR": 75,
    "COMPUTE_CAPABILITY_MINOR": 76,
    "MULTIPROCESSOR_COUNT": 16,
}
RANGE_START, RANGE_SIZE, DEVICE_POINTER = 11, 12, 3
MIB = 1 << 20
PAGE = 4096


def attributes(calls: ProbeCalls, note: Note) -> Answer:
    found = {}
    for name, which in ATTRIBUTES.items():
        try:
            found[name] = str(calls.attribute(which))
        except CallError as error:
            found[name] = str(error)
    return Answer("pitch-" + found["MAX_PITCH"], listed(found))


def range_attributes(calls: ProbeCalls, note: Note) -> Answer:
    """Whether an address within registered memory leads to the registration it lies in. Two lie
    side by side, the second in the middle of what the program has mapped."""
    host = HostMemory(4 * MIB)
    for half in (host.address + MIB, host.address + 2 * MIB):
        calls.must("cuMemHostRegister", calls.register(half, MIB))
    inside = host.address + 2 * MIB + 3 * PAGE
    allocated, on_device = calls.pinned(MIB), calls.new_memory(MIB)
    wanted = {
        "registered": (inside, host.address + 2 * MIB, MIB),
        "cuMemHostAlloc": (allocated + PAGE, allocated, MIB),
        "cuMemAlloc": (on_device + PAGE, on_device, MIB),
    }
    found = {}
    for name, (address, start, size) in wanted.items():
        got = tuple(calls.pointer_attribute(which, address) for which in (RANGE_START, RANGE_SIZE))
        exact = got == (start, size)
        words = [value if isinstance(value, str) else f"{value:#x}" for value in got]
        found[name] = "exactly it" if exact else f"start {words[0]}, size {words[1]}"
        if not exact:
            found[name] += f" (it is {start:#x}, {size:#x})"
    alias = calls.pointer_attribute(DEVICE_POINTER, inside)
    found["device pointer of registered"] = "the same address" if alias == inside else str(alias)
    word = "registration" if found["registered"] == "exactly it" else "otherwise"
    return Answer(word, listed(found))


# --- captures ------------------------------------------------------------------------------


def under_capture(calls: ProbeCalls, note: Note, tall: bool) -> Answer:
    """refused, or what became of the copy: executed at once, captured, or missing."""
    stream = calls.stream()
    host, device = calls.pinned(2 * PAGE, b"\x11" * 2 * PAGE), calls.new_memory(2 * PAGE)
    calls.write(device, bytes(2 * PAGE), stream)
    calls.must("cuStreamBeginCapture", calls.begin_capture(stream, RELAXED))
    note("capturing; the call is not back yet")
    if tall:
        code = calls.batch_3d(
            [Copy3D(device, host, PAGE, 2, dst_row=PAGE, src_row=PAGE, dst_layer=2, src_layer=2)],
            stream,
        )
    else:
        code = calls.batch([(device, host, 2 * PAGE)], stream)
    called = calls.describe(code)
    _, status = calls.capture_status(stream)
    ended, graph = calls.end_capture(stream)
    arrived = calls.read(device, 2 * PAGE, stream) == b"\x11" * 2 * PAGE
    state = {0: "none", 1: "active", 2: "invalidated"}.get(status, str(status))
    evidence = f"the call: {called}; the capture then: {state}; its end: {calls.describe(ended)}"
    if code != SUCCESS:
        return Answer(f"refused-{code}", evidence)
    if arrived:
        return Answer("executed", f"{evidence}; the bytes are there, at once")
    count = c_size_t()
    if graph is not None:
        calls.must(
            "cuGraphGetNodes", calls.lib.cuGraphGetNodes(c_void_p(graph), None, byref(count))
        )
    evidence += f"; the graph has {count.value} nodes"
    return Answer("captured" if count.value else "missing", evidence)


# --- large batches -------------------------------------------------------------------------

COUNTS = (1, 4096, 16_384, 32_768, 50_000, 51_828, 60_000, 65_535, 65_536)
SMALL = 64


def large_batches(calls: ProbeCalls, note: Note, tall: bool) -> Answer:
    """The largest that arrives whole, and what stopped the next."""
    stream = calls.stream()
    size = COUNTS[-1] * SMALL
    host, device = calls.pinned(size), calls.new_memory(size)
    largest, seen = 0, ""
    for count in COUNTS:
        note(f"up to {largest} copies in a call arrive; {count}: not back yet")
        put(host, bytes([count % 251 + 1]) * (count * SMALL))
        if tall:
            half = SMALL // 2
            ends = [(device + i * SMALL, host + i * SMALL) for i in range(count)]
            code = calls.batch_3d(
                [
                    Copy3D(to, at, half, 2, dst_row=half, src_row=half, dst_layer=2, src_layer=2)
                    for to, at in ends
                ],
                stream,
            )
        else:
            code = calls.batch(
                [(device + i * SMALL, host + i * SMALL, SMALL) for i in range(count)], stream
            )
        if code == SUCCESS:
            code = calls.synchronize(stream)
        if code != SUCCESS:
            seen = f"; {count}: {calls.describe(code)}"
            break
        whole = calls.read(device, count * SMALL, stream) == memory(host, count * SMALL).raw
        if not whole:
            seen = f"; {count}: accepted, and bytes are wrong"
            break
        largest = count
    return Answer(str(largest), f"up to {largest} copies in a call arrive{seen}")


# --- images --------------------------------------------------------------------------------

KERNEL = 'extern "C" __global__ void nothing() {}\n'
PTX = """\
.version {version}
.target sm_{target}
.address_size 64
.visible .entry nothing() {{ ret; }}
"""
# Byte 8 of an ELF file: the version of its ABI, which newer toolkits raise.
ELF_ABI_VERSION = 8


def image_too_new(calls: ProbeCalls, note: Note) -> Answer:
    """Of text for a compiler newer than the driver's, and of machine code for another GPU."""
    major = calls.attribute(ATTRIBUTES["COMPUTE_CAPABILITY_MAJOR"])
    minor = calls.attribute(ATTRIBUTES["COMPUTE_CAPABILITY_MINOR"])
    own = f"{major}{minor}"
    images = {
        "valid PTX": PTX.format(version="7.0", target="80").encode() + b"\0",
        "PTX of version 99.0": PTX.format(version="99.0", target=own).encode() + b"\0",
    }
    nvcc = shutil.which("nvcc")
    other = "100" if major != 10 else "90"
    if nvcc is not None:
        own_code, foreign = (_machine_code(nvcc, capability) for capability in (own, other))
        images |= {f"machine code for sm_{own}": own_code, f"machine code for sm_{other}": foreign}
        newer = bytearray(own_code)
        newer[ELF_ABI_VERSION] += 1
        images["machine code of the next ABI"] = bytes(newer)
    # What may crash a driver comes last.
    images["PTX for sm_250"] = PTX.format(version="8.0", target="250").encode() + b"\0"
    images["bytes of no image"] = b"\x7fELF" + bytes(252)
    found: dict[str, str] = {}
    for name, image in images.items():
        note(listed(found | {name: "not back yet"}))
        found[name] = _load(calls, image)
    if nvcc is None:
        found["machine code"] = "not tried, nvcc is not on the PATH"
        return Answer(_number(found["PTX of version 99.0"]), listed(found))
    return Answer(_number(found[f"machine code for sm_{other}"]), listed(found))


def _number(result: str) -> str:
    return result.rpartition("(")[2].rstrip(")")


def _machine_code(nvcc: str, capability: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, code = Path(folder, "nothing.cu"), Path(folder, "nothing.cubin")
        source.write_text(KERNEL)
        command = [nvcc, "-cubin", f"-arch=sm_{capability}", "-o", str(code), str(source)]
        subprocess.run(command, check=True, timeout=25, capture_output=True)
        return code.read_bytes()


def _load(calls: ProbeCalls, image: bytes) -> str:
    """As the core loads its kernels, down to the function: loading alone may put errors off."""
    code, library = calls.load_library(image)
    if code != SUCCESS:
        return f"loading: {calls.describe(code)}"
    code, kernel = calls.get_kernel(library, "nothing")
    if code != SUCCESS:
        return f"loads, finding the kernel: {calls.describe(code)}"
    code, _ = calls.get_function(kernel)
    if code != SUCCESS:
        return f"loads, getting its function: {calls.describe(code)}"
    return "loads (0)"


DRIVER_PROBES: Mapping[str, Probe] = {
    "attributes": Probe(attributes),
    "range-attributes": Probe(range_attributes),
    "batch-under-capture": Probe(partial(under_capture, tall=False)),
    "tall-batch-under-capture": Probe(partial(under_capture, tall=True)),
    "large-batches": Probe(partial(large_batches, tall=False)),
    "large-tall-batches": Probe(partial(large_batches, tall=True)),
    "image-too-new": Probe(image_too_new, modelled=False),
}
