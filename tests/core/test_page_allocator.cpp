#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/page_allocator.h"
#include "pools.h"
#include "refusals.h"

using namespace kvburst;
using namespace kvburst::testing;

namespace {

constexpr std::int64_t kPageSize = 4;
using Pages = std::vector<std::int64_t>;

struct Scene {
  explicit Scene(FreeOrder order = FreeOrder::lifo, std::int64_t pages = 8)
      : allocator("host pool", pages, kPageSize, order) {}

  /// Page ids handed out; the slots are checked on the way.
  Pages take(std::int64_t pages) {
    std::vector<std::int64_t> slots(static_cast<std::size_t>(pages * kPageSize), -1);
    REQUIRE(allocator.allocate(pages * kPageSize, slots.data()));
    Pages ids;
    for (std::int64_t i = 0; i < pages; ++i)
      ids.push_back(slots[static_cast<std::size_t>(i * kPageSize)] / kPageSize);
    CHECK(slots == slots_of(ids, kPageSize));
    return ids;
  }
  void free(const Pages& pages) {
    const auto slots = slots_of(pages, kPageSize);
    allocator.free(view_of("indices", slots));
  }
  /// As the device side of pairs whose host side is no page at all.
  std::int64_t hold(const Pages& pages) { return allocator.hold(pairs(pages), Tier::device); }
  void release(const Pages& pages, std::int64_t reset) {
    allocator.release(pairs(pages), Tier::device, reset);
  }
  /// All that is free, in the order in which it is handed out.
  Pages rest() { return take(allocator.available_pages()); }

  static std::vector<PagePair> pairs(const Pages& pages) {
    std::vector<PagePair> out;
    for (const std::int64_t page : pages) out.push_back({page, -7});
    return out;
  }

  PageAllocator allocator;
};

}  // namespace

TEST_CASE("pages are handed out from the first on, all of their slots") {
  Scene scene;
  CHECK(scene.allocator.available_pages() == 8);
  CHECK(scene.take(3) == Pages{0, 1, 2});
  CHECK(scene.take(0) == Pages{});
  CHECK(scene.take(2) == Pages{3, 4});
  CHECK(scene.allocator.available_pages() == 3);
}

TEST_CASE("lifo hands out first what was freed last, each batch in its order") {
  Scene scene(FreeOrder::lifo);
  scene.take(6);
  scene.free({4, 2});
  scene.free({5, 0, 1});
  CHECK(scene.rest() == Pages{5, 0, 1, 4, 2, 6, 7});
}

TEST_CASE("fifo hands out last what was freed last, each batch in its order") {
  Scene scene(FreeOrder::fifo);
  scene.take(6);
  scene.free({4, 2});
  scene.free({5, 0, 1});
  CHECK(scene.rest() == Pages{6, 7, 4, 2, 5, 0, 1});
}

TEST_CASE("asking for more than there is changes nothing and writes nothing") {
  Scene scene;
  scene.take(5);
  std::vector<std::int64_t> slots(4 * kPageSize, -1);
  CHECK(!scene.allocator.allocate(4 * kPageSize, slots.data()));
  CHECK(std::count(slots.begin(), slots.end(), -1) == std::ssize(slots));
  CHECK(scene.rest() == Pages{5, 6, 7});
}

TEST_CASE("what is not whole pages is refused") {
  Scene scene;
  std::vector<std::int64_t> slots(16);
  check_refused<PageError>([&] { scene.allocator.allocate(6, slots.data()); },
                           {"host pool", "6 slots", "page_size 4"});
  check_refused<PageError>([&] { scene.allocator.allocate(-4, slots.data()); }, {"-4 slots"});
  scene.take(2);
  const std::vector<std::int64_t> partial{4, 5, 6};
  check_refused<PageError>([&] { scene.allocator.free(view_of("indices", partial)); },
                           {"indices", "3 slots", "page_size 4"});
  const std::vector<std::int64_t> shuffled{4, 6, 5, 7};
  check_refused<PageError>([&] { scene.allocator.free(view_of("indices", shuffled)); },
                           {"indices[1]", "slot 6", "must be 5"});
  CHECK(scene.allocator.available_pages() == 6);
  check_refused<LayoutError>([&] { PageAllocator("p", 0, 4, FreeOrder::lifo); }, {"pages", "0"});
  check_refused<LayoutError>([&] { PageAllocator("p", 4, 0, FreeOrder::lifo); },
                             {"page_size", "0"});
}

