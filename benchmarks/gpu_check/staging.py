"""Gather and scatter of rows on the device, against one copy on the device of as many bytes.

Rows lie anywhere in an array twice as large. Timed between events on the stream; every byte is
compared once before anything is timed.
"""

from collections.abc import Callable

import torch
from harness import take_turns

from gpu_check.bench import Bench, LeftOutError
from kvburst import CudaDevice, DeviceError, KVBurstError, Stream

# Of latent and index rows as models have them, and a page of 64 rows of 656 bytes.
ROW_BYTES = (132, 528, 576, 656, 1152, 41_984)


class Rows:
    """``count`` rows of an array, packed and not."""

    def __init__(self, device: CudaDevice, row_bytes: int, nbytes: int) -> None:
        self.count = nbytes // row_bytes
        self.nbytes = self.count * row_bytes
        self.row_bytes = row_bytes
        self.array = device.tensor(2 * self.nbytes)
        self.packed = device.tensor(self.nbytes)
        self.spare = device.tensor(self.nbytes)
        chosen = torch.randperm(2 * self.count, generator=torch.Generator().manual_seed(1))
        self.ids = device.tensor(8 * self.count).view(torch.int64)
        self.ids.copy_(chosen[: self.count])
        self.array.random_(0, 256)
        device.synchronize()

    def gather(self, device: CudaDevice, stream: Stream) -> None:
        ends = (self.packed.data_ptr(), self.array.data_ptr(), self.ids.data_ptr())
        device.gather(stream, *ends, self.count, self.row_bytes)

    def scatter(self, device: CudaDevice, stream: Stream) -> None:
        ends = (self.array.data_ptr(), self.packed.data_ptr(), self.ids.data_ptr())
        device.scatter(stream, *ends, self.count, self.row_bytes)

    def copy(self, device: CudaDevice, stream: Stream) -> None:
        device.copy(stream, self.spare.data_ptr(), self.packed.data_ptr(), self.nbytes)

    def check(self, device: CudaDevice, stream: Stream) -> None:
        """Both ways, or this raises."""
        rows = self.array.view(-1, self.row_bytes)
        self.gather(device, stream)
        stream.synchronize()
        if not torch.equal(self.packed.view(-1, self.row_bytes), rows[self.ids]):
            raise KVBurstError(f"gather: rows of {self.row_bytes} bytes did not arrive")
        self.packed.random_(0, 256)
        expected = rows.clone()
        expected[self.ids] = self.packed.view(-1, self.row_bytes)
        device.synchronize()
        self.scatter(device, stream)
        stream.synchronize()
        if not torch.equal(rows, expected):
            raise KVBurstError(f"scatter: rows of {self.row_bytes} bytes did not arrive")


def timed(
    device: CudaDevice, stream: Stream, work: Callable[[CudaDevice, Stream], None], nbytes: int
) -> Callable[[], float]:
    """GB/s, each byte counted once."""
    begin, end = device.new_event(), device.new_event()

    def sample() -> float:
        begin.record(stream)
        work(device, stream)
        end.record(stream)
        end.synchronize()
        return nbytes / begin.elapsed_time(end) / 1e6

    return sample


def run(bench: Bench) -> None:
    device = bench.open()
    stream = device.new_stream()
    first = Rows(device, ROW_BYTES[0], 1 << 16)
    try:
        first.gather(device, stream)
    except DeviceError as error:
        # On a GPU a build without kernels has failed at this; nvcc is not everywhere else.
        if bench.device_name == "cuda":
            raise
        raise LeftOutError(f"no gather here: {error}".splitlines()[0]) from error
    bench.results.machine = {"kernels": device.kernels}
    for row_bytes in ROW_BYTES:
        rows = Rows(device, row_bytes, bench.size(256 << 20, 1 << 20))
        rows.check(device, stream)
        works = {"copy": rows.copy, "gather": rows.gather, "scatter": rows.scatter}
        samples = take_turns(
            {name: timed(device, stream, work, rows.nbytes) for name, work in works.items()},
            bench.size(20, 3),
        )
        for name in ("gather", "scatter"):
            scenario = {"what": name, "row_bytes": row_bytes, "rows": rows.count}
            bench.results.add(
                bench.row(
                    scenario,
                    "bandwidth_gbps",
                    "GB/s",
                    samples[name],
                    baseline=samples["copy"],
                    better="higher",
                )
            )
