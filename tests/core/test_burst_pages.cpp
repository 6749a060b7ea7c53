#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "core/burst_pages.h"
#include "core/error.h"
#include "pools.h"
#include "refusals.h"

using namespace kvburst;
using namespace kvburst::testing;

namespace {

constexpr std::int64_t kPageSize = 4;

std::vector<PoolLayout> two_pools(std::int64_t first_pages = 32, std::int64_t second_pages = 32) {
  return {
      layout_of(page_first("kv", layers(2), 64, first_pages, first_pages), 1 << 20, 1 << 24),
      layout_of(page_first("index", layers(2), 16, second_pages, second_pages), 1 << 28, 1 << 29)};
}

/// Index tensors that live only as long as the call they are passed to.
class Collector {
 public:
  explicit Collector(Direction direction = Direction::load,
                     std::vector<PoolLayout> layouts = two_pools(),
                     IndexCheck check = IndexCheck::slots)
      : pages(layouts, direction, kPageSize, check) {}

  std::int64_t add(std::vector<std::int64_t> device, std::vector<std::int64_t> host) {
    const auto device_slots = slots_of(device, kPageSize);
    const auto host_slots = slots_of(host, kPageSize);
    return pages.append(view_of("device_indices", device_slots),
                        view_of("host_indices", host_slots));
  }
  std::int64_t add_own(std::vector<std::int64_t> device, std::vector<std::int64_t> host,
                       std::vector<std::int64_t> own_device, std::vector<std::int64_t> own_host) {
    const auto device_slots = slots_of(device, kPageSize);
    const auto host_slots = slots_of(host, kPageSize);
    const auto own_device_slots = slots_of(own_device, kPageSize);
    const auto own_host_slots = slots_of(own_host, kPageSize);
    const std::array own{BurstPages::Own{1, view_of("own_device", own_device_slots),
                                         view_of("own_host", own_host_slots)}};
    return pages.append(view_of("device_indices", device_slots),
                        view_of("host_indices", host_slots), own);
  }
  std::vector<PagePair> of(std::size_t pool) const {
    const auto pairs = pages.lists().of_pool(pool);
    return {pairs.begin(), pairs.end()};
  }

  BurstPages pages;
};

using Pairs = std::vector<PagePair>;

}  // namespace

TEST_CASE_TEMPLATE("indices are read by their own width, stride and order", Integer, std::int32_t,
                   std::int64_t) {
  const std::vector<PoolLayout> layouts = two_pools();
  BurstPages pages(layouts, Direction::load, kPageSize, IndexCheck::slots);
  const auto host = slots_of<Integer>(std::array<std::int64_t, 3>{7, 0, 31}, kPageSize);
  const IndexView host_view = view_of("host_indices", host);

  SUBCASE("packed, unsorted") {
    const auto device = slots_of<Integer>(std::array<std::int64_t, 3>{20, 3, 11}, kPageSize);
    CHECK(pages.append(view_of("device_indices", device), host_view) == 3);
  }
  SUBCASE("every second element") {
    const auto packed = slots_of<Integer>(std::array<std::int64_t, 3>{20, 3, 11}, kPageSize);
    // No element after the last one that is read.
    std::vector<Integer> spread(2 * packed.size() - 1, -1);
    for (std::size_t i = 0; i < packed.size(); ++i) spread[2 * i] = packed[i];
    const IndexView view{"device_indices", spread.data(), std::ssize(packed), 2, sizeof(Integer)};
    CHECK(pages.append(view, host_view) == 3);
  }
  SUBCASE("backwards") {
    const auto packed = slots_of<Integer>(std::array<std::int64_t, 3>{20, 3, 11}, kPageSize);
    const std::vector<Integer> reversed(packed.rbegin(), packed.rend());
    const IndexView view{"device_indices", &reversed.back(), std::ssize(reversed), -1,
                         sizeof(Integer)};
    CHECK(pages.append(view, host_view) == 3);
  }
  CHECK(pages.lists().lists[0] == Pairs{{20, 7}, {3, 0}, {11, 31}});
  CHECK(pages.num_pages() == 3);
}

TEST_CASE("the indices may be overwritten and freed once the call has returned") {
  Collector collector;
  auto device =
      std::make_unique<std::vector<std::int64_t>>(slots_of(std::array{5l, 6l}, kPageSize));
  const auto host = slots_of(std::array{1l, 2l}, kPageSize);
  collector.pages.append(view_of("device_indices", *device), view_of("host_indices", host));
  std::fill(device->begin(), device->end(), 0);
  device.reset();
  CHECK(collector.of(0) == Pairs{{5, 1}, {6, 2}});
}

