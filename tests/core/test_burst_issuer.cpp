#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/burst_issuer.h"
#include "core/error.h"
#include "forwarding_device.h"
#include "pools.h"
#include "refusals.h"
#include "threads.h"

using namespace kvburst;
using namespace kvburst::testing;

namespace {

constexpr std::int64_t kPageSize = 2;
constexpr std::array<std::int64_t, 2> kNodes{41, 42};

/// Fails one call, counted from 1 over all calls of its kind; 0 never.
struct FailingDevice : ForwardingDevice {
  using ForwardingDevice::ForwardingDevice;

  void copy(StreamHandle stream, Direction direction, std::span<const Copy> copies) override {
    if (++copies_so_far == failing_copy) throw DeviceError("the link is down");
    ForwardingDevice::copy(stream, direction, copies);
  }
  void record(EventHandle event, StreamHandle stream) override {
    if (++records_so_far == failing_record) {
      if (oddly) throw std::runtime_error("an odd error");
      throw DeviceError("no more events");
    }
    ForwardingDevice::record(event, stream);
  }

  int failing_copy = 0;
  int failing_record = 0;
  bool oddly = false;
  int copies_so_far = 0;
  int records_so_far = 0;
};

std::vector<PoolShape> mixed_shapes() {
  PoolShape holes = layer_first("index", {0, 2, 5, 6}, 12, 16, 12);
  holes.rows = {1, std::nullopt, 0, 2};
  return {page_first("k", layers(6), 24, 16, 12), page_first("v", layers(6), 40, 16, 12), holes};
}

/// Pools with an issuer in each direction.
struct Scene {
  explicit Scene(std::vector<PoolShape> shapes = mixed_shapes(), CopyLimits limits = {},
                 PlanOptions options = {})
      : host(std::make_shared<HostDevice>(std::nullopt, limits)),
        device(std::make_shared<FailingDevice>(host)),
        producer(device),
        pools(make_pools(shapes)),
        layouts(layouts_of(pools)),
        gate(std::make_shared<LayerGate>(device, layouts, 2)),
        loads(layouts, Direction::load, kPageSize, IndexCheck::slots),
        backups(layouts, Direction::backup, kPageSize, IndexCheck::slots),
        loader(device, layouts, Direction::load, gate, options),
        saver(device, layouts, Direction::backup, nullptr, options) {}

  static std::vector<Pool> make_pools(const std::vector<PoolShape>& shapes) {
    std::vector<Pool> pools;
    for (const PoolShape& shape : shapes) {
      pools.emplace_back(shape, static_cast<unsigned>(pools.size() + 1));
    }
    return pools;
  }

  std::shared_ptr<Burst> move(Direction direction, const std::vector<std::int64_t>& device_pages,
                              const std::vector<std::int64_t>& host_pages) {
    const auto on_device = slots_of(device_pages, kPageSize);
    const auto on_host = slots_of(host_pages, kPageSize);
    BurstPages& pages = direction == Direction::load ? loads : backups;
    pages.append(view_of("device_indices", on_device), view_of("host_indices", on_host));
    BurstIssuer& issuer = direction == Direction::load ? loader : saver;
    return issuer.submit(pages, kNodes, producer.handle());
  }
  std::shared_ptr<Burst> load(const std::vector<std::int64_t>& to,
                              const std::vector<std::int64_t>& from) {
    return move(Direction::load, to, from);
  }
  std::shared_ptr<Burst> backup(const std::vector<std::int64_t>& from,
                                const std::vector<std::int64_t>& to) {
    return move(Direction::backup, from, to);
  }

  std::shared_ptr<HostDevice> host;
  std::shared_ptr<FailingDevice> device;
  Stream producer;
  std::vector<Pool> pools;
  std::vector<PoolLayout> layouts;
  std::shared_ptr<LayerGate> gate;
  BurstPages loads;
  BurstPages backups;
  BurstIssuer loader;
  BurstIssuer saver;
};

/// Images of what the pools must be after pages have moved.
std::vector<std::vector<std::uint8_t>> images(std::vector<Pool>& pools, Direction direction,
                                              const std::vector<PagePair>& pages) {
  std::vector<std::vector<std::uint8_t>> after;
  for (Pool& pool : pools) after.push_back(pool.after(direction, pages));
  return after;
}

}  // namespace

