#pragma once

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "core/device.h"
#include "host/host_device.h"

namespace kvburst::testing {

/// Holds a stream of a HostDevice until it is released, at the latest when it goes out of scope, so
/// that a failed test ends.
class Stall {
 public:
  Stall(HostDevice& device, StreamHandle stream) : mark_(device.stall(stream)) {}
  Stall(const Stall&) = delete;
  Stall& operator=(const Stall&) = delete;
  ~Stall() { release(); }

  void release() { release_at(now()); }
  /// The stream goes on at `time` of its own timeline.
  void release_at(Time time) {
    if (mark_) mark_->reach(time);
    mark_.reset();
  }

 private:
  std::shared_ptr<Mark> mark_;
};

/// Whether every thread of the process but the calling one sleeps, as the kernel sees them.
inline bool others_sleep() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(gettid())) continue;
    std::ifstream file(task.path() / "stat");
    std::string line;
    // A thread that has ended meanwhile has no line. The state follows the name.
    if (!std::getline(file, line)) continue;
    const std::size_t name_end = line.rfind(") ");
    if (name_end != std::string::npos && line[name_end + 2] != 'S') return false;
  }
  return true;
}

/// Waits until all that can run without the calling thread has run. What has not happened by then
/// is held up, and not merely late.
inline void settle() {
  for (int quiet = 0; quiet < 3; quiet = others_sleep() ? quiet + 1 : 0) std::this_thread::yield();
}

/// A thread that is expected to block.
class Blocking {
 public:
  template <class Body>
  explicit Blocking(Body body)
      : thread_([this, body = std::move(body)] {
          body();
          returned_.store(true);
        }) {}
  ~Blocking() {
    if (thread_.joinable()) thread_.join();
  }

  bool blocks() const {
    settle();
    return !returned_.load();
  }
  bool returned() const { return returned_.load(); }
  void join() { thread_.join(); }

 private:
  std::atomic<bool> returned_ = false;
  std::thread thread_;
};

}  // namespace kvburst::testing
