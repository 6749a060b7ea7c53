#include <doctest/doctest.h>

#include <array>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "core/burst_pages.h"
#include "core/copy_plan.h"
#include "core/error.h"
#include "core/pool_layout.h"
#include "pools.h"
#include "refusals.h"

using namespace kvburst;
using namespace kvburst::testing;

namespace {

// Nothing here reads or writes memory: addresses are numbers.
constexpr std::uintptr_t kDevice = 0x7f00'0000'0000;
constexpr std::uintptr_t kHost = 0x7e00'0000'0000;
constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();

/// A description that is served as it stands: 3 layers, 4 device pages and 5 host pages of 576
/// bytes. Each test spoils one thing.
struct Parts {
  std::vector<int> layer_ids{0, 1, 2};
  DeviceTier device{{kDevice, kDevice + 2304, kDevice + 4608}, 4, 576, {{kDevice, 6912}}};
  HostTier host{kHost, 8640, 5, 576, 1728, 576, {0, 1, 2}, {}};

  PoolLayout build() const { return {"kv", layer_ids, device, host}; }
  void refused(std::initializer_list<std::string> words) const {
    check_refused<LayoutError>([&] { build(); }, words);
  }
};

}  // namespace

TEST_CASE("a layout tells where every page of every layer lies") {
  const PoolLayout layout = Parts{}.build();
  CHECK(layout.num_layers() == 3);
  CHECK(layout.stored().size() == 3);
  CHECK(layout.device_address(layout.stored()[2], 3) == kDevice + 2 * 2304 + 3 * 576);
  CHECK(layout.host_address(layout.stored()[2], 4) == kHost + 4 * 1728 + 2 * 576);
}

TEST_CASE("layers without a row are not stored and keep their place in the numbering") {
  Parts parts;
  parts.layer_ids = {0, 2, 6};
  parts.host.rows = {std::nullopt, 1, 0};
  const PoolLayout layout = parts.build();
  CHECK(layout.num_layers() == 7);
  REQUIRE(layout.stored().size() == 2);
  CHECK(layout.stored()[0].layer == 2);
  CHECK(layout.stored()[0].device == kDevice + 2304);
  CHECK(layout.host_address(layout.stored()[0], 0) == kHost + 576);
  CHECK(layout.host_address(layout.stored()[1], 1) == kHost + 1728);
}

TEST_CASE("a pool without any stored layer needs no host buffer") {
  Parts parts;
  parts.host.rows = {std::nullopt, std::nullopt, std::nullopt};
  parts.host.size = 0;
  CHECK(parts.build().stored().empty());
  CHECK(parts.build().num_layers() == 3);
}

TEST_CASE("what is described must agree in number") {
  Parts parts;
  SUBCASE("device layers") {
    parts.device.layers.pop_back();
    parts.refused({"'kv'", "3 layer_ids", "2 device layers", "3 host rows"});
  }
  SUBCASE("host rows") {
    parts.host.rows.push_back(3);
    parts.refused({"3 device layers", "4 host rows"});
  }
  SUBCASE("none at all") {
    parts.layer_ids.clear();
    parts.device.layers.clear();
    parts.host.rows.clear();
    parts.refused({"0 layers", "at least 1"});
  }
}

TEST_CASE("layer ids increase strictly from 0") {
  Parts parts;
  SUBCASE("repeated") {
    parts.layer_ids = {0, 4, 4};
    parts.refused({"4 at position 2", "at least 5"});
  }
  SUBCASE("falling") {
    parts.layer_ids = {3, 2, 4};
    parts.refused({"2 at position 1", "at least 4"});
  }
  SUBCASE("negative") {
    parts.layer_ids = {-1, 0, 1};
    parts.refused({"-1 at position 0", "at least 0"});
  }
  SUBCASE("one that leaves no room for the number of layers") {
    parts.layer_ids = {0, 1, std::numeric_limits<int>::max()};
    parts.refused({std::to_string(std::numeric_limits<int>::max()), "at most 65535"});
  }
}

TEST_CASE("tiers have pages, and pages have bytes") {
  Parts parts;
  SUBCASE("no device pages") {
    parts.device.pages = 0;
    parts.refused({"device pages", "0", "minimum of 1"});
  }
  SUBCASE("less than no host pages") {
    parts.host.pages = -3;
    parts.refused({"host pages", "-3", "minimum of 1"});
  }
  SUBCASE("no bytes") {
    parts.device.page_bytes = 0;
    parts.refused({"page_bytes", "0", "minimum of 1"});
  }
}

