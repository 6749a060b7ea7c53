#pragma once

#include <atomic>

#include "core/device.h"

namespace kvburst {

/// The device "null": accepts every call and moves nothing. All work on it is done as soon as it
/// is enqueued, so what remains of a burst is the cost of planning and issuing it, which is what
/// the device is for. Whatever is measured with it counts no driver, and must say so.
class NullDevice final : public Device {
 public:
  /// Throws LayoutError if a limit is out of its bounds.
  explicit NullDevice(CopyLimits limits = {}) : limits_(limits) { limits_.check(); }

  std::string_view name() const override { return "null"; }
  CopyLimits limits() const override { return limits_; }

  StreamHandle create_stream() override { return next_handle_++; }
  void destroy_stream(StreamHandle) override {}
  EventHandle create_event() override { return next_handle_++; }
  void destroy_event(EventHandle) override {}
  StreamHandle current_stream() override { return kCurrent; }

  void record(EventHandle, StreamHandle) override {}
  void wait(StreamHandle, EventHandle) override {}
  bool query(EventHandle) override { return true; }
  void synchronize(EventHandle) override {}
  void synchronize_stream(StreamHandle) override {}
  double elapsed_ms(EventHandle, EventHandle) override { return 0; }

  std::shared_ptr<std::byte[]> landing(std::size_t bytes) override {
    return std::make_shared<std::byte[]>(bytes);
  }
  void read(StreamHandle, const Copy&) override {}
  void copy(StreamHandle, Direction, std::span<const Copy>) override {}

 private:
  static constexpr StreamHandle kCurrent = 1;

  const CopyLimits limits_;
  std::atomic<std::uintptr_t> next_handle_ = kCurrent + 1;
};

}  // namespace kvburst
