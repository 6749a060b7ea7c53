"""The drop-in copies move what a naive copy moves, touch nothing else, and refuse the rest."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvburst import LayoutError, PageError
from kvburst.kvcacheio import (
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
)

PAGES = 12


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def slots_of(pages: Sequence[int], page_size: int) -> torch.Tensor:
    first = torch.tensor(pages, dtype=torch.int64) * page_size
    return (first[:, None] + torch.arange(page_size)).reshape(-1)


def some_pages(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(PAGES), count)


class Tiers:
    """`kinds` host tensors, page-first, and so many layers each on the device; random bytes."""

    def __init__(self, kinds: int, layers: int, page_size: int, row: int, together: bool) -> None:
        self.kinds, self.layers, self.page_size = kinds, layers, page_size
        self.host = [random_bytes(PAGES, layers, page_size, 1, row) for _ in range(kinds)]
        block = random_bytes(kinds * layers, PAGES * page_size, 1, row)
        self.device = [each if together else each.clone() for each in block]

    def copy(self) -> "Tiers":
        twin = Tiers.__new__(Tiers)
        twin.kinds, twin.layers, twin.page_size = self.kinds, self.layers, self.page_size
        twin.host = [each.clone() for each in self.host]
        twin.device = [each.clone() for each in self.device]
        return twin

    def equals(self, other: "Tiers") -> bool:
        return all(
            torch.equal(ours, theirs)
            for ours, theirs in zip(self.host + self.device, other.host + other.device, strict=True)
        )


shapes = st.tuples(
    st.sampled_from([1, 2]),
    st.integers(1, 5),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([1, 8, 132]),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes,
    count=st.integers(0, PAGES),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_backup_moves_the_pages_of_all_layers_and_nothing_else(
    shape: tuple[int, int, int, int, bool], count: int, seed: int, dtype: torch.dtype
) -> None:
    tiers = Tiers(*shape)
    expected = tiers.copy()
    on_device = slots_of(some_pages(count, seed), tiers.page_size)
    on_host = slots_of(some_pages(count, seed + 1), tiers.page_size)
    for kind in range(tiers.kinds):
        for layer in range(tiers.layers):
            page, slot = on_host // tiers.page_size, on_host % tiers.page_size
            source = expected.device[kind * tiers.layers + layer]
            expected.host[kind][page, layer, slot] = source[on_device]

    transfer_kv_all_layer_direct_lf_pf(
        src_ptrs=tiers.device,
        dst_ptrs=tiers.host,
        src_indices=on_device.to(dtype),
        dst_indices=on_host.to(dtype),
        page_size=tiers.page_size,
    )

    assert tiers.equals(expected)


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes,
    count=st.integers(0, PAGES),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_load_moves_the_layers_it_is_given_from_layer_id_on(
    shape: tuple[int, int, int, int, bool], count: int, seed: int, data: st.DataObject
) -> None:
    tiers = Tiers(*shape)
    first = data.draw(st.integers(0, tiers.layers - 1))
    loaded = data.draw(st.integers(1, tiers.layers - first))
    expected = tiers.copy()
    on_device = slots_of(some_pages(count, seed), tiers.page_size)
    on_host = slots_of(some_pages(count, seed + 1), tiers.page_size)
    chosen = [kind * tiers.layers + layer for kind in range(tiers.kinds) for layer in range(loaded)]
    for kind in range(tiers.kinds):
        for layer in range(loaded):
            page, slot = on_host // tiers.page_size, on_host % tiers.page_size
            target = expected.device[kind * tiers.layers + layer]
            target[on_device] = expected.host[kind][page, first + layer, slot]

    transfer_kv_per_layer_direct_pf_lf(
        src_ptrs=tiers.host,
        dst_ptrs=[tiers.device[index] for index in chosen],
        src_indices=on_host,
        dst_indices=on_device,
        layer_id=first,
        page_size=tiers.page_size,
    )

    assert tiers.equals(expected)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 4),
    page_size=st.sampled_from([1, 4, 16]),
    count=st.integers(0, PAGES),
    seed=st.integers(0, 1000),
    whole_pages=st.booleans(),
)
def test_direct_copy_moves_slots_whether_they_form_pages_or_not(
    layers: int, page_size: int, count: int, seed: int, whole_pages: bool
) -> None:
    source = [random_bytes(PAGES * page_size, 2, 24) for _ in range(layers)]
    target = [random_bytes(PAGES * page_size, 2, 24) for _ in range(layers)]
    if whole_pages:
        read = slots_of(some_pages(count, seed), page_size)
        written = slots_of(some_pages(count, seed + 1), page_size)
    else:
        generator = torch.Generator().manual_seed(seed)
        read = torch.randperm(PAGES * page_size, generator=generator)[: count * page_size]
        written = torch.randperm(PAGES * page_size, generator=generator)[: count * page_size]
    expected = [each.clone() for each in target]
    for from_layer, to_layer in zip(source, expected, strict=True):
        to_layer[written] = from_layer[read]

    transfer_kv_direct(
        src_layers=source,
        dst_layers=target,
        src_indices=read,
        dst_indices=written,
        page_size=page_size,
    )

    assert all(torch.equal(*pair) for pair in zip(target, expected, strict=True))


def test_permuted_slots_of_a_page_are_copied_one_by_one() -> None:
    # sgl-project/sglang#24121
    source, target = random_bytes(16, 8), torch.zeros(16, 8, dtype=torch.uint8)
    read, written = torch.tensor([8, 10, 9, 11]), torch.tensor([3, 2, 1, 0])
    transfer_kv_direct([source], [target], read, written, 4)
    assert torch.equal(target[written], source[read])
    assert int(target[4:].sum()) == 0


def test_one_source_may_go_to_two_places() -> None:
    # kvcache-ai/Mooncake#3876
    source, target = random_bytes(16, 8), torch.zeros(16, 8, dtype=torch.uint8)
    transfer_kv_direct([source], [target], slots_of([1, 1], 4), slots_of([0, 2], 4), 4)
    assert torch.equal(target[0:4], source[4:8])
    assert torch.equal(target[8:12], source[4:8])


def test_host_pages_may_be_a_view_with_holes() -> None:
    buffer = random_bytes(2 * PAGES, 6, 4, 8)
    before = buffer.clone()
    host, device = buffer[::2, 1:5], [random_bytes(PAGES * 4, 8) for _ in range(4)]
    transfer_kv_all_layer_direct_lf_pf(device, [host], slots_of([3], 4), slots_of([5], 4), 4)
    for layer in range(4):
        assert torch.equal(host[5, layer], device[layer][12:16])
    host[5] = before[10, 1:5]
    assert torch.equal(buffer, before)


Call = Callable[[], None]


def refused() -> dict[str, tuple[type[Exception], list[str], Call]]:
    host = torch.zeros(PAGES, 3, 4, 8, dtype=torch.uint8)
    device = [torch.zeros(PAGES * 4, 8, dtype=torch.uint8) for _ in range(3)]
    four, page = slots_of([1], 4), slots_of([2], 4)

    def load(**changed: object) -> Call:
        arguments = {
            "src_ptrs": [host],
            "dst_ptrs": device[:1],
            "src_indices": page,
            "dst_indices": four,
            "layer_id": 0,
            "page_size": 4,
        }
        return lambda: transfer_kv_per_layer_direct_pf_lf(**(arguments | changed))  # type: ignore[arg-type]

    def backup(**changed: object) -> Call:
        arguments = {
            "src_ptrs": device,
            "dst_ptrs": [host],
            "src_indices": four,
            "dst_indices": page,
            "page_size": 4,
        }
        return lambda: transfer_kv_all_layer_direct_lf_pf(**(arguments | changed))  # type: ignore[arg-type]

    def direct(**changed: object) -> Call:
        arguments = {
            "src_layers": device[:1],
            "dst_layers": device[1:2],
            "src_indices": four,
            "dst_indices": page,
            "page_size": 4,
        }
        return lambda: transfer_kv_direct(**(arguments | changed))  # type: ignore[arg-type]

    narrow = torch.zeros(PAGES, 3, 4, 7, dtype=torch.uint8)
    strided = torch.zeros(PAGES * 4, 16, dtype=torch.uint8)[:, ::2]
    return {
        "a page beyond the host": (
            PageError,
            ["src_indices", str(PAGES * 4), str(PAGES)],
            load(src_indices=slots_of([PAGES], 4)),
        ),
        "a page before the first": (
            PageError,
            ["dst_indices", "-4"],
            load(dst_indices=slots_of([-1], 4)),
        ),
        "half a page": (PageError, ["2", "4"], load(src_indices=page[:2], dst_indices=four[:2])),
        "a slot in the middle of a page": (
            PageError,
            ["dst_indices", "5"],
            load(dst_indices=four + 1),
        ),
        "slots that do not follow each other": (
            PageError,
            ["src_indices", "10"],
            load(src_indices=torch.tensor([8, 10, 9, 11])),
        ),
        "fewer pages on one side": (
            PageError,
            ["4", "8"],
            load(src_indices=slots_of([1, 2], 4)),
        ),
        "a destination twice": (
            PageError,
            ["dst_indices"],
            load(src_indices=slots_of([1, 2], 4), dst_indices=slots_of([3, 3], 4)),
        ),
        "floating-point indices": (PageError, ["float32"], load(src_indices=page.float())),
        "a layer beyond the last": (LayoutError, ["layer_id", "3"], load(layer_id=3)),
        "a layer before the first": (LayoutError, ["layer_id", "-1"], load(layer_id=-1)),
        "three host tensors": (LayoutError, ["src_ptrs", "3"], load(src_ptrs=[host] * 3)),
        "no layers": (LayoutError, ["dst_ptrs", "0"], load(dst_ptrs=[])),
        "layers that K and V cannot share": (
            LayoutError,
            ["src_ptrs", "3", "2"],
            backup(dst_ptrs=[host, host.clone()]),
        ),
        "another page size": (LayoutError, ["dst_ptrs[0]", "4", "2"], backup(page_size=2)),
        "no page size": (PageError, ["page_size", "0"], backup(page_size=0)),
        # sgl-project/sglang#37534
        "host rows that are narrower": (
            LayoutError,
            ["src_ptrs[0]", "32", "28"],
            backup(dst_ptrs=[narrow]),
        ),
        "more layers than the host has": (
            LayoutError,
            ["6", "3"],
            backup(src_ptrs=device + device),
        ),
        # vllm-project/vllm#46888
        "device rows that are not packed": (
            LayoutError,
            ["not packed"],
            backup(src_ptrs=[strided] * 3),
        ),
        "bits of another type": (
            LayoutError,
            ["src_ptrs[0]", "int8", "uint8"],
            backup(src_ptrs=[layer.view(torch.int8) for layer in device]),
        ),
        "boolean indices": (PageError, ["src_indices", "bool"], direct(src_indices=four > 0)),
        "indices in rows": (
            PageError,
            ["dst_indices", "2"],
            direct(dst_indices=page.view(1, 4)),
        ),
        "sides of different length": (
            LayoutError,
            ["src_layers", "2", "1"],
            direct(src_layers=device[:2]),
        ),
        "rows of different width": (
            LayoutError,
            ["src_layers[0]", "(7,)", "(8,)"],
            direct(src_layers=[torch.zeros(PAGES * 4, 7, dtype=torch.uint8)]),
        ),
        "a number of slots that makes no pages": (
            PageError,
            ["src_indices", "3", "4"],
            direct(src_indices=four[:3], dst_indices=page[:3]),
        ),
        "a slot beyond the last": (
            PageError,
            ["dst_indices", str(PAGES * 4)],
            direct(dst_indices=torch.tensor([0, 1, 2, PAGES * 4])),
        ),
    }


@pytest.mark.parametrize("case", refused())
def test_is_refused_with_argument_value_and_bound(case: str) -> None:
    error, words, call = refused()[case]
    with pytest.raises(error) as raised:
        call()
    for word in words:
        assert word in str(raised.value)


def test_refused_call_moves_nothing() -> None:
    source, target = random_bytes(16, 8), torch.zeros(16, 8, dtype=torch.uint8)
    with pytest.raises(PageError):
        transfer_kv_direct([source], [target], slots_of([0, 1], 4), slots_of([0, 9], 4), 4)
    assert int(target.sum()) == 0
