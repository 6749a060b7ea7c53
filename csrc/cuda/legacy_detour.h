#pragma once

#include <memory>
#include <mutex>

#include "cuda/context.h"

namespace kvburst::cuda {

/// Does work of the legacy default stream on a stream of its own, in the same order: behind all
/// that is on the legacy stream, and ahead of all that comes onto it later. For calls that refuse
/// the legacy stream (vllm-project/vllm#46379). Any thread.
class LegacyDetour {
 public:
  explicit LegacyDetour(std::shared_ptr<const Context> context);
  ~LegacyDetour();
  LegacyDetour(const LegacyDetour&) = delete;
  LegacyDetour& operator=(const LegacyDetour&) = delete;

  /// The context is current. What `enqueue` throws is passed on, with what it had enqueued still in
  /// order.
  template <class Enqueue>
  void run(CUstream legacy, const Enqueue& enqueue) {
    const std::lock_guard lock(mutex_);
    leave(legacy);
    try {
      enqueue(stream_);
    } catch (...) {
      come_back(legacy);
      throw;
    }
    come_back(legacy);
  }

 private:
  void leave(CUstream legacy) const;
  void come_back(CUstream legacy) const;

  std::shared_ptr<const Context> context_;
  /// One detour at a time: the events are recorded again by the next.
  std::mutex mutex_;
  CUstream stream_ = nullptr;
  CUevent before_ = nullptr;
  CUevent after_ = nullptr;
};

}  // namespace kvburst::cuda
