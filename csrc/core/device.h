#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "core/error.h"

/// The one seam between the core and whatever moves bytes.
///
/// It is shaped by two facts. A driver charges the calling thread for every *copy*, not for every
/// byte (2.3 us on an H100 in public measurements), so the unit here is a batch of strided 2D
/// copies: one of them can move one page of many layers. And tensors, streams and events of the
/// caller's framework are not ours, so they cross as integers: an address, a stream handle, an
/// event handle. That is what lets one build serve every torch, and a machine without a driver.
///
/// Ordering is CUDA's. Work on one stream runs in the order in which it was enqueued; copies
/// within one call have no order among themselves; nothing else is ordered unless an event says
/// so. An event stands for the point in a stream at which it was last recorded: recording it again
/// does not move the waits already enqueued on it, and waiting on one that was never recorded is a
/// no-op.
namespace kvburst {

/// Device to host (backup) or host to device (load).
enum class Direction : std::uint8_t { backup, load };

constexpr std::string_view name_of(Direction direction) {
  return direction == Direction::load ? "load" : "backup";
}

/// `height` rows of `width` bytes, `*_pitch` bytes from one row to the next. Height 1 is a plain
/// copy, whose pitches are ignored.
struct Copy {
  std::uintptr_t dst;
  std::uintptr_t src;
  std::size_t width;
  std::size_t height;
  std::size_t dst_pitch;
  std::size_t src_pitch;

  std::size_t bytes() const { return width * height; }
  friend bool operator==(const Copy&, const Copy&) = default;
};

/// What a device accepts in one call; the planner keeps to it and the device refuses the rest.
struct CopyLimits {
  /// Bytes from one row to the next, on either tier (CUDA's device attribute: 2^31 - 1 in public
  /// dumps).
  std::size_t max_pitch = 2'147'483'647;
  /// Copies in one call. Drivers have crashed near 50,000 (vllm-project/vllm#49276).
  std::size_t copies_per_call = 4096;
  /// False forbids copies of more than one row.
  bool tall_copies = true;
  /// Host memory must be pinned: of other memory the device may read a source too early or too
  /// late, and says nothing.
  bool pinned_only = false;

  /// Throws LayoutError on a limit below 1.
  void check() const;
  /// Throws DeviceError on a copy without bytes, or one beyond the limits.
  void check(const Copy& copy) const;
  /// The same for the copies of one call, and for how many they are.
  void check(std::span<const Copy> copies) const;
};

using StreamHandle = std::uintptr_t;
using EventHandle = std::uintptr_t;

/// A device that copies asynchronously. Every member may be called from any thread. Nothing here
/// blocks on the device except `synchronize*` and, where a stream's queue is full, the call that
/// would enqueue on it. A handle that the device does not know is a DeviceError.
class Device {
 public:
  virtual ~Device() = default;

  virtual std::string_view name() const = 0;
  virtual CopyLimits limits() const = 0;

  virtual StreamHandle create_stream() = 0;
  /// Waits for the stream's work, then frees it.
  virtual void destroy_stream(StreamHandle stream) = 0;
  virtual EventHandle create_event() = 0;
  virtual void destroy_event(EventHandle event) = 0;

  /// The stream that the calling thread's compute is enqueued on.
  virtual StreamHandle current_stream() = 0;

  virtual void record(EventHandle event, StreamHandle stream) = 0;
  virtual void wait(StreamHandle stream, EventHandle event) = 0;
  /// True once the point the event stands for has been reached, or if it was never recorded.
  virtual bool query(EventHandle event) = 0;
  virtual void synchronize(EventHandle event) = 0;
  virtual void synchronize_stream(StreamHandle stream) = 0;
  /// Milliseconds between two reached events; DeviceError if one was never recorded.
  virtual double elapsed_ms(EventHandle start, EventHandle end) = 0;

  /// Memory that `read` may write to while the caller goes on: pinned, where that is a difference.
  virtual std::shared_ptr<std::byte[]> landing(std::size_t bytes) = 0;
  /// Enqueues a copy from the device's memory to `landing` memory: page ids, not pages.
  virtual void read(StreamHandle stream, const Copy& copy) = 0;

  /// Enqueues all `copies`. The span is read before the call returns. Copies beyond `limits()` are
  /// a DeviceError, and none is enqueued; where a driver fails in between, some of them may be, and
  /// what is recorded on the stream then still comes behind those.
  virtual void copy(StreamHandle stream, Direction direction, std::span<const Copy> copies) = 0;
};

/// Destroys, where a destructor cannot throw: a device that has failed has nothing to give back.
template <class Destroy>
void destroy_quietly(const Destroy& destroy) {
  try {
    destroy();
  } catch (const DeviceError&) {
  }
}

/// A stream that is destroyed with its owner. Move-only; keeps its device alive.
class Stream {
 public:
  explicit Stream(std::shared_ptr<Device> device)
      : device_(std::move(device)), handle_(device_->create_stream()) {}
  Stream(Stream&& other) noexcept
      : device_(std::move(other.device_)), handle_(std::exchange(other.handle_, 0)) {}
  Stream& operator=(Stream&&) = delete;
  ~Stream() {
    if (device_) destroy_quietly([&] { device_->destroy_stream(handle_); });
  }

  StreamHandle handle() const { return handle_; }

 private:
  std::shared_ptr<Device> device_;
  StreamHandle handle_;
};

/// An event that is destroyed with its owner. Move-only; keeps its device alive.
class Event {
 public:
  explicit Event(std::shared_ptr<Device> device)
      : device_(std::move(device)), handle_(device_->create_event()) {}
  Event(Event&& other) noexcept
      : device_(std::move(other.device_)), handle_(std::exchange(other.handle_, 0)) {}
  Event& operator=(Event&&) = delete;
  ~Event() {
    if (device_) destroy_quietly([&] { device_->destroy_event(handle_); });
  }

  EventHandle handle() const { return handle_; }

 private:
  std::shared_ptr<Device> device_;
  EventHandle handle_;
};

}  // namespace kvburst
