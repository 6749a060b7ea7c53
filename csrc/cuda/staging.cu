// The kernels of the exchange between ranks: rows gathered into a staging buffer that a collective
// sends, and scattered out of the one that it received into.
//
// Their shape follows from four facts of the hardware.
//  - A warp's 32 accesses of 16 bytes are whole lines of 128 bytes, and 16 bytes is the widest
//    access that every GPU since sm_80 has. Rows need not be aligned to it (132 bytes of an index
//    key are not), so words are as wide as both addresses allow and the rest is moved in bytes.
//  - Memory answers after some 0.6 to 0.8 us, whoever asks: what is moved in a second is what is
//    under way at once, divided by that. A thread has four words under way, so a block of 512
//    threads has 32 KiB, and 16 blocks (an eighth of an H100) half a MiB: some 650 GB/s, above the
//    450 GB/s that its NVLink sends. More would take processors from the forward beside it and
//    wait for the link all the same: hence one block for every eighth multiprocessor at most.
//  - A launch costs microseconds and a layer's bytes take tens: all pools of a layer go in one.
//    What is to be moved is the parameter itself, at most 4 KiB (32 since sm_70 with 12.1), so
//    nothing is copied to the device before.
//  - A pool is larger than 4 GiB: addresses and offsets are 64 bits wide throughout.
// A row is cut into pieces of 4 KiB, eight words a lane, so that a few large pages occupy all
// warps.
//
// The numbers are derived from public figures, and not measured. Look again when `gpu_check.sh` has
// run: if a gather of pages is slower than the link, raise the blocks; if rows of one token matter
// (each warp then waits for an id and for a row of a few words), give several rows to a warp; and
// if bulk copies by the memory engine (TMA, sm_90) free the threads, let them.
//
// The bodies are in core/row_moves.h, which the host compiles too.
// By itself: nvcc -std=c++20 -Icsrc -fatbin csrc/cuda/staging.cu (one of 12.x: -arch=sm_80 too)

#include "cuda/staging.h"

namespace kvburst::cuda {
namespace {

__device__ void run(const RowLaunch& launch, RowDirection direction) {
  const std::uint64_t thread = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  move_rows_as(launch, direction, thread, std::uint64_t{gridDim.x} * blockDim.x);
}

}  // namespace
}  // namespace kvburst::cuda

// By their names in staging.h.

extern "C" __global__ void __launch_bounds__(kvburst::cuda::kThreadsPerBlock, 1)
    kvburst_gather_rows(const __grid_constant__ kvburst::cuda::RowLaunch launch) {
  kvburst::cuda::run(launch, kvburst::RowDirection::gather);
}

extern "C" __global__ void __launch_bounds__(kvburst::cuda::kThreadsPerBlock, 1)
    kvburst_scatter_rows(const __grid_constant__ kvburst::cuda::RowLaunch launch) {
  kvburst::cuda::run(launch, kvburst::RowDirection::scatter);
}
