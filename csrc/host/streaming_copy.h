#pragma once

#include <cstddef>

namespace kvburst {

/// memcpy for rows that are part of something large. Scattered pages copied with plain stores reach
/// half to nine tenths of the bandwidth of one large memcpy: every destination line is first read,
/// only to be overwritten. This one writes past the cache; rows too small for that to pay, and
/// processors without such stores, get memcpy. `streaming_fence` must follow before another thread
/// is told.
void streaming_copy(void* dst, const void* src, std::size_t bytes);

/// Orders the stores of `streaming_copy` before what this thread writes next.
void streaming_fence();

}  // namespace kvburst
