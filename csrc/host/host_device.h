#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "core/compute_device.h"
#include "core/current_streams.h"
#include "host/host_stream.h"
#include "host/link_model.h"

namespace kvburst {

/// The device "host": host memory plays both tiers, every stream is a worker thread, every copy
/// moves its bytes. It is a real asynchronous device with CUDA's ordering, not a mock: whatever is
/// not ordered by a stream or an event really does race. The default, and the one that every test
/// runs on.
class HostDevice final : public ComputeDevice {
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

  StreamHandle current_stream() override { return current_streams_->current(); }
  void push_current_stream(StreamHandle stream) override;
  void pop_current_stream() override { current_streams_->pop(); }

  void record(EventHandle event, StreamHandle stream) override;
  void wait(StreamHandle stream, EventHandle event) override;
  bool query(EventHandle event) override;
  bool query_stream(StreamHandle stream) override;
  void synchronize(EventHandle event) override;
  void synchronize_stream(StreamHandle stream) override;
  void synchronize() override;
  double elapsed_ms(EventHandle start, EventHandle end) override;

  std::shared_ptr<std::byte[]> landing(std::size_t bytes) override;
  void read(StreamHandle stream, const Copy& copy) override { enqueue(stream, copy); }
  void copy(StreamHandle stream, Direction direction, std::span<const Copy> copies) override;
  CopyCounters counters(Direction direction) const override { return tally_.counters(direction); }
  void fail_copy_call(std::int64_t nth) override { tally_.fail_call(nth); }

  void copy_on_device(StreamHandle stream, const Copy& copy) override;
  void fill(StreamHandle stream, std::uintptr_t dst, std::uint8_t value, std::size_t size) override;
  void busy(StreamHandle stream, double microseconds) override;
  std::function<void()> hold(StreamHandle stream) override;
  /// The same, until the returned mark is reached.
  std::shared_ptr<Mark> stall(StreamHandle stream);
  /// The same with a mark that others may share, of this device's streams or another's.
  void hold(StreamHandle stream, std::shared_ptr<Mark> mark);
  /// Lets what is held by `mark` go on once `stream` has come to this point.
  void release(StreamHandle stream, std::shared_ptr<Mark> mark);

 private:
  class HostEvent {
   public:
    void record(HostStream& on);
    std::shared_ptr<Mark> mark() const;

   private:
    mutable std::mutex mutex_;
    std::shared_ptr<Mark> mark_;
  };

  std::shared_ptr<HostStream> find_stream(StreamHandle stream) const;
  std::shared_ptr<HostEvent> find_event(EventHandle event) const;
  void enqueue(StreamHandle stream, const Copy& copy);
  void move_rows(StreamHandle stream, RowDirection direction,
                 std::span<const RowMove> moves) override;
  static void hold_until(Time end);
  void issue_modelled(HostStream& stream, Link& link, std::span<const Copy> copies);

  const std::optional<LinkModel> link_;
  const CopyLimits limits_;
  std::array<Link, 2> links_;
  CopyTally tally_;
  mutable std::mutex mutex_;
  std::uintptr_t next_handle_ = 1;
  std::unordered_map<StreamHandle, std::shared_ptr<HostStream>> streams_;
  std::unordered_map<EventHandle, std::shared_ptr<HostEvent>> events_;
  std::optional<ThreadStreams> current_streams_;
  /// The one whose threads the streams are.
  const pid_t process_;
};

}  // namespace kvburst
