#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "core/copy_plan.h"
#include "core/error.h"
#include "plan_checks.h"
#include "pools.h"
#include "refusals.h"

using namespace kvburst;
using namespace kvburst::testing;

namespace {

PageLists one_list(std::vector<PagePair> pairs, std::size_t pools = 1) {
  return {{std::move(pairs)}, std::vector<int>(pools, 0)};
}

/// Pages no two of which are neighbours on both tiers.
std::vector<PagePair> scattered(std::int64_t pages) {
  std::vector<PagePair> pairs;
  for (std::int64_t i = 0; i < pages; ++i) pairs.push_back({2 * i, pages - 1 - i});
  return pairs;
}

/// `length` neighbours, from `device` and `host` on.
std::vector<PagePair> run(std::int64_t device, std::int64_t host, std::int64_t length) {
  std::vector<PagePair> pairs;
  for (std::int64_t i = 0; i < length; ++i) pairs.push_back({device + i, host + i});
  return pairs;
}

PlanOutcome planned(std::vector<PoolShape> shapes, Direction direction, PageLists pages,
                    const CopyLimits& limits = {}, const PlanOptions& options = {}) {
  std::vector<Pool> pools;
  for (std::size_t p = 0; p < shapes.size(); ++p) {
    pools.emplace_back(shapes[p], static_cast<unsigned>(p + 1));
  }
  const CopyPlanner planner(layouts_of(pools), direction, limits, options);
  PlanOutcome outcome = carry_out(pools, planner, options, std::move(pages));
  CHECK(outcome.fault == "");
  return outcome;
}

std::int64_t fallbacks(const CopyCount& count, SpanBreak reason) {
  return count.fallbacks[static_cast<std::size_t>(reason)];
}

std::int64_t all_fallbacks(const CopyCount& count) {
  std::int64_t sum = 0;
  for (const std::int64_t copies : count.fallbacks) sum += copies;
  return sum;
}

constexpr std::array kDirections{Direction::load, Direction::backup};

}  // namespace

TEST_CASE("a backup of scattered pages is one copy a page and pool") {
  const auto outcome =
      planned({page_first("kv", layers(78), 24, 40, 20), page_first("index", {1, 5, 9}, 8, 40, 20)},
              Direction::backup, one_list(scattered(20), 2));
  CHECK(outcome.count.copies == 2 * 20);
  CHECK(outcome.count.one_per_page_and_layer == 20 * (78 + 3));
  CHECK(outcome.count.neighbours_merged == 20 * (78 + 3));
  CHECK(all_fallbacks(outcome.count) == 0);
}

TEST_CASE("a load of scattered pages is one copy a page and group") {
  const auto outcome =
      planned({page_first("kv", layers(78), 24, 40, 20)}, Direction::load, one_list(scattered(20)));
  CHECK(outcome.count.copies == 20 * 8);
  CHECK(outcome.count.copies <= outcome.count.one_per_page_and_layer / 9);
}

TEST_CASE("a load of 21 layers takes at most a quarter of one copy per page and layer") {
  const auto outcome = planned({page_first("index", layers(21), 24, 40, 20)}, Direction::load,
                               one_list(scattered(20)));
  CHECK(outcome.count.copies == 20 * 5);
  CHECK(4 * outcome.count.copies <= outcome.count.one_per_page_and_layer);
}

TEST_CASE("a run of neighbours takes a copy a page or a copy a layer, whichever are fewer") {
  for (const Direction direction : kDirections) {
    for (const std::int64_t length : {1, 2, 5, 6, 7, 12}) {
      const PlanOptions options{.max_group = 6};
      const auto outcome = planned({page_first("kv", layers(6), 24, 16, 16)}, direction,
                                   one_list(run(3, 2, length)), {}, options);
      CAPTURE(length);
      if (direction == Direction::backup) {
        CHECK(outcome.count.copies == std::min<std::int64_t>(length, 6));
      } else {
        CHECK(outcome.count.copies ==
              1 + std::min<std::int64_t>(length, 2) + std::min<std::int64_t>(length, 3));
      }
      CHECK(outcome.count.neighbours_merged == 6);
      CHECK(outcome.count.one_per_page_and_layer == 6 * length);
    }
  }
}

TEST_CASE("pages that adjoin on the host move as one row a layer") {
  for (const Direction direction : kDirections) {
    const auto outcome = planned({layer_first("kv", layers(4), 24, 16, 16)}, direction,
                                 one_list(run(3, 2, 9)), {}, {.max_group = 4});
    CHECK(outcome.count.copies == (direction == Direction::backup ? 1 : 3));
    CHECK(outcome.batches[0][0][0].width == 9 * 24);
  }
}

