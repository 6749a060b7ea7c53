#include <doctest/doctest.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/layer_gate.h"
#include "forwarding_device.h"
#include "pools.h"
#include "refusals.h"
#include "threads.h"

using namespace kvburst;
using namespace kvburst::testing;

namespace {

/// Layers 0, 1 and 3 of 4; nobody stores layer 2.
std::vector<PoolLayout> sparse_pool() {
  return {layout_of(page_first("kv", {0, 1, 3}, 16, 4, 4), 1 << 20, 1 << 24)};
}

/// A gate and the issuer's side of it, done by hand. A layer is one byte that a stream writes.
struct Scene {
  explicit Scene(int slots = 2, std::vector<PoolLayout> layouts = sparse_pool())
      : device(std::make_shared<HostDevice>()),
        gate(device, layouts, slots),
        bursts(device, gate.num_layers()),
        transfer(device),
        forward(device) {}

  std::shared_ptr<Burst> begin(std::int64_t id) {
    std::shared_ptr<Burst> burst = bursts.take(id, Direction::load);
    gate.acquire(burst);
    return burst;
  }
  void issue_layer(Burst& burst, int layer) {
    device->fill(transfer.handle(), address(layer), value_of(burst.id), 1);
    gate.layer_issued(burst, layer, transfer.handle());
  }
  void finish(Burst& burst) {
    device->record(burst.finish.handle(), transfer.handle());
    burst.settle(BurstState::issued, {}, {});
    gate.burst_settled();
  }
  void fail(Burst& burst, std::string why) {
    device->record(burst.finish.handle(), transfer.handle());
    burst.settle(BurstState::failed, std::move(why), {});
    gate.burst_settled();
  }
  std::shared_ptr<Burst> issue(std::int64_t id) {
    std::shared_ptr<Burst> burst = begin(id);
    for (const int layer : {0, 1, 3}) issue_layer(*burst, layer);
    finish(*burst);
    return burst;
  }
  /// Has the forward's stream read a layer into `seen`.
  void snapshot(int layer, std::uint8_t& seen) {
    device->copy_on_device(forward.handle(),
                           {reinterpret_cast<std::uintptr_t>(&seen), address(layer), 1, 1, 0, 0});
  }
  std::uintptr_t address(int layer) {
    return reinterpret_cast<std::uintptr_t>(&bytes[static_cast<std::size_t>(layer)]);
  }
  static std::uint8_t value_of(std::int64_t id) { return static_cast<std::uint8_t>(id + 1); }

  std::array<std::uint8_t, 4> bytes{};
  std::shared_ptr<HostDevice> device;
  LayerGate gate;
  BurstPool bursts;
  Stream transfer;
  Stream forward;
};

}  // namespace

TEST_CASE("a gate has a layer for every model layer up to the highest") {
  const std::vector<PoolLayout> layouts{
      layout_of(page_first("kv", {0, 2}, 16, 4, 4), 1 << 20, 1 << 24),
      layout_of(page_first("draft", {6}, 16, 4, 4), 1 << 20, 1 << 24)};
  const Scene scene(3, layouts);
  CHECK(scene.gate.num_layers() == 7);
  CHECK(scene.gate.num_slots() == 3);
  const auto device = std::make_shared<HostDevice>();
  check_refused<LayoutError>([&] { LayerGate(device, layouts, 0); },
                             {"slots", "0", "minimum of 1"});
  check_refused<LayoutError>([&] { LayerGate(device, {}, 3); }, {"0 pools"});
}

TEST_CASE("a stream that waits for a layer sees its bytes, and without the wait it does not") {
  Scene scene;
  Stall stall(*scene.device, scene.transfer.handle());
  scene.issue(0);
  std::uint8_t without = 99;
  std::uint8_t with = 99;
  scene.snapshot(3, without);
  scene.device->synchronize_stream(scene.forward.handle());
  CHECK(without == 0);
  scene.gate.wait(0, 3, scene.forward.handle());
  scene.snapshot(3, with);
  stall.release();
  scene.device->synchronize_stream(scene.forward.handle());
  CHECK(with == Scene::value_of(0));
}

