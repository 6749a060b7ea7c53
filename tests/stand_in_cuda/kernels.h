#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/staging.h"
#include "happens_before.h"
#include "memory.h"

/// The staging kernels, which here are their own bodies compiled for the host.
namespace stand_in {

/// The bytes that a launch touches, as far as its ids say.
struct Touched {
  struct Rows {
    Range range;
    bool write;
  };
  std::vector<Rows> ranges;
  std::vector<std::shared_ptr<Block>> blocks;
};

/// A launch of one of the kernels: which rows, by the ids as they are in memory at some moment.
class RowKernel {
 public:
  RowKernel(kvburst::RowDirection direction, const kvburst::cuda::RowLaunch& launch)
      : direction_(direction), launch_(launch) {}

  /// Ids of all moves, one after the other. Nothing if they are in no memory that a GPU reaches.
  std::optional<std::vector<std::int64_t>> ids(const Memory& memory) const;
  /// Of packed memory and ids, whatever the ids are. Nothing if a byte is out of reach.
  std::optional<Touched> known(const Memory& memory) const;
  /// Of the rows with these ids. Nothing if a byte is out of reach.
  std::optional<Touched> rows(const Memory& memory, const std::vector<std::int64_t>& ids) const;
  /// Runs all `threads`, one after the other in an order of their own.
  void run(std::uint64_t threads, std::uint64_t seed) const;

  std::uint64_t bytes() const;

 private:
  template <class Each>
  void each_move(const Each& each) const;

  kvburst::RowDirection direction_;
  kvburst::cuda::RowLaunch launch_;
};

}  // namespace stand_in
