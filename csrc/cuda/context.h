#pragma once

#include <sys/types.h>

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "cuda/driver.h"

namespace kvburst::cuda {

/// The primary context of a GPU, which every library of the process shares; torch's too. Held from
/// construction until destruction. Any thread.
class Context {
 public:
  /// Throws DeviceError if the driver does not start, or has no GPU of this index.
  Context(std::shared_ptr<const Driver> driver, int index);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Driver& driver() const { return *driver_; }
  const DriverFunctions& call() const { return driver_->call(); }
  CUcontext handle() const { return handle_; }
  int index() const { return index_; }
  std::string gpu_name() const;
  int attribute(CUdevice_attribute which) const;
  /// A forked child has the parent's handles and no driver that knows them.
  bool forked() const;

 private:
  std::shared_ptr<const Driver> driver_;
  int index_;
  CUdevice device_ = 0;
  CUcontext handle_ = nullptr;
  const pid_t process_;
};

/// Of the GPUs that a driver has, by index. Starts the driver; throws DeviceError if that fails.
std::vector<std::string> gpu_names(const Driver& driver);

/// While it lives, calls of this thread reach the context: a thread of ours has none of its own, a
/// caller's may be another GPU's and is put back as it was.
///
/// The thread is in relaxed capture mode for as long. In the default mode a query or a wait, while
/// any other thread captures a graph, invalidates that graph.
class Current {
 public:
  /// Throws DeviceError.
  explicit Current(const Context& context);
  /// For teardown: does not throw for a driver or a context that is gone; see `gone`.
  Current(const Context& context, std::nothrow_t);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  /// There is nothing left that could be given back.
  bool gone() const { return gone_; }

 private:
  CUresult enter();
  void leave();

  const Context& context_;
  CUcontext before_ = nullptr;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool entered_ = false;
  bool relaxed_ = false;
  bool gone_ = false;
};

}  // namespace kvburst::cuda
