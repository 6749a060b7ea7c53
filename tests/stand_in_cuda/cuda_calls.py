"""The driver's functions as a test calls them: codes as numbers, handles and addresses as ints."""

import ctypes
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass

from stand_in import StandIn

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
DEINITIALIZED = 4
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_IMAGE = 200
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
NOT_FOUND = 500
NOT_READY = 600
ILLEGAL_ADDRESS = 700
LAUNCH_OUT_OF_RESOURCES = 701
CONTEXT_IS_DESTROYED = 709
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
NOT_PERMITTED = 800
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_MERGE = 902
CAPTURE_UNMATCHED = 903
CAPTURE_UNJOINED = 904
CAPTURE_ISOLATION = 905
CAPTURE_IMPLICIT = 906
CAPTURED_EVENT = 907
WRONG_THREAD = 908

LEGACY = 1
PER_THREAD = 2
BLOCKING = 0
NON_BLOCKING = 1
DISABLE_TIMING = 2

GLOBAL = 0
THREAD_LOCAL = 1
RELAXED = 2

STREAM_ORDER = 1
DURING_API_CALL = 2
ANY = 3

HOST = 1
DEVICE = 2
UNIFIED = 4


class CopyOf2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        (side + name, kind)
        for side in ("src", "dst")
        for name, kind in (
            ("XInBytes", c_size_t),
            ("Y", c_size_t),
            ("MemoryType", c_uint),
            ("Host", c_uint64),
            ("Device", c_uint64),
            ("Array", c_uint64),
            ("Pitch", c_size_t),
        )
    ] + [("WidthInBytes", c_size_t), ("Height", c_size_t)]


class Location(ctypes.Structure):
    _fields_ = [("type", c_uint), ("id", c_int)]


class Attributes(ctypes.Structure):
    _fields_ = [
        ("order", c_uint),
        ("src_hint", Location),
        ("dst_hint", Location),
        ("flags", c_uint),
    ]


class Operand(ctypes.Structure):
    """CUmemcpy3DOperand with a pointer; the union is 32 bytes long."""

    _fields_ = [
        ("type", c_uint),
        ("ptr", c_uint64),
        ("rowLength", c_size_t),
        ("layerHeight", c_size_t),
        ("hint", Location),
    ]


class CopyOf3D(ctypes.Structure):
    _fields_ = [
        ("src", Operand),
        ("dst", Operand),
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
        ("order", c_uint),
        ("flags", c_uint),
    ]


class RowPart(ctypes.Structure):
    """A move of rows, cut into pieces; see csrc/core/row_moves.h."""

    _fields_ = [
        (name, c_uint64)
        for name in ("packed", "rows", "ids", "count", "row_bytes", "pieces_per_row", "end")
    ]


PIECE_BYTES = 4096
MOVES_PER_LAUNCH = 64


class RowLaunch(ctypes.Structure):
    """The parameter of the staging kernels; see csrc/cuda/staging.h."""

    _fields_ = [("parts", RowPart * MOVES_PER_LAUNCH), ("pieces", c_uint64)]


@dataclass(frozen=True)
class Copy3D:
    dst: int
    src: int
    width: int
    height: int = 1
    depth: int = 1
    dst_row: int = 0
    src_row: int = 0
    dst_layer: int = 0
    src_layer: int = 0
    order: int = STREAM_ORDER


