"""The stand-in driver from Python: builds the library, loads instances of it, reads what they saw.

`python tests/stand_in.py` builds it and prints the path to give to `KVBURST_LIBCUDA`.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

TESTS = Path(__file__).resolve().parent
SOURCES = TESTS / "stand_in_cuda"
CORE = TESTS.parent / "csrc"

VERSIONS = (11080, 12040, 12080, 13000)
"""The driver versions that tests run on: without batches, without batches, and with each form."""

Order = Literal["eager", "latest", "random"]
ORDERS: tuple[Order, ...] = ("eager", "latest", "random")

FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread")
V2_ENTRY_POINT = "entry_points_v2"


class StandInError(RuntimeError):
    """The stand-in was used in a way that it does not know."""


# --- building ------------------------------------------------------------------------------------


def compiler() -> str:
    """The system's C++ compiler: what `CXX` names, or the first of c++, g++ and clang++."""
    named = os.environ.get("CXX")
    for name in (named,) if named else ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return path
    raise StandInError(f"the stand-in driver needs a C++ compiler; {named or 'c++'} is not there")


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise StandInError(f"{' '.join(command)}\nfailed:\n{result.stderr}")


def fingerprint(sources: list[Path]) -> str:
    """Changes with anything that the library is made of."""
    digest = hashlib.sha256(" ".join((compiler(), *FLAGS)).encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Library:
    """The built library, once as a driver since 12.0 has its entry points and once as before."""

    current: Path
    before_12: Path

    def of(self, version: int) -> Path:
        return self.current if version >= 12000 else self.before_12


def build(cache: Path) -> Library:
    """Builds the library in `cache` unless it is there; takes some seconds. Safe to call from
    several processes at once."""
    core = ("core/row_moves.h", "cuda/driver_types.h", "cuda/staging.h")
    headers = sorted([*SOURCES.glob("*.h"), *(CORE / name for name in core)])
    sources = sorted(path for path in SOURCES.glob("*.cpp") if not path.name.startswith("stress"))
    built = cache / fingerprint([*headers, *sources])
    library = Library(built / "libcuda_stand_in.so", built / "libcuda_stand_in_11.so")
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built.is_dir():
            return library
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            scratch = Path(directory)
            objects = [scratch / f"{source.stem}.o" for source in sources]
            include = ["-I", str(CORE), "-I", str(SOURCES)]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                commands = [
                    [compiler(), *FLAGS, *include, "-c", str(source), "-o", str(to)]
                    for source, to in zip(sources, objects, strict=True)
                ]
                list(pool.map(run, commands))
            done = scratch / "done"
            done.mkdir()
            link = [compiler(), "-shared", "-pthread", "-o"]
            run([*link, str(done / library.current.name), *map(str, objects), "-ldl"])
            older = [str(path) for path in objects if path.stem != V2_ENTRY_POINT]
            run([*link, str(done / library.before_12.name), *older, "-ldl"])
            done.rename(built)
    return library


# --- the control interface, see control.h --------------------------------------------------------


class _Call(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_char_p),
        ("thread", ctypes.c_uint32),
        ("result", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("event", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("copies", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Counts:
    """What is open now, and from `registered` on sums since the begin."""

    streams: int
    events: int
    allocations: int
    pinned: int
    registrations: int
    retained: int
    registered: int
    unregistered: int
    copies: int
    copied_bytes: int


class _Counts(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_uint64) for field in fields(Counts)]


@dataclass(frozen=True)
class Call:
    """A recorded call. `function` is as cuda.h has it, without _v2; threads count from 1; what the
    call was not about is 0."""

    function: str
    thread: int
    result: int
    stream: int
    event: int
    address: int
    bytes: int
    copies: int


class Stall:
    """A stream that stands. Release it, or leave the `with` block."""

    def __init__(self, stand_in: "StandIn", gate: int) -> None:
        self._stand_in = stand_in
        self._gate = gate

    def release(self) -> None:
        """A second release does nothing."""
        self._stand_in.control.stand_in_release(ctypes.c_uint64(self._gate))

    def __enter__(self) -> "Stall":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class StandIn:
    """One driver, with a state of its own: a copy of the library in `directory`, which the dynamic
    linker takes for another library. `path` is what `KVBURST_LIBCUDA` has to name. Never unloaded,
    since its threads may run. Any thread may call."""

    def __init__(
        self,
        library: Library,
        directory: Path,
        version: int = 13000,
        *,
        order: Order = "eager",
        seed: int = 1,
        **settings: int,
    ) -> None:
        self.version = version
        directory.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=f"libcuda_{version}_", suffix=".so", dir=directory)
        os.close(handle)
        self.path = Path(shutil.copyfile(library.of(version), path))
        self.control = ctypes.CDLL(path)
        for name in ("stand_in_stall", "stand_in_recorded", "stand_in_finding_count"):
            getattr(self.control, name).restype = ctypes.c_uint64
        self.control.stand_in_call_count.restype = ctypes.c_uint64
        self.control.stand_in_error.restype = ctypes.c_char_p
        for name in ("stand_in_finding", "stand_in_report"):
            getattr(self.control, name).restype = ctypes.c_size_t
        self.configure(order=order, seed=seed, **settings)

    def configure(self, *, order: Order | None = None, **settings: int) -> None:
        """Changes the settings that README.md lists; the version stays."""
        items = {"version": self.version, **settings}
        text = ",".join(f"{key}={int(value)}" for key, value in items.items())
        if order is not None:
            text += f",order={order}"
        self._refuse(self.control.stand_in_configure(text.encode()) != 0)

    def _refuse(self, refused: bool) -> None:
        if refused:
            raise StandInError(self.control.stand_in_error().decode())

    def fail(self, function: str, code: int, nth: int = 1) -> None:
        """The `nth` call of `function` from now on returns `code`. "*": every call from now on."""
        self.control.stand_in_fail(function.encode(), ctypes.c_uint64(nth), ctypes.c_uint(code))

    def stop_failing(self) -> None:
        self.control.stand_in_fail(b"*", ctypes.c_uint64(1), ctypes.c_uint(0))

    def count(self, function: str | None = None) -> int:
        """How often the function was called; all calls without a name."""
        name = None if function is None else function.encode()
        return int(self.control.stand_in_call_count(name))

    def calls(self, function: str | None = None) -> list[Call]:
        """The calls in their order, of one function or of all."""
        found = []
        for index in range(self.control.stand_in_recorded()):
            call = _Call()
            self.control.stand_in_call(ctypes.c_uint64(index), ctypes.byref(call))
            name = call.function.decode()
            if function in (None, name):
                found.append(
                    Call(
                        name,
                        call.thread,
                        call.result,
                        call.stream,
                        call.event,
                        call.address,
                        call.bytes,
                        call.copies,
                    )
                )
        return found

    def findings(self) -> list[str]:
        """The unordered accesses so far, a sentence each."""
        count = self.control.stand_in_finding_count()
        return [
            self._text(partial(self.control.stand_in_finding, ctypes.c_uint64(index)))
            for index in range(count)
        ]

    def report(self) -> str:
        """Counts, what is open, and the findings, as printed at exit with `report=1`."""
        return self._text(self.control.stand_in_report)

    def _text(self, write: Callable[[ctypes.Array[ctypes.c_char], ctypes.c_size_t], int]) -> str:
        size = write(ctypes.create_string_buffer(1), ctypes.c_size_t(1)) + 1
        text = ctypes.create_string_buffer(size)
        write(text, ctypes.c_size_t(size))
        return text.value.decode()

    def counts(self) -> Counts:
        counts = _Counts()
        self.control.stand_in_counts(ctypes.byref(counts))
        return Counts(*(int(getattr(counts, field.name)) for field in fields(Counts)))

    def host_read(self, address: int, size: int) -> None:
        """This code reads `size` bytes now, as far as the checker is concerned."""
        self.control.stand_in_host_read(ctypes.c_void_p(address), ctypes.c_size_t(size))

    def host_write(self, address: int, size: int) -> None:
        self.control.stand_in_host_write(ctypes.c_void_p(address), ctypes.c_size_t(size))

    def adopt(self, address: int, size: int, device: int = 0) -> None:
        """Takes the test's memory for memory of the device, until `disown`."""
        if self.control.stand_in_adopt(ctypes.c_void_p(address), ctypes.c_size_t(size), device):
            raise StandInError(f"address: the driver knows a byte of {address:#x} + {size} already")

    def disown(self, address: int) -> None:
        if self.control.stand_in_disown(ctypes.c_void_p(address)):
            raise StandInError(f"address: {address:#x} was not adopted")

    def stall(self, stream: int) -> Stall:
        """Holds the stream, from its next operation on."""
        gate = self.control.stand_in_stall(ctypes.c_uint64(stream))
        if gate == 0:
            raise StandInError(f"stream: there is no stream {stream:#x}")
        return Stall(self, gate)

    def busy(self, stream: int, microseconds: float) -> None:
        """Enqueues work that takes time and touches nothing."""
        if self.control.stand_in_busy(ctypes.c_uint64(stream), ctypes.c_double(microseconds)):
            raise StandInError(f"stream: there is no stream {stream:#x}")

    def touch(self, stream: int, address: int, size: int, *, write: bool) -> None:
        """Enqueues work that reads or writes these bytes, as far as the checker is concerned."""
        where = ctypes.c_void_p(address), ctypes.c_size_t(size)
        if self.control.stand_in_touch(ctypes.c_uint64(stream), *where, int(write)):
            raise StandInError(f"stream: there is no stream {stream:#x}")

    def settle(self) -> None:
        """Blocks until nothing more runs without being asked for."""
        self.control.stand_in_settle()

    def finish(self, seconds: float = 30) -> None:
        """Blocks until all streams have done all their work; opens every stall."""
        self._refuse_unfinished(self.control.stand_in_finish(ctypes.c_double(seconds)))

    def _refuse_unfinished(self, unfinished: int) -> None:
        if unfinished:
            raise StandInError("streams: a host function does not return")

    def reset(self, seconds: float = 30) -> None:
        """`finish`, then a new driver of the same version, with the settings of the environment.
        Nothing of before may be in use."""
        self._refuse_unfinished(self.control.stand_in_reset(ctypes.c_double(seconds)))
        self.configure()


LoadStandIn = Callable[..., StandIn]
"""What the fixture `load_stand_in` is: from the arguments of `StandIn` after the first two."""


def build_in_cache() -> Library:
    """In the user's cache directory, unless it is there already."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return build(cache / "kvburst-stand-in")


def main() -> None:
    version = int(sys.argv[1]) if len(sys.argv) > 1 else VERSIONS[-1]
    print(build_in_cache().of(version))


if __name__ == "__main__":
    main()