TEST_CASE("pages go to the host and come back to other pages, bit-exact, in every pool") {
  PlanOptions options;
  CopyLimits limits;
  SUBCASE("with the product's options") {}
  SUBCASE("a copy for every page and layer") {
    limits.tall_copies = false;
    options = {.ramp = false, .merge_neighbours = false};
  }
  SUBCASE("in small calls and chunks") {
    limits.copies_per_call = 2;
    options.chunk_pages = 2;
  }
  Scene scene(mixed_shapes(), limits, options);
  const std::vector<std::int64_t> from{3, 4, 5, 9, 0};
  const std::vector<std::int64_t> kept{7, 8, 2, 0, 11};
  const auto hosts =
      images(scene.pools, Direction::backup, {{3, 7}, {4, 8}, {5, 2}, {9, 0}, {0, 11}});
  const std::shared_ptr<Burst> saved = scene.backup(from, kept);
  scene.saver.drain();
  CHECK(saved->done());
  CHECK(saved->state.load() == BurstState::issued);
  CHECK(saved->tally.copies == scene.host->counters(Direction::backup).copies);
  CHECK(saved->tally.bytes == saved->plan.count.bytes);
  for (std::size_t p = 0; p < scene.pools.size(); ++p) CHECK(scene.pools[p].host.all() == hosts[p]);

  const std::vector<std::int64_t> to{15, 1, 2, 6, 12};
  const auto devices =
      images(scene.pools, Direction::load, {{15, 7}, {1, 8}, {2, 2}, {6, 0}, {12, 11}});
  const std::shared_ptr<Burst> restored = scene.load(to, kept);
  for (int layer = 0; layer < scene.gate->num_layers(); ++layer) {
    scene.gate->wait(restored->id, layer, std::nullopt);
  }
  restored->synchronize();
  CHECK(restored->done());
  CHECK(scene.gate->is_done(restored->id));
  for (std::size_t p = 0; p < scene.pools.size(); ++p) {
    CHECK(scene.pools[p].device.all() == devices[p]);
    CHECK(scene.pools[p].host.all() == hosts[p]);
  }
}

TEST_CASE("a layer's wait covers every pool's part of it") {
  Scene scene;
  Stall stall(*scene.host, scene.loader.stream());
  const std::shared_ptr<Burst> burst = scene.load({3}, {4});
  Stream forward(scene.device);
  // Layer 5 of all three pools, read behind the wait.
  std::array<std::vector<std::uint8_t>, 3> seen;
  const auto snapshot = [&] {
    for (std::size_t p = 0; p < 3; ++p) {
      const std::size_t bytes = scene.pools[p].shape().page_bytes;
      seen[p].resize(bytes);
      scene.host->copy_on_device(forward.handle(),
                                 {reinterpret_cast<std::uintptr_t>(seen[p].data()),
                                  scene.pools[p].device_page(p == 2 ? 2 : 5, 3), bytes, 1, 0, 0});
    }
  };
  const auto right = [&] {
    for (std::size_t p = 0; p < 3; ++p) {
      const auto expected = scene.pools[p].host.at(scene.pools[p].host_page(p == 2 ? 2 : 5, 4),
                                                   scene.pools[p].shape().page_bytes);
      if (!std::equal(expected.begin(), expected.end(), seen[p].begin())) return false;
    }
    return true;
  };
  snapshot();
  scene.host->synchronize_stream(forward.handle());
  CHECK(!right());
  scene.gate->wait(burst->id, 5, forward.handle());
  snapshot();
  stall.release();
  scene.host->synchronize_stream(forward.handle());
  CHECK(right());
}

// sgl-project/sglang#36738
TEST_CASE("a burst runs behind what was on the producer's stream, and behind nothing without it") {
  Scene scene({page_first("kv", layers(3), 24, 16, 12)});
  Pool& pool = scene.pools[0];
  Stream other(scene.device);
  const std::uintptr_t page = pool.device_page(1, 5);

  for (const bool ordered : {true, false}) {
    CAPTURE(ordered);
    // The producer writes page 5 of layer 1; the backup of that page must have what it wrote.
    Stall stall(*scene.host, scene.producer.handle());
    scene.host->fill(scene.producer.handle(), page, ordered ? 0xAA : 0xBB, 24);
    const auto slots = slots_of(std::array{5l}, kPageSize);
    scene.backups.append(view_of("device_indices", slots), view_of("host_indices", slots));
    const std::shared_ptr<Burst> burst = scene.saver.submit(
        scene.backups, kNodes, ordered ? scene.producer.handle() : other.handle());
    if (ordered) {
      settle();
      CHECK(!burst->done());
      stall.release();
    }
    burst->synchronize();
    CHECK(pool.host.at(pool.host_page(1, 5), 1)[0] == 0xAA);  // never 0xBB, which is stalled
    stall.release();
    scene.host->synchronize();
  }
}