TEST_CASE("neighbours are found in any order of the indices, and on both tiers or not at all") {
  std::vector<PagePair> pairs = run(3, 2, 4);
  std::reverse(pairs.begin(), pairs.end());
  CHECK(planned({layer_first("kv", layers(1), 24, 16, 16)}, Direction::load, one_list(pairs))
            .count.copies == 1);
  const std::vector<PagePair> crossed{{3, 5}, {4, 4}, {5, 3}};
  CHECK(planned({layer_first("kv", layers(1), 24, 16, 16)}, Direction::load, one_list(crossed))
            .count.copies == 3);
  CHECK(planned({layer_first("kv", layers(1), 24, 16, 16)}, Direction::load, one_list(run(3, 2, 4)),
                {}, {.merge_neighbours = false})
            .count.copies == 4);
}

TEST_CASE("one source page may fill several destinations") {
  const std::vector<PagePair> pairs{{4, 5}, {9, 5}, {10, 6}};
  planned({page_first("kv", layers(3), 24, 16, 16)}, Direction::load, one_list(pairs));
  const std::vector<PagePair> back{{5, 4}, {5, 9}, {6, 10}};
  planned({page_first("kv", layers(3), 24, 16, 16)}, Direction::backup, one_list(back));
}

TEST_CASE("no pages take no copies") {
  for (const Direction direction : kDirections) {
    const auto outcome =
        planned({page_first("kv", layers(3), 24, 16, 16)}, direction, one_list({}));
    CHECK(outcome.copies() == 0);
    CHECK(outcome.count.one_per_page_and_layer == 0);
    for (const auto& group : outcome.batches) CHECK(group.empty());
  }
}

TEST_CASE("layers in separate allocations cost a copy each, and the plan says so") {
  PoolShape shape = page_first("kv", layers(5), 24, 40, 20);
  shape.separate_allocations();
  const auto outcome = planned({shape}, Direction::backup, one_list(scattered(20)));
  CHECK(outcome.count.copies == 5 * 20);
  CHECK(fallbacks(outcome.count, SpanBreak::separate_allocations) == 4 * 20);
  CHECK(all_fallbacks(outcome.count) == 4 * 20);
}

TEST_CASE("a fallback costs a run only what it adds to it") {
  // 3 pages, layers split 2 + 4: min(3, 2) + min(3, 4) instead of min(3, 6).
  PoolShape shape = page_first("kv", layers(6), 24, 16, 16);
  shape.allocations = {{0, 2 * shape.layer_bytes()},
                       {2 * shape.layer_bytes(), 4 * shape.layer_bytes()}};
  const auto outcome = planned({shape}, Direction::backup, one_list(run(1, 1, 3)));
  CHECK(outcome.count.copies == 2 + 3);
  CHECK(fallbacks(outcome.count, SpanBreak::separate_allocations) == 2);
}

TEST_CASE("each reason is charged for its own copies") {
  PoolShape shape = page_first("kv", layers(4), 24, 40, 20);
  shape.layer_offsets = {0, 960, 1920, 2900};
  shape.allocations = {{0, 960}, {960, 3000}};
  shape.rows = {0, 1, 3, 4};
  shape.page_stride = 5 * 24;
  const auto outcome = planned({shape}, Direction::backup, one_list(scattered(10)));
  CHECK(fallbacks(outcome.count, SpanBreak::separate_allocations) == 10);
  CHECK(fallbacks(outcome.count, SpanBreak::uneven_device_layers) == 10);
  CHECK(fallbacks(outcome.count, SpanBreak::uneven_host_rows) == 0);
  CHECK(outcome.count.copies == 30);
}

TEST_CASE("a pitch above the device's maximum falls back to flat copies") {
  for (const Direction direction : kDirections) {
    const PoolShape shape = page_first("kv", layers(4), 24, 40, 20);
    const auto outcome =
        planned({shape}, direction, one_list(scattered(20)), {.max_pitch = 40 * 24 - 1});
    CHECK(outcome.count.copies == 4 * 20);
    CHECK(fallbacks(outcome.count, SpanBreak::pitch_above_maximum) ==
          (direction == Direction::backup ? 3 * 20 : 20));
  }
}

TEST_CASE("rows of pages keep to the maximum pitch as well") {
  for (const std::size_t max_pitch : {std::size_t{96}, std::size_t{95}}) {
    PoolShape shape = page_first("kv", layers(4), 24, 40, 20);
    shape.separate_allocations();
    const auto outcome =
        planned({shape}, Direction::backup, one_list(run(5, 6, 10)), {.max_pitch = max_pitch});
    CHECK(outcome.count.copies == (max_pitch == 96 ? 4 : 40));
  }
}