TEST_CASE("a view of the wrong shape is refused") {
  Collector collector;
  const auto good = slots_of(std::array{1l, 2l}, kPageSize);
  const IndexView host = view_of("host_indices", good);
  IndexView device = view_of("device_indices", good);
  SUBCASE("odd width") {
    device.itemsize = 2;
    check_refused<PageError>([&] { collector.pages.append(device, host); },
                             {"device_indices", "2 bytes", "int32 (4) or int64 (8)"});
  }
  SUBCASE("not whole pages") {
    device.count = 7;
    check_refused<PageError>([&] { collector.pages.append(device, host); },
                             {"device_indices", "7 slots", "page_size 4"});
  }
  SUBCASE("less than nothing") {
    device.count = -4;
    check_refused<PageError>([&] { collector.pages.append(device, host); }, {"-4 slots"});
  }
  SUBCASE("of another length") {
    device.count = 4;
    check_refused<PageError>([&] { collector.pages.append(device, host); },
                             {"device_indices has 4", "host_indices has 8"});
  }
  CHECK(collector.pages.num_pages() == 0);
}

// vllm-project/vllm#50653
TEST_CASE("one bad id among a thousand refuses the whole call") {
  for (const Direction direction : {Direction::load, Direction::backup}) {
    for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{1200}, std::int64_t{1} << 40}) {
      Collector collector(direction, two_pools(1200, 1200));
      std::vector<std::int64_t> good;
      for (std::int64_t page = 0; page < 1001; ++page) good.push_back(page);
      std::vector<std::int64_t> spoilt = good;
      spoilt[500] = bad;
      check_refused<PageError>([&] { collector.add(spoilt, good); },
                               {"device_indices[2000]", std::to_string(4 * bad), "1200 pages"});
      check_refused<PageError>([&] { collector.add(good, spoilt); },
                               {"host_indices[2000]", std::to_string(4 * bad), "1200 pages"});
      CHECK(collector.pages.num_pages() == 0);
      CHECK(collector.add(good, good) == 1001);
    }
  }
}

TEST_CASE("the smaller of the pools that share a list is the bound") {
  Collector collector(Direction::load, two_pools(32, 20));
  check_refused<PageError>([&] { collector.add({20}, {0}); }, {"slot 80", "20 pages"});
  check_refused<PageError>([&] { collector.add({0}, {20}); }, {"slot 80", "20 pages"});
  CHECK(collector.add_own({20}, {31}, {19}, {0}) == 1);
  check_refused<PageError>([&] { collector.add_own({21}, {30}, {20}, {1}); },
                           {"own_device[0]", "slot 80", "20 pages"});
}

TEST_CASE("slots must begin a page, and under the full check follow each other") {
  const std::vector<std::int64_t> good{8, 9, 10, 11};
  const std::vector<std::int64_t> shifted{9, 10, 11, 12};
  const std::vector<std::int64_t> shuffled{8, 10, 9, 11};
  for (const IndexCheck check : {IndexCheck::pages, IndexCheck::slots}) {
    Collector collector(Direction::load, two_pools(), check);
    check_refused<PageError>(
        [&] { collector.pages.append(view_of("device_indices", shifted), view_of("host", good)); },
        {"device_indices[0]", "slot 9", "page_size 4"});
    const auto append_shuffled = [&] {
      collector.pages.append(view_of("device", good), view_of("host_indices", shuffled));
    };
    if (check == IndexCheck::slots) {
      check_refused<PageError>(append_shuffled, {"host_indices[1]", "slot 10", "must be 9"});
      CHECK(collector.pages.num_pages() == 0);
    } else {
      append_shuffled();
      CHECK(collector.of(0) == Pairs{{2, 2}});
    }
  }
}

