#include <doctest/doctest.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/burst_issuer.h"
#include "core/format.h"
#include "forwarding_device.h"
#include "host/host_device.h"
#include "pools.h"

/// Mode `inline` makes exactly the stream and event calls of the path it stands for, SGLang's
/// `HiCacheController.start_loading` and `write` with their `L2TransferEngine`. Every call that
/// reaches the device is written down, in words.

using namespace kvburst;
using namespace kvburst::testing;

namespace {

/// Writes every call down. Handles are kept as numbers: what they are called is known afterwards.
struct LoggingDevice : ForwardingDevice {
  struct Call {
    std::string what;
    std::optional<EventHandle> event;
    std::optional<StreamHandle> stream;
  };

  using ForwardingDevice::ForwardingDevice;

  StreamHandle create_stream() override {
    calls.push_back({"create stream", {}, {}});
    return ForwardingDevice::create_stream();
  }
  EventHandle create_event() override {
    calls.push_back({"create event", {}, {}});
    return ForwardingDevice::create_event();
  }
  StreamHandle current_stream() override {
    calls.push_back({"current stream", {}, {}});
    return ForwardingDevice::current_stream();
  }
  void record(EventHandle event, StreamHandle stream) override {
    calls.push_back({"record", event, stream});
    ForwardingDevice::record(event, stream);
  }
  void wait(StreamHandle stream, EventHandle event) override {
    calls.push_back({"wait", event, stream});
    ForwardingDevice::wait(stream, event);
  }
  bool query(EventHandle event) override {
    calls.push_back({"query", event, {}});
    return ForwardingDevice::query(event);
  }
  void synchronize(EventHandle event) override {
    calls.push_back({"synchronize", event, {}});
    ForwardingDevice::synchronize(event);
  }
  void synchronize_stream(StreamHandle stream) override {
    calls.push_back({"synchronize", {}, stream});
    ForwardingDevice::synchronize_stream(stream);
  }
  void copy(StreamHandle stream, Direction direction, std::span<const Copy> copies) override {
    calls.push_back({text(copies.size(), " copies"), {}, stream});
    ForwardingDevice::copy(stream, direction, copies);
  }

  std::vector<Call> take() { return std::exchange(calls, {}); }

  std::vector<Call> calls;
};

using Names = std::map<std::uintptr_t, std::string>;

/// A stream that nobody gave us is called the transfer stream; that there is one only is checked.
std::vector<std::string> in_words(const std::vector<LoggingDevice::Call>& calls,
                                  const Names& streams, const Names& events) {
  std::vector<std::string> words;
  std::set<StreamHandle> own;
  for (const LoggingDevice::Call& call : calls) {
    std::string line = call.what;
    if (call.event) line += " " + events.at(*call.event);
    if (call.stream) {
      const auto name = streams.find(*call.stream);
      if (name == streams.end()) own.insert(*call.stream);
      line += " on " + (name == streams.end() ? "transfer" : name->second);
    }
    words.push_back(line);
  }
  CHECK(own.size() <= 1);
  return words;
}

struct Scene {
  Scene() {
    pools.emplace_back(page_first("k", layers(3), 16, 16, 16), 1);
    pools.emplace_back(page_first("v", layers(3), 24, 16, 16), 2);
    layouts = layouts_of(pools);
    streams = {{producer.handle(), "producer"}, {forward.handle(), "forward"}};
  }

  /// Submits and waits for a burst of two pages that are no neighbours.
  std::shared_ptr<Burst> move(BurstIssuer& issuer, BurstPages& pages,
                              std::optional<StreamHandle> fence) {
    const std::vector<std::int64_t> slots{2, 9};
    pages.append(view_of("device_indices", slots), view_of("host_indices", slots));
    return issuer.submit(pages, {}, producer.handle(), fence);
  }
  static Names events_of(const Burst& burst) {
    return {{burst.ready.handle(), "ready"},
            {burst.fence.handle(), "fence"},
            {burst.start.handle(), "start"},
            {burst.finish.handle(), "finish"}};
  }

  std::shared_ptr<LoggingDevice> device =
      std::make_shared<LoggingDevice>(std::make_shared<HostDevice>());
  Stream producer{device};
  Stream forward{device};
  std::vector<Pool> pools;
  std::vector<PoolLayout> layouts;
  Names streams;
};

std::vector<std::string> with_fence(std::vector<std::string> calls, bool fenced) {
  if (!fenced) {
    std::erase(calls, "record fence on forward");
    std::erase(calls, "wait fence on transfer");
  }
  return calls;
}

}  // namespace

