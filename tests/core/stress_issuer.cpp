#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "core/burst_issuer.h"
#include "core/error.h"
#include "host/host_device.h"
#include "pools.h"
#include "threads.h"

/// Two issuers on threads of their own, under four threads of a program: one submits loads, one
/// submits backups, one is a forward that waits at the gate, one retires what is done. Meanwhile
/// streams stall, copies fail, issuers are drained, and in the end stopped under full load. Every
/// byte is compared. For ThreadSanitizer.

using namespace kvburst;
using namespace kvburst::testing;
using namespace std::chrono_literals;

namespace {

constexpr std::int64_t kBursts = 1000;  // in each direction
constexpr int kLayers = 6;

/// One direction: a pool of its own, in which burst `id` moves page `id` and nothing else, so that
/// what is read here is ordered by nothing but the burst.
struct Lane {
  Lane(const std::shared_ptr<HostDevice>& on, Direction moves, unsigned seed)
      : device(on),
        direction(moves),
        pool(page_first("kv", layers(kLayers), 16, kBursts, kBursts), seed),
        layouts{pool.layout},
        gate(moves == Direction::load ? std::make_shared<LayerGate>(on, layouts, 3) : nullptr),
        producer(on),
        fence(on),
        pages(layouts, moves, 1, IndexCheck::slots),
        expected(pool.after(moves, every_page())),
        issuer(on, layouts, moves, gate, {.ramp = false}, {true, {}, {}}) {}

  static std::vector<PagePair> every_page() {
    std::vector<PagePair> pairs;
    for (std::int64_t page = 0; page < kBursts; ++page) pairs.push_back({page, kBursts - 1 - page});
    return pairs;
  }

  std::shared_ptr<Burst> submit(std::int64_t id) {
    const std::vector<std::int64_t> on_device{id};
    const std::vector<std::int64_t> on_host{kBursts - 1 - id};
    pages.append(view_of("device_indices", on_device), view_of("host_indices", on_host));
    return issuer.submit(pages, std::array{id}, producer.handle(), fence.handle());
  }
  bool is_in_place(std::int64_t id, std::size_t layer) {
    Buffer& to = pool.destination(direction);
    const std::uintptr_t page = direction == Direction::load
                                    ? pool.device_page(layer, id)
                                    : pool.host_page(layer, kBursts - 1 - id);
    const auto found = to.at(page, 16);
    return std::equal(found.begin(), found.end(),
                      expected.begin() + static_cast<std::ptrdiff_t>(to.position(page)));
  }

  std::shared_ptr<HostDevice> device;
  Direction direction;
  Pool pool;
  std::vector<PoolLayout> layouts;
  std::shared_ptr<LayerGate> gate;
  Stream producer;
  Stream fence;
  BurstPages pages;
  std::vector<std::uint8_t> expected;
  BurstIssuer issuer;
};

/// Acks that the submitters append and another thread retires.
class Acks {
 public:
  void append(std::shared_ptr<Burst> burst) {
    const std::lock_guard lock(mutex_);
    bursts_.push_back(std::move(burst));
  }
  /// The oldest if it is done.
  std::shared_ptr<Burst> take_done() {
    const std::lock_guard lock(mutex_);
    if (bursts_.empty() || !bursts_.front()->done()) return nullptr;
    std::shared_ptr<Burst> burst = std::move(bursts_.front());
    bursts_.pop_front();
    return burst;
  }
  /// How many of those that are there are not done.
  int unfinished() {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(std::count_if(bursts_.begin(), bursts_.end(),
                                          [](const auto& burst) { return !burst->done(); }));
  }

 private:
  std::mutex mutex_;
  std::deque<std::shared_ptr<Burst>> bursts_;
};

struct Counts {
  std::atomic<int> loads = 0;
  std::atomic<int> backups = 0;
  std::atomic<int> layer_waits = 0;
  std::atomic<int> waits_for_the_issuer = 0;
  std::atomic<int> failed_waits = 0;
  std::atomic<int> failed_bursts = 0;
  std::atomic<int> stalls = 0;
  std::atomic<int> drains = 0;
  std::atomic<int> issued_after_the_stop = 0;
  std::atomic<int> wrong = 0;
};

}  // namespace