TEST_CASE("a wait blocks the thread until the layer has been issued, by stream and without") {
  Scene scene;
  const std::shared_ptr<Burst> burst = scene.begin(0);
  scene.issue_layer(*burst, 0);
  CHECK(scene.gate.wait_issued(0, 0, std::chrono::milliseconds(0)));
  CHECK(!scene.gate.wait_issued(0, 1, std::chrono::milliseconds(0)));
  std::uint8_t by_stream = 99;
  std::uint8_t by_thread = 99;
  Blocking on_stream([&] {
    scene.gate.wait(0, 1, scene.forward.handle());
    scene.snapshot(1, by_stream);
    scene.device->synchronize_stream(scene.forward.handle());
  });
  Blocking on_thread([&] {
    scene.gate.wait(0, 1, std::nullopt);
    by_thread = scene.bytes[1];
  });
  // The event of layer 1 was never recorded: a wait on it alone would be a no-op.
  CHECK(on_stream.blocks());
  CHECK(on_thread.blocks());
  scene.issue_layer(*burst, 1);
  on_stream.join();
  on_thread.join();
  CHECK(by_stream == Scene::value_of(0));
  CHECK(by_thread == Scene::value_of(0));
  scene.issue_layer(*burst, 3);
  scene.finish(*burst);
}

TEST_CASE("an event recorded for an earlier burst does not stand for this one") {
  Scene scene(1);
  scene.issue(0);
  scene.device->synchronize();
  const std::shared_ptr<Burst> burst = scene.begin(1);
  std::uint8_t seen = 99;
  // The only slot's event of layer 0 is reached, by burst 0.
  Blocking waiter([&] {
    scene.gate.wait(1, 0, scene.forward.handle());
    scene.snapshot(0, seen);
    scene.device->synchronize_stream(scene.forward.handle());
  });
  CHECK(waiter.blocks());
  scene.issue_layer(*burst, 0);
  waiter.join();
  CHECK(seen == Scene::value_of(1));
  for (const int layer : {1, 3}) scene.issue_layer(*burst, layer);
  scene.finish(*burst);
}

TEST_CASE("the device is not asked to wait for a layer before that layer has been issued") {
  struct Watching : ForwardingDevice {
    using ForwardingDevice::ForwardingDevice;
    void wait(StreamHandle stream, EventHandle event) override {
      if (!issued->issued[0].load()) too_early.store(true);
      ForwardingDevice::wait(stream, event);
    }
    std::shared_ptr<Burst> issued;
    std::atomic<bool> too_early = false;
  };
  const auto host = std::make_shared<HostDevice>();
  const auto device = std::make_shared<Watching>(host);
  LayerGate gate(device, sparse_pool(), 2);
  BurstPool bursts(device, gate.num_layers());
  Stream transfer(device);
  Stream forward(device);
  for (std::int64_t id = 0; id < 200; ++id) {
    device->issued = bursts.take(id, Direction::load);
    gate.acquire(device->issued);
    Blocking waiter([&] { gate.wait(id, 0, forward.handle()); });
    for (const int layer : {0, 1, 3}) gate.layer_issued(*device->issued, layer, transfer.handle());
    device->record(device->issued->finish.handle(), transfer.handle());
    device->issued->settle(BurstState::issued, {}, {});
    gate.burst_settled();
    waiter.join();
  }
  CHECK(!device->too_early.load());
  device->issued.reset();
}

TEST_CASE("layers that no pool stores never hold anybody up") {
  Scene scene;
  const std::shared_ptr<Burst> burst = scene.begin(0);
  CHECK(scene.gate.wait_issued(0, 2, std::chrono::milliseconds(0)));
  scene.gate.wait(0, 2, scene.forward.handle());
  scene.gate.wait(0, 2, std::nullopt);
  for (const int layer : {0, 1, 3})
    CHECK(!scene.gate.wait_issued(0, layer, std::chrono::milliseconds(0)));
  scene.finish(*burst);
}