// sgl-project/sglang#37534
TEST_CASE("a host page narrower than the device page is refused with both widths") {
  for (const std::size_t width : {132, 528, 576, 656, 1152}) {
    Parts parts;
    parts.device = {{kDevice}, 4, width, {{kDevice, 4 * width}}};
    parts.layer_ids = {0};
    parts.host = {kHost, 5 * width, 5, width, width, width, {0}, {}};
    parts.build();
    parts.host.page_bytes = width - 1;
    parts.refused({std::to_string(width - 1), std::to_string(width), "narrower"});
  }
}

TEST_CASE("device layers lie in declared allocations and apart from each other") {
  Parts parts;
  SUBCASE("overlapping by a byte") {
    parts.device.layers[1] = kDevice + 2303;
    parts.refused({std::to_string(kDevice), std::to_string(kDevice + 2303), "2304 bytes"});
  }
  SUBCASE("overlapping, given in falling order") {
    parts.device.layers = {kDevice + 4608, kDevice + 2305, kDevice};
    parts.refused({std::to_string(kDevice + 2305), std::to_string(kDevice + 4608), "overlap"});
  }
  SUBCASE("one byte past the allocation") {
    parts.device.allocations = {{kDevice, 6911}};
    parts.refused({"layer 2", "2304 bytes", std::to_string(kDevice + 4608), "1 declared"});
  }
  SUBCASE("one byte before it") {
    parts.device.allocations = {{kDevice + 1, 6911}};
    parts.refused({"layer 0", std::to_string(kDevice)});
  }
  SUBCASE("across two of them") {
    parts.device.allocations = {{kDevice, 3000}, {kDevice + 3000, 3912}};
    parts.refused({"layer 1", std::to_string(kDevice + 2304), "2 declared"});
  }
  SUBCASE("in none") {
    parts.device.allocations.clear();
    parts.refused({"0 declared"});
  }
  SUBCASE("an allocation of no bytes") {
    parts.device.allocations.push_back({kDevice, 0});
    parts.refused({"allocations", "size 0"});
  }
}

TEST_CASE("host strides keep pages and rows apart") {
  Parts parts;
  SUBCASE("page first, pages one byte too close") {
    parts.host.page_stride = 1727;
    parts.refused({"page_stride 1727", "layer_stride 576", "5 pages", "3 rows", "576 bytes"});
  }
  SUBCASE("page first, rows one byte too close") {
    parts.host.layer_stride = 575;
    parts.refused({"layer_stride 575", "576 bytes"});
  }
  SUBCASE("layer first, rows one byte too close") {
    parts.host.page_stride = 576;
    parts.host.layer_stride = 5 * 576 - 1;
    parts.refused({"page_stride 576", "layer_stride 2879"});
  }
  SUBCASE("layer first is served") {
    parts.host.page_stride = 576;
    parts.host.layer_stride = 5 * 576;
    parts.build();
  }
  SUBCASE("a row number far up counts as rows") {
    parts.host.rows = {0, 1, 3};
    parts.refused({"4 rows", "page_stride 1728"});
  }
}

TEST_CASE("a host tier larger than its buffer is refused with both sizes") {
  Parts parts;
  parts.host.size = 8639;
  parts.refused({"8640", "8639", "5 pages", "3 rows"});
}

TEST_CASE("host rows are used once and counted from 0") {
  Parts parts;
  SUBCASE("twice") {
    parts.host.rows = {0, 2, 2};
    parts.refused({"row 2", "layer 2"});
  }
  SUBCASE("negative") {
    parts.host.rows = {0, -1, 2};
    parts.refused({"row -1", "layer 1", "minimum of 0"});
  }
  SUBCASE("too large to be counted") {
    const std::int64_t most = std::numeric_limits<std::int64_t>::max();
    parts.host.rows = {0, 1, most};
    parts.refused({std::to_string(most), "too large"});
  }
}