TEST_CASE("a destination occurs once, within a call and across calls") {
  for (const Direction direction : {Direction::load, Direction::backup}) {
    Collector collector(direction);
    const auto add = [&](std::vector<std::int64_t> to, std::vector<std::int64_t> from) {
      return direction == Direction::load ? collector.add(to, from) : collector.add(from, to);
    };
    const std::string name = direction == Direction::load ? "device_indices" : "host_indices";
    check_refused<PageError>([&] { add({4, 5, 4}, {1, 2, 3}); },
                             {name + "[8]", "page 4", std::string(name_of(direction))});
    CHECK(add({4, 5}, {1, 2}) == 2);
    check_refused<PageError>([&] { add({6, 5}, {3, 4}); }, {name + "[4]", "page 5"});
    CHECK(collector.pages.num_pages() == 2);
    // Page 6 came with the refused call and is free to be used.
    CHECK(add({6}, {3}) == 1);
    CHECK(collector.pages.num_pages() == 3);
  }
}

// kvcache-ai/Mooncake#3876
TEST_CASE("one source may fill several destinations") {
  Collector collector;
  CHECK(collector.add({10, 20}, {5, 5}) == 2);
  CHECK(collector.of(0) == Pairs{{10, 5}, {20, 5}});
}

TEST_CASE("no pages are no error and no pages") {
  Collector collector;
  CHECK(collector.add({}, {}) == 0);
  CHECK(collector.add_own({}, {}, {}, {}) == 0);
  CHECK(collector.pages.num_pages() == 0);
  CHECK(collector.add({1}, {1}) == 1);
}

TEST_CASE("a pool's own pages depart from those it shared so far") {
  Collector collector;
  collector.add({1, 2}, {3, 4});
  collector.add_own({5}, {6}, {7}, {8});
  collector.add({9}, {10});
  CHECK(collector.of(0) == Pairs{{1, 3}, {2, 4}, {5, 6}, {9, 10}});
  CHECK(collector.of(1) == Pairs{{1, 3}, {2, 4}, {7, 8}, {9, 10}});
  CHECK(collector.pages.num_pages() == 4);
}

TEST_CASE("destinations are told apart by pool once a pool has its own") {
  Collector collector;
  collector.add({1}, {1});
  // 1 was a destination of both pools while they shared a list.
  check_refused<PageError>([&] { collector.add_own({2}, {2}, {1}, {2}); },
                           {"own_device[0]", "page 1"});
  CHECK(collector.pages.num_pages() == 1);
  collector.add_own({2}, {2}, {3}, {2});
  collector.add_own({3}, {3}, {2}, {3});
  check_refused<PageError>([&] { collector.add_own({4}, {4}, {3}, {4}); },
                           {"own_device[0]", "page 3"});
  CHECK(collector.of(0) == Pairs{{1, 1}, {2, 2}, {3, 3}});
  CHECK(collector.of(1) == Pairs{{1, 1}, {3, 2}, {2, 3}});
}

TEST_CASE("a call refused for one pool leaves every pool as it was") {
  Collector collector;
  collector.add_own({1}, {1}, {2}, {2});
  check_refused<PageError>([&] { collector.add_own({3, 4}, {3, 4}, {5, 2}, {5, 6}); },
                           {"own_device[4]", "page 2"});
  CHECK(collector.of(0) == Pairs{{1, 1}});
  CHECK(collector.of(1) == Pairs{{2, 2}});
  // Everything the refused call brought can still be used, on either list.
  CHECK(collector.add_own({3, 4}, {3, 4}, {5, 3}, {5, 6}) == 2);
  CHECK(collector.of(1) == Pairs{{2, 2}, {5, 5}, {3, 6}});
}

// sgl-project/sglang#31108
TEST_CASE("own pages that do not fit the burst are refused") {
  Collector collector;
  check_refused<PageError>([&] { collector.add_own({1, 2}, {1, 2}, {3}, {3}); },
                           {"own_device", "1 pages", "device_indices has 2"});
  check_refused<PageError>([&] { collector.add_own({1, 2}, {1, 2}, {3, 4}, {3}); },
                           {"own_device has 8", "own_host has 4"});
  const auto slots = slots_of(std::array{1l}, kPageSize);
  for (const std::size_t pool : {std::size_t{0}, std::size_t{2}}) {
    const std::array own{BurstPages::Own{pool, view_of("own", slots), view_of("own", slots)}};
    check_refused<PageError>(
        [&] { collector.pages.append(view_of("device", slots), view_of("host", slots), own); },
        {"own", "pool " + std::to_string(pool), "pools 1 to 1"});
  }
  const BurstPages::Own part{1, view_of("own", slots), view_of("own", slots)};
  const std::array twice{part, part};
  check_refused<PageError>(
      [&] { collector.pages.append(view_of("device", slots), view_of("host", slots), twice); },
      {"own", "pool 1", "twice"});
  CHECK(collector.pages.num_pages() == 0);
}

