#pragma once

#include <cstddef>

namespace kvburst {

/// memcpy for rows that are part of something large. Scattered pages copied with plain stores reach
/// about 0.6 of the bandwidth of one large memcpy: every destination line is first read, only to be
/// overwritten. From a few KiB on this one writes past the cache, as memcpy itself does for blocks
/// too large to be cached; the processor's widest such store is found at run time, and where there
/// is none it is memcpy. `streaming_fence` must follow before another thread is told.
void streaming_copy(void* dst, const void* src, std::size_t bytes);

/// Orders the stores of `streaming_copy` before what this thread writes next.
void streaming_fence();

}  // namespace kvburst