// sgl-project/sglang#36798
TEST_CASE("registrations cover the host buffer without a gap or an overlap") {
  Parts parts;
  SUBCASE("in any order, and reaching past the buffer") {
    parts.host.registrations = {{kHost + 4000, 9000}, {kHost - 100, 4100}};
    const PoolLayout layout = parts.build();
    REQUIRE(layout.registrations().size() == 2);
    CHECK(layout.registrations()[0].address == kHost - 100);
  }
  SUBCASE("a gap of one byte") {
    parts.host.registrations = {{kHost, 4000}, {kHost + 4001, 4639}};
    parts.refused({"4640", "8640", std::to_string(kHost + 4000)});
  }
  SUBCASE("one byte short at the end") {
    parts.host.registrations = {{kHost, 8639}};
    parts.refused({"1 of the host buffer's 8640 bytes", std::to_string(kHost + 8639)});
  }
  SUBCASE("one byte late at the start") {
    parts.host.registrations = {{kHost + 1, 8639}};
    parts.refused({"8640", std::to_string(kHost)});
  }
  SUBCASE("an overlap of one byte") {
    parts.host.registrations = {{kHost, 4001}, {kHost + 4000, 4640}};
    parts.refused({std::to_string(kHost), std::to_string(kHost + 4000), "overlap"});
  }
  SUBCASE("all smaller than a page") {
    for (std::size_t at = 0; at < 8640; at += 540) {
      parts.host.registrations.push_back({kHost + at, 540});
    }
    parts.refused({"576", "540", "largest registration"});
  }
  SUBCASE("of no bytes") {
    parts.host.registrations = {{kHost, 8640}, {kHost + 8640, 0}};
    parts.refused({"registrations", "size 0"});
  }
}

TEST_CASE("arithmetic that does not fit in 64 bits is refused and not wrapped") {
  Parts parts;
  SUBCASE("device pages x page bytes") {
    parts.device.pages = std::int64_t{1} << 62;
    parts.refused({"device tier", std::to_string(std::int64_t{1} << 62), "576", "64 bits"});
  }
  SUBCASE("a device layer that would wrap into its allocation") {
    parts.device.layers[2] = kMost - 100;
    parts.refused({"layer 2", std::to_string(kMost - 100)});
  }
  SUBCASE("an allocation past the last address") {
    parts.device.allocations.push_back({kMost - 10, 11});
    parts.refused({"allocations", "11 bytes", std::to_string(kMost - 10), "last address"});
  }
  SUBCASE("a host buffer past the last address") {
    parts.host.address = kMost - 8000;
    parts.refused({"8640", std::to_string(kMost - 8000), "last address"});
  }
  SUBCASE("host pages x page stride") {
    parts.host.page_stride = kMost / 4;
    parts.refused({"host tier", std::to_string(kMost / 4), "64 bits"});
  }
  SUBCASE("host rows x layer stride") {
    parts.host.layer_stride = kMost / 2;
    parts.refused({"host tier", std::to_string(kMost / 2), "64 bits"});
  }
  SUBCASE("pages and rows together, though neither alone") {
    parts.host.pages = 2;
    parts.host.rows = {0, std::nullopt, 1};
    parts.host.page_stride = kMost / 2 + 600;
    parts.host.layer_stride = kMost / 2;
    parts.refused({"host tier", "64 bits"});
  }
  SUBCASE("a registration past the last address") {
    parts.host.registrations = {{kHost, kMost}};
    parts.refused({"registrations", std::to_string(kMost), "last address"});
  }
}

namespace {

/// Two layers of pages of `stride` bytes, enough of them for `page`, page first on the host.
PoolLayout large_pool(std::size_t stride, std::int64_t pages) {
  const std::size_t layer_bytes = static_cast<std::size_t>(pages) * stride;
  return {"large", std::array{0, 1},
          DeviceTier{{kDevice, kDevice + layer_bytes}, pages, stride, {{kDevice, 2 * layer_bytes}}},
          HostTier{kHost, 2 * layer_bytes, pages, stride, 2 * stride, stride, {0, 1}, {}}};
}

/// Page ids whose byte offset lies just below, about and just above `offset`.
std::vector<std::int64_t> pages_about(std::int64_t offset, std::int64_t stride) {
  return {offset / stride - 1, offset / stride, offset / stride + 1};
}

std::uintptr_t exactly(std::uintptr_t base, std::int64_t page, std::size_t stride,
                       std::size_t more) {
  return static_cast<std::uintptr_t>(static_cast<unsigned __int128>(page) * stride + base + more);
}

constexpr std::array kStrides{132, 37440, 149760, 276480};
constexpr std::array kOffsets{std::int64_t{1} << 31, std::int64_t{1} << 32,
                              (std::int64_t{1} << 33) + 1};

}  // namespace

