"""The replay's cache and server: which pages they take, keep, move and give back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_helpers import PAGE, Planned, conversations, request

from kvburst.replay.prefix_cache import Claim, Node
from kvburst.replay.trace import Request


def test_device_pages_come_back_last_in_first_out_and_host_pages_first_in_first_out() -> None:
    mover = Planned([], device_pages=6, host_pages=6).mover
    taken = mover.take_device(6)
    mover.free_device(taken[1:3])
    mover.free_device(taken[4:5])
    assert mover.take_device(3) == [taken[4], taken[1], taken[2]]
    first = mover.write(taken[:3])
    mover.free_host(first)
    assert mover.write(taken[:4]) == [3, 4, 5, first[0]]


def test_prefix_found_on_the_device_is_not_moved() -> None:
    # 33 pages each of 64: only one runs at a time.
    planned = Planned([request([0, i], output=17 * PAGE) for i in (1, 2)]).run()
    assert planned.server.counts.tokens_hit_on_device == 512
    assert planned.bursts("load") == []


def test_prefix_evicted_to_the_host_comes_back() -> None:
    fill = [request([10 + i], output=50 * PAGE) for i in range(2)]
    planned = Planned([request([1, 2], output=40 * PAGE), *fill, request([1, 2, 3])]).run()
    counts = planned.server.counts
    assert counts.tokens_hit_on_host == 1024
    assert counts.requests_hit_on_host == 1
    (device, host) = planned.bursts("load")[0]
    first_backup = planned.bursts("backup")[0]
    assert host == first_backup[1][:16]
    assert len(set(device)) == 16
    assert counts.tokens_prefilled_again == 0


def test_prefix_evicted_from_both_tiers_is_prefilled_again() -> None:
    fill = [request([10 + i], output=50 * PAGE) for i in range(3)]
    requests = [request([1, 2], output=40 * PAGE), *fill, request([1, 2, 3])]
    planned = Planned(requests, host_pages=64).run()
    assert planned.server.counts.tokens_hit_on_host == 0
    assert planned.server.counts.tokens_prefilled_again == 1024


def test_last_token_of_a_prompt_is_computed_even_if_cached() -> None:
    twice = [request([1], output=50 * PAGE), request([1], output=50 * PAGE)]
    counts = Planned(twice).run().server.counts
    assert counts.tokens_hit_on_device == 512 - PAGE
    assert counts.tokens_prefilled == 512 + PAGE


def test_long_prompt_is_backed_up_chunk_by_chunk() -> None:
    blocks = list(range(40))
    planned = Planned([request(blocks, output=0)], device_pages=512, host_pages=512).run()
    assert [len(device) for device, _ in planned.bursts("backup")] == [128, 128, 64]


def test_decode_pages_of_concurrent_requests_are_interleaved() -> None:
    planned = Planned([request([i], output=4 * PAGE) for i in range(3)]).run()
    *_, (device, _) = planned.bursts("backup")
    # Three requests of 8 pages each came first; then a page for each of them in turn.
    assert device == [24, 27, 30, 33, 25, 28, 31, 34, 26, 29, 32, 35]


def test_loads_of_one_step_are_one_burst() -> None:
    first = [request([i, 10 + i], output=0) for i in range(2)]
    fill = request([90], output=56 * PAGE)
    again = [request([i, 10 + i, 20 + i], output=0) for i in range(2)]
    planned = Planned([*first, fill, *again]).run()
    (device, host) = planned.bursts("load")[0]
    assert len(planned.bursts("load")) == 1
    assert len(device) == len(host) == 32
    assert planned.server.counts.requests_hit_on_host == 2


def test_page_computed_twice_is_kept_once() -> None:
    planned = Planned([request([7], output=0), request([7], output=0)]).run()
    assert planned.mover.free_device_pages == 64 - 8
    assert sum(len(node) for node in planned.cache.nodes()) == 8
    assert [len(device) for device, _ in planned.bursts("backup")] == [8]


def test_everything_is_backed_up_unless_the_host_is_full() -> None:
    planned = Planned([request([1], output=4 * PAGE)], host_pages=8).run()
    kept = {len(node): node.host for node in planned.cache.nodes()}
    assert kept[8] is not None
    assert kept[4] is None


class Cached:
    """A cache into which paths of single-page contents go by hand."""

    def __init__(self, device_pages: int, host_pages: int = 64) -> None:
        planned = Planned([], device_pages, host_pages)
        self.cache, self.mover, self.log = planned.cache, planned.mover, planned.log

    def put(self, contents: list[int], *, back_up: bool = True) -> Claim:
        claim = self.cache.claim(self.cache.match(contents))
        new = len(contents) - len(claim.pages)
        self.cache.make_room(new)
        pages = [*claim.pages, *self.mover.take_device(new)]
        claim = self.cache.insert(claim, contents, pages)
        if back_up:
            self.cache.back_up()
            self.cache.finish_backups()
        return claim

    def keep(self, contents: list[int]) -> None:
        self.cache.release(self.put(contents))

    def tiers(self, contents: list[int]) -> str:
        match = self.cache.match(contents)
        return f"{match.device_pages} device, {match.host_pages} host"


def test_least_recently_used_leaf_leaves_the_device_first() -> None:
    cached = Cached(device_pages=6)
    cached.keep([1, 2])
    cached.keep([3, 4])
    cached.keep([5, 6])
    cached.keep([1, 2])
    cached.cache.make_room(2)
    assert cached.tiers([1, 2]) == "2 device, 0 host"
    assert cached.tiers([3, 4]) == "0 device, 2 host"
    assert cached.tiers([5, 6]) == "2 device, 0 host"


def test_leaf_leaves_before_the_prefix_that_it_continues() -> None:
    cached = Cached(device_pages=6)
    cached.keep([1, 2])
    cached.keep([1, 2, 3, 4])
    cached.cache.make_room(4)
    assert cached.tiers([1, 2, 3, 4]) == "2 device, 2 host"
    cached.cache.make_room(6)
    assert cached.tiers([1, 2, 3, 4]) == "0 device, 4 host"


def test_locked_prefix_stays_on_the_device() -> None:
    cached = Cached(device_pages=4)
    claim = cached.put([1, 2])
    cached.keep([3, 4])
    cached.cache.make_room(2)
    assert cached.tiers([1, 2]) == "2 device, 0 host"
    assert cached.cache.evictable_pages == 0
    cached.cache.release(claim)
    assert cached.cache.evictable_pages == 2


def test_page_being_backed_up_stays_on_the_device() -> None:
    cached = Cached(device_pages=4)
    cached.cache.release(cached.put([1, 2], back_up=False))
    assert cached.cache.evictable_pages == 0
    cached.cache.back_up()
    assert cached.cache.evictable_pages == 0
    cached.cache.finish_backups()
    assert cached.cache.evictable_pages == 2


def test_prefix_that_ends_within_a_stretch_cuts_it() -> None:
    cached = Cached(device_pages=8)
    cached.keep([1, 2, 3, 4])
    cached.cache.make_room(8)
    claim = cached.cache.claim(cached.cache.match([1, 2, 9]))
    assert len(claim.pages) == 2
    assert cached.tiers([1, 2, 3, 4]) == "2 device, 2 host"
    assert cached.cache.evictable_pages == 0


def test_stretch_that_is_cut_while_it_is_backed_up_is_backed_up_whole() -> None:
    cached = Cached(device_pages=8)
    first = cached.put([1, 2, 3, 4], back_up=False)
    second = cached.put([1, 2, 5, 6])
    cached.cache.release(first)
    cached.cache.release(second)
    cached.cache.make_room(8)
    assert cached.tiers([1, 2, 3, 4]) == "0 device, 4 host"
    assert cached.tiers([1, 2, 5, 6]) == "0 device, 4 host"


def test_host_keeps_the_prefix_and_drops_the_leaf() -> None:
    cached = Cached(device_pages=4, host_pages=4)
    cached.keep([1, 2])
    cached.keep([1, 2, 3])
    cached.cache.make_room(4)
    cached.keep([7, 8])
    assert cached.tiers([1, 2, 3]) == "0 device, 2 host"
    assert cached.tiers([7, 8]) == "2 device, 0 host"


def test_matching_changes_nothing() -> None:
    cached = Cached(device_pages=4)
    cached.keep([1, 2])
    cached.keep([3, 4])
    for _ in range(3):
        cached.cache.match([1, 2])
    cached.cache.make_room(2)
    assert cached.tiers([1, 2]) == "0 device, 2 host"


# --- whatever happens ----------------------------------------------------------------------


def check_tree(planned: Planned) -> None:
    """After a run nobody holds a page but the cache, and the tree's rules hold."""
    nodes = list(planned.cache.nodes())
    device = [page for node in nodes for page in node.device or []]
    host = [page for node in nodes for page in node.host or []]
    assert len(set(device)) == len(device)
    assert len(set(host)) == len(host)
    assert planned.mover.free_device_pages == planned.sizes.device_pages - len(device)
    assert planned.mover.free_host_pages == planned.sizes.host_pages - len(host)
    assert planned.cache.evictable_pages == len(device)
    for node in nodes:
        check_node(node)