TEST_CASE("bursts on two native threads under stalls, failures, drains and a stop") {
  const auto device = std::make_shared<HostDevice>();
  Lane loads(device, Direction::load, 1);
  Lane backups(device, Direction::backup, 2);
  Acks load_acks;
  Acks backup_acks;
  Counts counts;
  std::atomic<std::int64_t> newest_load = -1;
  std::atomic<int> submitters = 2;
  std::atomic<bool> stopped = false;

  const auto submit_all = [&](Lane& lane, Acks& acks, std::atomic<int>& submitted,
                              std::atomic<std::int64_t>* newest) {
    std::mt19937 random(static_cast<unsigned>(lane.direction) + 10);
    for (std::int64_t id = 0; id < kBursts; ++id) {
      std::optional<Stall> stall;
      if (random() % 16 == 0) {
        // Without a gate slot to wait for, so that the submitter itself gets to the release.
        const bool free = !lane.gate || lane.gate->has_slot(id);
        if (free) {
          stall.emplace(*device, random() % 2 == 0 ? lane.producer.handle() : lane.fence.handle());
          ++counts.stalls;
        }
      }
      if (random() % 16 == 0) device->fail_copy_call(1 + random() % 12);
      const bool after_the_stop = stopped.load();
      const std::shared_ptr<Burst> burst = lane.submit(id);
      if (burst->id != id) ++counts.wrong;
      if (after_the_stop) ++counts.issued_after_the_stop;
      ++submitted;
      acks.append(burst);
      if (newest) newest->store(id);
      for (unsigned turns = random() % 8; turns > 0; --turns) std::this_thread::yield();
      stall.reset();
      if (random() % 32 == 0) {
        lane.issuer.drain();
        counts.wrong += acks.unfinished();
        ++counts.drains;
      }
    }
    --submitters;
  };

  std::thread loader([&] { submit_all(loads, load_acks, counts.loads, &newest_load); });
  std::thread saver([&] { submit_all(backups, backup_acks, counts.backups, nullptr); });

  std::thread forward([&] {
    std::mt19937 random(3);
    const Stream stream(device);
    for (std::int64_t id = 0; id < kBursts; ++id) {
      while (newest_load.load() < id) std::this_thread::yield();
      try {
        for (int layer = 0; layer < kLayers; ++layer) {
          if (!loads.gate->wait_issued(id, layer, 0ms)) ++counts.waits_for_the_issuer;
          if (random() % 4 == 0) {
            loads.gate->wait(id, layer, std::nullopt);
          } else {
            loads.gate->wait(id, layer, stream.handle());
            device->synchronize_stream(stream.handle());
          }
          ++counts.layer_waits;
          if (!loads.is_in_place(id, static_cast<std::size_t>(layer))) ++counts.wrong;
        }
      } catch (const BurstError&) {
        ++counts.failed_waits;
      }
    }
  });

  std::thread poller([&] {
    std::array<std::int64_t, 2> next{0, 0};
    while (next[0] < kBursts || next[1] < kBursts) {
      for (Lane* lane : {&loads, &backups}) {
        Acks& acks = lane == &loads ? load_acks : backup_acks;
        std::int64_t& expected = next[lane == &loads ? 0 : 1];
        const std::shared_ptr<Burst> burst = acks.take_done();
        if (!burst) continue;
        if (burst->id != expected++) ++counts.wrong;
        if (burst->state.load() == BurstState::failed) {
          if (burst->error.empty()) ++counts.wrong;
          ++counts.failed_bursts;
          continue;
        }
        if (burst->tally.bytes != kLayers * 16) ++counts.wrong;
        for (std::size_t layer = 0; layer < kLayers; ++layer) {
          if (!lane->is_in_place(burst->id, layer)) ++counts.wrong;
        }
      }
      std::this_thread::yield();
    }
  });

  // Stopped while both still submit.
  while (counts.loads < kBursts * 9 / 10 || counts.backups < kBursts * 9 / 10) {
    std::this_thread::yield();
  }
  CHECK(loads.issuer.stop(60s));
  CHECK(backups.issuer.stop(60s));
  stopped = true;

  loader.join();
  saver.join();
  forward.join();
  poller.join();
  MESSAGE("loads ", counts.loads.load(), ", backups ", counts.backups.load(), ", layer waits ",
          counts.layer_waits.load(), ", of which for the issuer ",
          counts.waits_for_the_issuer.load(), ", failed waits ", counts.failed_waits.load(),
          ", failed bursts ", counts.failed_bursts.load(), ", stalls ", counts.stalls.load(),
          ", drains ", counts.drains.load(), ", bursts after the stop ",
          counts.issued_after_the_stop.load());
  CHECK(counts.wrong == 0);
  CHECK(counts.loads + counts.backups == 2 * kBursts);
  for (const std::atomic<int>* exercised :
       {&counts.layer_waits, &counts.waits_for_the_issuer, &counts.failed_waits,
        &counts.failed_bursts, &counts.stalls, &counts.drains, &counts.issued_after_the_stop}) {
    CHECK(*exercised > 0);
  }
}