TEST_CASE("a load never overtakes the forward that still writes its pages") {
  for (const bool ordered : {true, false}) {
    CAPTURE(ordered);
    Scene scene({page_first("kv", layers(3), 24, 16, 12)});
    Pool& pool = scene.pools[0];
    Stream other(scene.device);
    std::vector<std::uint8_t> loaded = pool.after(Direction::load, std::array{PagePair{5, 2}});
    Stall stall(*scene.host, scene.producer.handle());
    scene.host->fill(scene.producer.handle(), pool.device_page(1, 5), 0xAA, 24);
    const auto on_device = slots_of(std::array{5l}, kPageSize);
    const auto on_host = slots_of(std::array{2l}, kPageSize);
    scene.loads.append(view_of("device_indices", on_device), view_of("host_indices", on_host));
    const std::shared_ptr<Burst> burst = scene.loader.submit(
        scene.loads, kNodes, ordered ? scene.producer.handle() : other.handle());
    settle();
    CHECK(burst->done() == !ordered);
    stall.release();
    scene.host->synchronize();
    // Without the order the forward's late write is what stays.
    CHECK((pool.device.all() == loaded) == ordered);
  }
}

TEST_CASE("work that follows on the producer's stream does not hold a burst up") {
  Scene scene;
  Stall before(*scene.host, scene.producer.handle());
  const std::shared_ptr<Burst> burst = scene.load({1}, {1});
  Stall after(*scene.host, scene.producer.handle());
  before.release();
  burst->synchronize();
  CHECK(burst->done());
}

// sgl-project/sglang#11005
TEST_CASE("no pages make no burst, take no slot and make no call") {
  Scene scene;
  CHECK(scene.load({}, {}) == nullptr);
  CHECK(scene.backup({}, {}) == nullptr);
  CHECK(scene.host->counters(Direction::load).calls == 0);
  check_refused<BurstError>([&] { scene.gate->is_done(0); }, {"never submitted"});
  CHECK(scene.load({1}, {1})->id == 0);
  CHECK(scene.load({}, {}) == nullptr);
  CHECK(scene.load({2}, {2})->id == 1);
  scene.loader.drain();
}

TEST_CASE("bursts are numbered and their records say what they were") {
  Scene scene;
  const std::shared_ptr<Burst> first = scene.load({1, 2}, {3, 4});
  CHECK(first->id == 0);
  CHECK(first->title() == "load 0");
  CHECK(first->num_pages == 2);
  CHECK(first->node_ids == std::vector<std::int64_t>{41, 42});
  CHECK(scene.loads.num_pages() == 0);
  CHECK(scene.load({1, 2}, {3, 4})->id == 1);
  CHECK(scene.backup({9}, {9})->title() == "backup 0");
  scene.host->synchronize();
}

TEST_CASE("a burst waits for a gate slot while the burst that has it still copies") {
  Scene scene;
  Stall stall(*scene.host, scene.loader.stream());
  const std::shared_ptr<Burst> first = scene.load({1}, {1});
  scene.load({2}, {2});
  std::shared_ptr<Burst> third;
  Blocking submitter([&] { third = scene.load({3}, {3}); });
  CHECK(submitter.blocks());
  CHECK(scene.gate->find(0) == first);
  stall.release();
  submitter.join();
  CHECK(third->id == 2);
  scene.loader.drain();
  CHECK(third->done());
}

TEST_CASE("a failed copy fails its burst by name, and the next burst is served") {
  Scene scene;
  scene.device->failing_copy = 4;
  const std::shared_ptr<Burst> failed = scene.load({1, 2, 9}, {3, 4, 5});
  CHECK(failed->state.load() == BurstState::failed);
  const LayerGroup& group = scene.loader.planner().groups()[3];
  const PoolLayout& pool = scene.layouts[static_cast<std::size_t>(group.pool)];
  const int first = pool.stored()[static_cast<std::size_t>(group.first)].layer;
  for (const std::string& word :
       {std::string("load 0"), std::string("group 4 of "), "pool '" + pool.name() + "'",
        "layers " + std::to_string(first) + " to ", std::string("[41, 42]"),
        std::string("the link is down")}) {
    CHECK_MESSAGE(failed->error.find(word) != std::string::npos, failed->error);
  }
  CHECK(failed->tally.copies == scene.host->counters(Direction::load).copies);
  failed->synchronize();
  CHECK(failed->done());
  for (int layer = 0; layer < scene.gate->num_layers(); ++layer) {
    check_refused<BurstError>([&] { scene.gate->wait(0, layer, std::nullopt); },
                              {"load 0 failed", "the link is down"});
  }

  const auto devices = images(scene.pools, Direction::load, {{1, 3}, {2, 4}, {9, 5}});
  const std::shared_ptr<Burst> next = scene.load({1, 2, 9}, {3, 4, 5});
  CHECK(next->state.load() == BurstState::issued);
  CHECK(next->error.empty());
  scene.gate->wait(1, 6, std::nullopt);
  next->synchronize();
  for (std::size_t p = 0; p < scene.pools.size(); ++p) {
    CHECK(scene.pools[p].device.all() == devices[p]);
  }
}

