#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/row_moves.h"
#include "cuda/context.h"
#include "cuda/kernel_image.h"

namespace kvburst::cuda {

/// The kernels of staging.cu on one GPU.
///
/// They are loaded and found at construction, since a driver that loads lazily would say at the
/// first launch, in the middle of a forward, what is wrong with them. What cannot be used is no
/// error as long as there is another way: `usable` says so, and `description` why. They stay loaded
/// until the process ends: what was launched may still run, on a stream of somebody else's, and no
/// call tells when it is done. Any thread.
class RowKernels {
 public:
  /// Throws DeviceError if loading fails for another reason than that this driver or GPU does not
  /// take the image.
  RowKernels(std::shared_ptr<const Context> context, KernelImage image);

  bool usable() const { return gather_ != nullptr; }
  /// Which were loaded, and how many blocks they run on; or why there are none.
  const std::string& description() const { return description_; }

  /// Enqueues the moves, in one launch for every `kMovesPerLaunch` of them that have rows. The
  /// kernels are usable, the moves checked, the context is current and the stream not capturing.
  void launch(CUstream stream, RowDirection direction, std::span<const RowMove> moves) const;

 private:
  /// Nothing if all is well, or why the image cannot be used.
  std::string load(const KernelImage& image);
  void launch_once(CUstream stream, RowDirection direction, std::span<const RowMove> moves) const;

  std::shared_ptr<const Context> context_;
  CUfunction gather_ = nullptr;
  CUfunction scatter_ = nullptr;
  unsigned most_blocks_ = 0;
  std::string description_;
};

/// Why a driver cannot load kernels from an image; empty if it can try.
std::string why_not_loadable(const Driver& driver, const KernelImage& image);

}  // namespace kvburst::cuda