// sgl-project/sglang#13483
TEST_CASE("freeing what is not allocated is refused and leaves everything as it was") {
  for (const FreeOrder order : {FreeOrder::lifo, FreeOrder::fifo}) {
    Scene scene(order);
    scene.take(5);
    scene.free({1});
    check_refused<PageError>([&] { scene.free({2, 3, 2}); },
                             {"indices[8]", "page 2", "not allocated"});
    check_refused<PageError>([&] { scene.free({2, 1}); }, {"indices[4]", "page 1"});
    check_refused<PageError>([&] { scene.free({2, 6}); },
                             {"indices[4]", "page 6", "never handed out"});
    check_refused<PageError>([&] { scene.free({2, 8}); }, {"indices[4]", "slot 32", "8 pages"});
    check_refused<PageError>([&] { scene.free({2, -1}); }, {"indices[4]", "slot -4"});
    CHECK(scene.allocator.available_pages() == 4);
    // Pages 2 and 3 are still their owner's.
    scene.free({2, 3});
    Pages free = scene.rest();
    std::sort(free.begin(), free.end());
    CHECK(free == Pages{1, 2, 3, 5, 6, 7});
  }
}

TEST_CASE("freeing nothing is no error") {
  Scene scene;
  scene.free({});
  CHECK(scene.hold({}) == scene.hold({}));
  CHECK(scene.allocator.available_pages() == 8);
}

// sgl-project/sglang#27444
TEST_CASE("a page that a burst holds is not handed out until the burst lets go") {
  for (const FreeOrder order : {FreeOrder::lifo, FreeOrder::fifo}) {
    Scene scene(order);
    scene.take(4);
    const std::int64_t reset = scene.hold({3, 1});
    scene.free({0, 1, 2, 3});
    CHECK(scene.allocator.available_pages() == 6);
    const Pages taken = scene.rest();
    CHECK(std::count(taken.begin(), taken.end(), 1) == 0);
    CHECK(std::count(taken.begin(), taken.end(), 3) == 0);
    scene.release({3, 1}, reset);
    // They join the free list as one batch, in the burst's order.
    CHECK(scene.rest() == Pages{3, 1});
  }
}

TEST_CASE("a page held by several bursts, or several times by one, waits for all of them") {
  Scene scene;
  scene.take(2);
  const std::int64_t first = scene.hold({0, 0, 1});
  const std::int64_t second = scene.hold({0});
  scene.free({0, 1});
  scene.release({0}, second);
  CHECK(scene.allocator.available_pages() == 6);
  scene.release({0, 0, 1}, first);
  CHECK(scene.allocator.available_pages() == 8);
  CHECK(scene.take(2) == Pages{0, 1});
}

TEST_CASE("a hold that ends before the owner frees the page frees nothing") {
  Scene scene;
  scene.take(2);
  scene.release({0, 1}, scene.hold({0, 1}));
  CHECK(scene.allocator.available_pages() == 6);
  scene.free({0, 1});
  CHECK(scene.allocator.available_pages() == 8);
}

TEST_CASE("a page that is freed while it is held cannot be freed or held again") {
  Scene scene;
  scene.take(2);
  const std::int64_t reset = scene.hold({0});
  scene.free({0});
  check_refused<PageError>([&] { scene.free({1, 0}); }, {"page 0", "not allocated"});
  check_refused<PageError>([&] { scene.hold({1, 0}); }, {"page 0", "not allocated"});
  scene.release({0}, reset);
  CHECK(scene.take(1) == Pages{0});
  scene.free({1, 0});
  CHECK(scene.allocator.available_pages() == 8);
}

TEST_CASE("a refused hold holds none of its pages") {
  Scene scene;
  scene.take(2);
  check_refused<PageError>([&] { scene.hold({0, 1, 2}); }, {"page 2", "not allocated"});
  check_refused<PageError>([&] { scene.hold({0, 8}); }, {"page 8"});
  check_refused<PageError>([&] { scene.hold({0, -2}); }, {"page -2"});
  scene.free({0, 1});
  CHECK(scene.allocator.available_pages() == 8);
}