def check_node(node: Node) -> None:
    assert node.locks == 0
    assert node.device is not None or node.host is not None
    for pages in (node.device, node.host):
        assert pages is None or len(pages) == len(node)
    for first, child in node.children.items():
        assert child.parent is node
        assert child.contents[0] == first
        assert child.device is None or node.device is not None
        assert child.host is None or node.host is not None


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    requests=st.integers(1, 40),
    device_pages=st.integers(54, 150),
    host_pages=st.integers(1, 300),
)
def test_no_page_is_lost_or_held_twice(
    seed: int, requests: int, device_pages: int, host_pages: int
) -> None:
    trace = [
        Request(i, 0.0, each["input_length"], each["output_length"], tuple(each["hash_ids"]))
        for i, each in enumerate(conversations(seed, requests), start=1)
    ]
    planned = Planned(trace, device_pages, host_pages).run()
    assert planned.server.counts.requests == requests
    check_tree(planned)
    counts = planned.server.counts
    found = counts.tokens_hit_on_device + counts.tokens_hit_on_host
    assert found + counts.tokens_prefilled == sum(each.input_length for each in trace)
    assert counts.tokens_prefilled_again <= counts.tokens_prefilled


def test_request_that_never_fits_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="does not fit into an idle server"):
        Planned([request([0, 1], output=0)], device_pages=15).run()
