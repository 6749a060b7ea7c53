#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <semaphore>
#include <string>
#include <vector>

#include "core/burst_issuer.h"
#include "core/error.h"
#include "forwarding_device.h"
#include "pools.h"
#include "refusals.h"
#include "threads.h"

/// The issuer on a thread of its own, held at any point of a burst: the device under it runs a
/// test's code before each call of `copy`, on the thread that issues.

using namespace kvburst;
using namespace kvburst::testing;
using namespace std::chrono_literals;

/// What an issuer leaves behind because it is stuck is left on purpose.
extern "C" __attribute__((visibility("default"))) const char* __lsan_default_suppressions() {
  return "leak:leave_body_behind";
}

namespace {

struct InterruptedDevice : ForwardingDevice {
  using ForwardingDevice::ForwardingDevice;

  void copy(StreamHandle stream, Direction direction, std::span<const Copy> copies) override {
    if (before_copy) before_copy(calls++, stream);
    ForwardingDevice::copy(stream, direction, copies);
  }

  /// Gets the number of the call, from 0, and its stream. Set while nothing is issued.
  std::function<void(int, StreamHandle)> before_copy;
  /// Of the issuing thread alone.
  int calls = 0;
};

/// Holds the issuing thread inside the nth copy call, as a driver that does not return does.
class Stuck {
 public:
  Stuck(InterruptedDevice& device, int nth) {
    device.before_copy = [this, nth](int call, StreamHandle) {
      if (call != nth) return;
      reached_.release();
      go_on_.acquire();
    };
  }
  ~Stuck() { release(); }

  /// Returns when the thread is there.
  void wait_until_reached() { reached_.acquire(); }
  void release() {
    if (!released_) go_on_.release();
    released_ = true;
  }

 private:
  std::binary_semaphore reached_{0};
  std::binary_semaphore go_on_{0};
  bool released_ = false;
};

/// Pages of `kLayers` layers, a copy call for each of a load.
struct Scene {
  static constexpr int kLayers = 8;

  explicit Scene(int slots = 3) {
    pools.emplace_back(page_first("kv", layers(kLayers), 16, 32, 32), 1);
    layouts = layouts_of(pools);
    gate = std::make_shared<LayerGate>(device, layouts, slots);
    issuer = std::make_unique<BurstIssuer>(device, layouts, Direction::load, gate,
                                           PlanOptions{.ramp = false}, IssuerOptions{true, {}, {}});
    pages = std::make_unique<BurstPages>(layouts, Direction::load, 1, IndexCheck::slots);
  }

  std::shared_ptr<Burst> load(std::int64_t to, std::int64_t from) {
    const std::vector<std::int64_t> on_device{to};
    const std::vector<std::int64_t> on_host{from};
    pages->append(view_of("device_indices", on_device), view_of("host_indices", on_host));
    return issuer->submit(*pages, std::array<std::int64_t, 1>{7}, producer.handle());
  }

  /// What a forward finds in a page of a layer, behind what is on its stream by then.
  struct Snapshot {
    std::array<std::uint8_t, 16> bytes{};
  };
  void snapshot(std::size_t layer, std::int64_t page, Snapshot& into) {
    host->copy_on_device(forward.handle(), {reinterpret_cast<std::uintptr_t>(into.bytes.data()),
                                            pools[0].device_page(layer, page), 16, 1, 0, 0});
  }
  bool is_loaded(const Snapshot& seen, std::size_t layer, std::int64_t from) {
    const auto right = pools[0].host.at(pools[0].host_page(layer, from), 16);
    return std::equal(right.begin(), right.end(), seen.bytes.begin());
  }

  std::shared_ptr<HostDevice> host = std::make_shared<HostDevice>();
  std::shared_ptr<InterruptedDevice> device = std::make_shared<InterruptedDevice>(host);
  Stream producer{device};
  Stream forward{device};
  std::vector<Pool> pools;
  std::vector<PoolLayout> layouts;
  std::shared_ptr<LayerGate> gate;
  std::unique_ptr<BurstIssuer> issuer;
  std::unique_ptr<BurstPages> pages;
};

}  // namespace

// sgl-project/sglang#36743
TEST_CASE("who waits for every layer sees all of them, who waits for layer 0 may see a stale 7") {
  Scene scene;
  std::unique_ptr<Stall> stall;
  std::binary_semaphore stalled(0);
  scene.device->before_copy = [&](int call, StreamHandle stream) {
    if (call != 7) return;
    stall = std::make_unique<Stall>(*scene.host, stream);
    stalled.release();
  };
  const std::shared_ptr<Burst> burst = scene.load(5, 11);
  stalled.acquire();

  std::array<Scene::Snapshot, Scene::kLayers> early;
  scene.gate->wait(burst->id, 0, scene.forward.handle());
  for (std::size_t layer : {0, 7}) scene.snapshot(layer, 5, early[layer]);
  scene.host->synchronize_stream(scene.forward.handle());
  CHECK(scene.is_loaded(early[0], 0, 11));
  CHECK(!scene.is_loaded(early[7], 7, 11));

  std::array<Scene::Snapshot, Scene::kLayers> late;
  for (int layer = 0; layer < Scene::kLayers; ++layer) {
    scene.gate->wait(burst->id, layer, scene.forward.handle());
  }
  for (std::size_t layer = 0; layer < Scene::kLayers; ++layer) {
    scene.snapshot(layer, 5, late[layer]);
  }
  settle();
  CHECK(!burst->done());
  stall->release();
  scene.host->synchronize_stream(scene.forward.handle());
  for (std::size_t layer = 0; layer < Scene::kLayers; ++layer) {
    CAPTURE(layer);
    CHECK(scene.is_loaded(late[layer], layer, 11));
  }
}

