#pragma once

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "agreement/step_board.h"

namespace kvburst::testing {

/// Zeroed memory that several boards of one process share as several processes would.
class SharedMemory {
 public:
  explicit SharedMemory(std::size_t bytes)
      : bytes_(bytes),
        start_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (start_ == MAP_FAILED) throw std::bad_alloc();
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() { munmap(start_, bytes_); }

  std::byte* start() const { return static_cast<std::byte*>(start_); }

 private:
  std::size_t bytes_;
  void* start_;
};

/// Processes that end when they are told to.
class FakePeers final : public BoardPeers {
 public:
  bool ended(int rank) const override { return ended_[static_cast<std::size_t>(rank)].load(); }
  std::string process(int rank) const override { return "pid " + std::to_string(100 + rank); }
  void end(int rank) { ended_[static_cast<std::size_t>(rank)].store(true); }

 private:
  std::array<std::atomic<bool>, 16> ended_{};
};

/// All ranks of a board, in one process.
struct Ranks {
  explicit Ranks(const BoardShape& of, const BoardPatience& patience = {},
                 std::uint64_t first_round = 1)
      : shape(of), memory(shape.bytes()) {
    for (int rank = 0; rank < shape.ranks; ++rank) {
      boards.push_back(
          std::make_unique<StepBoard>(memory.start(), shape, rank, peers, patience, first_round));
    }
  }

  StepBoard& operator[](int rank) { return *boards[static_cast<std::size_t>(rank)]; }
  std::vector<std::int64_t> read(int rank) {
    std::vector<std::int64_t> out(static_cast<std::size_t>(shape.values));
    (*this)[rank].read(out);
    return out;
  }

  BoardShape shape;
  SharedMemory memory;
  std::shared_ptr<FakePeers> peers = std::make_shared<FakePeers>();
  std::vector<std::unique_ptr<StepBoard>> boards;
};

/// What rank `rank` publishes as value `place` of round `round`: any 64 bits.
inline std::int64_t value_of(std::uint64_t round, int rank, int place) {
  std::uint64_t bits = round * 0x9e3779b97f4a7c15U + static_cast<std::uint64_t>(rank) * 7919 +
                       static_cast<std::uint64_t>(place) * 104729;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
  return static_cast<std::int64_t>(bits ^ (bits >> 27));
}

inline std::int64_t minimum_of(std::uint64_t round, int ranks, int place) {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (int rank = 0; rank < ranks; ++rank) least = std::min(least, value_of(round, rank, place));
  return least;
}

}  // namespace kvburst::testing
