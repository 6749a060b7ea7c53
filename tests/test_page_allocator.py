"""Pages are handed out once, and come back late where a burst still uses them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvburst import PageAllocator, PageError
from kvburst._core import LayoutError

PAGE = 4


def allocator(pages: int = 8, order: str = "lifo") -> PageAllocator:
    return PageAllocator(name="device tier", pages=pages, page_size=PAGE, order=order)


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def pages_of(indices: torch.Tensor | None) -> list[int]:
    assert indices is not None
    return [int(slot) // PAGE for slot in indices[::PAGE]]


def test_alloc_returns_whole_pages_of_slots() -> None:
    indices = allocator().alloc(2 * PAGE)
    assert indices is not None
    assert indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert indices.dtype == torch.int64


def test_alloc_beyond_what_is_free_is_none_and_takes_nothing() -> None:
    a = allocator(pages=2)
    assert a.alloc(3 * PAGE) is None
    assert a.alloc(2**62 // PAGE * PAGE) is None
    assert a.available_size() == 2 * PAGE


def test_alloc_of_nothing_is_an_empty_tensor() -> None:
    a = allocator()
    assert pages_of(a.alloc(0)) == []
    assert a.available_size() == a.size == 8 * PAGE


@pytest.mark.parametrize("count", [-PAGE, -1, 1, PAGE + 1])
def test_alloc_of_a_broken_page_is_refused(count: int) -> None:
    a = allocator()
    with pytest.raises(PageError, match=rf"device tier: {count} slots .* page_size 4"):
        a.alloc(count)
    assert a.available_size() == a.size


def test_freed_pages_join_the_front_of_a_lifo_list_in_their_order() -> None:
    a = allocator(pages=4)
    a.alloc(4 * PAGE)
    a.free(slots(3, 1))
    a.free(slots(2))
    assert pages_of(a.alloc(3 * PAGE)) == [2, 3, 1]


def test_freed_pages_join_the_end_of_a_fifo_list() -> None:
    a = allocator(pages=4, order="fifo")
    a.alloc(3 * PAGE)
    a.free(slots(2, 0))
    assert pages_of(a.alloc(3 * PAGE)) == [3, 2, 0]


# sgl-project/sglang#13483
@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (slots(0, 0), r"indices\[4\]: page 0 is not allocated"),
        (slots(1, 0, 1), r"indices\[8\]: page 1 is not allocated"),
        (slots(5), r"indices\[0\]: page 5 is not allocated"),
        (slots(0, 8), r"indices\[4\]: slot 32 is out of range, the tier has 8 pages"),
        (torch.arange(-PAGE, 0), r"indices\[0\]: slot -4 is out of range"),
        (torch.arange(2, 2 + PAGE), r"indices\[0\]: slot 2 does not start a page"),
        (torch.tensor([0, 1, 3, 2]), r"indices\[2\]: slot 3 must be 2"),
        (torch.arange(PAGE + 1), r"indices: 5 slots is not a multiple of page_size 4"),
        (slots(0).to(torch.float32), r"indices: dtype torch.float32"),
        (slots(0).reshape(2, 2), r"indices: 2 dimensions, must be 1"),
    ],
)
def test_a_bad_free_is_refused_whole(indices: torch.Tensor, message: str) -> None:
    a = allocator()
    a.alloc(3 * PAGE)
    before = a.available_size()
    with pytest.raises(PageError, match=message):
        a.free(indices)
    assert a.available_size() == before
    a.free(slots(0, 1, 2))  # each of them is still allocated, once
    assert a.available_size() == a.size


def test_freeing_twice_is_refused_and_leaves_the_free_count_alone() -> None:
    a = allocator()
    a.alloc(2 * PAGE)
    a.free(slots(1))
    with pytest.raises(PageError, match="page 1 is not allocated"):
        a.free(slots(0, 1))
    assert a.available_pages == 7


@pytest.mark.parametrize("order", ["lifo", "fifo"])
@given(data=st.data())
def test_no_page_is_ever_in_two_hands(order: str, data: st.DataObject) -> None:
    a = allocator(pages=6, order=order)
    held: list[int] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if data.draw(st.booleans()):
            wanted = data.draw(st.integers(0, 7))
            got = a.alloc(wanted * PAGE)
            assert (got is None) == (wanted > 6 - len(held))
            if got is not None:
                assert not set(pages_of(got)) & set(held)
                held += pages_of(got)
        elif held:
            leaving = data.draw(st.lists(st.sampled_from(held), unique=True, min_size=1))
            a.free(slots(*leaving))
            held = [page for page in held if page not in leaving]
        assert a.available_pages == 6 - len(held)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(LayoutError, match="pages: 0 is below the minimum of 1"):
        allocator(pages=0)
    with pytest.raises(LayoutError, match="order: 'random' must be 'lifo' or 'fifo'"):
        allocator(order="random")
