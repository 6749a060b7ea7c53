#pragma once

#include <chrono>
#include <functional>

#include "cuda/driver.h"

/// Work that a stream does on a thread of the driver, and that takes no GPU: what stands for a
/// kernel in tests and demos. Such work of different streams may run one after the other.
namespace kvburst::cuda {

/// Longest `hold`: what nobody releases until then goes on.
constexpr std::chrono::seconds kLongestHold{120};

/// Occupies the stream for so long.
void enqueue_busy(const Driver& driver, CUstream stream, double microseconds);
/// Holds the stream until the result is called, from any thread, or for `kLongestHold`.
std::function<void()> enqueue_hold(const Driver& driver, CUstream stream);

}  // namespace kvburst::cuda