TEST_CASE("a forward that ignores the issued flag runs on stale bytes") {
  for (const bool heeded : {true, false}) {
    CAPTURE(heeded);
    Scene scene;
    Stuck stuck(*scene.device, 3);
    const std::shared_ptr<Burst> burst = scene.load(5, 11);
    stuck.wait_until_reached();
    // Layers 0 to 2 are issued, 3 is not, so its event says nothing of this burst yet.
    if (!heeded) burst->issued[3].store(true);
    Scene::Snapshot seen;
    Blocking waiter([&] {
      scene.gate->wait(burst->id, 3, scene.forward.handle());
      scene.snapshot(3, 5, seen);
      scene.host->synchronize_stream(scene.forward.handle());
    });
    CHECK(waiter.blocks() == heeded);
    if (!heeded) waiter.join();
    stuck.release();
    if (heeded) waiter.join();
    CHECK(scene.is_loaded(seen, 3, 11) == heeded);
    scene.issuer->drain();
  }
}

TEST_CASE(
    "layers that are issued let their waiters go on while the thread is stuck in later ones") {
  Scene scene;
  Stuck stuck(*scene.device, 3);
  const std::shared_ptr<Burst> burst = scene.load(5, 11);
  stuck.wait_until_reached();
  for (int layer = 0; layer < 3; ++layer) {
    CHECK(scene.gate->wait_issued(burst->id, layer, 0ms));
    scene.gate->wait(burst->id, layer, std::nullopt);
  }
  for (int layer = 3; layer < Scene::kLayers; ++layer) {
    CHECK(!scene.gate->wait_issued(burst->id, layer, 0ms));
  }
  CHECK(!scene.gate->wait_issued(burst->id, 3, 20ms));
  CHECK(!burst->settled());
  stuck.release();
  scene.issuer->drain();
  CHECK(scene.gate->wait_issued(burst->id, 7, 0ms));
}

TEST_CASE("the slot of a burst that is not issued is not handed out, though its events say done") {
  Scene scene(2);
  Stuck stuck(*scene.device, 0);
  const std::shared_ptr<Burst> current = scene.load(1, 1);
  stuck.wait_until_reached();
  const std::shared_ptr<Burst> queued = scene.load(2, 2);
  for (const auto& burst : {current, queued}) {
    // An event alone would have handed the slot out: it was never recorded.
    CHECK(scene.device->query(burst->finish.handle()));
    CHECK(!burst->done());
    CHECK(!scene.gate->has_slot(burst->id + 2));
  }
  CHECK(!scene.issuer->only_hands_over());
  std::shared_ptr<Burst> third;
  Blocking submitter([&] { third = scene.load(3, 3); });
  CHECK(submitter.blocks());
  CHECK(scene.gate->find(0) == current);
  stuck.release();
  submitter.join();
  CHECK(third->id == 2);
  scene.issuer->drain();
  CHECK(scene.gate->find(0) == nullptr);
  CHECK(queued->done());
}

TEST_CASE("handing a burst over does not wait for the issuer, and bursts keep their order") {
  Scene scene(4);
  Stuck stuck(*scene.device, 0);
  scene.load(1, 1);
  stuck.wait_until_reached();
  std::vector<std::shared_ptr<Burst>> bursts;
  for (int i = 0; i < 3; ++i) {
    CHECK(scene.issuer->only_hands_over());
    bursts.push_back(scene.load(2 + i, 2 + i));
  }
  stuck.release();
  bursts[2]->synchronize();
  CHECK(bursts[0]->done());
  CHECK(bursts[1]->done());
  scene.issuer->drain();
  double newest = -1;
  for (const auto& burst : bursts) {
    const double since = scene.host->elapsed_ms(bursts[0]->start.handle(), burst->start.handle());
    CHECK(since > newest);
    newest = since;
  }
}