TEST_CASE("with tall copies off every copy has one row") {
  for (const Direction direction : kDirections) {
    std::vector<PagePair> pages = scattered(6);
    const auto more = run(20, 10, 5);
    pages.insert(pages.end(), more.begin(), more.end());
    const auto outcome = planned({page_first("kv", layers(4), 24, 40, 20)}, direction,
                                 one_list(pages), {.tall_copies = false});
    CHECK(outcome.count.copies == 4 * 11);
    for (const auto& group : outcome.batches) {
      for (const auto& batch : group) {
        for (const Copy& copy : batch) CHECK(copy.height == 1);
      }
    }
  }
}

// sgl-project/sglang#36798
TEST_CASE("a copy that would cross a registration is cut, between rows or within one") {
  for (const Direction direction : kDirections) {
    // 6 rows of 24 bytes a page: registrations of 5, 6, 7, ... rows and ones that cut rows.
    for (const std::size_t bytes : {24, 25, 47, 48, 100, 120, 144, 145, 168, 1000}) {
      CAPTURE(bytes);
      PoolShape shape = page_first("kv", layers(6), 24, 40, 20);
      shape.registered_by(bytes);
      std::vector<PagePair> pages = scattered(8);
      const auto more = run(20, 10, 7);
      pages.insert(pages.end(), more.begin(), more.end());
      const auto outcome = planned({shape}, direction, one_list(pages));
      // Cut or not, the plan's own count is that of the unregistered pool.
      shape.registrations.clear();
      CHECK(outcome.count.copies == planned({shape}, direction, one_list(pages)).count.copies);
    }
  }
}

TEST_CASE("a boundary between pages splits nothing, one inside a page splits that page") {
  PoolShape shape = page_first("kv", layers(6), 24, 40, 20);
  std::vector<PagePair> pages;
  for (std::int64_t page = 0; page < 20; ++page) pages.push_back({2 * page, page});
  shape.registered_by(5 * 144);
  CHECK(planned({shape}, Direction::backup, one_list(pages)).count.registration_splits == 0);
  shape.registered_by(5 * 144 + 48);  // after 2 rows of page 5, after 4 of 10; page 16 begins one
  CHECK(planned({shape}, Direction::backup, one_list(pages)).count.registration_splits == 2);
  shape.registered_by(5 * 144 + 20);  // inside the first row of page 5: the row and the rest
  CHECK(planned({shape}, Direction::backup, one_list({{0, 5}})).count.registration_splits == 2);
}

TEST_CASE("a long row is cut at every registration that it crosses") {
  PoolShape shape = layer_first("kv", layers(2), 24, 16, 16);
  shape.registered_by(30);
  const auto outcome = planned({shape}, Direction::load, one_list(run(0, 0, 16)));
  // 2 layers of 384 bytes, 13 registrations each touches: 12 cuts, and 13 where it starts inside.
  CHECK(outcome.count.copies == 2);
  CHECK(outcome.count.registration_splits == 12 + 13);
}

TEST_CASE("batches keep to the copies of a call") {
  for (const std::size_t cap : {1, 3, 20, 4096}) {
    const auto outcome = planned({page_first("kv", layers(2), 8, 40, 20)}, Direction::backup,
                                 one_list(scattered(20)), {.copies_per_call = cap});
    CHECK(outcome.batches[0].size() == (20 + cap - 1) / cap);
    CHECK(outcome.batches[0][0].size() == std::min<std::size_t>(cap, 20));
  }
}

TEST_CASE("a backup hands over a chunk of pages at a time, and cuts runs at its end") {
  for (const std::int64_t chunk : {1, 3, 7, 20, 256}) {
    CAPTURE(chunk);
    std::vector<PagePair> pages = scattered(10);
    const auto more = run(20, 10, 10);
    pages.insert(pages.end(), more.begin(), more.end());
    for (const PoolShape& shape :
         {page_first("kv", layers(4), 8, 40, 20), layer_first("kv", layers(4), 8, 40, 20)}) {
      const auto outcome =
          planned({shape}, Direction::backup, one_list(pages), {}, {.chunk_pages = chunk});
      CHECK(std::ssize(outcome.batches[0]) == (20 + chunk - 1) / chunk);
    }
  }
}

TEST_CASE("chunks are of no effect in a load") {
  const auto outcome = planned({page_first("kv", layers(1), 8, 40, 20)}, Direction::load,
                               one_list(scattered(20)), {}, {.chunk_pages = 1});
  CHECK(outcome.batches[0].size() == 1);
}