TEST_CASE("an inline load makes the calls of SGLang's start_loading, and no others") {
  // One copy call a pool and layer, as there: groups of one layer.
  PlanOptions plain{.ramp = false};
  for (const bool fenced : {false, true}) {
    CAPTURE(fenced);
    Scene scene;
    const auto gate = std::make_shared<LayerGate>(scene.device, scene.layouts, 3);
    BurstIssuer issuer(scene.device, scene.layouts, Direction::load, gate, plain);
    BurstPages pages(scene.layouts, Direction::load, 1, IndexCheck::slots);
    const auto fence = fenced ? std::optional(scene.forward.handle()) : std::nullopt;
    // Burst 4 is the first that finds a record to use again, and a slot that had another burst.
    std::shared_ptr<Burst> earlier;
    for (int id = 0; id < 4; ++id) {
      const std::shared_ptr<Burst> burst = scene.move(issuer, pages, fence);
      if (id == 1) earlier = burst;
      issuer.drain();
    }
    scene.device->take();
    const std::shared_ptr<Burst> burst = scene.move(issuer, pages, fence);
    const auto calls = scene.device->take();
    REQUIRE(burst->id == 4);

    // A layer's event is the one that a forward is made to wait for.
    Names events = Scene::events_of(*burst);
    events[earlier->finish.handle()] = "finish of the slot's last burst";
    for (int layer = 0; layer < 3; ++layer) {
      gate->wait(4, layer, scene.forward.handle());
      const auto waits = scene.device->take();
      REQUIRE(waits.size() == 1);
      CHECK(waits[0].what == "wait");
      CHECK(waits[0].stream == scene.forward.handle());
      events[*waits[0].event] = text("layer ", layer);
    }
    CHECK(in_words(calls, scene.streams, events) == with_fence(
                                                        {
                                                            "record ready on producer",
                                                            "record fence on forward",
                                                            "query finish of the slot's last burst",
                                                            "wait fence on transfer",
                                                            "wait ready on transfer",
                                                            "record start on transfer",
                                                            "2 copies on transfer",
                                                            "2 copies on transfer",
                                                            "record layer 0 on transfer",
                                                            "2 copies on transfer",
                                                            "2 copies on transfer",
                                                            "record layer 1 on transfer",
                                                            "2 copies on transfer",
                                                            "2 copies on transfer",
                                                            "record layer 2 on transfer",
                                                            "record finish on transfer",
                                                        },
                                                        fenced));
    issuer.drain();
  }
}

TEST_CASE("an inline backup makes the calls of SGLang's write, and no others") {
  for (const bool fenced : {false, true}) {
    CAPTURE(fenced);
    Scene scene;
    BurstIssuer issuer(scene.device, scene.layouts, Direction::backup, nullptr, {});
    BurstPages pages(scene.layouts, Direction::backup, 1, IndexCheck::slots);
    const auto fence = fenced ? std::optional(scene.forward.handle()) : std::nullopt;
    scene.move(issuer, pages, fence);
    issuer.drain();
    scene.device->take();
    const std::shared_ptr<Burst> burst = scene.move(issuer, pages, fence);
    CHECK(in_words(scene.device->take(), scene.streams, Scene::events_of(*burst)) ==
          with_fence(
              {
                  "record ready on producer",
                  "record fence on forward",
                  "wait fence on transfer",
                  "wait ready on transfer",
                  "record start on transfer",
                  "2 copies on transfer",
                  "2 copies on transfer",
                  "record finish on transfer",
              },
              fenced));
    issuer.drain();
  }
}

TEST_CASE("polling and waiting at the gate make one call each") {
  Scene scene;
  const auto gate = std::make_shared<LayerGate>(scene.device, scene.layouts, 3);
  BurstIssuer issuer(scene.device, scene.layouts, Direction::load, gate, {});
  BurstPages pages(scene.layouts, Direction::load, 1, IndexCheck::slots);
  const std::shared_ptr<Burst> burst = scene.move(issuer, pages, {});
  issuer.drain();
  scene.device->take();
  burst->done();
  CHECK(in_words(scene.device->take(), scene.streams, Scene::events_of(*burst)) ==
        std::vector<std::string>{"query finish"});
  gate->wait(0, 2, std::nullopt);
  CHECK(scene.device->take().size() == 1);
}
