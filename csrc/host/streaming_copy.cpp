#include "host/streaming_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvburst {

#if defined(__x86_64__)

namespace {

/// Below this the destination is likely to be read again while still cached.
constexpr std::size_t kSmallest = 4096;
/// Bytes moved per turn of the loops, and the alignment that streaming stores need.
constexpr std::size_t kTurn = 128;
constexpr std::size_t kAlignment = 32;

__attribute__((target("avx2"))) void stream_avx2(char* dst, const char* src, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kTurn) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 32));
    const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 64));
    const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 96));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 32), b);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 64), c);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 96), d);
  }
}

void stream_sse2(char* dst, const char* src, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
  }
}

}  // namespace

void streaming_copy(void* dst, const void* src, std::size_t bytes) {
  static const auto stream = __builtin_cpu_supports("avx2") ? stream_avx2 : stream_sse2;
  if (bytes < kSmallest) {
    std::memcpy(dst, src, bytes);
    return;
  }
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % kAlignment;
  const std::size_t body = (bytes - head) / kTurn * kTurn;
  std::memcpy(to, from, head);
  stream(to + head, from + head, body);
  std::memcpy(to + head + body, from + head + body, bytes - head - body);
}

void streaming_fence() { _mm_sfence(); }

#else

void streaming_copy(void* dst, const void* src, std::size_t bytes) { std::memcpy(dst, src, bytes); }

void streaming_fence() {}

#endif

}  // namespace kvburst