TEST_CASE("a burst that fails after it had to wait for its slot is thrown at its waiters") {
  Scene scene;
  std::optional<Stall> stall(std::in_place, *scene.host, scene.loader.stream());
  scene.load({1}, {1});
  scene.load({2}, {2});
  scene.device->failing_copy = scene.device->copies_so_far + 2;
  Blocking submitter([&] { scene.load({3}, {3}); });
  CHECK(submitter.blocks());
  stall.reset();
  submitter.join();
  check_refused<BurstError>([&] { scene.gate->wait(2, 5, std::nullopt); }, {"load 2 failed"});
}

TEST_CASE("a failure at any copy of a burst leaves the issuer fit for the next") {
  Scene counting;
  counting.load({1, 2, 9}, {3, 4, 5});
  const int calls = counting.device->copies_so_far;
  REQUIRE(calls > 5);
  Scene scene;
  for (int n = 1; n <= calls; ++n) {
    CAPTURE(n);
    scene.device->failing_copy = scene.device->copies_so_far + n;
    const std::shared_ptr<Burst> failed = scene.load({1, 2, 9}, {3, 4, 5});
    CHECK(failed->state.load() == BurstState::failed);
    const std::shared_ptr<Burst> next = scene.load({4}, {4});
    CHECK(next->state.load() == BurstState::issued);
    scene.gate->wait(next->id, 0, std::nullopt);
  }
  scene.loader.drain();
}

TEST_CASE("a failed burst is done only when what it had issued has been copied") {
  Scene scene;
  Stall stall(*scene.host, scene.saver.stream());
  scene.device->failing_copy = 2;
  const std::shared_ptr<Burst> failed = scene.backup({1}, {1});
  CHECK(failed->state.load() == BurstState::failed);
  CHECK(failed->tally.copies == 1);
  settle();
  CHECK(!failed->done());
  stall.release();
  failed->synchronize();
  CHECK(failed->done());
}

TEST_CASE("events that cannot be recorded fail the burst as well, and nobody hangs") {
  for (const bool oddly : {false, true}) {
    CAPTURE(oddly);
    Scene counting;
    counting.load({1}, {1});
    // The first record is that on the caller's stream: it throws at the caller, see below.
    for (int n = 2; n <= counting.device->records_so_far; ++n) {
      CAPTURE(n);
      Scene scene;
      scene.device->failing_record = n;
      scene.device->oddly = oddly;
      const std::shared_ptr<Burst> failed = scene.load({1}, {1});
      CHECK(failed->state.load() == BurstState::failed);
      CHECK(failed->error.find(oddly ? "an odd error" : "no more events") != std::string::npos);
      check_refused<BurstError>([&] { scene.gate->wait(0, 0, std::nullopt); }, {"load 0 failed"});
      CHECK(scene.load({2}, {2})->state.load() == BurstState::issued);
    }
  }
}

TEST_CASE("a device of which every record fails still settles the burst") {
  struct Dead : ForwardingDevice {
    using ForwardingDevice::ForwardingDevice;
    void record(EventHandle event, StreamHandle stream) override {
      if (dead) throw std::runtime_error("gone");
      ForwardingDevice::record(event, stream);
    }
    void copy(StreamHandle, Direction, std::span<const Copy>) override {
      dead = true;
      throw std::runtime_error("gone");
    }
    void synchronize_stream(StreamHandle stream) override {
      ++synchronized;
      ForwardingDevice::synchronize_stream(stream);
    }
    bool dead = false;
    int synchronized = 0;
  };
  std::vector<Pool> pools;
  pools.emplace_back(page_first("kv", layers(3), 24, 16, 12));
  const std::vector<PoolLayout> layouts = layouts_of(pools);
  const auto device = std::make_shared<Dead>(std::make_shared<HostDevice>());
  const auto gate = std::make_shared<LayerGate>(device, layouts, 2);
  BurstIssuer issuer(device, layouts, Direction::load, gate, {});
  BurstPages pages(layouts, Direction::load, 1, IndexCheck::slots);
  const std::vector<std::int64_t> slots{1};
  pages.append(view_of("device_indices", slots), view_of("host_indices", slots));
  const std::shared_ptr<Burst> burst = issuer.submit(pages, kNodes, device->current_stream());
  CHECK(burst->state.load() == BurstState::failed);
  CHECK(burst->error.find("finish event") != std::string::npos);
  CHECK(device->synchronized == 1);  // no event says when its copies are done, so it waited
  check_refused<BurstError>([&] { gate->wait(0, 0, std::nullopt); }, {"gone"});
}

