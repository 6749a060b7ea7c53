#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <span>

#include "core/device.h"
#include "core/row_moves.h"

namespace kvburst {

/// Copies that a device was handed in one direction since it was made.
struct CopyCounters {
  std::int64_t calls = 0;
  std::int64_t copies = 0;
  std::int64_t bytes = 0;
};

/// Counts what `copy` is handed, and fails one call on demand. Any thread.
class CopyTally {
 public:
  /// Throws DeviceError if this is the call that is to fail.
  void begin();
  void count(Direction direction, std::span<const Copy> copies);
  CopyCounters counters(Direction direction) const;
  /// Makes the `nth` call from now on, counted from 1, fail.
  void fail_call(std::int64_t nth);

 private:
  struct Counts {
    std::atomic<std::int64_t> calls = 0;
    std::atomic<std::int64_t> copies = 0;
    std::atomic<std::int64_t> bytes = 0;
  };

  std::array<Counts, 2> counts_;
  std::atomic<std::int64_t> calls_until_failure_ = 0;
};

/// Longest `busy`, in microseconds. A day: far more than any forward, far less than a clock holds.
constexpr double kLongestBusyUs = 86'400e6;

/// A device on which a forward can run, or what stands for one in tests and demos: work other than
/// transfers, on streams that threads make their current ones.
class ComputeDevice : public Device {
 public:
  /// Makes `stream` the calling thread's current one until it is popped.
  virtual void push_current_stream(StreamHandle stream) = 0;
  /// Throws DeviceError if the thread has pushed none.
  virtual void pop_current_stream() = 0;

  virtual bool query_stream(StreamHandle stream) = 0;
  using Device::synchronize;
  /// Waits for all streams that the device created, and for the current one.
  virtual void synchronize() = 0;

  virtual CopyCounters counters(Direction direction) const = 0;
  /// Makes the `nth` call of `copy` from now on, counted from 1, throw and copy nothing.
  virtual void fail_copy_call(std::int64_t nth) = 0;

  /// Whether `gather` and `scatter` can be called; where not, they raise why.
  virtual bool moves_rows() const { return true; }
  /// Enqueues rows to packed memory, all `moves` at once and without an order among them. Ids in
  /// host memory are read before the call returns and checked as far as they can be; ids in a GPU's
  /// memory are read when the stream gets there, and nobody checks them. The memory must stay until
  /// it is done. DeviceError, and nothing is enqueued, on moves that `RowMove::check` refuses.
  void gather(StreamHandle stream, std::span<const RowMove> moves) {
    move_rows(stream, RowDirection::gather, moves);
  }
  /// The reverse: each packed row goes to the row of its id.
  void scatter(StreamHandle stream, std::span<const RowMove> moves) {
    move_rows(stream, RowDirection::scatter, moves);
  }

  /// A copy within the device, which no counter counts and no link slows.
  virtual void copy_on_device(StreamHandle stream, const Copy& copy) = 0;
  virtual void fill(StreamHandle stream, std::uintptr_t dst, std::uint8_t value,
                    std::size_t size) = 0;
  /// Occupies the stream as a kernel would.
  virtual void busy(StreamHandle stream, double microseconds) = 0;
  /// Holds the stream at this point until the result is called, from any thread.
  virtual std::function<void()> hold(StreamHandle stream) = 0;

 protected:
  virtual void move_rows(StreamHandle stream, RowDirection direction,
                         std::span<const RowMove> moves) = 0;
  /// Throws DeviceError unless it is from 0 to `kLongestBusyUs`.
  static void check_busy(double microseconds);
};

}  // namespace kvburst
