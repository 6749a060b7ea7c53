#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "core/error.h"
#include "host/host_device.h"
#include "host/streaming_copy.h"
#include "pools.h"
#include "refusals.h"
#include "threads.h"

using namespace kvburst;
using namespace kvburst::testing;

namespace {

/// A copy of one row.
Copy flat(std::uintptr_t dst, std::uintptr_t src, std::size_t width) {
  return {dst, src, width, 1, 0, 0};
}

RowMove move_of(std::uint8_t* packed, std::uint8_t* rows, const std::vector<std::int64_t>& ids,
                std::uint64_t row_bytes) {
  return {reinterpret_cast<std::uintptr_t>(packed), reinterpret_cast<std::uintptr_t>(rows),
          reinterpret_cast<std::uintptr_t>(ids.data()), ids.size(), row_bytes};
}

/// A device, two streams and a byte in device memory that one of them writes.
struct Scene {
  explicit Scene(std::optional<LinkModel> link = std::nullopt, CopyLimits limits = {})
      : device(std::make_shared<HostDevice>(link, limits)), a(device), b(device) {}

  std::uintptr_t address(std::uint8_t& byte) const {
    return reinterpret_cast<std::uintptr_t>(&byte);
  }
  void write(StreamHandle stream, std::uint8_t value) {
    device->fill(stream, address(cell), value, 1);
  }
  /// What a stream reads from the cell, once it is done.
  void read(StreamHandle stream, std::uint8_t& into) {
    device->copy_on_device(stream, flat(address(into), address(cell), 1));
  }

  std::uint8_t cell = 0;
  std::shared_ptr<HostDevice> device;
  Stream a;
  Stream b;
};

}  // namespace

TEST_CASE("work on one stream runs in the order in which it was enqueued") {
  Scene scene;
  std::array<std::uint8_t, 3> seen{};
  Stall stall(*scene.device, scene.a.handle());
  scene.write(scene.a.handle(), 1);
  scene.read(scene.a.handle(), seen[0]);
  scene.write(scene.a.handle(), 2);
  scene.read(scene.a.handle(), seen[1]);
  scene.write(scene.a.handle(), 3);
  scene.read(scene.a.handle(), seen[2]);
  settle();
  CHECK(!scene.device->query_stream(scene.a.handle()));
  CHECK(seen == std::array<std::uint8_t, 3>{0, 0, 0});
  stall.release();
  scene.device->synchronize_stream(scene.a.handle());
  CHECK(seen == std::array<std::uint8_t, 3>{1, 2, 3});
  CHECK(scene.device->query_stream(scene.a.handle()));
}

TEST_CASE("streams are ordered where an event says so, and only there") {
  Scene scene;
  Event written(scene.device);
  std::uint8_t without = 99;
  std::uint8_t with = 99;
  Stall stall(*scene.device, scene.a.handle());
  scene.write(scene.a.handle(), 7);
  scene.device->record(written.handle(), scene.a.handle());

  // The control: b does not wait, so it reads what was there before the stalled write.
  scene.read(scene.b.handle(), without);
  scene.device->synchronize_stream(scene.b.handle());
  CHECK(without == 0);

  scene.device->wait(scene.b.handle(), written.handle());
  scene.read(scene.b.handle(), with);
  settle();
  CHECK(!scene.device->query_stream(scene.b.handle()));
  stall.release();
  scene.device->synchronize_stream(scene.b.handle());
  CHECK(with == 7);
}

TEST_CASE("an event that was never recorded is reached and holds nobody up") {
  Scene scene;
  Event never(scene.device);
  std::uint8_t seen = 99;
  CHECK(scene.device->query(never.handle()));
  scene.device->synchronize(never.handle());
  Stall stall(*scene.device, scene.a.handle());
  scene.device->wait(scene.b.handle(), never.handle());
  scene.read(scene.b.handle(), seen);
  scene.device->synchronize_stream(scene.b.handle());
  CHECK(seen == 0);

  // Recording it now does not reach back to the wait above, but to the next one.
  scene.device->record(never.handle(), scene.a.handle());
  CHECK(!scene.device->query(never.handle()));
}

