#include "happens_before.h"

#include <algorithm>
#include <iterator>

namespace stand_in {

void HappensBefore::split(std::uintptr_t at) {
  auto segment = segments_.upper_bound(at);
  if (segment == segments_.begin()) return;
  --segment;
  if (segment->first == at || segment->second.end <= at) return;
  Segment upper = segment->second;
  segment->second.end = at;
  segments_.emplace_hint(std::next(segment), at, std::move(upper));
}

void HappensBefore::check(const Segments::value_type& segment, const Stamp& earlier,
                          bool earlier_writes, bool later_writes, const VectorClock& start,
                          const Stamp& over) {
  if (start.at(earlier.line) >= earlier.tick) return;
  if (!known_.insert({earlier.call, over.call}).second) return;
  findings_.push_back(
      {{segment.first, segment.second.end}, earlier.call, over.call, earlier_writes, later_writes});
}

void HappensBefore::access(Range range, bool write, const VectorClock& start, const Stamp& over) {
  if (range.begin >= range.end) return;
  split(range.begin);
  split(range.end);
  auto segment = segments_.lower_bound(range.begin);
  if (write) {
    while (segment != segments_.end() && segment->first < range.end) {
      if (segment->second.written) check(*segment, segment->second.write, true, true, start, over);
      for (const Stamp& read : segment->second.reads) {
        check(*segment, read, false, true, start, over);
      }
      segment = segments_.erase(segment);
    }
    segments_.emplace_hint(segment, range.begin, Segment{range.end, true, over, {}});
    return;
  }
  for (std::uintptr_t at = range.begin; at < range.end;) {
    if (segment == segments_.end() || segment->first > at) {
      const std::uintptr_t end =
          segment == segments_.end() ? range.end : std::min(range.end, segment->first);
      segment = segments_.emplace_hint(segment, at, Segment{end, false, {}, {}});
    }
    Segment& bytes = segment->second;
    if (bytes.written) check(*segment, bytes.write, true, false, start, over);
    const auto same_line = std::find_if(bytes.reads.begin(), bytes.reads.end(),
                                        [&](const Stamp& read) { return read.line == over.line; });
    if (same_line == bytes.reads.end()) {
      bytes.reads.push_back(over);
    } else {
      *same_line = over;
    }
    at = bytes.end;
    ++segment;
  }
}

}  // namespace stand_in
