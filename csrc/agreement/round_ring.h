#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

/// What ranks publish, and how the others may read it without a lock.
///
/// A rank has one entry a round, in cache lines of its own: it writes the values, then the round's
/// number as a stamp; who sees the stamp sees the values. Entries are few and rounds are many, so
/// they rotate: round `r` lies at `r % rounds`. What keeps a rank from writing over an entry that
/// somebody still reads is not in here: it is how far apart ranks can be, which follows from when
/// each of them publishes and reads (see `step_board.h`).
///
/// The values are plain memory on purpose: the stamps alone must order them, and a race detector
/// can say whether they do.
namespace kvburst {

/// How a stamp is written and read.
struct StampOrders {
  static constexpr std::memory_order write = std::memory_order_release;
  static constexpr std::memory_order read = std::memory_order_acquire;
};

/// A view of memory that several threads or processes share. Its other parameters are the memory's
/// and must be the same everywhere. One thread writes the entries of a rank; any number reads.
template <class Orders = StampOrders>
class RoundRing {
 public:
  static constexpr int kMaxValues = 31;

  /// `memory`: `bytes(ranks, rounds)` of it, aligned to 256 bytes, zeroed before first use, so that
  /// no round 0 is ever missed: rounds start at 1. `rounds` is a power of two, since numbers wrap.
  RoundRing(std::byte* memory, int ranks, int values, int rounds)
      : entries_(reinterpret_cast<Entry*>(memory)),
        ranks_(static_cast<std::size_t>(ranks)),
        values_(static_cast<std::size_t>(values)),
        mask_(static_cast<std::uint64_t>(rounds) - 1) {}

  static constexpr std::size_t bytes(int ranks, int rounds) {
    return sizeof(Entry) * static_cast<std::size_t>(ranks) * static_cast<std::size_t>(rounds);
  }

  void write(std::uint64_t round, int rank, std::span<const std::int64_t> values) {
    Entry& entry = at(round, static_cast<std::size_t>(rank));
    for (std::size_t i = 0; i < values_; ++i) entry.values[i] = values[i];
    entry.stamp.store(round, Orders::write);
  }

  bool has(std::uint64_t round, int rank) const {
    return at(round, static_cast<std::size_t>(rank)).stamp.load(Orders::read) == round;
  }

  /// The element-wise minimum over the ranks, all of which have been seen to have the round.
  void minimum(std::uint64_t round, std::span<std::int64_t> out) const {
    const Entry& first = at(round, 0);
    for (std::size_t i = 0; i < values_; ++i) out[i] = first.values[i];
    for (std::size_t rank = 1; rank < ranks_; ++rank) {
      const Entry& entry = at(round, rank);
      for (std::size_t i = 0; i < values_; ++i) out[i] = std::min(out[i], entry.values[i]);
    }
  }

 private:
  // Whole pairs of cache lines: processors fetch the neighbour too. Few values touch only one line.
  struct alignas(256) Entry {
    std::atomic<std::uint64_t> stamp;
    std::array<std::int64_t, kMaxValues> values;
  };
  static_assert(sizeof(Entry) == 256);
  // Only these mean the same at different addresses in different processes.
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

  Entry& at(std::uint64_t round, std::size_t rank) const {
    return entries_[static_cast<std::size_t>(round & mask_) * ranks_ + rank];
  }

  Entry* entries_;
  std::size_t ranks_;
  std::size_t values_;
  std::uint64_t mask_;
};

}  // namespace kvburst