TEST_CASE("recording an event again does not move the waits already enqueued on it") {
  Scene scene;
  Event event(scene.device);
  Stream c(scene.device);
  std::uint8_t early = 99;
  std::uint8_t late = 99;
  Stall first(*scene.device, scene.a.handle());
  scene.write(scene.a.handle(), 1);
  scene.device->record(event.handle(), scene.a.handle());
  scene.device->wait(scene.b.handle(), event.handle());
  scene.read(scene.b.handle(), early);

  Stall second(*scene.device, scene.a.handle());
  scene.write(scene.a.handle(), 2);
  scene.device->record(event.handle(), scene.a.handle());
  scene.device->wait(c.handle(), event.handle());
  scene.read(c.handle(), late);

  first.release();
  scene.device->synchronize_stream(scene.b.handle());
  CHECK(early == 1);
  settle();
  // The event stands for its second recording, which b's wait is not about.
  CHECK(!scene.device->query(event.handle()));
  CHECK(!scene.device->query_stream(c.handle()));
  second.release();
  scene.device->synchronize(event.handle());
  CHECK(scene.device->query(event.handle()));
  scene.device->synchronize_stream(c.handle());
  CHECK(late == 2);
}

TEST_CASE("an event destroyed while a stream waits for it still lets the stream go on") {
  Scene scene;
  std::uint8_t seen = 99;
  Stall stall(*scene.device, scene.a.handle());
  scene.write(scene.a.handle(), 5);
  {
    Event event(scene.device);
    scene.device->record(event.handle(), scene.a.handle());
    scene.device->wait(scene.b.handle(), event.handle());
  }
  scene.read(scene.b.handle(), seen);
  stall.release();
  scene.device->synchronize();
  CHECK(seen == 5);
}

TEST_CASE("synchronizing blocks the thread until the point is reached") {
  Scene scene;
  Event event(scene.device);
  Stall stall(*scene.device, scene.a.handle());
  scene.write(scene.a.handle(), 4);
  scene.device->record(event.handle(), scene.a.handle());
  std::uint8_t by_event = 0;
  std::uint8_t by_stream = 0;
  Blocking on_event([&] {
    scene.device->synchronize(event.handle());
    by_event = scene.cell;
  });
  Blocking on_stream([&] {
    scene.device->synchronize_stream(scene.a.handle());
    by_stream = scene.cell;
  });
  CHECK(on_event.blocks());
  CHECK(on_stream.blocks());
  stall.release();
  on_event.join();
  on_stream.join();
  CHECK(by_event == 4);
  CHECK(by_stream == 4);
}

TEST_CASE("synchronizing a stream waits for what it holds and not for what comes later") {
  Scene scene;
  Stall first(*scene.device, scene.a.handle());
  Blocking waiter([&] { scene.device->synchronize_stream(scene.a.handle()); });
  CHECK(waiter.blocks());
  Stall second(*scene.device, scene.a.handle());
  first.release();
  waiter.join();
  settle();
  CHECK(!scene.device->query_stream(scene.a.handle()));
}

