#include "core/compute_device.h"

#include "core/error.h"
#include "core/format.h"

namespace kvburst {

void CopyTally::begin() {
  if (calls_until_failure_ > 0 && --calls_until_failure_ == 0) {
    throw DeviceError("copy: failed, as it was told to");
  }
}

void CopyTally::count(Direction direction, std::span<const Copy> copies) {
  std::int64_t bytes = 0;
  for (const Copy& copy : copies) bytes += static_cast<std::int64_t>(copy.bytes());
  Counts& counts = counts_[static_cast<std::size_t>(direction)];
  counts.calls += 1;
  counts.copies += static_cast<std::int64_t>(copies.size());
  counts.bytes += bytes;
}

CopyCounters CopyTally::counters(Direction direction) const {
  const Counts& counts = counts_[static_cast<std::size_t>(direction)];
  return {counts.calls, counts.copies, counts.bytes};
}

void CopyTally::fail_call(std::int64_t nth) {
  if (nth < 1) throw DeviceError(text("fail_copy_call: ", nth, " is below the minimum of 1"));
  calls_until_failure_ = nth;
}

void ComputeDevice::check_busy(double microseconds) {
  if (!(microseconds >= 0 && microseconds <= kLongestBusyUs)) {
    throw DeviceError(
        text("busy: ", microseconds, " microseconds must be from 0 to ", kLongestBusyUs));
  }
}

}  // namespace kvburst