TEST_CASE("truncating drops the last pages and frees them for use") {
  Collector collector;
  collector.add({1, 2, 3}, {4, 5, 6});
  collector.add_own({7}, {7}, {8}, {8});
  check_refused<PageError>([&] { collector.pages.truncate(5); }, {"5", "4 collected"});
  check_refused<PageError>([&] { collector.pages.truncate(-1); }, {"-1", "4 collected"});
  collector.pages.truncate(2);
  CHECK(collector.of(0) == Pairs{{1, 4}, {2, 5}});
  CHECK(collector.of(1) == Pairs{{1, 4}, {2, 5}});
  CHECK(collector.add({3, 7, 8}, {6, 7, 8}) == 3);
  check_refused<PageError>([&] { collector.add({2}, {9}); }, {"page 2"});
}

TEST_CASE("taking the pages leaves an empty collection that reuses the memory handed in") {
  Collector collector;
  collector.add_own({1, 2}, {3, 4}, {5, 6}, {7, 8});
  PageLists first = collector.pages.take({});
  CHECK(first.of_pool(0).size() == 2);
  CHECK(first.of_pool(1)[0] == PagePair{5, 7});
  CHECK(collector.pages.num_pages() == 0);
  // The burst is over: its destinations are free, and both pools share a list again.
  CHECK(collector.add({1, 5}, {0, 1}) == 2);
  CHECK(collector.of(1) == Pairs{{1, 0}, {5, 1}});

  const void* memory = first.lists[0].data();
  const PageLists second = collector.pages.take(std::move(first));
  CHECK(second.lists[0] == Pairs{{1, 0}, {5, 1}});
  CHECK(collector.pages.num_pages() == 0);
  collector.add({9}, {9});
  CHECK(collector.of(0) == Pairs{{9, 9}});
  CHECK(collector.of(1) == Pairs{{9, 9}});
  CHECK(collector.pages.lists().lists[0].data() == memory);
}

TEST_CASE("no page is taken for a destination of an earlier burst") {
  Collector collector;
  PageLists spent;
  for (std::int64_t burst = 0; burst < 5000; ++burst) {
    const std::int64_t page = burst % 31;
    if (burst % 3 == 0) {
      REQUIRE(collector.add_own({page}, {page}, {page + 1}, {page}) == 1);
    } else {
      REQUIRE(collector.add({page}, {page}) == 1);
    }
    bool refused = false;
    try {
      collector.add({page}, {page});
    } catch (const PageError&) {
      refused = true;
    }
    REQUIRE(refused);
    REQUIRE(collector.pages.num_pages() == 1);
    if (burst % 5 == 0) {
      collector.pages.truncate(0);
      REQUIRE(collector.add({page}, {page}) == 1);
    }
    spent = collector.pages.take(std::move(spent));
    REQUIRE(spent.of_pool(0)[0] == PagePair{page, page});
    REQUIRE(collector.pages.num_pages() == 0);
  }
}

TEST_CASE("a collection needs pools and a page size") {
  const std::vector<PoolLayout> layouts = two_pools();
  check_refused<LayoutError>([&] { BurstPages({}, Direction::load, kPageSize, IndexCheck::pages); },
                             {"0 pools"});
  check_refused<LayoutError>([&] { BurstPages(layouts, Direction::load, 0, IndexCheck::pages); },
                             {"page_size", "0 slots", "minimum of 1"});
}

TEST_CASE("the digest tells host pages, their order and their number apart, and no device pages") {
  const auto digest = [](std::vector<std::int64_t> device, std::vector<std::int64_t> host) {
    Collector collector;
    collector.add(std::move(device), std::move(host));
    return host_digest(collector.pages.lists());
  };
  const std::int64_t pages = digest({1, 2, 3}, {7, 8, 9});
  CHECK(digest({11, 5, 30}, {7, 8, 9}) == pages);
  CHECK(digest({1, 2, 3}, {7, 9, 8}) != pages);
  CHECK(digest({1, 2, 3}, {7, 8, 10}) != pages);
  CHECK(digest({1, 2}, {7, 8}) != pages);
  CHECK(pages >= 0);
  CHECK(pages < (std::int64_t{1} << 62));
}