def memory(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """The bytes there: device memory of the stand-in is memory."""
    return (ctypes.c_char * size).from_address(address)


def bytes_at(address: int, size: int) -> bytes:
    return memory(address, size).raw


class CallError(RuntimeError):
    """A call that had to succeed has not."""


class DriverCalls:
    """A loaded driver, a GPU's or one that stands in for it, with a current primary context on the
    calling thread, unless `initialize` is false. What makes something returns it, and raises
    CallError if the driver does not; what does something returns the driver's code."""

    def __init__(self, lib: ctypes.CDLL, *, initialize: bool = True) -> None:
        self.lib = lib
        if initialize:
            self.must("cuInit", self.lib.cuInit(0))
            self.context = self.retain()
            self.must("cuCtxSetCurrent", self.set_current(self.context))

    def must(self, call: str, code: int) -> None:
        if code != SUCCESS:
            raise CallError(f"{call}: {self.describe(code)}")

    def describe(self, code: int) -> str:
        """A code as cuda.h names it, and its number."""
        name = c_char_p()
        self.lib.cuGetErrorName(c_uint(code), byref(name))
        return f"{(name.value or b'unknown error').decode()} ({code})"

    # --- contexts --------------------------------------------------------------------------------

    def retain(self, device: int = 0) -> int:
        context = c_void_p()
        self.must(
            "cuDevicePrimaryCtxRetain", self.lib.cuDevicePrimaryCtxRetain(byref(context), device)
        )
        return _handle(context)

    def release(self, device: int = 0) -> int:
        return self.lib.cuDevicePrimaryCtxRelease_v2(device)

    def set_current(self, context: int | None) -> int:
        return self.lib.cuCtxSetCurrent(c_void_p(context))

    # --- entry points ----------------------------------------------------------------------------

    def entry_point(self, name: str, version: int) -> tuple[int, int | None, int]:
        """Code, address and status, by the five-argument form."""
        entry, status = c_void_p(), c_uint(99)
        code = self.lib.cuGetProcAddress_v2(
            name.encode(), byref(entry), version, c_uint64(0), byref(status)
        )
        return code, entry.value, status.value

    def entry_point_v1(self, name: str, version: int) -> tuple[int, int | None]:
        entry = c_void_p()
        code = self.lib.cuGetProcAddress(name.encode(), byref(entry), version, c_uint64(0))
        return code, entry.value

    # --- memory ----------------------------------------------------------------------------------

    def try_alloc(self, size: int) -> tuple[int, int]:
        address = c_uint64()
        code = self.lib.cuMemAlloc_v2(byref(address), c_size_t(size))
        return code, address.value

    def new_memory(self, size: int) -> int:
        """Device memory."""
        code, address = self.try_alloc(size)
        self.must(f"cuMemAlloc of {size} bytes", code)
        return address

    def free(self, address: int) -> int:
        return self.lib.cuMemFree_v2(c_uint64(address))

    def pinned(self, size: int, content: bytes = b"") -> int:
        address = c_void_p()
        self.must("cuMemHostAlloc", self.lib.cuMemHostAlloc(byref(address), c_size_t(size), 0))
        memory(_handle(address), max(1, len(content)))[: len(content)] = content
        return _handle(address)

    def free_pinned(self, address: int) -> int:
        return self.lib.cuMemFreeHost(c_void_p(address))

    def register(self, address: int, size: int) -> int:
        return self.lib.cuMemHostRegister_v2(c_void_p(address), c_size_t(size), 0)

    def unregister(self, address: int) -> int:
        return self.lib.cuMemHostUnregister(c_void_p(address))

    def device_pointer(self, address: int) -> tuple[int, int]:
        alias = c_uint64()
        code = self.lib.cuMemHostGetDevicePointer_v2(byref(alias), c_void_p(address), 0)
        return code, alias.value

    # --- streams and events ----------------------------------------------------------------------

    def stream(self, flags: int = NON_BLOCKING) -> int:
        stream = c_void_p()
        self.must("cuStreamCreate", self.lib.cuStreamCreate(byref(stream), flags))
        return _handle(stream)

    def destroy_stream(self, stream: int) -> int:
        return self.lib.cuStreamDestroy_v2(c_void_p(stream))

    def synchronize(self, stream: int) -> int:
        return self.lib.cuStreamSynchronize(c_void_p(stream))

    def query_stream(self, stream: int) -> int:
        return self.lib.cuStreamQuery(c_void_p(stream))

    def event(self, flags: int = 0) -> int:
        event = c_void_p()
        self.must("cuEventCreate", self.lib.cuEventCreate(byref(event), flags))
        return _handle(event)

    def destroy_event(self, event: int) -> int:
        return self.lib.cuEventDestroy_v2(c_void_p(event))

    def record(self, event: int, stream: int) -> int:
        return self.lib.cuEventRecord(c_void_p(event), c_void_p(stream))

    def wait(self, stream: int, event: int) -> int:
        return self.lib.cuStreamWaitEvent(c_void_p(stream), c_void_p(event), 0)

    def query(self, event: int) -> int:
        return self.lib.cuEventQuery(c_void_p(event))

    def synchronize_event(self, event: int) -> int:
        return self.lib.cuEventSynchronize(c_void_p(event))

    def elapsed(self, start: int, end: int) -> tuple[int, float]:
        milliseconds = c_float()
        code = self.lib.cuEventElapsedTime(byref(milliseconds), c_void_p(start), c_void_p(end))
        return code, milliseconds.value

    # --- copies ----------------------------------------------------------------------------------

    def to_device(self, dst: int, src: int, size: int, stream: int) -> int:
        return self.lib.cuMemcpyHtoDAsync_v2(
            c_uint64(dst), c_void_p(src), c_size_t(size), c_void_p(stream)
        )

    def to_host(self, dst: int, src: int, size: int, stream: int) -> int:
        return self.lib.cuMemcpyDtoHAsync_v2(
            c_void_p(dst), c_uint64(src), c_size_t(size), c_void_p(stream)
        )

    def on_device(self, dst: int, src: int, size: int, stream: int) -> int:
        return self.lib.cuMemcpyDtoDAsync_v2(
            c_uint64(dst), c_uint64(src), c_size_t(size), c_void_p(stream)
        )

    def copy(self, dst: int, src: int, size: int, stream: int) -> int:
        return self.lib.cuMemcpyAsync(
            c_uint64(dst), c_uint64(src), c_size_t(size), c_void_p(stream)
        )

    def fill(self, dst: int, value: int, size: int, stream: int) -> int:
        return self.lib.cuMemsetD8Async(
            c_uint64(dst), ctypes.c_ubyte(value), c_size_t(size), c_void_p(stream)
        )

    def load_2d(
        self,
        dst: int,
        src: int,
        width: int,
        height: int,
        dst_pitch: int,
        src_pitch: int,
        stream: int,
    ) -> int:
        """Rows from the host to the device."""
        copy = CopyOf2D()
        copy.srcMemoryType, copy.srcHost, copy.srcPitch = HOST, src, src_pitch
        copy.dstMemoryType, copy.dstDevice, copy.dstPitch = DEVICE, dst, dst_pitch
        copy.WidthInBytes, copy.Height = width, height
        return self.copy_2d(copy, stream)

    def copy_2d(self, copy: CopyOf2D, stream: int) -> int:
        return self.lib.cuMemcpy2DAsync_v2(byref(copy), c_void_p(stream))

    def batch(
        self,
        copies: list[tuple[int, int, int]],
        stream: int,
        *,
        orders: list[int] | None = None,
        first_copies: list[int] | None = None,
    ) -> int:
        """Copies (destination, source, bytes) in one call, by the form of 13.0. Attributes: an
        order for each entry of `first_copies`."""
        count = len(copies)
        dsts = (c_uint64 * count)(*(dst for dst, _, _ in copies))
        srcs = (c_uint64 * count)(*(src for _, src, _ in copies))
        sizes = (c_size_t * count)(*(size for _, _, size in copies))
        orders = [STREAM_ORDER] if orders is None else orders
        firsts = [0] if first_copies is None else first_copies
        attributes = (Attributes * len(orders))(*(Attributes(order=order) for order in orders))
        return self.call_batch(
            dsts,
            srcs,
            sizes,
            c_size_t(count),
            attributes,
            (c_size_t * len(firsts))(*firsts),
            c_size_t(len(orders)),
            stream=stream,
        )

    def call_batch(self, *described: object, stream: int) -> int:
        return self.lib.cuMemcpyBatchAsync_v2(*described, c_void_p(stream))

    def batch_3d(self, copies: list[Copy3D], stream: int) -> int:
        entries = (CopyOf3D * len(copies))()
        for entry, copy in zip(entries, copies, strict=True):
            entry.dst = Operand(1, copy.dst, copy.dst_row, copy.dst_layer)
            entry.src = Operand(1, copy.src, copy.src_row, copy.src_layer)
            entry.width, entry.height, entry.depth = copy.width, copy.height, copy.depth
            entry.order = copy.order
        return self.call_batch_3d(c_size_t(len(copies)), entries, stream=stream)

    def call_batch_3d(self, count: c_size_t, entries: object, *, stream: int) -> int:
        return self.lib.cuMemcpy3DBatchAsync_v2(count, entries, c_uint64(0), c_void_p(stream))

    # --- kernels ---------------------------------------------------------------------------------

    def load_library(self, image: bytes) -> tuple[int, int | None]:
        library = c_void_p()
        code = self.lib.cuLibraryLoadData(byref(library), image, None, None, 0, None, None, 0)
        return code, library.value

    def get_kernel(self, library: int | None, name: str) -> tuple[int, int | None]:
        kernel = c_void_p()
        code = self.lib.cuLibraryGetKernel(byref(kernel), c_void_p(library), name.encode())
        return code, kernel.value

    def get_function(self, kernel: int | None) -> tuple[int, int | None]:
        function = c_void_p()
        code = self.lib.cuKernelGetFunction(byref(function), c_void_p(kernel))
        return code, function.value

    def function(self, image: bytes, name: str) -> int:
        code, library = self.load_library(image)
        assert code == SUCCESS
        code, kernel = self.get_kernel(library, name)
        assert code == SUCCESS
        code, function = self.get_function(kernel)
        assert code == SUCCESS
        assert function is not None
        return function

    def launch(
        self,
        function: int,
        stream: int,
        *,
        packed: int,
        rows: int,
        ids: int,
        count: int,
        row_bytes: int,
        blocks: int = 1,
        threads: int = 64,
    ) -> int:
        """Of a staging kernel, for one move."""
        pieces = -(-row_bytes // PIECE_BYTES)
        launch = RowLaunch(pieces=count * pieces)
        launch.parts[0] = RowPart(packed, rows, ids, count, row_bytes, pieces, count * pieces)
        return self.launch_with(
            (c_void_p * 1)(ctypes.addressof(launch)), function, stream, blocks, threads
        )

    def launch_with(
        self,
        parameters: "ctypes.Array[c_void_p] | None",
        function: int,
        stream: int,
        blocks: int,
        threads: int,
    ) -> int:
        sizes = (c_uint(size) for size in (blocks, 1, 1, threads, 1, 1, 0))
        return self.lib.cuLaunchKernel(
            c_void_p(function), *sizes, c_void_p(stream), parameters, None
        )

    # --- captures --------------------------------------------------------------------------------

    def begin_capture(self, stream: int, mode: int = GLOBAL) -> int:
        return self.lib.cuStreamBeginCapture_v2(c_void_p(stream), mode)

    def end_capture(self, stream: int) -> tuple[int, int | None]:
        graph = c_void_p()
        code = self.lib.cuStreamEndCapture(c_void_p(stream), byref(graph))
        return code, graph.value

    def capture_status(self, stream: int) -> tuple[int, int]:
        status = c_uint(99)
        code = self.lib.cuStreamIsCapturing(c_void_p(stream), byref(status))
        return code, status.value

    def exchange_mode(self, mode: int) -> int:
        """The mode that the calling thread had."""
        value = c_uint(mode)
        self.must(
            "cuThreadExchangeStreamCaptureMode",
            self.lib.cuThreadExchangeStreamCaptureMode(byref(value)),
        )
        return value.value


class Cuda(DriverCalls):
    """The same of a stand-in driver, whose device memory the host may write to."""

    def __init__(self, driver: StandIn, *, initialize: bool = True) -> None:
        super().__init__(driver.control, initialize=initialize)
        self.driver = driver

    def alloc(self, size: int, content: bytes = b"") -> int:
        """Device memory that begins with `content`, written by the host before anything else."""
        address = self.new_memory(size)
        memory(address, max(1, len(content)))[: len(content)] = content
        return address


def _handle(made: c_void_p) -> int:
    """What a driver that reports success has made."""
    if made.value is None:
        raise CallError("the driver reports success and a null handle")
    return made.value


def pageable(size: int, content: bytes = b"") -> tuple[ctypes.Array[ctypes.c_char], int]:
    """Memory of the process that no driver knows, and its address. Keep the first."""
    buffer = ctypes.create_string_buffer(content, size)
    return buffer, ctypes.addressof(buffer)
