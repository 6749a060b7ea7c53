#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "vector_clock.h"

namespace stand_in {

struct Range {
  std::uintptr_t begin;
  std::uintptr_t end;  ///< one past the last byte
};

/// When an access is over: the `tick`-th step of its line of events; and the call it belongs to.
struct Stamp {
  std::size_t line;
  std::uint64_t tick;
  std::uint64_t call;
};

/// Two accesses to the same bytes, one of them a write, that nothing orders.
struct Finding {
  Range range;
  std::uint64_t earlier_call;
  std::uint64_t later_call;
  bool earlier_writes;
  bool later_writes;
};

/// Looks for unordered accesses. Whatever orders two operations of a driver was enqueued after the
/// first and no later than the second, so each access can be judged when it is enqueued, against
/// those before it: an access that is over at a tick its successor does not know of is unordered.
/// Nothing has to go wrong in the run itself. One finding for each pair of calls.
class HappensBefore {
 public:
  /// `start` is what is known to have happened before the access can begin; it does not know the
  /// access's own tick, so overlaps within one call are found too.
  void access(Range range, bool write, const VectorClock& start, const Stamp& over);

  /// An access of which is only known when it runs what it is to: judged against what was enqueued
  /// before its call, as far as that is still the last of its kind. What was enqueued after the
  /// call was judged without it, and stays as it is.
  void access_late(Range range, bool write, const VectorClock& start, const Stamp& over);

  const std::vector<Finding>& findings() const { return findings_; }

 private:
  struct Segment {
    std::uintptr_t end;
    bool written;
    Stamp write;
    std::vector<Stamp> reads;  // since the write, the last one of each line
  };
  using Segments = std::map<std::uintptr_t, Segment>;

  void split(std::uintptr_t at);
  /// The segment that begins at `at`, or a new one up to the next or to `end`. `next` is the first
  /// that does not begin before `at`.
  Segments::iterator segment_at(Segments::iterator next, std::uintptr_t at, std::uintptr_t end);
  static void add_read(Segment& segment, const Stamp& over);
  void check(const Segments::value_type& segment, const Stamp& earlier, bool earlier_writes,
             bool later_writes, const VectorClock& start, const Stamp& over);

  Segments segments_;
  std::vector<Finding> findings_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> known_;
};

}  // namespace stand_in
