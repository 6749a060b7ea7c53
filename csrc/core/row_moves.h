#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

/// Rows gathered into packed memory, and scattered out of it: the bodies that run as kernels on a
/// GPU (csrc/cuda/staging.cu), on a thread of the device `host`, and in tests and on the stand-in
/// driver thread by thread. So what decides which byte goes where is compiled for the host too, and
/// tested there.
///
/// A large row is cut into pieces, since a few large rows must occupy as many workers as many small
/// ones. How the bytes of a piece are copied is the caller's: on a GPU `LaneCopy` does it, all
/// lanes of a worker side by side, in the widest words that both addresses allow.
#if defined(__CUDACC__)
#define KVBURST_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KVBURST_HOST_DEVICE inline
#endif
/// Before a loop that nvcc is not to unroll: `words` says itself how many loads are in flight.
#if defined(__CUDA_ARCH__)
#define KVBURST_NO_UNROLL _Pragma("unroll 1")
#else
#define KVBURST_NO_UNROLL
#endif

namespace kvburst {

/// Rows to packed memory, or packed memory to rows.
enum class RowDirection : std::uint8_t { gather, scatter };

/// `count` rows of `row_bytes` bytes: the i-th packed one belongs to row `ids[i]` of the array that
/// begins at `rows`. Addresses; the ids are int64, of rows that are there. A row is whatever
/// `row_bytes` says: a page of a layer, or one token's part of it. Gathering a row twice is fine;
/// where two packed rows go to the same row, each of its bytes is from either.
struct RowMove {
  std::uintptr_t packed;
  std::uintptr_t rows;
  std::uintptr_t ids;
  std::uint64_t count;
  std::uint64_t row_bytes;

  /// Throws DeviceError, naming the value, on a row without bytes, more bytes than an address
  /// reaches, or, where there are rows, an address that is 0 or, of the ids, not aligned.
  void check() const;
};

/// A move among those of one launch.
struct RowPart {
  RowMove move;
  std::uint64_t pieces_per_row;
  /// Pieces of this move and those before it.
  std::uint64_t end;
};

/// Puts `moves` into `parts`, of which there are as many, with rows cut into pieces of
/// `piece_bytes`. Returns how many pieces there are in all.
std::uint64_t cut(std::span<const RowMove> moves, std::uint64_t piece_bytes, RowPart* parts);

/// The 16 bytes that a GPU moves in one access.
#if defined(__CUDACC__)
using Word16 = uint4;
#else
struct alignas(16) Word16 {
  std::uint64_t low;
  std::uint64_t high;
};
#endif

/// Through L2 alone: what is moved is read once, and not by whoever wrote it.
template <class Word>
KVBURST_HOST_DEVICE Word load_word(std::uintptr_t address) {
#if defined(__CUDA_ARCH__)
  return __ldcg(reinterpret_cast<const Word*>(address));
#else
  Word word;
  std::memcpy(&word, reinterpret_cast<const void*>(address), sizeof(Word));
  return word;
#endif
}

template <class Word>
KVBURST_HOST_DEVICE void store_word(std::uintptr_t address, const Word& word) {
#if defined(__CUDA_ARCH__)
  __stcg(reinterpret_cast<Word*>(address), word);
#else
  std::memcpy(reinterpret_cast<void*>(address), &word, sizeof(Word));
#endif
}

/// What lane `lane` of `lanes` copies of some bytes; all lanes together copy each byte once.
/// Neighbouring lanes copy neighbouring words, of the size to which both addresses can be aligned
/// at once; bytes before and behind whole words are copied one by one.
struct LaneCopy {
  unsigned lane;
  unsigned lanes;

  KVBURST_HOST_DEVICE void operator()(std::uintptr_t dst, std::uintptr_t src,
                                      std::uint64_t bytes) const {
    const std::uintptr_t apart = dst ^ src;
    if (apart % 16 == 0) {
      in_words<Word16>(dst, src, bytes);
    } else if (apart % 8 == 0) {
      in_words<std::uint64_t>(dst, src, bytes);
    } else if (apart % 4 == 0) {
      in_words<std::uint32_t>(dst, src, bytes);
    } else if (apart % 2 == 0) {
      in_words<std::uint16_t>(dst, src, bytes);
    } else {
      words<std::uint8_t>(dst, src, bytes);
    }
  }

