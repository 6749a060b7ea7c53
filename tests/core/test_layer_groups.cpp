#include <doctest/doctest.h>

#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/layer_groups.h"
#include "pools.h"
#include "refusals.h"

using namespace kvburst;
using namespace kvburst::testing;

namespace {

/// Layouts without memory: the groups depend on addresses alone.
PoolLayout layout(const PoolShape& shape) { return layout_of(shape, 1 << 20, 1 << 24); }

std::vector<LayerGroup> load_groups(const std::vector<PoolLayout>& pools,
                                    const PlanOptions& options = {}) {
  return layer_groups(pools, Direction::load, options, {});
}

/// Model layers of a group, first to last.
std::vector<int> layers_of(const std::vector<PoolLayout>& pools, const LayerGroup& group) {
  std::vector<int> ids;
  for (int i = group.first; i < group.first + group.layers; ++i) {
    ids.push_back(
        pools[static_cast<std::size_t>(group.pool)].stored()[static_cast<std::size_t>(i)].layer);
  }
  return ids;
}

std::vector<int> sizes_of(const std::vector<LayerGroup>& groups) {
  std::vector<int> sizes;
  for (const LayerGroup& group : groups) sizes.push_back(group.layers);
  return sizes;
}

/// What the spans of the only group of a backup are, and why they end.
std::vector<std::pair<int, SpanBreak>> spans_of(const PoolShape& shape,
                                                const CopyLimits& limits = {}) {
  const std::vector<PoolLayout> pools{layout(shape)};
  const auto groups = layer_groups(pools, Direction::backup, {}, limits);
  REQUIRE(groups.size() == 1);
  std::vector<std::pair<int, SpanBreak>> spans;
  int next = 0;
  for (const LayerSpan& span : groups[0].spans) {
    CHECK(span.first == next);
    next += span.layers;
    spans.emplace_back(span.layers, span.ends);
  }
  CHECK(next == groups[0].layers);
  return spans;
}

using Sizes = std::vector<int>;

}  // namespace

TEST_CASE("the groups of a load grow from one layer to the largest allowed") {
  const std::vector<PoolLayout> pools{layout(page_first("kv", layers(78), 16, 4, 4))};
  CHECK(sizes_of(load_groups(pools)) == Sizes{1, 2, 4, 8, 16, 16, 16, 15});
  CHECK(sizes_of(load_groups(pools, {.max_group = 5})) ==
        Sizes{1, 2, 4, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 1});
  CHECK(sizes_of(load_groups(pools, {.max_group = 1})) == Sizes(78, 1));
  CHECK(sizes_of(load_groups(pools, {.max_group = std::numeric_limits<int>::max()})) ==
        Sizes{1, 2, 4, 8, 16, 32, 15});
  CHECK(sizes_of(load_groups(pools, {.ramp = false})) == Sizes(78, 1));
}

TEST_CASE("a backup is one group a pool, whatever the ramp") {
  const std::vector<PoolLayout> pools{layout(page_first("kv", layers(78), 16, 4, 4)),
                                      layout(page_first("index", {3, 7, 11}, 16, 4, 4))};
  for (const bool ramp : {true, false}) {
    const auto groups = layer_groups(pools, Direction::backup, {.max_group = 2, .ramp = ramp}, {});
    CHECK(sizes_of(groups) == Sizes{78, 3});
  }
}

TEST_CASE("groups are issued by their first model layer, and a sparse pool holds nothing back") {
  const std::vector<PoolLayout> pools{layout(page_first("kv", layers(8), 16, 4, 4)),
                                      layout(page_first("index", {2, 5, 7}, 16, 4, 4))};
  const auto groups = load_groups(pools);
  std::vector<std::pair<int, std::vector<int>>> order;
  for (const LayerGroup& group : groups) order.emplace_back(group.pool, layers_of(pools, group));
  CHECK(order == std::vector<std::pair<int, std::vector<int>>>{
                     {0, {0}}, {0, {1, 2}}, {1, {2}}, {0, {3, 4, 5, 6}}, {1, {5, 7}}, {0, {7}}});
}

TEST_CASE("a group completes the layers of which it issues the last part") {
  const std::vector<PoolLayout> pools{layout(page_first("kv", layers(8), 16, 4, 4)),
                                      layout(page_first("index", {2, 5, 7}, 16, 4, 4))};
  const auto groups = load_groups(pools);
  std::vector<std::vector<int>> completes;
  for (const LayerGroup& group : groups) completes.push_back(group.completes);
  CHECK(completes == std::vector<std::vector<int>>{{0}, {1}, {2}, {3, 4, 6}, {5}, {7}});
}

TEST_CASE("every stored layer of every pool is in one group and completed by the last of them") {
  PoolShape holes = page_first("holes", {0, 4, 9, 10}, 16, 4, 4);
  holes.rows = {2, std::nullopt, 0, 1};
  const std::vector<PoolLayout> pools{layout(page_first("kv", layers(11), 16, 4, 4)), layout(holes),
                                      layout(page_first("draft", {11}, 16, 4, 4))};
  for (const Direction direction : {Direction::load, Direction::backup}) {
    for (const int max_group : {1, 3, 16}) {
      const auto groups = layer_groups(pools, direction, {.max_group = max_group}, {});
      std::map<std::pair<int, int>, int> times;
      std::map<int, std::size_t> last;
      std::map<int, std::size_t> completed;
      for (std::size_t g = 0; g < groups.size(); ++g) {
        for (const int layer : layers_of(pools, groups[g])) {
          ++times[{groups[g].pool, layer}];
          last[layer] = g;
        }
        for (const int layer : groups[g].completes) {
          CHECK(completed.emplace(layer, g).second);
        }
      }
      CHECK(times.size() == 11 + 3 + 1);
      for (const auto& [where, count] : times) CHECK(count == 1);
      CHECK(times.count({1, 4}) == 0);
      CHECK(completed == last);
    }
  }
}

