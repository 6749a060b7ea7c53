#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "cuda/context.h"

namespace kvburst::cuda {

/// Turns the copies of one call into as few calls of the driver as it has: one batch of plain
/// copies and one of copies of several rows, or a call a copy where the driver is older than 12.8.
///
/// There is no falling back from one to the other: a driver that refuses a copy means it, and the
/// next call would hide why. Any thread; no memory is allocated once a call of the same size was
/// made before.
class CopyCalls {
 public:
  /// `single`: a call a copy in any case.
  CopyCalls(std::shared_ptr<const Context> context, bool single);

  /// "cuMemcpyBatchAsync and cuMemcpy3DBatchAsync, as of 12.8", or what is used instead, and why.
  const std::string& description() const { return description_; }

  /// Between host and device memory, in `direction`. The copies are within the limits, the context
  /// is current, and the stream is neither the legacy one nor being captured. Throws DeviceError,
  /// naming the copy; those before it may be enqueued.
  void issue(CUstream stream, Direction direction, std::span<const Copy> copies);
  /// Within the device.
  void issue_on_device(CUstream stream, const Copy& copy) const;

 private:
  /// What the driver reads the copies of one call from.
  struct Batch {
    std::vector<CUdeviceptr> dsts;
    std::vector<CUdeviceptr> srcs;
    std::vector<std::size_t> sizes;
    std::vector<CUDA_MEMCPY3D_BATCH_OP> tall;
    /// Which of the copies each is, to name one that is refused.
    std::vector<std::size_t> plain_index;
    std::vector<std::size_t> tall_index;
  };

  void issue_batches(CUstream stream, Direction direction, std::span<const Copy> copies);
  void issue_single(CUstream stream, Direction direction, const Copy& copy) const;
  CUresult issue_rows(CUstream stream, CUmemorytype dst, CUmemorytype src, const Copy& copy) const;
  void fill(Batch& batch, Direction direction, std::span<const Copy> copies) const;
  CUdeviceptr seen_by_device(std::uintptr_t host) const;
  std::unique_ptr<Batch> take();
  void put_back(std::unique_ptr<Batch> batch);

  std::shared_ptr<const Context> context_;
  const bool single_;
  /// False: the device knows pinned host memory by another address.
  const bool host_addresses_;
  const std::string description_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Batch>> spare_;
};

}  // namespace kvburst::cuda
