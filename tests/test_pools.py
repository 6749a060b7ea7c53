"""Torch tensors described as pools: the right bytes are found, and the rest is refused."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvburst import pools
from kvburst._core import LayoutError
from kvburst.geometries import GEOMETRIES, Geometry, PoolSpec
from kvburst.host_memory import HostMemoryError
from kvburst.pools import DevicePool, HostLayout, HostPool, Pool

LAYOUTS: tuple[HostLayout, ...] = ("page_first_direct", "layer_first")
CANARY = 0xC7


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def backup(pool: Pool, pages: list[tuple[int, int]]) -> None:
    """The naive copy, straight from the addresses: (device page, host page)."""
    for layer in pool.layout.stored_layers:
        for device_page, host_page in pages:
            ctypes.memmove(
                pool.layout.host_address(layer, host_page),
                pool.layout.device_address(layer, device_page),
                pool.layout.page_bytes,
            )


def load(pool: Pool, pages: list[tuple[int, int]]) -> None:
    """The way back of ``backup``."""
    for layer in pool.layout.stored_layers:
        for device_page, host_page in pages:
            ctypes.memmove(
                pool.layout.device_address(layer, device_page),
                pool.layout.host_address(layer, host_page),
                pool.layout.page_bytes,
            )


def page_of(tensor: torch.Tensor, page: int, page_bytes: int) -> torch.Tensor:
    return as_bytes(tensor)[page * page_bytes : (page + 1) * page_bytes]


# --- the bytes are found -------------------------------------------------------------------


def test_list_of_layers_is_described_with_one_allocation_each() -> None:
    layers = [torch.zeros(256, 1, 576, dtype=torch.bfloat16) for _ in range(3)]
    pool = DevicePool.from_layers("kv", layers, page_size=64)
    assert (pool.pages, pool.slots, pool.page_bytes) == (4, 256, 64 * 1152)
    assert pool.layer_ids == (0, 1, 2)
    assert pool.allocations == tuple((layer.data_ptr(), 256 * 1152) for layer in layers)


def test_one_tensor_of_all_layers_is_one_allocation() -> None:
    tensor = torch.zeros(5, 128, 576, dtype=torch.bfloat16)
    pool = DevicePool.from_layers("kv", tensor, page_size=64, layer_ids=[0, 1, 4, 5, 9])
    assert pool.allocations == ((tensor.data_ptr(), 5 * 128 * 1152),)
    assert [layer.data_ptr() for layer in pool.layers] == [
        tensor.data_ptr() + index * 128 * 1152 for index in range(5)
    ]


def test_paged_layers_keep_their_own_page_bytes() -> None:
    pages = [torch.zeros(7, 64 * 132, dtype=torch.uint8) for _ in range(2)]
    pool = DevicePool.from_paged_layers("index_k", pages, page_size=64, layer_ids=[0, 6])
    assert (pool.pages, pool.page_bytes, pool.page_size) == (7, 8448, 64)
    assert pool.layer_ids == (0, 6)


def test_keys_and_values_become_two_pools_of_their_own_width() -> None:
    keys = torch.zeros(2, 128, 8, 192, dtype=torch.bfloat16)
    values = torch.zeros(2, 128, 8, 128, dtype=torch.bfloat16)
    k, v = DevicePool.key_value(keys, values, page_size=64)
    assert (k.name, k.page_bytes) == ("k", 64 * 8 * 192 * 2)
    assert (v.name, v.page_bytes) == ("v", 64 * 8 * 128 * 2)


def test_packed_draft_layer_is_one_more_row_of_the_host_page_from_its_own_allocation() -> None:
    target = random_bytes(3, 64, 24)
    draft = random_bytes(64, 24)
    device = DevicePool.from_layers("kv", [*target.unbind(0), draft], page_size=16)
    host = HostPool.allocate(device, pages=2)
    pool = Pool.pair(device, host)

    backup(pool, [(3, 1)])

    assert device.allocations == ((target.data_ptr(), 3 * 64 * 24), (draft.data_ptr(), 64 * 24))
    assert pool.num_layers == 4
    for row, layer in enumerate([*target.unbind(0), draft]):
        assert torch.equal(host.tensor[1, row], page_of(layer, 3, 16 * 24))
    assert not host.tensor[0].any()


# sgl-project/sglang#37534, sgl-project/sglang#13431, sgl-project/sglang#40304
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row_bytes", [132, 528, 576, 656, 1152])
def test_rows_come_back_exact_to_the_last_byte(row_bytes: int, layout: HostLayout) -> None:
    page_size, pages = 4, 3
    layers = random_bytes(5, pages * page_size, row_bytes)
    before = layers.clone()
    device = DevicePool.from_layers("kv", layers, page_size=page_size)
    pool = Pool.pair(device, HostPool.allocate(device, pages=pages, layout=layout))

    backup(pool, [(0, 2), (1, 0), (2, 1)])
    layers.fill_(0)
    load(pool, [(0, 0), (1, 1), (2, 2)])

    page_bytes = page_size * row_bytes
    for layer in range(5):
        for target, source in ((0, 1), (1, 2), (2, 0)):
            assert torch.equal(
                page_of(layers[layer], target, page_bytes),
                page_of(before[layer], source, page_bytes),
            )


def test_layers_that_are_not_stored_take_no_host_bytes_and_do_not_move() -> None:
    layers = random_bytes(4, 32, 8)
    device = DevicePool.from_layers("kv", layers, page_size=16, layer_ids=[0, 2, 5, 6])
    host = HostPool.allocate(device, pages=3, stored_layers=[6, 2])
    pool = Pool.pair(device, host)

    backup(pool, [(1, 2)])

    assert host.rows == (None, 0, None, 1)
    assert host.stored_layers == (2, 6)
    assert list(pool.layout.stored_layers) == [2, 6]
    assert host.tensor.numel() == 3 * 2 * 16 * 8
    assert torch.equal(host.tensor[2, 0], page_of(layers[1], 1, 128))
    assert torch.equal(host.tensor[2, 1], page_of(layers[3], 1, 128))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_that_stores_no_layer_pairs_and_holds_no_bytes(layout: HostLayout) -> None:
    device = DevicePool.from_layers("draft", torch.zeros(1, 32, 8), page_size=16)
    host = HostPool.allocate(device, pages=3, stored_layers=[], layout=layout)
    pool = Pool.pair(device, host)
    assert host.tensor.numel() == 0
    assert host.pages == 3
    assert list(pool.layout.stored_layers) == []


# LMCache/LMCache#2374
def test_view_with_a_storage_offset_moves_and_the_bytes_around_it_stay() -> None:
    whole = torch.full((3, 64 + 2 * 7, 24), CANARY, dtype=torch.uint8)
    view = whole.narrow(1, 7, 64)
    view.copy_(random_bytes(3, 64, 24))
    before = view.clone()
    device = DevicePool.from_layers("kv", view, page_size=16)
    pool = Pool.pair(device, HostPool.allocate(device, pages=4))

    backup(pool, [(page, page) for page in range(4)])
    view.fill_(0)
    load(pool, [(page, page) for page in range(4)])

    assert view.storage_offset() != 0
    assert torch.equal(view, before)
    assert (whole[:, :7] == CANARY).all()
    assert (whole[:, -7:] == CANARY).all()


def test_rows_of_a_larger_host_buffer_are_used_and_the_others_stay() -> None:
    buffer = torch.full((4, 6, 128), CANARY, dtype=torch.uint8)
    layers = random_bytes(3, 64, 8)
    device = DevicePool.from_layers("kv", layers, page_size=16)
    host = HostPool.from_tensor(device, buffer[:, 2:5], layout="page_first_direct")
    backup(Pool.pair(device, host), [(1, 3), (2, 0)])

    for layer in range(3):
        assert torch.equal(buffer[3, 2 + layer], page_of(layers[layer], 1, 128))
        assert torch.equal(buffer[0, 2 + layer], page_of(layers[layer], 2, 128))
    assert (buffer[1:3] == CANARY).all()
    assert (buffer[:, :2] == CANARY).all()
    assert (buffer[:, 5:] == CANARY).all()


# LMCache/LMCache#3821
def test_every_second_page_of_a_host_buffer_is_copied_by_its_stride() -> None:
    buffer = torch.full((8, 2, 128), CANARY, dtype=torch.uint8)
    layers = random_bytes(2, 64, 8)
    device = DevicePool.from_layers("kv", layers, page_size=16)
    pool = Pool.pair(device, HostPool.from_tensor(device, buffer[::2], layout="page_first_direct"))
    backup(pool, [(page, page) for page in range(4)])

    assert pool.layout.host_pages == 4
    for page in range(4):
        assert torch.equal(buffer[2 * page, 1], page_of(layers[1], page, 128))
    assert (buffer[1::2] == CANARY).all()


def test_layer_first_buffer_counted_in_slots_is_taken_as_a_view_of_pages() -> None:
    buffer = torch.zeros(2, 48, 1, 8, dtype=torch.uint8)
    layers = random_bytes(2, 32, 8)
    device = DevicePool.from_layers("kv", layers, page_size=16)
    host = HostPool.from_tensor(device, buffer.view(2, 3, -1), layout="layer_first")
    backup(Pool.pair(device, host), [(1, 2)])
    assert torch.equal(buffer[1, 32:48, 0], layers[1, 16:32])
    assert not buffer[:, :32].any()


@settings(max_examples=60, deadline=None)
@given(
    layer_ids=st.sets(st.integers(0, 90), min_size=1, max_size=6).map(sorted),
    page_size=st.integers(1, 5),
    row_bytes=st.integers(1, 9),
    pages=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    layout=st.sampled_from(LAYOUTS),
    paged=st.booleans(),
    one_allocation=st.booleans(),
    data=st.data(),
)
def test_every_page_of_every_stored_layer_has_its_own_bytes_on_both_tiers(
    layer_ids: list[int],
    page_size: int,
    row_bytes: int,
    pages: tuple[int, int],
    layout: HostLayout,
    paged: bool,
    one_allocation: bool,
    data: st.DataObject,
) -> None:
    own = data.draw(st.lists(st.sampled_from(layer_ids), unique=True))
    stored = data.draw(st.lists(st.sampled_from(layer_ids), unique=True))
    spec = PoolSpec("kv", row_bytes, tuple(layer_ids), paged=paged, own_allocation=tuple(own))
    device = DevicePool.allocate(
        spec, pages=pages[0], page_size=page_size, one_allocation=one_allocation
    )
    host = HostPool.allocate(device, pages=pages[1], layout=layout, stored_layers=stored)
    pool = Pool.pair(device, host)

    assert list(pool.layout.stored_layers) == sorted(stored)
    for position, layer in enumerate(layer_ids):
        if layer not in stored:
            continue
        for page in range(pages[0]):
            ctypes.memset(pool.layout.device_address(layer, page), 1, spec.page_bytes(page_size))
            assert as_bytes(device.layers[position]).sum() == spec.page_bytes(page_size) * (
                page + 1
            )
        for page in range(pages[1]):
            ctypes.memset(pool.layout.host_address(layer, page), 1, spec.page_bytes(page_size))
    assert (host.tensor == 1).all()
    for position, layer in enumerate(layer_ids):
        assert (device.layers[position] == (1 if layer in stored else 0)).all()


@pytest.mark.parametrize("model", GEOMETRIES, ids=lambda model: model.name)
def test_every_named_geometry_pairs_in_both_layouts(model: Geometry) -> None:
    for spec in model.pools:
        device = DevicePool.allocate(spec, pages=1, page_size=model.page_size)
        for layout in LAYOUTS:
            pool = Pool.pair(device, HostPool.allocate(device, pages=1, layout=layout))
            assert pool.layout.page_bytes == spec.page_bytes(model.page_size)
            assert pool.num_layers == spec.layer_ids[-1] + 1
            assert pool.page_size == model.page_size
            assert pool.name == spec.name
        assert len(device.allocations) == 1 + len(spec.own_allocation)


def test_separate_allocations_are_made_when_asked_for() -> None:
    spec = PoolSpec("kv", 8, (0, 1, 2))
    device = DevicePool.allocate(spec, pages=2, page_size=4, one_allocation=False)
    assert len(device.allocations) == 3


def test_pool_keeps_its_tensors_alive() -> None:
    device = DevicePool.allocate(PoolSpec("kv", 8, (0,)), pages=2, page_size=4)
    pool = Pool.pair(device, HostPool.allocate(device, pages=2))
    del device
    pool.device.layers[0].fill_(9)
    backup(pool, [(0, 1)])
    assert (pool.host.tensor[1, 0] == 9).all()


def test_pinned_ranges_reach_the_native_layout() -> None:
    device = DevicePool.from_layers("kv", torch.zeros(1, 32, 8, dtype=torch.uint8), page_size=16)
    buffer = torch.zeros(2, 1, 128, dtype=torch.uint8)
    half = [(buffer.data_ptr(), 128)]
    whole = [*half, (buffer.data_ptr() + 128, 128)]

    Pool.pair(
        device,
        HostPool.from_tensor(device, buffer, layout="page_first_direct", registrations=whole),
    )
    with pytest.raises(LayoutError, match="registration"):
        Pool.pair(
            device,
            HostPool.from_tensor(device, buffer, layout="page_first_direct", registrations=half),
        )


def test_memory_of_both_tiers_comes_from_where_it_is_asked_for() -> None:
    asked: list[int] = []

    def counted(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    spec = PoolSpec("kv", 8, (0, 1, 2), own_allocation=(2,))
    device = DevicePool.allocate(spec, pages=2, page_size=4, memory=counted)
    HostPool.allocate(device, pages=5, memory=counted)
    assert sorted(asked) == [64, 128, 480]


# --- the rest is refused -------------------------------------------------------------------


# sgl-project/sglang#37534, sgl-project/sglang#13431, sgl-project/sglang#40304
@pytest.mark.parametrize(
    ("host_row", "device_row"), [(128, 132), (132, 528), (528, 576), (576, 656), (656, 1152)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_page_narrower_than_the_device_page_is_refused_naming_both_widths(
    host_row: int, device_row: int, layout: HostLayout
) -> None:
    device = DevicePool.allocate(PoolSpec("kv", device_row, (0, 1)), pages=1, page_size=64)
    narrow = DevicePool.allocate(PoolSpec("kv", host_row, (0, 1)), pages=1, page_size=64)
    host = HostPool.allocate(narrow, pages=1, layout=layout)

    with pytest.raises(LayoutError) as refused:
        Pool.pair(device, host)

    assert str(64 * host_row) in str(refused.value)
    assert str(64 * device_row) in str(refused.value)


# sgl-project/sglang#37534
def test_callers_buffer_sized_for_narrower_rows_is_refused_naming_both_widths() -> None:
    device = DevicePool.allocate(PoolSpec("kv", 656, (0, 1)), pages=1, page_size=64)
    buffer = torch.zeros(3, 2, 64, 1, 576, dtype=torch.uint8)
    host = HostPool.from_tensor(device, buffer, layout="page_first_direct")
    with pytest.raises(LayoutError, match=r"36864.*41984"):
        Pool.pair(device, host)


def head_major() -> torch.Tensor:
    return torch.zeros(8, 64, 16).permute(1, 0, 2)


def padded_rows() -> torch.Tensor:
    return torch.zeros(64, 24)[:, :16]


def every_second_page() -> torch.Tensor:
    return torch.zeros(8, 16, 4)[::2].flatten(1, 2)


def expanded() -> torch.Tensor:
    return torch.zeros(1, 16).expand(64, 16)


def every_second_slot() -> torch.Tensor:
    return torch.zeros(128, 16)[::2]


# LMCache/LMCache#2374, LMCache/LMCache#3821, vllm-project/vllm#46888
@pytest.mark.parametrize(
    "view", [head_major, padded_rows, every_second_page, expanded, every_second_slot]
)
@pytest.mark.parametrize("describe", [DevicePool.from_layers, DevicePool.from_paged_layers])
def test_view_whose_rows_are_not_packed_is_refused_naming_its_strides(
    view: Callable[[], torch.Tensor], describe: Callable[..., DevicePool]
) -> None:
    tensor = view()
    packed = tensor.contiguous()

    describe("kv", [packed], page_size=1)
    with pytest.raises(LayoutError) as refused:
        describe("kv", [packed, tensor], page_size=1)

    assert "layer 1" in str(refused.value)
    assert f"strides {tensor.stride()}" in str(refused.value)
    assert f"packed ones are {packed.stride()}" in str(refused.value)


def test_layers_in_the_second_dimension_are_refused() -> None:
    slots_first = torch.zeros(64, 3, 16)
    with pytest.raises(LayoutError, match="not packed"):
        DevicePool.from_layers("kv", slots_first.transpose(0, 1), page_size=16)


def test_slots_that_are_no_multiple_of_the_page_are_refused() -> None:
    with pytest.raises(LayoutError, match="130 slots is not a multiple of page_size 64"):
        DevicePool.from_layers("kv", [torch.zeros(130, 8)], page_size=64)


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (torch.zeros(64, 8, dtype=torch.float16), "float16.*float32"),
        (torch.zeros(128, 8), "128 in its first dimension.*64"),
        (torch.zeros(64, 9), "2304 bytes are not 4 pages of 512 bytes"),
    ],
    ids=["dtype", "slots", "width"],
)
def test_layers_that_differ_are_refused_naming_both(second: torch.Tensor, named: str) -> None:
    with pytest.raises(LayoutError, match=f"layer 1: .*{named}"):
        DevicePool.from_layers("kv", [torch.zeros(64, 8), second], page_size=16)


@pytest.mark.parametrize(
    ("layer_ids", "named"),
    [
        ([0, 0], "layer_ids: 0 at position 1 must be at least 1"),
        ([3, 1], "layer_ids: 1 at position 1 must be at least 4"),
        ([-2, 1], "layer_ids: -2 at position 0 must be at least 0"),
        ([0], "2 layers for 1 layer_ids"),
        ([], "layer_ids: 0 layers"),
    ],
)
def test_layer_ids_that_are_not_increasing_are_refused(layer_ids: list[int], named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        DevicePool.from_layers("kv", torch.zeros(2, 32, 8), page_size=16, layer_ids=layer_ids)


@pytest.mark.parametrize(
    ("layers", "page_size", "named"),
    [
        ([], 16, "layers: 0 layers"),
        ([torch.zeros(0, 8)], 16, "pages: 0"),
        ([torch.zeros(32, 0)], 16, "page_bytes: 0"),
        ([torch.zeros(32, 8)], 0, "page_size: 0"),
        ([torch.zeros(32)], 16, r"layers\[0\]: shape \(32,\) has 1 dimensions"),
        (torch.zeros(32, 8), 16, r"layers\[0\]: shape \(8,\) has 1 dimensions"),
    ],
)
def test_layers_that_hold_nothing_are_refused(
    layers: list[torch.Tensor] | torch.Tensor, page_size: int, named: str
) -> None:
    with pytest.raises(LayoutError, match=named):
        DevicePool.from_layers("kv", layers, page_size=page_size)


def test_one_tensor_given_for_two_layers_is_refused() -> None:
    layer = torch.zeros(32, 8)
    device = DevicePool.from_layers("kv", [layer, layer], page_size=16)
    with pytest.raises(LayoutError, match="overlap"):
        Pool.pair(device, HostPool.allocate(device, pages=1))


def test_page_first_is_refused_by_name_with_the_reason() -> None:
    device = DevicePool.from_layers("kv", torch.zeros(1, 32, 8), page_size=16)
    reason = "'page_first' interleaves the layers of a page token by token"
    with pytest.raises(LayoutError, match=reason):
        HostPool.allocate(device, pages=1, layout="page_first")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=reason):
        HostPool.from_tensor(device, torch.zeros(2, 1, 128), layout="page_first")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="'diagonal' is not 'page_first_direct' or"):
        HostPool.allocate(device, pages=1, layout="diagonal")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (torch.zeros(4, 512), "has 2 dimensions"),
        (torch.zeros(4, 2, 256)[:, :, ::2], "not packed"),
        (torch.zeros(4, 1, 128), "row 1 is beyond the 1 rows"),
        (torch.zeros(0, 2, 128), "host pages: 0"),
        (torch.zeros(4, 2, 128, device="meta"), "lies on meta"),
    ],
    ids=["shape", "padded", "rows", "pages", "device"],
)
def test_host_buffer_that_does_not_fit_its_layout_is_refused(
    tensor: torch.Tensor, named: str
) -> None:
    device = DevicePool.from_layers("kv", torch.zeros(2, 32, 8), page_size=16)
    with pytest.raises(LayoutError, match=named):
        HostPool.from_tensor(device, tensor, layout="page_first_direct")


def test_host_pages_that_lie_on_each_other_are_refused() -> None:
    device = DevicePool.from_layers("kv", torch.zeros(2, 32, 8), page_size=16)
    same_page = torch.zeros(1, 2, 128).expand(4, 2, 128)
    host = HostPool.from_tensor(device, same_page, layout="page_first_direct")
    with pytest.raises(LayoutError, match="page_stride 0"):
        Pool.pair(device, host)


def test_layer_that_the_device_does_not_have_cannot_be_stored() -> None:
    device = DevicePool.from_layers("kv", torch.zeros(2, 32, 8), page_size=16, layer_ids=[0, 4])
    with pytest.raises(LayoutError, match=r"stored_layers: layer 3 .*\[0, 4\]"):
        HostPool.allocate(device, pages=1, stored_layers=[0, 3])


def test_tiers_that_describe_different_layers_do_not_pair() -> None:
    device = DevicePool.from_layers("kv", torch.zeros(2, 32, 8), page_size=16, layer_ids=[0, 4])
    other = DevicePool.from_layers("kv", torch.zeros(2, 32, 8), page_size=16, layer_ids=[0, 5])
    with pytest.raises(LayoutError, match=r"\[0, 5\].*\[0, 4\]"):
        Pool.pair(device, HostPool.allocate(other, pages=1))


def test_pools_of_no_pages_are_refused() -> None:
    spec = PoolSpec("kv", 8, (0,))
    with pytest.raises(LayoutError, match="pages: 0"):
        DevicePool.allocate(spec, pages=0, page_size=4)
    device = DevicePool.allocate(spec, pages=1, page_size=4)
    with pytest.raises(LayoutError, match="host pages: 0"):
        HostPool.allocate(device, pages=0)


def test_pool_larger_than_the_memory_that_is_left_is_refused() -> None:
    with pytest.raises(HostMemoryError, match="above the budget"):
        DevicePool.allocate(PoolSpec("kv", 2**40, (0,)), pages=2**10, page_size=4)


# --- memory that torch maps in pieces ------------------------------------------------------------


def test_layers_in_an_expandable_segment_are_allocations_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = torch.zeros(3, 8, 16, dtype=torch.uint8)
    pool = DevicePool.from_layers("kv", together, page_size=4)
    begin = together.data_ptr()
    assert pool.allocations == ((begin, 3 * 128),)
    for segment, found in (
        ((begin - 64, 1024), tuple((begin + layer * 128, 128) for layer in range(3))),
        ((begin + 3 * 128, 1024), ((begin, 3 * 128),)),  # another's
    ):
        monkeypatch.setattr(pools, "_expandable_segments", lambda device, s=segment: [s])
        assert pool.allocations == found


# --- pinned memory -------------------------------------------------------------------------


@dataclass(frozen=True)
class Registered:
    ranges: list[tuple[int, int]]


def halves(buffer: torch.Tensor, unit: int) -> Registered:
    """As a device registers a buffer that is larger than one registration may be."""
    half = buffer.nbytes // 2 // unit * unit
    return Registered([(buffer.data_ptr(), half), (buffer.data_ptr() + half, buffer.nbytes - half)])


def test_pinned_ranges_of_a_new_buffer_are_described() -> None:
    device = DevicePool.from_layers("kv", torch.zeros(3, 256, 8, dtype=torch.uint8), page_size=64)
    host = HostPool.allocate(device, pages=4, pin=halves)
    assert host.registrations == tuple(halves(host.tensor, device.page_bytes).ranges)
    assert isinstance(host.pinned, Registered)
    Pool.pair(device, host)
    assert HostPool.allocate(device, pages=4).registrations == ()


def test_pinned_ranges_that_leave_bytes_out_are_refused() -> None:
    device = DevicePool.from_layers("kv", torch.zeros(3, 256, 8, dtype=torch.uint8), page_size=64)

    def first_half(buffer: torch.Tensor, unit: int) -> Registered:
        return Registered(halves(buffer, unit).ranges[:1])

    host = HostPool.allocate(device, pages=4, pin=first_half)
    with pytest.raises(LayoutError, match="registrations: 3072 of the host buffer's 6144 bytes"):
        Pool.pair(device, host)