TEST_CASE("a stream that is not the device's is refused before a slot is taken or a page lost") {
  Scene scene;
  const auto slots = slots_of(std::array{1l, 2l}, kPageSize);
  scene.loads.append(view_of("device_indices", slots), view_of("host_indices", slots));
  check_refused<DeviceError>([&] { scene.loader.submit(scene.loads, kNodes, 999'999); },
                             {"handle 999999"});
  CHECK(scene.loads.num_pages() == 2);
  check_refused<BurstError>([&] { scene.gate->is_done(0); }, {"never submitted"});
  const std::shared_ptr<Burst> burst =
      scene.loader.submit(scene.loads, kNodes, scene.producer.handle());
  CHECK(burst->id == 0);
  CHECK(burst->num_pages == 2);
  scene.loader.drain();
}

TEST_CASE("pages of another direction or other pools are refused") {
  Scene scene;
  check_refused<PageError>(
      [&] { scene.loader.submit(scene.backups, kNodes, scene.producer.handle()); },
      {"a backup", "direction is load"});
  BurstPages fewer(std::span(scene.layouts).first(1), Direction::load, kPageSize,
                   IndexCheck::pages);
  check_refused<PageError>([&] { scene.loader.submit(fewer, kNodes, scene.producer.handle()); },
                           {"1 pools", "has 3"});
}

TEST_CASE("a gate for other layers than the pools is refused") {
  Scene scene;
  const std::span layouts(scene.layouts);
  const auto first_pool = std::make_shared<LayerGate>(scene.device, layouts.first(1), 2);
  check_refused<LayoutError>(
      [&] { BurstIssuer(scene.device, scene.layouts, Direction::load, first_pool, {}); },
      {"gate", "do not store layer 6", "this issuer's do"});
  const std::vector<PoolLayout> index(layouts.begin() + 2, layouts.end());
  check_refused<LayoutError>(
      [&] { BurstIssuer(scene.device, index, Direction::load, scene.gate, {}); },
      {"gate", "pools that store layer 1", "this issuer's do not"});
}

TEST_CASE("the bursts of an issuer outlive it, done") {
  Scene scene;
  std::shared_ptr<Burst> burst;
  {
    BurstIssuer brief(scene.device, scene.layouts, Direction::load, nullptr, {});
    const auto slots = slots_of(std::array{1l, 2l}, kPageSize);
    scene.loads.append(view_of("device_indices", slots), view_of("host_indices", slots));
    burst = brief.submit(scene.loads, kNodes, scene.producer.handle());
  }
  CHECK(burst->done());
  CHECK(burst->num_pages == 2);
}

TEST_CASE("the copies are taken from the indices as they were at submission") {
  // NVIDIA/TensorRT-LLM#15546
  Scene scene({page_first("kv", layers(2), 24, 16, 12)});
  Stall stall(*scene.host, scene.loader.stream());
  std::vector<std::int64_t> on_device = slots_of(std::array{1l, 2l}, kPageSize);
  std::vector<std::int64_t> on_host = slots_of(std::array{3l, 4l}, kPageSize);
  const auto expected = scene.pools[0].after(
      Direction::load, std::array{PagePair{1, 3}, PagePair{2, 4}, PagePair{8, 0}, PagePair{9, 1}});
  const auto submit = [&] {
    scene.loads.append(view_of("device_indices", on_device), view_of("host_indices", on_host));
    return scene.loader.submit(scene.loads, kNodes, scene.producer.handle());
  };
  submit();
  on_device = slots_of(std::array{8l, 9l}, kPageSize);
  on_host = slots_of(std::array{0l, 1l}, kPageSize);
  submit();
  std::fill(on_device.begin(), on_device.end(), 0);
  stall.release();
  scene.loader.drain();
  CHECK(scene.pools[0].device.all() == expected);
}
