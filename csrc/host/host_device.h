#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/device.h"
#include "host/host_stream.h"
#include "host/link_model.h"

namespace kvburst {

/// Copies that a device was handed in one direction since it was made.
struct CopyCounters {
  std::int64_t calls = 0;
  std::int64_t copies = 0;
  std::int64_t bytes = 0;
};

/// The device "host": host memory plays both tiers, every stream is a worker thread, every copy
/// moves its bytes. It is a real asynchronous device with CUDA's ordering, not a mock: whatever is
/// not ordered by a stream or an event really does race. The default, and the one that every test
/// runs on.
class HostDevice final : public Device {
 public:
  /// Throws LayoutError if the model or a limit is out of its bounds.
  explicit HostDevice(std::optional<LinkModel> link = std::nullopt, CopyLimits limits = {});
  /// Works off every stream. In a forked child, which has none of their threads, it leaves them.
  ~HostDevice() override;

  std::string_view name() const override { return "host"; }
  CopyLimits limits() const override { return limits_; }
  const std::optional<LinkModel>& link() const { return link_; }

  StreamHandle create_stream() override;
  void destroy_stream(StreamHandle stream) override;
  EventHandle create_event() override;
  void destroy_event(EventHandle event) override;

  /// Until a thread sets another, one stream that all threads share.
  StreamHandle current_stream() override;
  /// Makes `stream` the calling thread's current one until it is popped.
  void push_current_stream(StreamHandle stream);
  /// Throws DeviceError if the thread has pushed none.
  void pop_current_stream();

  void record(EventHandle event, StreamHandle stream) override;
  void wait(StreamHandle stream, EventHandle event) override;
  bool query(EventHandle event) override;
  bool query_stream(StreamHandle stream);
  void synchronize(EventHandle event) override;
  void synchronize_stream(StreamHandle stream) override;
  /// Waits for all streams.
  void synchronize();
  double elapsed_ms(EventHandle start, EventHandle end) override;

  std::shared_ptr<std::byte[]> landing(std::size_t bytes) override;
  void read(StreamHandle stream, const Copy& copy) override { enqueue(stream, copy); }
  void copy(StreamHandle stream, Direction direction, std::span<const Copy> copies) override;
  CopyCounters counters(Direction direction) const;
  /// Makes the `nth` call of `copy` from now on, counted from 1, throw and copy nothing.
  void fail_copy_call(std::int64_t nth);

  // What a forward does in tests and demos: work on a stream that reads and writes device memory.

  /// A copy within the device, which no counter counts and no link slows.
  void copy_on_device(StreamHandle stream, const Copy& copy);
  void fill(StreamHandle stream, std::uintptr_t dst, std::uint8_t value, std::size_t size);
  /// Occupies the stream as a kernel would.
  void busy(StreamHandle stream, double microseconds);
  /// Holds the stream at this point until the returned mark is reached.
  std::shared_ptr<Mark> stall(StreamHandle stream);

 private:
  class HostEvent {
   public:
    void record(HostStream& on);
    std::shared_ptr<Mark> mark() const;

   private:
    mutable std::mutex mutex_;
    std::shared_ptr<Mark> mark_;
  };
  struct Counts {
    std::atomic<std::int64_t> calls = 0;
    std::atomic<std::int64_t> copies = 0;
    std::atomic<std::int64_t> bytes = 0;
  };

  std::shared_ptr<HostStream> find_stream(StreamHandle stream) const;
  std::shared_ptr<HostEvent> find_event(EventHandle event) const;
  void check(const Copy& copy) const;
  void enqueue(StreamHandle stream, const Copy& copy);
  static void hold_until(Time end);
  void issue_modelled(HostStream& stream, Link& link, std::span<const Copy> copies);

  const std::optional<LinkModel> link_;
  const CopyLimits limits_;
  std::array<Link, 2> links_;
  std::array<Counts, 2> counts_;
  std::atomic<std::int64_t> calls_until_failure_ = 0;
  mutable std::mutex mutex_;
  std::uintptr_t next_handle_ = 1;
  std::unordered_map<StreamHandle, std::shared_ptr<HostStream>> streams_;
  std::unordered_map<EventHandle, std::shared_ptr<HostEvent>> events_;
  /// Innermost last.
  std::map<std::thread::id, std::vector<StreamHandle>> current_streams_;
  StreamHandle default_stream_;
  /// The one whose threads the streams are.
  const pid_t process_;
};

}  // namespace kvburst
