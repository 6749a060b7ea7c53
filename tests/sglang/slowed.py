"""The plugin's device in a test's hands: held, slowed, or with nobody waiting for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvburst import HostDevice, LinkModel
from kvburst.sglang_plugin import devices
from kvburst.sglang_plugin.layer_done import BurstLayers


@contextmanager
def on_device(link: LinkModel | None = None) -> Iterator[HostDevice]:
    """The device of caches that are built meanwhile."""
    device = HostDevice(link=link)
    with mock.patch.object(devices, "new_device", return_value=device):
        yield device


@contextmanager
def held(device: HostDevice) -> Iterator[None]:
    """Copies that are submitted meanwhile start when it ends."""
    stall = device.stall(device.current_stream())
    try:
        yield
    finally:
        stall.release()


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Forwards do not wait for layers: the negative control."""
    with mock.patch.object(BurstLayers, "wait"):
        yield
