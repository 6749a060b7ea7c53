#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace kvburst::cuda {

/// A fat binary of staging.cu, or why there is none.
struct KernelImage {
  /// Borrowed until they are loaded: the driver copies what it loads. Empty: none.
  std::span<const std::byte> bytes;
  /// In words: what compiled it, or why it is not there.
  std::string origin;
};

/// The one that this build holds.
KernelImage built_in_kernels();

}  // namespace kvburst::cuda