TEST_CASE("a slot still copying is never handed out again") {
  Scene scene(2);
  Stall stall(*scene.device, scene.transfer.handle());
  scene.issue(0);
  scene.issue(1);
  const std::shared_ptr<Burst> third = scene.bursts.take(2, Direction::load);
  settle();
  CHECK(!scene.gate.try_acquire(third));
  CHECK(!scene.gate.is_done(0));
  REQUIRE(scene.gate.find(0));
  CHECK(scene.gate.find(0)->id == 0);
  Blocking acquirer([&] { scene.gate.acquire(third); });
  Blocking waiter([&] { scene.gate.wait_for_slot(2); });
  CHECK(acquirer.blocks());
  CHECK(waiter.blocks());
  CHECK(!acquirer.returned());
  // Denied or waiting, the slot is still its holder's.
  CHECK(scene.gate.find(0)->id == 0);
  stall.release();
  acquirer.join();
  waiter.join();
  CHECK(scene.gate.find(2) == third);
  scene.gate.wait(1, 3, std::nullopt);
  CHECK(scene.bytes[3] == Scene::value_of(1));
}

TEST_CASE("a slot whose burst is done is handed out at once") {
  Scene scene(1);
  scene.issue(0);
  scene.device->synchronize();
  CHECK(scene.gate.is_done(0));
  scene.gate.wait_for_slot(1);
  CHECK(scene.gate.try_acquire(scene.bursts.take(1, Direction::load)));
}

TEST_CASE("a slot whose burst has not even been issued is waited for") {
  Scene scene(1);
  const std::shared_ptr<Burst> first = scene.begin(0);
  const std::shared_ptr<Burst> second = scene.bursts.take(1, Direction::load);
  CHECK(!scene.gate.try_acquire(second));
  CHECK(!first->done());
  Blocking acquirer([&] { scene.gate.acquire(second); });
  CHECK(acquirer.blocks());
  for (const int layer : {0, 1, 3}) scene.issue_layer(*first, layer);
  scene.finish(*first);
  acquirer.join();
  CHECK(scene.gate.find(1) == second);
}

TEST_CASE("an id whose slot has moved on is complete and needs no wait") {
  Scene scene(1);
  scene.issue(0);
  scene.device->synchronize();
  const std::shared_ptr<Burst> next = scene.begin(1);
  // Burst 1 has the slot and has issued nothing.
  scene.gate.wait(0, 0, scene.forward.handle());
  scene.gate.wait(0, 0, std::nullopt);
  CHECK(scene.gate.wait_issued(0, 0, std::chrono::milliseconds(0)));
  CHECK(scene.gate.is_done(0));
  CHECK(!scene.gate.find(0));
  CHECK(scene.device->query_stream(scene.forward.handle()));
  CHECK(!scene.gate.is_done(1));
  scene.finish(*next);
}

TEST_CASE("ids that were never submitted and layers out of range are refused") {
  Scene scene;
  check_refused<BurstError>([&] { scene.gate.wait(0, 0, std::nullopt); },
                            {"0 was never submitted", "newest is -1"});
  scene.issue(0);
  for (const std::int64_t id : {std::int64_t{-1}, std::int64_t{1}, std::int64_t{1} << 40}) {
    const std::string name = std::to_string(id) + " was never submitted";
    check_refused<BurstError>([&] { scene.gate.wait(id, 0, std::nullopt); }, {name, "newest is 0"});
    check_refused<BurstError>([&] { scene.gate.wait_issued(id, 0, std::chrono::milliseconds(0)); },
                              {name});
    check_refused<BurstError>([&] { scene.gate.is_done(id); }, {name});
    check_refused<BurstError>([&] { scene.gate.find(id); }, {name});
  }
  for (const int layer : {-1, 4}) {
    const std::string name = "layer: " + std::to_string(layer);
    check_refused<LayoutError>([&] { scene.gate.wait(0, layer, std::nullopt); },
                               {name, "4 layers"});
    check_refused<LayoutError>(
        [&] { scene.gate.wait_issued(0, layer, std::chrono::milliseconds(0)); },
        {name, "4 layers"});
  }
}

