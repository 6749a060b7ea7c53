"""How many operations a stream takes before a call blocks, and what a blocked stream holds up.

Whatever stalls a stream here is released again, in a ``finally``, before anything is waited for.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from ctypes import c_uint, c_uint64, c_void_p

from cuda_calls import NOT_READY, SUCCESS

from gpu_check.probe import Answer, Note, Probe, ProbeCalls, listed, put

# An operation that has not returned after so long waits for room in the queue.
STUCK_SECONDS = 0.5
# Where the search ends.
MOST_OPERATIONS = 20_000
JOIN_SECONDS = 10.0
GEQ = 0

Operation = Callable[[int], int]


@contextmanager
def stalled_by_wait_value(calls: ProbeCalls, stream: int) -> Iterator[None]:
    """The GPU itself waits for a word of pinned memory."""
    word = calls.pinned(4, bytes(4))
    code = calls.lib.cuStreamWaitValue32_v2(
        c_void_p(stream), c_uint64(word), c_uint(1), c_uint(GEQ)
    )
    calls.must("cuStreamWaitValue32", code)
    try:
        yield
    finally:
        put(word, (1).to_bytes(4, "little"))


class Filler:
    """A thread that enqueues one operation after the other until it is told to end."""

    def __init__(self, calls: ProbeCalls, operation: Operation, stream: int) -> None:
        self.enqueued = 0
        self.code = SUCCESS
        self._end = threading.Event()
        self._calls, self._operation, self._stream = calls, operation, stream
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._calls.set_current(self._calls.context)
        while not self._end.is_set() and self.enqueued < MOST_OPERATIONS:
            self.code = self._operation(self._stream)
            if self.code != SUCCESS:
                return
            self.enqueued += 1

    def fill(self) -> str:
        """How many were taken before one did not return."""
        self._thread.start()
        seen, since = -1, time.monotonic()
        while self._thread.is_alive():
            if self.enqueued != seen:
                seen, since = self.enqueued, time.monotonic()
            elif time.monotonic() - since > STUCK_SECONDS:
                return str(seen)
            time.sleep(0.01)
        if self.code != SUCCESS:
            return f"{self.enqueued}, then {self._calls.describe(self.code)}"
        return f"more than {self.enqueued}"

    def end(self) -> bool:
        """Once the stream goes on, so does the thread."""
        self._end.set()
        self._thread.join(JOIN_SECONDS)
        return not self._thread.is_alive()


Stalled = Callable[[ProbeCalls, int], AbstractContextManager[None]]


def depth(calls: ProbeCalls, note: Note, stalled: Stalled) -> Answer:
    device, host, event = calls.new_memory(1 << 16), calls.pinned(1 << 16), calls.event()
    operations: Mapping[str, Operation] = {
        "copies of 4 KiB": lambda stream: calls.to_device(device, host, 4096, stream),
        "batches of one": lambda stream: calls.batch([(device, host, 4096)], stream),
        "batches of 16": lambda stream: calls.batch(
            [(device + 4096 * i, host + 4096 * i, 4096) for i in range(16)], stream
        ),
        "memsets": lambda stream: calls.fill(device, 1, 64, stream),
        "event records": lambda stream: calls.record(event, stream),
    }
    found: dict[str, str] = {}
    for name, operation in operations.items():
        note(listed(found | {name: "not back yet"}))
        stream = calls.stream()
        filler = Filler(calls, operation, stream)
        with stalled(calls, stream):
            found[name] = filler.fill()
        if not filler.end():
            found[name] += ", and the call does not return once the stream goes on"
            return Answer("hung", listed(found))
        calls.must("cuStreamSynchronize", calls.synchronize(stream))
    return Answer(found["copies of 4 KiB"].replace(" ", "-"), listed(found))


def depth_behind_host_function(calls: ProbeCalls, note: Note) -> Answer:
    return depth(calls, note, ProbeCalls.held)


def depth_behind_wait_value(calls: ProbeCalls, note: Note) -> Answer:
    return depth(calls, note, stalled_by_wait_value)


def host_functions(calls: ProbeCalls, note: Note) -> Answer:
    """One that blocks on a stream; then a copy, and a host function of no length, on others."""
    held, copying, calling = (calls.stream() for _ in range(3))
    memory_of_device, host = calls.new_memory(4096), calls.pinned(4096)
    with calls.held(held):
        calls.must("copy", calls.to_device(memory_of_device, host, 4096, copying))
        calls.host_function(calling, lambda: None)
        copied = _done_within(calls, copying, 2.0)
        called = _done_within(calls, calling, 2.0)
    for stream in (held, copying, calling):
        calls.must("cuStreamSynchronize", calls.synchronize(stream))
    evidence = f"beside a host function that blocks: a copy on another stream {copied}, a host"
    evidence += f" function on a third {called}"
    if "not" in copied:
        return Answer("delays-copies", evidence)
    return Answer("delays" if "not" in called else "independent", evidence)


def _done_within(calls: ProbeCalls, stream: int, seconds: float) -> str:
    begin = time.monotonic()
    while calls.query_stream(stream) == NOT_READY:
        if time.monotonic() - begin > seconds:
            return f"is not done after {seconds:.0f} s"
        time.sleep(0.001)
    return f"is done after {1000 * (time.monotonic() - begin):.1f} ms"


QUEUE_PROBES: Mapping[str, Probe] = {
    "queue-depth": Probe(depth_behind_host_function),
    "queue-depth-wait-value": Probe(depth_behind_wait_value, modelled=False),
    "host-functions": Probe(host_functions),
}
