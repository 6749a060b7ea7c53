#include "host/streaming_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kvburst {

#if defined(__x86_64__)

namespace {

/// Only whole lines are streamed. A line that is partly streamed and partly stored is written back
/// in pieces: aligned to 32 bytes instead, rows of 256 bytes to 1 KiB that begin in the middle of a
/// line took 2 to 8 times as long as with memcpy.
constexpr std::size_t kLine = 64;

/// Read this far ahead, so that a row does not wait where it enters another page of memory:
/// scattered rows of 8 KiB became a seventh faster. Past the row's end it is a hint, and no access.
constexpr std::size_t kAhead = 512;

/// 16-byte stores, which every x86-64 has, fill a line as well as wider ones: from 8 KiB on no
/// difference to 32 bytes was seen, at 1 KiB it was a tenth.
void stream_lines(char* dst, const char* src, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kLine) {
    _mm_prefetch(src + i + kAhead, _MM_HINT_T0);
    for (std::size_t j = i; j < i + kLine; j += sizeof(__m128i)) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(dst + j),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + j)));
    }
  }
}

}  // namespace

void streaming_copy(void* dst, const void* src, std::size_t bytes) {
  if (bytes < kStreamedFrom) {
    std::memcpy(dst, src, bytes);
    return;
  }
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % kLine;
  const std::size_t lines = (bytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  stream_lines(to + head, from + head, lines);
  std::memcpy(to + head + lines, from + head + lines, bytes - head - lines);
}

void streaming_fence() { _mm_sfence(); }

#else

// Processors of the aarch64 family recognise lines that are overwritten as a whole on their own
// (write streaming), so there is neither a hint to give nor a fence to set. Not measured.
void streaming_copy(void* dst, const void* src, std::size_t bytes) { std::memcpy(dst, src, bytes); }

void streaming_fence() {}

#endif

}  // namespace kvburst