// In CUDA an event is recorded at once: nobody can wait for a recording that is not on its stream.
TEST_CASE("a wait between threads never catches a recording that its stream has yet to get") {
  Scene scene;
  Event event(scene.device);
  Blocking recorder([&] {
    for (int i = 0; i < 20'000; ++i) scene.device->record(event.handle(), scene.a.handle());
  });
  for (int i = 0; i < 20'000; ++i) scene.device->wait(scene.a.handle(), event.handle());
  recorder.join();
  scene.device->synchronize_stream(scene.a.handle());
  CHECK(scene.device->query(event.handle()));
}

TEST_CASE("handles that were destroyed, or never were the device's, are refused") {
  Scene scene;
  Event kept(scene.device);
  const StreamHandle stream = scene.device->create_stream();
  scene.device->destroy_stream(stream);
  const EventHandle event = scene.device->create_event();
  scene.device->destroy_event(event);
  std::uint8_t byte = 0;
  const std::array copies{flat(scene.address(byte), scene.address(scene.cell), 1)};
  HostDevice& device = *scene.device;
  const std::string of_stream = "handle " + std::to_string(stream);
  const std::string of_event = "handle " + std::to_string(event);
  check_refused<DeviceError>([&] { device.record(kept.handle(), stream); }, {of_stream});
  check_refused<DeviceError>([&] { device.wait(stream, kept.handle()); }, {of_stream});
  check_refused<DeviceError>([&] { device.copy(stream, Direction::load, copies); }, {of_stream});
  check_refused<DeviceError>([&] { device.synchronize_stream(stream); }, {of_stream});
  check_refused<DeviceError>([&] { device.query_stream(stream); }, {of_stream});
  check_refused<DeviceError>([&] { device.fill(stream, scene.address(byte), 1, 1); }, {of_stream});
  check_refused<DeviceError>([&] { device.busy(stream, 1); }, {of_stream});
  check_refused<DeviceError>([&] { device.stall(stream); }, {of_stream});
  check_refused<DeviceError>([&] { device.push_current_stream(stream); }, {of_stream});
  check_refused<DeviceError>([&] { device.destroy_stream(stream); }, {of_stream});
  check_refused<DeviceError>([&] { device.record(event, scene.a.handle()); }, {of_event});
  check_refused<DeviceError>([&] { device.wait(scene.a.handle(), event); }, {of_event});
  check_refused<DeviceError>([&] { device.query(event); }, {of_event});
  check_refused<DeviceError>([&] { device.synchronize(event); }, {of_event});
  check_refused<DeviceError>([&] { device.elapsed_ms(event, kept.handle()); }, {of_event});
  check_refused<DeviceError>([&] { device.destroy_event(event); }, {of_event});
  // A stream's handle is not an event's.
  check_refused<DeviceError>([&] { device.query(scene.a.handle()); }, {"event: handle"});
  CHECK(byte == 0);
}

TEST_CASE("a stream's work is done before it is destroyed") {
  Scene scene;
  {
    Stream brief(scene.device);
    scene.write(brief.handle(), 9);
  }
  CHECK(scene.cell == 9);
  check_refused<DeviceError>([&] { scene.device->destroy_stream(scene.device->current_stream()); },
                             {"default stream"});
}

TEST_CASE("the current stream is the thread's own, and the default once it is destroyed") {
  Scene scene;
  const StreamHandle fallback = scene.device->current_stream();
  StreamHandle of_other = 0;
  {
    Stream mine(scene.device);
    scene.device->push_current_stream(mine.handle());
    CHECK(scene.device->current_stream() == mine.handle());
    std::thread([&] { of_other = scene.device->current_stream(); }).join();
    CHECK(of_other == fallback);
  }
  CHECK(scene.device->current_stream() == fallback);
  check_refused<DeviceError>([&] { scene.device->pop_current_stream(); }, {"has set none"});
}

TEST_CASE("copies within the device do not count against the link's queue") {
  Scene scene(LinkModel{.gigabytes_per_second = 1, .queue_depth = 2});
  std::array<std::uint8_t, 4> bytes{1, 2, 3, 4};
  const auto at = [&](std::size_t i) { return scene.address(bytes[i]); };
  for (int i = 0; i < 5; ++i) {
    scene.device->copy_on_device(scene.a.handle(), {at(1), at(0), 1, 1, 0, 0});
  }
  scene.device->synchronize_stream(scene.a.handle());
  const std::array<Copy, 2> copies{Copy{at(2), at(0), 1, 1, 0, 0}, Copy{at(3), at(0), 1, 1, 0, 0}};
  scene.device->copy(scene.a.handle(), Direction::load, copies);
  scene.device->copy(scene.a.handle(), Direction::load, copies);
  scene.device->synchronize_stream(scene.a.handle());
  CHECK(bytes == std::array<std::uint8_t, 4>{1, 1, 1, 1});
}

// vllm-project/vllm#49276
TEST_CASE("a call past the device's limits is refused, and moves and counts nothing") {
  Scene scene(std::nullopt, {.max_pitch = 64, .copies_per_call = 3});
  Buffer from(256, 1);
  Buffer to(256, 2);
  const auto before = to.all();
  const auto copy = [&](std::vector<Copy> copies) {
    scene.device->copy(scene.a.handle(), Direction::load, copies);
  };
  const Copy good = flat(to.address(), from.address(), 16);
  check_refused<DeviceError>([&] { copy({}); }, {"0 copies", "from 1 to 3"});
  check_refused<DeviceError>([&] { copy({good, good, good, good}); }, {"4 copies", "from 1 to 3"});
  check_refused<DeviceError>([&] { copy({good, flat(to.address(), from.address(), 0)}); },
                             {"0 bytes x 1 rows"});
  check_refused<DeviceError>([&] { copy({good, {to.address(), from.address(), 8, 0, 8, 8}}); },
                             {"8 bytes x 0 rows"});
  check_refused<DeviceError>([&] { copy({good, {to.address(), from.address(), 8, 2, 65, 8}}); },
                             {"pitch 65", "64"});
  check_refused<DeviceError>([&] { copy({good, {to.address(), from.address(), 8, 2, 8, 65}}); },
                             {"pitch 65", "64"});
  check_refused<DeviceError>([&] { copy({good, {to.address(), from.address(), 8, 2, 7, 8}}); },
                             {"pitch 7", "width 8"});
  scene.device->synchronize();
  CHECK(to.all() == before);
  CHECK(scene.device->counters(Direction::load).copies == 0);

  // At the limits, and with pitches of no meaning in a row of its own.
  copy({{to.address(), from.address(), 8, 4, 64, 64},
        {to.address() + 16, from.address(), 100, 1, 1000, 0},
        good});
  scene.device->synchronize();
  CHECK(scene.device->counters(Direction::load).copies == 3);
}

TEST_CASE("tall copies are refused where they are switched off") {
  Scene scene(std::nullopt, {.tall_copies = false});
  Buffer bytes(64);
  const std::array tall{Copy{bytes.address(), bytes.address() + 32, 8, 2, 16, 16}};
  check_refused<DeviceError>([&] { scene.device->copy(scene.a.handle(), Direction::load, tall); },
                             {"2 rows"});
}

TEST_CASE("copies are counted by direction, and those within the device are not") {
  Scene scene;
  Buffer from(256, 1);
  Buffer to(256, 2);
  const std::array two{flat(to.address(), from.address(), 10),
                       Copy{to.address() + 32, from.address(), 8, 3, 16, 20}};
  scene.device->copy(scene.a.handle(), Direction::load, two);
  const std::array one{flat(to.address() + 200, from.address(), 10)};
  scene.device->copy(scene.b.handle(), Direction::load, one);
  scene.device->copy(scene.b.handle(), Direction::backup, one);
  scene.device->copy_on_device(scene.a.handle(), two[0]);
  scene.device->fill(scene.a.handle(), to.address() + 128, 3, 16);
  scene.device->synchronize();
  const CopyCounters loads = scene.device->counters(Direction::load);
  CHECK(loads.calls == 2);
  CHECK(loads.copies == 3);
  CHECK(loads.bytes == 10 + 24 + 10);
  const CopyCounters backups = scene.device->counters(Direction::backup);
  CHECK(backups.calls == 1);
  CHECK(backups.copies == 1);
  CHECK(backups.bytes == 10);
}

TEST_CASE("the copies of a call are read before it returns") {
  Scene scene;
  Buffer from(64, 1);
  Buffer to(64, 2);
  Stall stall(*scene.device, scene.a.handle());
  auto copies = std::make_unique<std::vector<Copy>>(1, flat(to.address(), from.address(), 64));
  scene.device->copy(scene.a.handle(), Direction::load, *copies);
  copies.reset();
  stall.release();
  scene.device->synchronize();
  CHECK(std::memcmp(to.data(), from.data(), 64) == 0);
}

TEST_CASE("copies of every size and alignment move their bytes and no others") {
  constexpr std::size_t kLargest = 3 * 4096;
  Buffer from(kLargest + 64, 1);
  for (const std::size_t size : {1, 31, 32, 33, 127, 128, 129, 255, 256, 4095, 4096, 4097, 4127,
                                 4128, 4223, 4224, 4225, 8191, 12288}) {
    for (const std::size_t to_shift : {0, 1, 15, 16, 31, 33}) {
      for (const std::size_t from_shift : {0, 1, 17}) {
        Buffer to(kLargest + 64, 2);
        std::vector<std::uint8_t> expected = to.all();
        const std::uintptr_t dst = to.address() + to_shift;
        std::memcpy(expected.data() + to.position(dst), from.data() + from_shift, size);
        streaming_copy(to.data() + to_shift, from.data() + from_shift, size);
        streaming_fence();
        CAPTURE(size);
        CAPTURE(to_shift);
        CAPTURE(from_shift);
        CHECK(to.all() == expected);
      }
    }
  }
}

TEST_CASE("limits of zero are refused") {
  check_refused<LayoutError>([] { HostDevice({}, {.max_pitch = 0}); }, {"max_pitch", "0"});
  check_refused<LayoutError>([] { HostDevice({}, {.copies_per_call = 0}); },
                             {"copies_per_call", "0"});
}

TEST_CASE("time between events is refused where there is none") {
  Scene scene;
  Event never(scene.device);
  Event start(scene.device);
  Event end(scene.device);
  scene.device->record(start.handle(), scene.a.handle());
  check_refused<DeviceError>([&] { scene.device->elapsed_ms(start.handle(), never.handle()); },
                             {"never recorded"});
  Stall stall(*scene.device, scene.a.handle());
  scene.device->record(end.handle(), scene.a.handle());
  scene.device->synchronize(start.handle());
  check_refused<DeviceError>([&] { scene.device->elapsed_ms(start.handle(), end.handle()); },
                             {"not reached"});
  stall.release();
  scene.device->synchronize(end.handle());
  CHECK(scene.device->elapsed_ms(start.handle(), end.handle()) >= 0);
}

// --- the modelled link ---------------------------------------------------------------------------

namespace {

/// Rounding of the timeline, in milliseconds: a few nanoseconds.
constexpr double kRounding = 1e-5;

bool about(double a, double b) { return std::abs(a - b) < kRounding; }

constexpr std::size_t kMegabyte = 1'000'000;
constexpr LinkModel kOneGigabyte{.gigabytes_per_second = 1};

}  // namespace

TEST_CASE("copies over a link take the time of the model, by the stream's own clock") {
  LinkModel model = kOneGigabyte;
  double expected = 1;
  SUBCASE("1 MB at 1 GB/s: 1 ms") {}
  SUBCASE("at 4 GB/s a quarter") {
    model.gigabytes_per_second = 4;
    expected = 0.25;
  }
  SUBCASE("counted twice: twice as long") {
    model.byte_scale = 2;
    expected = 2;
  }
  Scene scene(model);
  std::vector<std::uint8_t> from(kMegabyte, 3);
  std::vector<std::uint8_t> to(kMegabyte);
  const auto dst = reinterpret_cast<std::uintptr_t>(to.data());
  const auto src = reinterpret_cast<std::uintptr_t>(from.data());
  Event start(scene.device);
  Event end(scene.device);
  // All of it is enqueued before the stream starts, so no call's own time is part of the timeline.
  Stall stall(*scene.device, scene.a.handle());
  scene.device->record(start.handle(), scene.a.handle());
  const std::array halves{
      flat(dst, src, kMegabyte / 2),
      Copy{dst + kMegabyte / 2, src, kMegabyte / 4, 2, kMegabyte / 4, kMegabyte / 4}};
  scene.device->copy(scene.a.handle(), Direction::load, halves);
  scene.device->record(end.handle(), scene.a.handle());
  stall.release();
  scene.device->synchronize(end.handle());
  CHECK(about(scene.device->elapsed_ms(start.handle(), end.handle()), expected));
  CHECK(std::count(to.begin(), to.end(), 3) == static_cast<std::ptrdiff_t>(kMegabyte));
}

TEST_CASE("the bytes of a modelled copy are there when its event is reached, not long before") {
  Scene scene(LinkModel{.gigabytes_per_second = 0.1});
  std::vector<std::uint8_t> from(kMegabyte, 3);
  std::vector<std::uint8_t> to(kMegabyte);
  Event end(scene.device);
  const auto begin = std::chrono::steady_clock::now();
  const std::array all{flat(reinterpret_cast<std::uintptr_t>(to.data()),
                            reinterpret_cast<std::uintptr_t>(from.data()), kMegabyte)};
  scene.device->copy(scene.a.handle(), Direction::load, all);
  scene.device->record(end.handle(), scene.a.handle());
  scene.device->synchronize(end.handle());
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(10));
  CHECK(to == from);
}

TEST_CASE("streams share the link of a direction, and not that of the other") {
  Scene scene(kOneGigabyte);
  std::vector<std::uint8_t> from(kMegabyte, 3);
  std::vector<std::uint8_t> to_a(kMegabyte);
  std::vector<std::uint8_t> to_b(kMegabyte);
  Direction of_b = Direction::load;
  double later = 2;
  SUBCASE("the same direction: one after the other") {}
  SUBCASE("both directions at once") {
    of_b = Direction::backup;
    later = 1;
  }
  std::array<Event, 4> events{Event(scene.device), Event(scene.device), Event(scene.device),
                              Event(scene.device)};
  const auto enqueue = [&](const Stream& stream, Direction direction, std::vector<std::uint8_t>& to,
                           std::size_t first) {
    scene.device->record(events[first].handle(), stream.handle());
    const std::array all{flat(reinterpret_cast<std::uintptr_t>(to.data()),
                              reinterpret_cast<std::uintptr_t>(from.data()), kMegabyte)};
    scene.device->copy(stream.handle(), direction, all);
    scene.device->record(events[first + 1].handle(), stream.handle());
  };
  Stall stall_a(*scene.device, scene.a.handle());
  Stall stall_b(*scene.device, scene.b.handle());
  enqueue(scene.a, Direction::load, to_a, 0);
  enqueue(scene.b, of_b, to_b, 2);
  const Time together = now();
  stall_a.release_at(together);
  stall_b.release_at(together);
  scene.device->synchronize();
  const double a = scene.device->elapsed_ms(events[0].handle(), events[1].handle());
  const double b = scene.device->elapsed_ms(events[2].handle(), events[3].handle());
  CHECK(about(std::min(a, b), 1));
  CHECK(about(std::max(a, b), later));
  CHECK(about(scene.device->elapsed_ms(events[0].handle(), events[2].handle()), 0));
}

TEST_CASE("a copy starts when the kernel before it has ended") {
  Scene scene(kOneGigabyte);
  std::vector<std::uint8_t> bytes(2 * kMegabyte);
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
  const std::array all{flat(address, address + kMegabyte, kMegabyte)};
  Event start(scene.device);
  Event middle(scene.device);
  Event end(scene.device);
  Stall stall(*scene.device, scene.a.handle());
  scene.device->record(start.handle(), scene.a.handle());
  scene.device->busy(scene.a.handle(), 1500);
  scene.device->record(middle.handle(), scene.a.handle());
  scene.device->copy(scene.a.handle(), Direction::load, all);
  scene.device->record(end.handle(), scene.a.handle());
  SUBCASE("on its own stream") {}
  SUBCASE("and another stream behind the event sees the same time") {
    scene.device->wait(scene.b.handle(), middle.handle());
    Event seen(scene.device);
    scene.device->record(seen.handle(), scene.b.handle());
    stall.release();
    scene.device->synchronize();
    CHECK(about(scene.device->elapsed_ms(middle.handle(), seen.handle()), 0));
  }
  stall.release();
  scene.device->synchronize();
  CHECK(about(scene.device->elapsed_ms(start.handle(), middle.handle()), 1.5));
  CHECK(about(scene.device->elapsed_ms(start.handle(), end.handle()), 2.5));
  check_refused<DeviceError>([&] { scene.device->busy(scene.a.handle(), -1); },
                             {"-1", "must be from"});
}

TEST_CASE("what a copy costs to issue holds the caller, and a tall one its own cost") {
  Scene scene(LinkModel{.gigabytes_per_second = 1000, .issue_us = 50, .tall_issue_us = 200});
  Buffer bytes(4096);
  const Copy low = flat(bytes.address(), bytes.address() + 2048, 16);
  const Copy tall{bytes.address(), bytes.address() + 2048, 16, 2, 32, 32};
  const std::vector<Copy> copies{low, low, tall, low, tall};
  Event start(scene.device);
  Event end(scene.device);
  scene.device->record(start.handle(), scene.a.handle());
  const auto begin = std::chrono::steady_clock::now();
  scene.device->copy(scene.a.handle(), Direction::load, copies);
  const auto held = std::chrono::steady_clock::now() - begin;
  CHECK(held >= std::chrono::microseconds(3 * 50 + 2 * 200));
  scene.device->record(end.handle(), scene.a.handle());
  scene.device->synchronize(end.handle());
  // The last copy cannot end before it has been issued.
  CHECK(scene.device->elapsed_ms(start.handle(), end.handle()) >= 0.55 - kRounding);
}

TEST_CASE("the link's arithmetic") {
  const LinkModel model{.gigabytes_per_second = 2, .issue_us = 1, .tall_issue_us = 3};
  const Copy low{0, 0, 4000, 1, 0, 0};  // 2 us on the link
  const Copy tall{0, 0, 500, 2, 0, 0};  // 0.5 us
  SUBCASE("the link is the bottleneck: copies follow each other from the start on") {
    Link link;
    CHECK(link.transfer(1'000'000, 0, std::array{low, low, low}, model) == 1'006'000);
    CHECK(link.transfer(1'000'000, 0, std::array{low}, model) == 1'008'000);
  }
  SUBCASE("issuing is the bottleneck: every copy waits to be issued") {
    Link link;
    CHECK(link.transfer(0, 100, std::array{tall, tall}, model) == 100 + 6000 + 500);
    CHECK(link.transfer(0, 100, std::array{low}, model) == 6600 + 2000);
  }
  SUBCASE("a tall copy is issued at its own cost") {
    Link link;
    CHECK(link.transfer(0, 0, std::array{low, tall, low}, model) == 5000 + 2000);
  }
}

TEST_CASE("a full queue holds the caller until copies are done, and not before it is full") {
  Scene scene(LinkModel{.gigabytes_per_second = 1000, .queue_depth = 8});
  Buffer bytes(4096);
  const std::vector<Copy> eight(8, flat(bytes.address(), bytes.address() + 2048, 16));
  Stall stall(*scene.device, scene.a.handle());
  scene.device->copy(scene.a.handle(), Direction::load, eight);
  CHECK(scene.device->counters(Direction::load).copies == 8);
  Blocking ninth(
      [&] { scene.device->copy(scene.a.handle(), Direction::load, std::span(eight).first(1)); });
  CHECK(ninth.blocks());
  // Another stream has a queue of its own, and events do not count.
  const std::vector<Copy> elsewhere(8, flat(bytes.address() + 1024, bytes.address() + 2048, 16));
  scene.device->copy(scene.b.handle(), Direction::load, elsewhere);
  Event event(scene.device);
  scene.device->record(event.handle(), scene.a.handle());
  CHECK(!ninth.returned());
  stall.release();
  ninth.join();
  scene.device->synchronize();
  CHECK(scene.device->counters(Direction::load).copies == 17);
}

TEST_CASE("a model out of its bounds is refused") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  for (const double bad : {0.0, -1.0, nan, inf}) {
    check_refused<LayoutError>([&] { HostDevice(LinkModel{.gigabytes_per_second = bad}); },
                               {"gigabytes_per_second", "must be from"});
    LinkModel scaled = kOneGigabyte;
    scaled.byte_scale = bad;
    check_refused<LayoutError>([&] { HostDevice{scaled}; }, {"byte_scale", "must be from"});
  }
  for (const double bad : {-1.0, nan, inf}) {
    LinkModel model = kOneGigabyte;
    model.issue_us = bad;
    check_refused<LayoutError>([&] { HostDevice{model}; }, {"issue_us", "must be from"});
    model = kOneGigabyte;
    model.tall_issue_us = bad;
    check_refused<LayoutError>([&] { HostDevice{model}; }, {"tall_issue_us", "must be from"});
  }
  LinkModel model = kOneGigabyte;
  model.queue_depth = -1;
  check_refused<LayoutError>([&] { HostDevice{model}; }, {"queue_depth", "-1"});
}

