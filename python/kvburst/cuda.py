"""The device "cuda" as torch sees it: whose streams are current, and memory as tensors."""

import ctypes
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from kvburst import _core
from kvburst._core import CopyLimits, CudaDriver, Device, DeviceError, PinnedMemory
from kvburst.host_memory import allocate_host
from kvburst.pools import Memory, Pin

# Far below the 512 GiB at which drivers refuse to register (a public report: sgl-project/sglang).
LARGEST_CHUNK = 256 << 30


class CudaDevice(_core.CudaDevice):
    """GPU `index` of a CUDA driver; whatever torch computes on it is on its current streams.

    driver: a driver that is loaded already, or its library; by default what the environment's
        KVBURST_LIBCUDA names, or else libcuda.so.1.
    limits: what it accepts in one call; the largest pitch is the GPU's where that is less.
    single_copies: a driver call a copy, for a driver whose batch calls misbehave.
    kernels: a fat binary of this version's csrc/cuda/staging.cu that `gather` and `scatter` are to
        be loaded from, by default the one in this build; `CudaDevice.kernels` says what became of
        it. Without kernels, which is no error, torch does their work.

    Holds the GPU's primary context, which torch uses too. Any thread. Raises DeviceError, saying
    why, where there is no driver or no such GPU.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        driver: CudaDriver | str | None = None,
        limits: CopyLimits | None = None,
        single_copies: bool = False,
        kernels: bytes | None = None,
    ) -> None:
        if not isinstance(driver, CudaDriver):
            driver = CudaDriver(driver)
        self._driver = driver
        self._has_torch = not driver.stand_in and torch.cuda.is_available()
        super().__init__(
            index,
            driver=driver,
            limits=limits,
            single_copies=single_copies,
            kernels=kernels,
            streams=_torch_streams(index) if self._has_torch else None,
        )
        if driver.batch_version == 0 and not single_copies:
            logging.getLogger("kvburst").warning("%s: %s", self.gpu_name, self.copy_calls)

    @property
    def driver(self) -> CudaDriver:
        return self._driver

    @property
    def memory_device(self) -> torch.device:
        """Where tensors in its memory lie: on the CPU, if a stand-in plays the driver."""
        return torch.device("cpu") if self._driver.stand_in else torch.device("cuda", self.index)

    def tensor(self, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes of its memory, zeroed, as a one-dimensional uint8 tensor that owns them.

        Raises DeviceError if this torch cannot compute on the GPU.
        """
        if self._driver.stand_in:
            return _view(self.allocate(nbytes))
        if not self._has_torch:
            raise DeviceError(
                f"torch {torch.__version__} does not compute on GPUs, so no tensor can lie on"
                f" {self.gpu_name}"
            )
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.memory_device)

    def pin(
        self, tensor: torch.Tensor, unit: int, *, largest_chunk: int = LARGEST_CHUNK
    ) -> PinnedMemory:
        """Pin the bytes of a contiguous tensor on the CPU, for as long as the result is kept.

        They are registered in chunks of at most `largest_chunk` bytes, whole multiples of `unit`:
        the bytes of a page. What is registered already is used as it is. Blocks, about a second
        for every few GiB. Raises DeviceError if the driver refuses; nothing is pinned then.
        """
        return self.pin_memory(
            tensor.data_ptr(),
            tensor.nbytes,
            unit=unit,
            largest_chunk=largest_chunk,
            owner=tensor,
        )


@dataclass(frozen=True)
class TierMemory:
    """How to get the memory of a device's two tiers: what `DevicePool.allocate` takes as
    ``memory``, and `HostPool.allocate` as ``pin``."""

    device: Memory
    pin: Pin | None


def tier_memory(device: Device) -> TierMemory:
    """Of a `CudaDevice` its own memory, and pinning; of any other plain host memory."""
    if isinstance(device, CudaDevice):
        return TierMemory(device.tensor, device.pin)
    return TierMemory(allocate_host, None)


def memory_device(device: Device) -> torch.device:
    """Where the tensors of a device's pools must lie."""
    return device.memory_device if isinstance(device, CudaDevice) else torch.device("cpu")


def _view(memory: _core.DeviceMemory) -> torch.Tensor:
    """A stand-in's device memory as the host memory that it is."""
    view = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
    view.memory = memory  # type: ignore[attr-defined]  # freed with the last tensor
    return torch.frombuffer(view, dtype=torch.uint8).zero_()


def as_torch_stream(handle: int, index: int) -> torch.cuda.Stream:
    # An external stream of handle 0 would be another than the default (pytorch/pytorch#182960).
    if handle == 0:
        return torch.cuda.default_stream(index)
    return torch.cuda.ExternalStream(handle, device=index)  # type: ignore[no-untyped-call]


class _Entered(threading.local):
    """The streams that a thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.contexts: list[AbstractContextManager[object]] = []


def _torch_streams(
    index: int,
) -> tuple[Callable[[], int], Callable[[int], None], Callable[[], None]]:
    """How to ask torch for a thread's current stream, to set it, and to put it back."""
    entered = _Entered()

    def current() -> int:
        return int(torch.cuda.current_stream(index).cuda_stream)

    def push(handle: int) -> None:
        context: AbstractContextManager[object] = torch.cuda.stream(as_torch_stream(handle, index))
        context.__enter__()
        entered.contexts.append(context)

    def pop() -> None:
        if not entered.contexts:
            raise DeviceError("current stream: this thread has set none")
        entered.contexts.pop().__exit__(None, None, None)

    return current, push, pop
