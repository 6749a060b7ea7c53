#pragma once

#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "core/device.h"

namespace kvburst {

/// Which stream a thread's compute is enqueued on. Any thread; `push` and `pop` pair up in each.
class CurrentStreams {
 public:
  virtual ~CurrentStreams() = default;

  virtual StreamHandle current() = 0;
  /// Makes `stream` the calling thread's current one until it is popped.
  virtual void push(StreamHandle stream) = 0;
  /// Throws DeviceError if the thread has pushed none.
  virtual void pop() = 0;
};

/// Of a device that no framework has current streams for. Until a thread sets another, one stream
/// that all threads share.
class ThreadStreams final : public CurrentStreams {
 public:
  explicit ThreadStreams(StreamHandle shared) : shared_(shared) {}

  StreamHandle current() override;
  void push(StreamHandle stream) override;
  void pop() override;
  StreamHandle shared() const { return shared_; }
  /// Of a stream that is to be destroyed. Throws DeviceError for the shared one.
  void forget(StreamHandle stream);

 private:
  const StreamHandle shared_;
  std::mutex mutex_;
  /// Innermost last.
  std::map<std::thread::id, std::vector<StreamHandle>> pushed_;
};

}  // namespace kvburst