TEST_CASE("pools with pages of their own move those") {
  for (const Direction direction : kDirections) {
    PageLists pages{{scattered(8), run(3, 9, 8)}, {0, 1, 0}};
    const auto outcome =
        planned({page_first("k", layers(4), 24, 40, 20), page_first("index", {1, 3}, 12, 40, 20),
                 layer_first("v", layers(4), 24, 40, 20)},
                direction, pages);
    CHECK(outcome.count.one_per_page_and_layer == 8 * 10);
    CHECK(outcome.count.neighbours_merged == 8 * 4 + 2 + 8 * 4);
  }
}

TEST_CASE("rows with holes and gaps move what is stored and nothing else") {
  for (const Direction direction : kDirections) {
    PoolShape shape = page_first("kv", {0, 2, 3, 6, 7}, 24, 16, 16);
    shape.rows = {std::nullopt, 6, 2, 4, std::nullopt};
    shape.page_stride = 7 * 24 + 5;
    const auto outcome = planned({shape}, direction, one_list(run(2, 7, 5)));
    CHECK(outcome.count.one_per_page_and_layer == 5 * 3);
    CHECK(outcome.count.bytes == 5 * 3 * 24);
  }
}

TEST_CASE("a plan made again has nothing of the one before") {
  std::vector<Pool> pools;
  pools.emplace_back(page_first("kv", layers(3), 24, 40, 20));
  const CopyPlanner planner(layouts_of(pools), Direction::load, {}, {});
  CopyPlan plan;
  PageLists many = one_list(scattered(20));
  planner.plan(many, plan);
  PageLists few = one_list(run(0, 0, 2));
  planner.plan(few, plan);
  CHECK(plan.runs[0].size() == 1);
  CHECK(plan.count.one_per_page_and_layer == 6);
}

TEST_CASE("pages of another set of pools are refused") {
  std::vector<Pool> pools;
  pools.emplace_back(page_first("kv", layers(3), 24, 40, 20));
  const CopyPlanner planner(layouts_of(pools), Direction::load, {}, {});
  CopyPlan plan;
  PageLists pages = one_list(scattered(2), 2);
  check_refused<PageError>([&] { planner.plan(pages, plan); }, {"2 pools", "has 1"});
  check_refused<LayoutError>([&] { CopyPlanner({}, Direction::load, {}, {}); }, {"0 pools"});
}

TEST_CASE("random pages of random pools move as the naive copy moves them") {
  std::mt19937 random(20);
  const auto upto = [&](std::size_t most) { return random() % (most + 1); };
  for (int round = 0; round < 150; ++round) {
    CAPTURE(round);
    std::vector<PoolShape> shapes;
    for (std::size_t p = 0; p <= upto(2); ++p) {
      std::vector<int> ids;
      for (int layer = 0; layer < 12; ++layer) {
        if (upto(3) > 0) ids.push_back(layer);
      }
      if (ids.empty()) ids.push_back(0);
      const std::size_t page_bytes = 1 + upto(40);
      PoolShape shape = upto(1) ? page_first("pool", ids, page_bytes, 24, 20)
                                : layer_first("pool", ids, page_bytes, 24, 20);
      if (upto(2) == 0) shape.separate_allocations();
      if (upto(1)) shape.registered_by(page_bytes + upto(200));
      shapes.push_back(shape);
    }
    const Direction direction = upto(1) ? Direction::load : Direction::backup;
    std::vector<std::int64_t> device;
    for (std::int64_t page = 0; page < 24; ++page) device.push_back(page);
    if (upto(1)) std::shuffle(device.begin(), device.end(), random);
    std::vector<std::int64_t> host;
    for (std::int64_t page = 0; page < 20; ++page) host.push_back(page);
    if (upto(2) == 0) std::shuffle(host.begin(), host.end(), random);
    std::vector<PagePair> pairs;
    for (std::size_t i = 0; i < upto(20); ++i) pairs.push_back({device[i], host[i]});
    const CopyLimits limits{.max_pitch = upto(1) ? std::size_t{1} << 31 : 1 + upto(500),
                            .copies_per_call = 1 + upto(30),
                            .tall_copies = upto(4) > 0};
    const PlanOptions options{.max_group = 1 + static_cast<int>(upto(15)),
                              .ramp = upto(3) > 0,
                              .merge_neighbours = upto(3) > 0,
                              .chunk_pages = static_cast<std::int64_t>(upto(1) * upto(9))};
    planned(shapes, direction, one_list(pairs, shapes.size()), limits, options);
  }
}
