"""Fixtures that several test files share."""

from collections.abc import Callable

import pytest
import torch

from kvburst import HostDevice

pytest.register_assert_rewrite("burst_helpers")

# Tensors here are small: on a busy machine torch's threads cost a test seconds of waiting for each
# other, and bring nothing.
torch.set_num_threads(1)

MakeDevice = Callable[..., HostDevice]

# Every device that tests run on, by name, with what makes one from the limits and the link it is
# to have. One that needs what a machine may lack skips, with the reason, in its maker.
DEVICES: dict[str, MakeDevice] = {"host": HostDevice}


@pytest.fixture(params=DEVICES)
def make_device(request: pytest.FixtureRequest) -> MakeDevice:
    return DEVICES[request.param]


@pytest.fixture
def device(make_device: MakeDevice) -> HostDevice:
    return make_device()
