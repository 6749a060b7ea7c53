#pragma once

#include <cstddef>
#include <cstdint>

#include "core/row_moves.h"

/// What whoever launches the kernels of staging.cu has to know of them. Why the numbers are what
/// they are stands there.
namespace kvburst::cuda {

constexpr const char* kGatherKernel = "kvburst_gather_rows";
constexpr const char* kScatterKernel = "kvburst_scatter_rows";

constexpr unsigned kLanes = 32;
constexpr unsigned kThreadsPerBlock = 512;
/// A whole multiple of the widest word, so that the pieces of a row are aligned alike.
constexpr std::uint64_t kPieceBytes = 4096;
/// At most one block for so many multiprocessors of the GPU.
constexpr int kProcessorsPerBlock = 8;
/// What a launch takes; more are several launches.
constexpr std::uint32_t kMovesPerLaunch = 64;

/// All that one launch is to move: the one parameter of both kernels, within the 4 KiB that every
/// GPU and driver takes.
struct RowLaunch {
  RowPart parts[kMovesPerLaunch];
  std::uint64_t pieces;
};
static_assert(sizeof(RowLaunch) <= 4096);

/// What thread `thread` of `threads` moves: all lanes of a warp work on one piece.
KVBURST_HOST_DEVICE void move_rows_as(const RowLaunch& launch, RowDirection direction,
                                      std::uint64_t thread, std::uint64_t threads) {
  move_rows(launch.parts, launch.pieces, kPieceBytes, direction, thread / kLanes, threads / kLanes,
            LaneCopy{static_cast<unsigned>(thread % kLanes), kLanes});
}

}  // namespace kvburst::cuda
