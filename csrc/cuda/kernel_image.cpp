#include "cuda/kernel_image.h"

#ifdef KVBURST_FATBIN

// The file itself, so that nothing has to translate it. A driver reads it in words of 8 bytes.
asm(".pushsection .rodata\n"
    ".balign 16\n"
    "kvburst_kernels_begin:\n"
    ".incbin \"" KVBURST_FATBIN
    "\"\n"
    "kvburst_kernels_end:\n"
    ".popsection\n");

extern "C" {
extern const std::byte kvburst_kernels_begin[] __attribute__((visibility("hidden")));
extern const std::byte kvburst_kernels_end[] __attribute__((visibility("hidden")));
}

namespace kvburst::cuda {

KernelImage built_in_kernels() {
  return {{kvburst_kernels_begin, kvburst_kernels_end},
          "those of this build, by CUDA toolkit " KVBURST_CUDA_TOOLKIT};
}

}  // namespace kvburst::cuda

#else

namespace kvburst::cuda {

KernelImage built_in_kernels() { return {{}, "this build has none: " KVBURST_CUDA_REASON}; }

}  // namespace kvburst::cuda

#endif
