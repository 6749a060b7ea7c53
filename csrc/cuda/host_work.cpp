#include "cuda/host_work.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace kvburst::cuda {
namespace {

class Hold {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kLongestHold, [this] { return released_; });
  }
  void release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool released_ = false;
};

/// The driver calls `work` once and never again; it is not called in a context that has failed.
template <class Work>
void enqueue(const Driver& driver, CUstream stream, Work work) {
  auto given = std::make_unique<Work>(std::move(work));
  const CUhostFn run = [](void* data) { (*std::unique_ptr<Work>(static_cast<Work*>(data)))(); };
  driver.check(driver.call().cuLaunchHostFunc(stream, run, given.get()), "cuLaunchHostFunc");
  given.release();
}

}  // namespace

void enqueue_busy(const Driver& driver, CUstream stream, double microseconds) {
  enqueue(driver, stream, [length = std::chrono::duration<double, std::micro>(microseconds)] {
    std::this_thread::sleep_for(length);
  });
}

std::function<void()> enqueue_hold(const Driver& driver, CUstream stream) {
  const auto hold = std::make_shared<Hold>();
  enqueue(driver, stream, [hold] { hold->wait(); });
  return [hold] { hold->release(); };
}

}  // namespace kvburst::cuda
