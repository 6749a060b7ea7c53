#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace stand_in {

/// What is known to have happened: for each line of events (the host is line 0, each stream has one
/// of its own) the number of its steps that lie before.
class VectorClock {
 public:
  std::uint64_t at(std::size_t line) const { return line < ticks_.size() ? ticks_[line] : 0; }

  void set(std::size_t line, std::uint64_t tick) {
    if (line >= ticks_.size()) ticks_.resize(line + 1, 0);
    ticks_[line] = tick;
  }

  void join(const VectorClock& other) {
    if (ticks_.size() < other.ticks_.size()) ticks_.resize(other.ticks_.size(), 0);
    for (std::size_t line = 0; line < other.ticks_.size(); ++line) {
      ticks_[line] = std::max(ticks_[line], other.ticks_[line]);
    }
  }

 private:
  std::vector<std::uint64_t> ticks_;
};

}  // namespace stand_in