 private:
  template <class Word>
  KVBURST_HOST_DEVICE void in_words(std::uintptr_t dst, std::uintptr_t src,
                                    std::uint64_t bytes) const {
    std::uint64_t head = (0 - dst) % sizeof(Word);
    if (head > bytes) head = bytes;
    const std::uint64_t body = (bytes - head) / sizeof(Word) * sizeof(Word);
    one_by_one<std::uint8_t>(dst, src, lane, head);
    words<Word>(dst + head, src + head, body / sizeof(Word));
    one_by_one<std::uint8_t>(dst + head + body, src + head + body, lane, bytes - head - body);
  }

  /// Loads of several words are under way before the first is stored.
  template <class Word>
  KVBURST_HOST_DEVICE void words(std::uintptr_t dst, std::uintptr_t src,
                                 std::uint64_t count) const {
    constexpr unsigned kInFlight = 4;
    const std::uint64_t step = std::uint64_t{kInFlight} * lanes;
    std::uint64_t i = lane;
    KVBURST_NO_UNROLL
    for (; i + step - lanes < count; i += step) {
      Word word[kInFlight];
      for (unsigned k = 0; k < kInFlight; ++k) {
        word[k] = load_word<Word>(src + (i + std::uint64_t{k} * lanes) * sizeof(Word));
      }
      for (unsigned k = 0; k < kInFlight; ++k) {
        store_word(dst + (i + std::uint64_t{k} * lanes) * sizeof(Word), word[k]);
      }
    }
    one_by_one<Word>(dst, src, i, count);
  }

  /// Word `i` and, of those behind it, this lane's.
  template <class Word>
  KVBURST_HOST_DEVICE void one_by_one(std::uintptr_t dst, std::uintptr_t src, std::uint64_t i,
                                      std::uint64_t count) const {
    KVBURST_NO_UNROLL
    for (; i < count; i += lanes) {
      store_word(dst + i * sizeof(Word), load_word<Word>(src + i * sizeof(Word)));
    }
  }
};

/// Copies a piece of a row with `copy(dst, src, bytes)`. `piece` counts those of the part.
template <class Copy>
KVBURST_HOST_DEVICE void move_piece(const RowPart& part, std::uint64_t piece,
                                    std::uint64_t piece_bytes, RowDirection direction,
                                    const Copy& copy) {
  const RowMove& move = part.move;
  std::uint64_t row = piece;
  std::uint64_t begin = 0;
  if (part.pieces_per_row > 1) {
    row = piece / part.pieces_per_row;
    begin = (piece - row * part.pieces_per_row) * piece_bytes;
  }
  const std::uint64_t left = move.row_bytes - begin;
  const std::uint64_t bytes = left < piece_bytes ? left : piece_bytes;
  const auto id = load_word<std::int64_t>(move.ids + row * sizeof(std::int64_t));
  const std::uintptr_t packed = move.packed + row * move.row_bytes + begin;
  const std::uintptr_t place = move.rows + static_cast<std::uint64_t>(id) * move.row_bytes + begin;
  if (direction == RowDirection::gather) {
    copy(packed, place, bytes);
  } else {
    copy(place, packed, bytes);
  }
}

/// What worker `worker` of `workers` moves of `pieces` in all. `parts` are those of `cut`.
template <class Copy>
KVBURST_HOST_DEVICE void move_rows(const RowPart* parts, std::uint64_t pieces,
                                   std::uint64_t piece_bytes, RowDirection direction,
                                   std::uint64_t worker, std::uint64_t workers, const Copy& copy) {
  const RowPart* part = parts;
  std::uint64_t before = 0;
  KVBURST_NO_UNROLL
  for (std::uint64_t piece = worker; piece < pieces; piece += workers) {
    KVBURST_NO_UNROLL
    while (piece >= part->end) before = (part++)->end;
    move_piece(*part, piece - before, piece_bytes, direction, copy);
  }
}

}  // namespace kvburst
