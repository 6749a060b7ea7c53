#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "core/device.h"

namespace kvburst::testing {

/// Passes every call on to another device. Tests override what is to go wrong or to be watched.
class ForwardingDevice : public Device {
 public:
  explicit ForwardingDevice(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  std::string_view name() const override { return device_->name(); }
  CopyLimits limits() const override { return device_->limits(); }
  StreamHandle create_stream() override { return device_->create_stream(); }
  void destroy_stream(StreamHandle stream) override { device_->destroy_stream(stream); }
  EventHandle create_event() override { return device_->create_event(); }
  void destroy_event(EventHandle event) override { device_->destroy_event(event); }
  StreamHandle current_stream() override { return device_->current_stream(); }
  void record(EventHandle event, StreamHandle stream) override { device_->record(event, stream); }
  void wait(StreamHandle stream, EventHandle event) override { device_->wait(stream, event); }
  bool query(EventHandle event) override { return device_->query(event); }
  void synchronize(EventHandle event) override { device_->synchronize(event); }
  void synchronize_stream(StreamHandle stream) override { device_->synchronize_stream(stream); }
  double elapsed_ms(EventHandle start, EventHandle end) override {
    return device_->elapsed_ms(start, end);
  }
  std::shared_ptr<std::byte[]> landing(std::size_t bytes) override {
    return device_->landing(bytes);
  }
  void read(StreamHandle stream, const Copy& copy) override { device_->read(stream, copy); }
  void copy(StreamHandle stream, Direction direction, std::span<const Copy> copies) override {
    device_->copy(stream, direction, copies);
  }

 private:
  std::shared_ptr<Device> device_;
};

}  // namespace kvburst::testing