TEST_CASE("rows are gathered and scattered in the order of their ids, behind what is ahead") {
  Scene scene;
  std::array<std::uint8_t, 12> rows{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5};
  std::array<std::uint8_t, 6> packed{};
  std::array<std::uint8_t, 12> back{};
  std::vector<std::int64_t> ids{4, 0, 3};
  {
    Stall stall(*scene.device, scene.a.handle());
    const std::array gather{move_of(packed.data(), rows.data(), ids, 2)};
    const std::array scatter{move_of(packed.data(), back.data(), ids, 2)};
    scene.device->gather(scene.a.handle(), gather);
    scene.device->scatter(scene.a.handle(), scatter);
    ids.assign(3, 1);  // The ids were read by the call.
    rows[8] = 9;       // The rows were not.
    stall.release();
  }
  scene.device->synchronize();
  CHECK(packed == std::array<std::uint8_t, 6>{9, 4, 0, 0, 3, 3});
  CHECK(back == std::array<std::uint8_t, 12>{0, 0, 0, 0, 0, 0, 3, 3, 9, 4, 0, 0});
}

TEST_CASE("rows that cannot be are refused, and no other move of the call is made") {
  Scene scene;
  std::array<std::uint8_t, 8> rows{1, 2, 3, 4, 5, 6, 7, 8};
  std::array<std::uint8_t, 8> packed{};
  const std::vector<std::int64_t> ids{1, 0};
  const std::vector<std::int64_t> negative{0, -3};
  const RowMove good = move_of(packed.data(), rows.data(), ids, 2);
  const auto refused = [&](RowMove bad, std::initializer_list<std::string> words) {
    const std::array moves{good, bad};
    check_refused<DeviceError>([&] { scene.device->gather(scene.a.handle(), moves); }, words);
    check_refused<DeviceError>([&] { scene.device->scatter(scene.a.handle(), moves); }, words);
  };
  const auto changed = [&](auto RowMove::* field, std::uint64_t value) {
    RowMove bad = good;
    bad.*field = value;
    return bad;
  };
  refused(changed(&RowMove::row_bytes, 0), {"row_bytes: 0"});
  refused(changed(&RowMove::count, std::uint64_t{1} << 56), {"count: 72057594037927936 rows"});
  refused(changed(&RowMove::packed, 0), {"packed: 0 is no address"});
  refused(changed(&RowMove::rows, 0), {"rows: 0 is no address"});
  refused(changed(&RowMove::ids, 0), {"ids: 0 is no address"});
  refused(changed(&RowMove::ids, good.ids + 4), {"ids: address 0x", "must be a multiple of 8"});
  refused(move_of(packed.data(), rows.data(), negative, 2), {"ids: -3 at 1", "minimum 0"});
  scene.device->synchronize();
  CHECK(packed == std::array<std::uint8_t, 8>{});
  const std::array none{RowMove{0, 0, 0, 0, 2}};
  scene.device->gather(scene.a.handle(), none);
  CHECK_THROWS_AS(scene.device->gather(scene.a.handle() + 1000, none), DeviceError);
}

TEST_CASE("a stream is let go by another one's coming to a point") {
  Scene scene;
  std::uint8_t seen = 0;
  const auto ahead = std::make_shared<Mark>();
  scene.device->hold(scene.a.handle(), ahead);
  scene.read(scene.a.handle(), seen);
  Stall stall(*scene.device, scene.b.handle());
  scene.write(scene.b.handle(), 7);
  scene.device->release(scene.b.handle(), ahead);
  CHECK_FALSE(ahead->reached());
  stall.release();
  scene.device->synchronize();
  CHECK(seen == 7);
}