TEST_CASE("a failed burst is thrown at those who wait for it, then and later") {
  Scene scene(1);
  const std::shared_ptr<Burst> burst = scene.begin(0);
  scene.issue_layer(*burst, 0);
  std::string thrown;
  Blocking waiter([&] {
    try {
      scene.gate.wait(0, 1, scene.forward.handle());
    } catch (const BurstError& error) {
      thrown = error.what();
    }
  });
  CHECK(waiter.blocks());
  scene.fail(*burst, "load 0 failed in its middle");
  waiter.join();
  CHECK(thrown == "load 0 failed in its middle");
  check_refused<BurstError>([&] { scene.gate.wait(0, 0, std::nullopt); }, {"failed in its middle"});
  check_refused<BurstError>([&] { scene.gate.wait(0, 2, std::nullopt); }, {"failed in its middle"});
  check_refused<BurstError>([&] { scene.gate.is_done(0); }, {"failed in its middle"});
  CHECK(scene.gate.wait_issued(0, 1, std::chrono::milliseconds(0)));

  // Its slot goes to the next burst once what it had issued is done.
  scene.device->synchronize();
  scene.issue(1);
  scene.gate.wait(1, 3, std::nullopt);
  CHECK(scene.bytes[3] == Scene::value_of(1));
}

TEST_CASE("a slot of a failed burst that still copies is not handed out") {
  Scene scene(1);
  Stall stall(*scene.device, scene.transfer.handle());
  const std::shared_ptr<Burst> burst = scene.begin(0);
  scene.issue_layer(*burst, 0);
  scene.fail(*burst, "why");
  settle();
  CHECK(!burst->done());
  CHECK(!scene.gate.try_acquire(scene.bursts.take(1, Direction::load)));
  stall.release();
  burst->synchronize();
  CHECK(burst->done());
  CHECK(scene.gate.try_acquire(scene.bursts.take(1, Direction::load)));
}

TEST_CASE("every forward sees its own burst while slots rotate under it") {
  Scene scene(3);
  for (std::int64_t id = 0; id < 300; ++id) {
    const std::shared_ptr<Burst> burst = scene.begin(id);
    std::array<std::uint8_t, 4> seen{};
    Blocking forward([&] {
      for (const int layer : {0, 1, 3}) {
        scene.gate.wait(id, layer, scene.forward.handle());
        scene.snapshot(layer, seen[static_cast<std::size_t>(layer)]);
      }
      scene.device->synchronize_stream(scene.forward.handle());
    });
    for (const int layer : {0, 1, 3}) scene.issue_layer(*burst, layer);
    scene.finish(*burst);
    forward.join();
    for (const std::size_t layer : {0, 1, 3}) REQUIRE(seen[layer] == Scene::value_of(id));
  }
}

TEST_CASE("records come back when their last reader lets go, and their events with them") {
  const auto device = std::make_shared<HostDevice>();
  std::shared_ptr<Burst> outliving;
  {
    BurstPool bursts(device, 2);
    std::shared_ptr<Burst> first = bursts.take(0, Direction::load);
    std::shared_ptr<Burst> reader = first;
    const Burst* record = first.get();
    first->issued[1].store(true);
    first->state.store(BurstState::failed);
    first->error = "why";
    first->node_ids = {1, 2};
    first.reset();
    outliving = bursts.take(1, Direction::backup);
    CHECK(outliving.get() != record);
    reader.reset();
    const std::shared_ptr<Burst> again = bursts.take(2, Direction::backup);
    CHECK(again.get() == record);
    CHECK(again->id == 2);
    CHECK(again->title() == "backup 2");
    CHECK(again->state.load() == BurstState::queued);
    CHECK(!again->issued[1].load());
    CHECK(again->error.empty());
    CHECK(again->node_ids.empty());
    CHECK(!again->done());
  }
  CHECK(outliving->id == 1);
}
