"""Fixtures that several test files share."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from devices import (
    DEVICES,
    SHALLOW_QUEUE,
    STAND_IN_KERNELS,
    STAND_INS,
    MakeDevice,
    StandInKind,
    make_host_device,
)
from stand_in import Library, LoadStandIn, StandIn, build

from kvburst import ComputeDevice, CopyLimits, CudaDevice

pytest.register_assert_rewrite("burst_helpers")

# Tensors here are small: on a busy machine torch's threads cost a test seconds of waiting for each
# other, and bring nothing.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=1,
        help="of the order in which stand-in drivers run what nothing orders",
    )


# --- devices -------------------------------------------------------------------------------------


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.gpu) if name == "cuda" else name for name in DEVICES
    ]
)
def make_device(request: pytest.FixtureRequest) -> Iterator[MakeDevice]:
    """Makes devices of one kind. A stand-in driver's record is checked in the end: nothing may have
    touched the same bytes without an order, unless the test is there to show a race."""
    if request.param == "host":
        yield make_host_device
    elif request.param == "cuda":
        yield make_gpu
    else:
        drivers: list[StandIn] = []
        load = request.getfixturevalue("load_stand_in")
        yield partial(make_stand_in_device, load, drivers, STAND_INS[request.param], request)
        found = [finding for driver in drivers for finding in driver.findings()]
        if request.node.get_closest_marker("races"):
            assert found
        else:
            assert found == []


def make_gpu(*, limits: CopyLimits | None = None, shallow: bool = False) -> CudaDevice:
    if shallow:
        pytest.skip("the queue of a GPU's stream takes more than a test can fill")
    return CudaDevice(limits=limits)


def make_stand_in_device(
    load: LoadStandIn,
    drivers: list[StandIn],
    kind: StandInKind,
    request: pytest.FixtureRequest,
    *,
    limits: CopyLimits | None = None,
    shallow: bool = False,
) -> CudaDevice:
    depth = {"queue_depth": SHALLOW_QUEUE} if shallow else {}
    seed = request.config.getoption("--seed")
    drivers.append(load(kind.version, order=kind.order, seed=seed, **depth))
    return CudaDevice(driver=str(drivers[-1].path), limits=limits, kernels=STAND_IN_KERNELS)


@pytest.fixture
def device(make_device: MakeDevice) -> ComputeDevice:
    return make_device()


@pytest.fixture
def moving(device: ComputeDevice) -> ComputeDevice:
    """A device that gathers and scatters rows by its own means."""
    if not device.moves_rows:
        pytest.skip(device.kernels)
    return device


# --- the stand-in driver -------------------------------------------------------------------------


@pytest.fixture(scope="session")
def stand_in_library(request: pytest.FixtureRequest) -> Library:
    """Built with the system's compiler if it is not in pytest's cache; never skipped."""
    return build(Path(request.config.cache.mkdir("stand_in")))


@pytest.fixture
def load_stand_in(stand_in_library: Library, tmp_path: Path) -> Iterator[LoadStandIn]:
    """Makes drivers, each with a state of its own, from the arguments of `StandIn` after the first
    two. In the end their streams do what is left, and their threads end."""
    drivers: list[StandIn] = []

    def load(*arguments: int, **settings: object) -> StandIn:
        drivers.append(StandIn(stand_in_library, tmp_path / "drivers", *arguments, **settings))
        return drivers[-1]

    yield load
    for driver in drivers:
        driver.reset()