TEST_CASE("a pool without stored layers has no groups") {
  PoolShape none = page_first("none", {0, 1}, 16, 4, 4);
  none.rows = {std::nullopt, std::nullopt};
  const std::vector<PoolLayout> pools{layout(none)};
  CHECK(load_groups(pools).empty());
  CHECK(layer_groups(pools, Direction::backup, {}, {}).empty());
}

TEST_CASE("evenly spaced layers of one allocation are one span") {
  const PoolShape shape = page_first("kv", layers(6), 16, 4, 4);
  CHECK(spans_of(shape).size() == 1);
  const std::vector<PoolLayout> pools{layout(shape)};
  const LayerSpan span = layer_groups(pools, Direction::backup, {}, {})[0].spans[0];
  CHECK(span.device_pitch == 64);
  CHECK(span.host_pitch == 16);
}

TEST_CASE("what keeps neighbouring layers apart is named") {
  PoolShape shape = page_first("kv", layers(4), 16, 4, 4);
  SUBCASE("allocations") {
    shape.separate_allocations();
    for (const auto& [size, ends] : spans_of(shape)) {
      CHECK(size == 1);
      CHECK(ends == SpanBreak::separate_allocations);
    }
  }
  SUBCASE("one allocation boundary") {
    shape.allocations = {{0, 2 * 64}, {2 * 64, 2 * 64}};
    const auto spans = spans_of(shape);
    REQUIRE(spans.size() == 2);
    CHECK(spans[0] == std::pair{2, SpanBreak::separate_allocations});
    CHECK(spans[1].first == 2);
  }
  SUBCASE("a wider step on the device") {
    shape.layer_offsets = {0, 64, 144, 224};
    shape.allocations = {{0, 288}};
    const auto spans = spans_of(shape);
    REQUIRE(spans.size() == 2);
    CHECK(spans[0] == std::pair{2, SpanBreak::uneven_device_layers});
    CHECK(spans[1].first == 2);
  }
  SUBCASE("device layers that fall") {
    shape.layer_offsets = {192, 128, 64, 0};
    const auto spans = spans_of(shape);
    CHECK(spans.size() == 4);
    CHECK(spans[0].second == SpanBreak::uneven_device_layers);
  }
  SUBCASE("a wider step on the host") {
    shape.rows = {0, 1, 3, 4};
    shape.page_stride = 80;
    const auto spans = spans_of(shape);
    REQUIRE(spans.size() == 2);
    CHECK(spans[0] == std::pair{2, SpanBreak::uneven_host_rows});
  }
  SUBCASE("host rows that fall") {
    shape.rows = {3, 2, 1, 0};
    CHECK(spans_of(shape).size() == 4);
    CHECK(spans_of(shape)[0].second == SpanBreak::uneven_host_rows);
  }
  SUBCASE("a device pitch one byte above the maximum") {
    CHECK(spans_of(shape, {.max_pitch = 64}).size() == 1);
    const auto spans = spans_of(shape, {.max_pitch = 63});
    CHECK(spans.size() == 4);
    CHECK(spans[0].second == SpanBreak::pitch_above_maximum);
  }
  SUBCASE("a host pitch one byte above the maximum") {
    PoolShape wide = layer_first("kv", layers(4), 16, 2, 40);
    CHECK(spans_of(wide, {.max_pitch = 640}).size() == 1);
    CHECK(spans_of(wide, {.max_pitch = 639})[0].second == SpanBreak::pitch_above_maximum);
  }
  SUBCASE("the switch") {
    const auto spans = spans_of(shape, {.tall_copies = false});
    CHECK(spans.size() == 4);
    CHECK(spans[0].second == SpanBreak::tall_copies_off);
  }
}

TEST_CASE("layers that skip model layers or rows evenly are still one span") {
  PoolShape shape = page_first("index", {0, 2, 6, 7}, 16, 4, 4);
  shape.rows = {1, 3, 5, 7};
  shape.page_stride = 8 * 16;
  CHECK(spans_of(shape).size() == 1);
}

TEST_CASE("options and limits out of their bounds are refused") {
  const std::vector<PoolLayout> pools{layout(page_first("kv", layers(2), 16, 4, 4))};
  check_refused<LayoutError>([&] { load_groups(pools, {.max_group = 0}); },
                             {"max_group", "0 layers", "minimum of 1"});
  check_refused<LayoutError>([&] { load_groups(pools, {.chunk_pages = -1}); },
                             {"chunk_pages", "-1 pages", "minimum of 0"});
  check_refused<LayoutError>([&] { layer_groups(pools, Direction::load, {}, {.max_pitch = 0}); },
                             {"max_pitch", "0 bytes"});
  check_refused<LayoutError>(
      [&] { layer_groups(pools, Direction::load, {}, {.copies_per_call = 0}); },
      {"copies_per_call", "0"});
}

TEST_CASE("every reason has words of its own") {
  std::map<std::string_view, int> words;
  for (std::size_t i = 0; i < kSpanBreaks; ++i) ++words[name_of(static_cast<SpanBreak>(i))];
  CHECK(words.size() == kSpanBreaks);
  CHECK(words.count("unknown") == 0);
}