// sgl-project/sglang#40312
TEST_CASE("a thread that is stuck in the driver is left behind by name, and nobody hangs") {
  Scene scene;
  Stuck stuck(*scene.device, 2);
  const std::shared_ptr<Burst> current = scene.load(1, 1);
  stuck.wait_until_reached();
  const std::shared_ptr<Burst> queued = scene.load(2, 2);
  scene.load(3, 3);
  std::string thrown;
  Blocking waiter([&] {
    try {
      scene.gate->wait(current->id, 7, scene.forward.handle());
    } catch (const BurstError& error) {
      thrown = error.what();
    }
  });
  Blocking drainer(
      [&] { check_refused<BurstError>([&] { scene.issuer->drain(); }, {"stuck in load 0"}); });
  std::string refused;
  // Waits for the slot of a burst that is never issued.
  Blocking submitter([&] { refused = scene.load(4, 4)->error; });
  CHECK(waiter.blocks());
  CHECK(drainer.blocks());
  CHECK(submitter.blocks());

  const auto begin = std::chrono::steady_clock::now();
  CHECK(!scene.issuer->stop(50ms));
  CHECK(std::chrono::steady_clock::now() - begin < 3s);
  waiter.join();
  drainer.join();
  submitter.join();
  CHECK(thrown.find("load 0 failed in the driver, node_ids [7]") != std::string::npos);
  CHECK(thrown.find("after 50 ms") != std::string::npos);
  CHECK(refused.find("load 3 failed in the queue") != std::string::npos);
  CHECK(current->state.load() == BurstState::abandoned);
  CHECK(queued->state.load() == BurstState::failed);
  check_refused<BurstError>([&] { scene.load(5, 5); }, {"stuck in load 0"});
  check_refused<BurstError>([&] { scene.issuer->only_hands_over(); }, {"stuck in load 0"});
  CHECK(!scene.issuer->stop(10s));

  stuck.release();
  scene.issuer.reset();
  settle();
  scene.host->synchronize();
  // The thread, set free, has issued nothing more of its burst than the group it was stuck in.
  CHECK(scene.host->counters(Direction::load).copies == 3);
  CHECK(current->error.find("in the driver") != std::string::npos);
}

TEST_CASE(
    "a forward that comes after the slot of a failed burst has moved on is told all the same") {
  Scene scene(1);
  scene.host->fail_copy_call(6);
  scene.load(1, 1);
  scene.issuer->drain();
  const std::shared_ptr<Burst> next = scene.load(2, 2);
  CHECK(scene.gate->find(0) == nullptr);
  for (const int layer : {0, 7}) {
    check_refused<BurstError>([&] { scene.gate->wait(0, layer, std::nullopt); }, {"load 0 failed"});
    check_refused<BurstError>([&] { scene.gate->wait(0, layer, scene.forward.handle()); },
                              {"load 0 failed"});
  }
  check_refused<BurstError>([&] { scene.gate->is_done(0); }, {"load 0 failed"});
  scene.gate->wait(next->id, 7, std::nullopt);
  scene.load(3, 3);
  scene.gate->wait(next->id, 7, std::nullopt);  // gone as well, but in place
  CHECK(scene.gate->is_done(next->id));
  scene.issuer->drain();
}

TEST_CASE("a stop waits for what is queued, and later bursts are issued on the caller") {
  Scene scene;
  Stuck stuck(*scene.device, 0);
  scene.load(1, 1);
  stuck.wait_until_reached();
  const std::shared_ptr<Burst> queued = scene.load(2, 2);
  bool ended = false;
  Blocking stopper([&] { ended = scene.issuer->stop(60s); });
  Blocking another([&] { CHECK(scene.issuer->stop(60s)); });
  CHECK(stopper.blocks());
  CHECK(another.blocks());
  // The thread is still there, and so the only one that may issue.
  const std::shared_ptr<Burst> late = scene.load(3, 3);
  CHECK(!late->settled());
  stuck.release();
  stopper.join();
  another.join();
  CHECK(ended);
  CHECK(queued->settled());
  CHECK(late->settled());
  const std::shared_ptr<Burst> inline_burst = scene.load(4, 4);
  CHECK(inline_burst->settled());
  scene.issuer->drain();
  CHECK(inline_burst->done());
  CHECK(scene.issuer->stop(0ms));
}

TEST_CASE("an issuer keeps the memory it was given until its copies are done") {
  Scene scene;
  std::atomic<bool> freed = false;
  std::shared_ptr<const void> memory(&scene, [&](const void*) { freed = true; });
  bool ends = false;
  Stall stall(*scene.host, scene.producer.handle());
  {
    BurstIssuer issuer(scene.device, scene.layouts, Direction::load, nullptr, {},
                       IssuerOptions{true, {}, std::move(memory)});
    const std::vector<std::int64_t> slots{1};
    scene.pages->append(view_of("device_indices", slots), view_of("host_indices", slots));
    const auto burst = issuer.submit(*scene.pages, {}, scene.producer.handle());
    SUBCASE("which come to an end") { ends = true; }
    SUBCASE("and for ever if they do not") {}
    if (ends) stall.release();
    CHECK(!freed);
  }
  CHECK(freed == ends);
  stall.release();
  scene.host->synchronize();
  CHECK(freed == ends);
}