// sgl-project/sglang#34025
TEST_CASE("page id x stride is exact above 2^31, 2^32 and 2^33") {
  for (const std::int64_t stride : kStrides) {
    const auto bytes = static_cast<std::size_t>(stride);
    for (const std::int64_t offset : kOffsets) {
      CAPTURE(stride);
      CAPTURE(offset);
      const std::vector<std::int64_t> pages = pages_about(offset, stride);
      const std::int64_t count = pages.back() + 1;
      const PoolLayout layout = large_pool(bytes, count);
      const StoredLayer& second = layout.stored()[1];
      const std::size_t layer_bytes = static_cast<std::size_t>(count) * bytes;
      for (const std::int64_t page : pages) {
        CHECK(layout.device_address(second, page) == exactly(kDevice, page, bytes, layer_bytes));
        CHECK(layout.host_address(second, page) == exactly(kHost, page, 2 * bytes, bytes));
      }
      for (const Direction direction : {Direction::load, Direction::backup}) {
        const CopyPlanner planner({layout}, direction, {.max_pitch = kMost}, {.ramp = false});
        PageLists lists{{{}}, {0}};
        for (const std::int64_t page : pages) lists.lists[0].push_back({page, count - 1 - page});
        CopyPlan plan;
        planner.plan(lists, plan);
        std::vector<Copy> batch;
        std::int64_t splits = 0;
        std::vector<Copy> copies;
        planner.emit(
            plan, 0, batch,
            [&](std::span<const Copy> made) { copies.assign(made.begin(), made.end()); }, splits);
        REQUIRE(copies.size() == pages.size());
        for (std::size_t i = 0; i < pages.size(); ++i) {
          const bool load = direction == Direction::load;
          CHECK((load ? copies[i].dst : copies[i].src) == exactly(kDevice, pages[i], bytes, 0));
          CHECK((load ? copies[i].src : copies[i].dst) ==
                exactly(kHost, count - 1 - pages[i], 2 * bytes, 0));
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("page ids of either width reach pages above 2^33 bytes", Integer, std::int32_t,
                   std::int64_t) {
  for (const std::int64_t stride : {37440, 149760, 276480}) {
    for (const std::int64_t offset : kOffsets) {
      const std::vector<std::int64_t> pages = pages_about(offset, stride);
      const std::int64_t count = pages.back() + 1;
      const std::vector<PoolLayout> layouts{large_pool(static_cast<std::size_t>(stride), count)};
      BurstPages collected(layouts, Direction::load, 1, IndexCheck::slots);
      const auto slots = slots_of<Integer>(pages, 1);
      collected.append(view_of("device_indices", slots), view_of("host_indices", slots));
      for (std::size_t i = 0; i < pages.size(); ++i) {
        CHECK(collected.lists().lists[0][i] == PagePair{pages[i], pages[i]});
      }
      check_refused<PageError>(
          [&] {
            const auto past = slots_of<Integer>(std::array{count}, 1);
            collected.append(view_of("device_indices", past), view_of("host_indices", past));
          },
          {"device_indices[0]", std::to_string(count)});
    }
  }
}

TEST_CASE("totals above 2^31 bytes are exact") {
  const std::int64_t pages = 20'000;
  const std::size_t stride = 149'760;
  const std::size_t layer_bytes = static_cast<std::size_t>(pages) * stride;
  REQUIRE(layer_bytes > std::size_t{1} << 31);
  // One layer whose pages adjoin on both tiers: the whole run is one row.
  const PoolLayout layout("wide", std::array{0},
                          DeviceTier{{kDevice}, pages, stride, {{kDevice, layer_bytes}}},
                          HostTier{kHost, layer_bytes, pages, stride, stride, stride, {0}, {}});
  const CopyPlanner planner({layout}, Direction::load, {}, {});
  PageLists lists{{{}}, {0}};
  for (std::int64_t page = 0; page < pages; ++page) lists.lists[0].push_back({page, page});
  CopyPlan plan;
  planner.plan(lists, plan);
  CHECK(plan.count.bytes == static_cast<std::int64_t>(layer_bytes));
  std::vector<Copy> batch;
  std::int64_t splits = 0;
  std::vector<Copy> copies;
  planner.emit(
      plan, 0, batch,
      [&](std::span<const Copy> made) { copies.insert(copies.end(), made.begin(), made.end()); },
      splits);
  REQUIRE(copies.size() == 1);
  CHECK(copies[0].width == layer_bytes);
  CHECK(copies[0].bytes() == layer_bytes);
}
