#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "host/host_device.h"
#include "threads.h"

/// Many threads on one HostDevice. What is asserted is little; what is meant is that
/// ThreadSanitizer sees every bit of state that they share, and that all of it ends.

using namespace kvburst;
using namespace kvburst::testing;

namespace {

constexpr int kThreads = 4;

template <class Body>
void on_threads(Body body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

std::uintptr_t address(std::uint8_t& byte) { return reinterpret_cast<std::uintptr_t>(&byte); }

}  // namespace

TEST_CASE("threads share streams and events, stall them at random, and everything ends") {
  constexpr std::size_t kStreams = 3;
  constexpr std::size_t kEvents = 5;
  const auto device = std::make_shared<HostDevice>();
  std::vector<Stream> streams;
  std::vector<Event> events;
  for (std::size_t i = 0; i < kStreams; ++i) streams.emplace_back(device);
  for (std::size_t i = 0; i < kEvents; ++i) events.emplace_back(device);
  // Two bytes a stream, which only that stream touches.
  std::array<std::array<std::uint8_t, 2>, kStreams> cells{};
  std::atomic<std::int64_t> copies = 0;

  on_threads([&](int thread) {
    std::mt19937 random(static_cast<unsigned>(thread));
    for (int step = 0; step < 20'000; ++step) {
      const std::size_t s = random() % kStreams;
      const StreamHandle stream = streams[s].handle();
      const EventHandle event = events[random() % kEvents].handle();
      switch (random() % 8) {
        case 0:
          device->record(event, stream);
          break;
        case 1:
          device->wait(stream, event);
          break;
        case 2:
          device->query(event);
          break;
        case 3: {
          const std::array one{Copy{address(cells[s][0]), address(cells[s][1]), 1, 1, 0, 0}};
          device->copy(stream, Direction::load, one);
          ++copies;
          break;
        }
        case 4:
          device->fill(stream, address(cells[s][1]), 3, 1);
          break;
        case 5: {
          // Nothing here blocks the thread before the stall goes.
          const Stall stall(*device, stream);
          device->record(event, stream);
          device->wait(streams[(s + 1) % kStreams].handle(), event);
          break;
        }
        case 6:
          device->synchronize(event);
          break;
        default:
          if (random() % 16 == 0) device->synchronize_stream(stream);
          device->query_stream(stream);
      }
    }
  });
  device->synchronize();
  for (const Event& event : events) CHECK(device->query(event.handle()));
  for (const Stream& stream : streams) CHECK(device->query_stream(stream.handle()));
  CHECK(device->counters(Direction::load).copies == copies.load());
}

TEST_CASE("an event orders the bytes of two streams, in every thread at once") {
  const auto device = std::make_shared<HostDevice>();
  std::atomic<int> wrong = 0;
  on_threads([&](int thread) {
    Stream writer(device);
    Stream reader(device);
    Event written(device);
    Event read(device);
    std::uint8_t cell = 0;
    std::uint8_t seen = 0;
    std::mt19937 random(static_cast<unsigned>(thread));
    for (int step = 0; step < 6000; ++step) {
      const auto value = static_cast<std::uint8_t>(step);
      device->wait(writer.handle(), read.handle());
      device->fill(writer.handle(), address(cell), value, 1);
      device->record(written.handle(), writer.handle());
      device->wait(reader.handle(), written.handle());
      device->copy_on_device(reader.handle(), {address(seen), address(cell), 1, 1, 0, 0});
      device->record(read.handle(), reader.handle());
      if (random() % 4 == 0) {
        device->synchronize(read.handle());
        if (seen != value) ++wrong;
      }
    }
    device->synchronize_stream(reader.handle());
  });
  CHECK(wrong.load() == 0);
}

TEST_CASE("streams and events come and go while others work") {
  const auto device = std::make_shared<HostDevice>();
  std::atomic<int> wrong = 0;
  on_threads([&](int) {
    for (int step = 0; step < 400; ++step) {
      Stream stream(device);
      device->push_current_stream(stream.handle());
      std::uint8_t cell = 0;
      {
        const Event event(device);
        device->fill(device->current_stream(), address(cell), 7, 1);
        device->record(event.handle(), stream.handle());
        device->wait(stream.handle(), event.handle());
        if (step % 2 == 0) device->synchronize(event.handle());
      }
      if (step % 3 == 0) device->synchronize();
      device->synchronize_stream(stream.handle());
      if (cell != 7) ++wrong;
    }
  });
  device->synchronize();
  CHECK(wrong.load() == 0);
}
