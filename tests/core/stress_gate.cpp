#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "core/burst_issuer.h"
#include "host/host_device.h"
#include "pools.h"

/// One thread submits loads through a gate of few slots while several forwards wait, layer by
/// layer, for bursts that are new, half done, or long gone from their slots.

using namespace kvburst;
using namespace kvburst::testing;

TEST_CASE("forwards on several threads see their burst while slots rotate under them") {
  constexpr std::int64_t kBursts = 2000;
  constexpr int kForwards = 3;
  const auto device = std::make_shared<HostDevice>();
  std::vector<Pool> pools;
  // Every burst has a page of its own, so nothing but the gate orders what is read here.
  pools.emplace_back(page_first("kv", layers(6), 16, kBursts, kBursts), 1);
  pools.emplace_back(page_first("index", {1, 4}, 8, kBursts, kBursts), 2);
  const std::vector<PoolLayout> layouts = layouts_of(pools);
  const auto expected = pools[0].after(Direction::load, [] {
    std::vector<PagePair> pairs;
    for (std::int64_t page = 0; page < kBursts; ++page) pairs.push_back({page, kBursts - 1 - page});
    return pairs;
  }());
  const auto gate = std::make_shared<LayerGate>(device, layouts, 2);
  std::atomic<std::int64_t> newest = -1;
  std::atomic<int> wrong = 0;

  std::vector<std::thread> forwards;
  for (int f = 0; f < kForwards; ++f) {
    forwards.emplace_back([&, f] {
      std::mt19937 random(static_cast<unsigned>(f));
      const Stream stream(device);
      std::array<std::uint8_t, 16> seen{};
      for (std::int64_t id = 0; id < kBursts; ++id) {
        while (newest.load() < id) std::this_thread::yield();
        for (std::size_t layer = 0; layer < 6; ++layer) {
          const std::uintptr_t page = pools[0].device_page(layer, id);
          if (random() % 2 == 0) {
            gate->wait(id, static_cast<int>(layer), std::nullopt);
          } else {
            gate->wait(id, static_cast<int>(layer), stream.handle());
          }
          device->copy_on_device(
              stream.handle(), {reinterpret_cast<std::uintptr_t>(seen.data()), page, 16, 1, 0, 0});
          device->synchronize_stream(stream.handle());
          const auto* right = expected.data() + pools[0].device.position(page);
          if (!std::equal(seen.begin(), seen.end(), right)) ++wrong;
        }
        gate->wait_issued(id, 3, std::chrono::milliseconds(0));
        if (const std::shared_ptr<Burst> burst = gate->find(id)) burst->done();
      }
    });
  }

  {
    BurstIssuer issuer(device, layouts, Direction::load, gate, {});
    BurstPages pages(layouts, Direction::load, 1, IndexCheck::slots);
    for (std::int64_t id = 0; id < kBursts; ++id) {
      const std::vector<std::int64_t> to{id};
      const std::vector<std::int64_t> from{kBursts - 1 - id};
      pages.append(view_of("device_indices", to), view_of("host_indices", from));
      issuer.submit(pages, {}, device->current_stream());
      newest.store(id);
    }
    issuer.drain();
  }
  for (std::thread& forward : forwards) forward.join();
  CHECK(wrong.load() == 0);
  CHECK(gate->is_done(kBursts - 1));
}