TEST_CASE("each tier's pages are those of its side of the pairs") {
  PageAllocator host("host", 8, kPageSize, FreeOrder::lifo);
  std::vector<std::int64_t> slots(2 * kPageSize);
  REQUIRE(host.allocate(2 * kPageSize, slots.data()));
  const std::vector<PagePair> pairs{{500, 0}, {600, 1}};
  const std::int64_t reset = host.hold(pairs, Tier::host);
  host.free(view_of("indices", slots));
  CHECK(host.available_pages() == 6);
  host.release(pairs, Tier::host, reset);
  CHECK(host.available_pages() == 8);
}

TEST_CASE("a page that is not held cannot be released") {
  Scene scene(FreeOrder::lifo);
  scene.take(6);
  const std::int64_t reset = scene.hold({1});
  scene.release({1}, reset);
  check_refused<PageError>([&] { scene.release({1}, reset); }, {"page 1", "not held"});
}

// sgl-project/sglang#29310
TEST_CASE("a reset frees everything, and a hold from before it is released to no effect") {
  for (const FreeOrder order : {FreeOrder::lifo, FreeOrder::fifo}) {
    Scene scene(order);
    scene.take(6);
    const std::int64_t before = scene.hold({1, 2, 3});
    scene.free({2, 5});
    scene.allocator.reset();
    CHECK(scene.allocator.available_pages() == 8);
    CHECK(scene.take(4) == Pages{0, 1, 2, 3});
    const std::int64_t after = scene.hold({1, 2});
    CHECK(after != before);
    scene.free({1, 2});
    // Late, and of pages that have new owners and new holds.
    scene.release({1, 2, 3}, before);
    CHECK(scene.allocator.available_pages() == 4);
    scene.release({1, 2}, after);
    Pages free = scene.rest();
    std::sort(free.begin(), free.end());
    CHECK(free == Pages{1, 2, 4, 5, 6, 7});
  }
}

TEST_CASE("whatever the calls, a page has one owner and is free only when nobody uses it") {
  std::mt19937 random(7);
  for (const FreeOrder order : {FreeOrder::lifo, FreeOrder::fifo}) {
    Scene scene(order, 16);
    Pages owned;
    std::deque<Pages> held;
    std::int64_t reset = 0;
    std::vector<int> uses(16, 0);
    for (int step = 0; step < 4000; ++step) {
      const std::size_t what = random() % 4;
      if (what == 0 && scene.allocator.available_pages() > 0) {
        const auto most = static_cast<std::uint32_t>(scene.allocator.available_pages());
        for (const std::int64_t page : scene.take(1 + random() % most)) {
          REQUIRE(std::count(owned.begin(), owned.end(), page) == 0);
          REQUIRE(uses[static_cast<std::size_t>(page)] == 0);
          owned.push_back(page);
        }
      } else if (what == 1 && !owned.empty()) {
        const std::size_t count = 1 + random() % owned.size();
        std::shuffle(owned.begin(), owned.end(), random);
        scene.free({owned.end() - static_cast<std::ptrdiff_t>(count), owned.end()});
        owned.resize(owned.size() - count);
      } else if (what == 2 && !owned.empty()) {
        Pages pages;
        for (std::size_t i = 0; i <= random() % 4; ++i)
          pages.push_back(owned[random() % owned.size()]);
        reset = scene.hold(pages);
        for (const std::int64_t page : pages) ++uses[static_cast<std::size_t>(page)];
        held.push_back(pages);
      } else if (what == 3 && !held.empty()) {
        scene.release(held.front(), reset);
        for (const std::int64_t page : held.front()) --uses[static_cast<std::size_t>(page)];
        held.pop_front();
      }
      std::int64_t busy = 0;
      for (std::int64_t page = 0; page < 16; ++page) {
        if (uses[static_cast<std::size_t>(page)] > 0 ||
            std::count(owned.begin(), owned.end(), page) > 0) {
          ++busy;
        }
      }
      REQUIRE(scene.allocator.available_pages() == 16 - busy);
    }
  }
}
