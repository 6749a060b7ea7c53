"""What a probe is, and the driver as probes call it."""

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass

from cuda_calls import SUCCESS, DriverCalls, memory

V2_BATCHES = 13000
# Linux's, which Python names since 3.13.
MAP_NORESERVE = 0x4000
# A host function that nobody releases gives up.
LONGEST_HOLD_SECONDS = 20.0
HostFunction = ctypes.CFUNCTYPE(None, c_void_p)


@dataclass(frozen=True)
class Answer:
    """One word, and what was seen."""

    word: str
    evidence: str


# Told the evidence so far, before something that may not return.
Note = Callable[[str], None]
Ask = Callable[["ProbeCalls", Note], Answer]


@dataclass(frozen=True)
class Probe:
    """``modelled``: the stand-in driver has something to say to it. It then says what its makers
    have read, which is no evidence of what a GPU does."""

    ask: Ask
    modelled: bool = True


class ProbeCalls(DriverCalls):
    """Of GPU 0, also what the stand-in driver does not have."""

    def __init__(self, library: str | None) -> None:
        self.library = library or "libcuda.so.1"
        super().__init__(ctypes.CDLL(self.library))
        value = c_int()
        self.must("cuDriverGetVersion", self.lib.cuDriverGetVersion(byref(value)))
        self.version = value.value
        self._functions: list[object] = []

    @property
    def stand_in(self) -> bool:
        """It exports what no driver does."""
        try:
            self.lib.stand_in_configure  # noqa: B018
        except AttributeError:
            return False
        return True

    def host_function(self, stream: int, body: Callable[[], object]) -> None:
        """Enqueues a call of it, on a thread of the driver's."""
        function = HostFunction(lambda data: body() and None)
        self._functions.append(function)  # the driver has its address only
        code = self.lib.cuLaunchHostFunc(c_void_p(stream), function, None)
        self.must("cuLaunchHostFunc", code)

    @contextmanager
    def held(self, stream: int) -> Iterator[None]:
        """A host function that does not return keeps the stream until this is left."""
        released = threading.Event()
        self.host_function(stream, lambda: released.wait(LONGEST_HOLD_SECONDS))
        try:
            yield
        finally:
            released.set()

    def attribute(self, which: int) -> int:
        value = c_int()
        self.must("cuDeviceGetAttribute", self.lib.cuDeviceGetAttribute(byref(value), which, 0))
        return value.value

    def call_batch(self, *described: object, stream: int) -> int:
        """By the form that this driver has."""
        if self.version >= V2_BATCHES:
            return super().call_batch(*described, stream=stream)
        failed = c_size_t()
        return int(self.lib.cuMemcpyBatchAsync(*described, byref(failed), c_void_p(stream)))

    def call_batch_3d(self, count: c_size_t, entries: object, *, stream: int) -> int:
        if self.version >= V2_BATCHES:
            return super().call_batch_3d(count, entries, stream=stream)
        failed = c_size_t()
        return int(
            self.lib.cuMemcpy3DBatchAsync(
                count, entries, byref(failed), c_uint64(0), c_void_p(stream)
            )
        )

    # --- bytes -----------------------------------------------------------------------------

    def write(self, address: int, content: bytes, stream: int) -> None:
        """Into device memory, at once."""
        with self.scratch(len(content)) as host:
            put(host, content)
            self.must("write", self.to_device(address, host, len(content), stream))
            self.must("write", self.synchronize(stream))

    def read(self, address: int, size: int, stream: int) -> bytes:
        with self.scratch(size) as host:
            self.must("read", self.to_host(host, address, size, stream))
            self.must("read", self.synchronize(stream))
            return memory(host, size).raw

    @contextmanager
    def scratch(self, size: int) -> Iterator[int]:
        """Pinned host memory."""
        address = self.pinned(size)
        try:
            yield address
        finally:
            self.must("cuMemFreeHost", self.free_pinned(address))

    # --- attributes ------------------------------------------------------------------------

    def pointer_attribute(self, which: int, address: int) -> int | str:
        """A number of at most 64 bits, or the error."""
        value = c_uint64()
        code = self.lib.cuPointerGetAttribute(byref(value), c_uint(which), c_uint64(address))
        return value.value if code == SUCCESS else self.describe(code)


def put(address: int, content: bytes) -> None:
    """Into host memory."""
    ctypes.memmove(address, content, len(content))


class HostMemory:
    """Page-aligned memory that no driver knows yet; pages take space once they are touched."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size = size


def listed(results: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {result}" for name, result in results.items())
