"""Random use of a controller against a dictionary of what each page must hold.

A short run by default; `KVBURST_MODEL_STEPS=100000 pytest tests/test_controller_model.py` is a long
one.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from typing import ClassVar, Literal

import pytest
import torch
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stand_in import Library, StandIn

from kvburst import (
    Ack,
    BurstController,
    ComputeDevice,
    CudaDevice,
    DevicePool,
    HostDevice,
    HostPool,
    PageAllocator,
    PlanOptions,
    Pool,
)
from kvburst.cuda import tier_memory

STEPS = int(os.environ.get("KVBURST_MODEL_STEPS", "5000"))
STEPS_PER_EXAMPLE = 50
# Hypothesis ends some examples early: four fifths of the steps it may take are taken.
EXAMPLES = max(1, STEPS * 5 // 4 // STEPS_PER_EXAMPLE)
PAGE = 2
ROW = 3
DEVICE_PAGES = 10
HOST_PAGES = 14
LAYER_IDS = {"kv": (0, 1, 2, 4), "index_k": (1, 4)}

Tag = int


def byte_of(tag: Tag, pool: int, layer: int) -> int:
    """What page `tag` holds in every byte of one layer of one pool."""
    return (tag * 37 + pool * 101 + layer * 11 + 1) % 256


def slots(pages: Iterable[int]) -> torch.Tensor:
    return torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)], dtype=torch.int64)


def pages_of(indices: torch.Tensor) -> list[int]:
    return [int(slot) // PAGE for slot in indices[::PAGE]]


class ControllerModel(RuleBasedStateMachine):
    """Device pages are written by a forward on the current stream, which may be stalled."""

    mode: Literal["thread", "inline"] = "thread"

    def make_device(self) -> ComputeDevice:
        return HostDevice()

    def __init__(self) -> None:
        super().__init__()
        self.device = self.make_device()
        memory = tier_memory(self.device)
        self.pools = []
        for name, layout in (("kv", "page_first_direct"), ("index_k", "layer_first")):
            shape = (len(LAYER_IDS[name]), DEVICE_PAGES * PAGE, ROW)
            on_device = DevicePool.from_layers(
                name,
                memory.device(prod(shape)).view(shape),
                page_size=PAGE,
                layer_ids=LAYER_IDS[name],
            )
            on_host = HostPool.allocate(on_device, pages=HOST_PAGES, layout=layout, pin=memory.pin)
            self.pools.append(Pool.pair(on_device, on_host))
        self.device_pages = PageAllocator(
            name="device tier", pages=DEVICE_PAGES, page_size=PAGE, order="lifo"
        )
        self.host_pages = PageAllocator(
            name="host tier", pages=HOST_PAGES, page_size=PAGE, order="fifo"
        )
        self.controller = BurstController(
            self.pools,
            self.device,
            device_allocator=self.device_pages,
            host_allocator=self.host_pages,
            options=PlanOptions(max_group=2, chunk_pages=2),
            check="slots",
            gate_slots=2,
            mode=self.mode,
        )
        self.on_device: dict[int, Tag] = {}
        """What each device page that somebody owns must hold."""
        self.on_host: dict[int, Tag] = {}
        """The same for host pages whose backup is retired."""
        self.backing_up: dict[int, dict[int, Tag]] = {}
        """By node id: host pages of backups that are not retired."""
        self.queued: dict[int, Tag] = {}
        """Device pages of loads that are not started."""
        self.used: dict[int, tuple[list[int], list[int]]] = {}
        """By node id: device and host pages that a burst uses until its ack is retired."""
        self.next_tag = 0
        self.next_node = 0
        self.stall = None

    def new_node(self) -> int:
        self.next_node += 1
        return self.next_node

    def some(self, data: st.DataObject, pages: Iterable[int], repeats: bool = False) -> list[int]:
        pool = sorted(pages)
        return data.draw(st.lists(st.sampled_from(pool), max_size=5, unique=not repeats))

    def settle(self) -> None:
        self.controller.drain()
        self.device.synchronize()

    def go_on(self) -> None:
        if self.stall is not None:
            self.stall.release()
            self.stall = None

    def handed_out(self, on_device: Iterable[int] = (), on_host: Iterable[int] = ()) -> None:
        """No page that a burst still uses may be among those that an allocator hands out."""
        for device_pages, host_pages in self.used.values():
            assert not set(device_pages) & set(on_device)
            assert not set(host_pages) & set(on_host)

    def retired(self, acks: list[Ack]) -> None:
        for ack in acks:
            assert ack.error is None
            for node in ack.node_ids:
                self.used.pop(node)
                self.on_host.update(self.backing_up.pop(node, {}))

    # --- the forward -----------------------------------------------------------------------

    @precondition(lambda self: self.stall is None)
    @rule()
    def stall_the_forward(self) -> None:
        # What is complete while it is stalled is then the same in every run, as replays need it.
        self.settle()
        self.stall = self.device.stall(self.device.current_stream())

    @rule()
    def let_the_forward_go_on(self) -> None:
        self.go_on()

    @rule(count=st.integers(0, 4))
    def prefill(self, count: int) -> None:
        indices = self.device_pages.alloc(count * PAGE)
        if indices is None:
            event("device tier full")
            return
        stream = self.device.current_stream()
        self.handed_out(on_device=pages_of(indices))
        for page in pages_of(indices):
            assert page not in self.on_device
            assert page not in self.queued
            self.on_device[page] = self.next_tag
            for p, pool in enumerate(self.pools):
                for layer in pool.layout.stored_layers:
                    self.device.fill(
                        stream,
                        pool.layout.device_address(layer, page),
                        byte_of(self.next_tag, p, layer),
                        pool.layout.page_bytes,
                    )
            self.next_tag += 1

    # --- the cache -------------------------------------------------------------------------

    @precondition(lambda self: self.on_device)
    @rule(data=st.data())
    def back_up(self, data: st.DataObject) -> None:
        pages = self.some(data, self.on_device)
        node = self.new_node()
        host = self.controller.write(slots(pages), node_id=node)
        if host is None:
            event("host tier full")
            return
        assert not set(pages_of(host)) & set(self.on_host)
        self.handed_out(on_host=pages_of(host))
        if pages:
            self.used[node] = (pages, pages_of(host))
            tags = [self.on_device[page] for page in pages]
            self.backing_up[node] = dict(zip(pages_of(host), tags, strict=True))

    @precondition(lambda self: self.on_host)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        pages = self.some(data, self.on_host, repeats=True)
        node = self.new_node()
        target = self.controller.load(slots(pages), node_id=node)
        if target is None:
            event("device tier full")
            return
        self.handed_out(on_device=pages_of(target))
        if pages:
            self.used[node] = (pages_of(target), pages)
        for page, source in zip(pages_of(target), pages, strict=True):
            assert page not in self.on_device
            assert page not in self.queued
            self.queued[page] = self.on_host[source]

    @precondition(lambda self: self.controller.has_free_load_back_slot())
    @rule()
    def start_loading(self) -> None:
        burst = self.controller.start_loading()
        assert (burst == -1) == (not self.queued)
        if burst == -1:
            return
        # Whatever runs next on the forward's stream finds the pages in place.
        counter = self.controller.layer_done_counter
        counter.set_consumer(burst)
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
        self.on_device.update(self.queued)
        self.queued.clear()

    @precondition(lambda self: self.on_device)
    @rule(data=st.data())
    def evict_from_device(self, data: st.DataObject) -> None:
        pages = self.some(data, self.on_device)
        self.device_pages.free(slots(pages))
        for page in pages:
            del self.on_device[page]

    @precondition(lambda self: self.on_host)
    @rule(data=st.data())
    def evict_from_host(self, data: st.DataObject) -> None:
        pages = self.some(data, self.on_host)
        self.host_pages.free(slots(pages))
        for page in pages:
            del self.on_host[page]

    @rule()
    def poll(self) -> None:
        if self.stall is None:
            self.settle()
        self.retired(self.controller.poll())

    @rule()
    def reset(self) -> None:
        self.go_on()
        self.controller.reset()
        assert not self.controller.has_inflight_device_transfers()
        for pages in self.backing_up.values():
            self.on_host.update(pages)
        self.backing_up.clear()
        self.used.clear()
        self.device_pages.free(slots(self.queued))
        self.queued.clear()

    @rule()
    def every_page_holds_what_it_must(self) -> None:
        self.go_on()
        self.settle()
        self.retired(self.controller.poll())
        for p, pool in enumerate(self.pools):
            on_host = pool.host.tensor
            by_row = on_host if pool.host.layout == "layer_first" else on_host.transpose(0, 1)
            for row, layer in enumerate(pool.layout.stored_layers):
                for page, tag in self.on_device.items():
                    found = pool.device.layers[row][page * PAGE : (page + 1) * PAGE]
                    assert set(found.flatten().tolist()) == {byte_of(tag, p, layer)}
                for page, tag in self.on_host.items():
                    assert set(by_row[row][page].flatten().tolist()) == {byte_of(tag, p, layer)}

    @invariant()
    def no_page_is_free_while_it_is_owned_or_used(self) -> None:
        owned = len(self.on_device) + len(self.queued)
        assert self.device_pages.available_pages + owned <= DEVICE_PAGES
        kept = len(self.on_host) + sum(map(len, self.backing_up.values()))
        assert self.host_pages.available_pages + kept <= HOST_PAGES
        if not self.controller.has_inflight_device_transfers():
            assert self.device_pages.available_pages + owned == DEVICE_PAGES
            assert self.host_pages.available_pages + kept == HOST_PAGES

    def teardown(self) -> None:
        self.every_page_holds_what_it_must()
        self.controller.stop()


class InlineControllerModel(ControllerModel):
    mode = "inline"


class StandInControllerModel(ControllerModel):
    """The same on a driver that is as late as it may be, and tells what nothing orders."""

    load: ClassVar[Callable[..., StandIn]]

    def make_device(self) -> ComputeDevice:
        self.driver = type(self).load(13000, order="random")
        return CudaDevice(driver=str(self.driver.path))

    def teardown(self) -> None:
        super().teardown()
        assert self.driver.findings() == []


@pytest.fixture(autouse=True, scope="module")
def library(stand_in_library: Library, tmp_path_factory: pytest.TempPathFactory) -> None:
    StandInControllerModel.load = partial(
        StandIn, stand_in_library, tmp_path_factory.mktemp("drivers")
    )


SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS_PER_EXAMPLE,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestControllerModel = ControllerModel.TestCase
TestControllerModel.settings = SETTINGS
TestInlineControllerModel = InlineControllerModel.TestCase
TestInlineControllerModel.settings = SETTINGS
TestStandInControllerModel = StandInControllerModel.TestCase
TestStandInControllerModel.settings = SETTINGS
