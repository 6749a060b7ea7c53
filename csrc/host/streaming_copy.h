#pragma once

#include <cstddef>

namespace kvburst {

/// Scattered rows from this size on are faster with streaming stores. Measured on an EPYC of the
/// Zen 4 generation, rows over 256 MiB, as a part of what one memcpy of all of it reaches: rows of
/// 128 bytes 0.40 to 0.52 (plain stores 0.44 to 0.48), of 256 bytes 0.57 to 0.64 (0.52 to 0.58), of
/// 1 KiB 1.0 to 1.2 (0.52 to 0.57), of 40 KiB 1.4 to 1.5 (0.96 to 0.99).
constexpr std::size_t kStreamedFrom = 256;

/// memcpy for rows that are part of something large. Scattered pages copied with plain stores reach
/// half to nine tenths of the bandwidth of one large memcpy: every destination line is first read,
/// only to be overwritten. This one writes past the cache; rows too small for that to pay, and
/// processors without such stores, get memcpy. `streaming_fence` must follow before another thread
/// is told.
void streaming_copy(void* dst, const void* src, std::size_t bytes);

/// Orders the stores of `streaming_copy` before what this thread writes next.
void streaming_fence();

}  // namespace kvburst
