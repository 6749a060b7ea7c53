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
  for (std::uintptr_t at = range.begin; at < range.end; ++segment) {
    segment = segment_at(segment, at, range.end);
    Segment& bytes = segment->second;
    if (bytes.written) check(*segment, bytes.write, true, false, start, over);
    add_read(bytes, over);
    at = bytes.end;
  }
}

HappensBefore::Segments::iterator HappensBefore::segment_at(Segments::iterator next,
                                                            std::uintptr_t at, std::uintptr_t end) {
  if (next != segments_.end() && next->first == at) return next;
  const std::uintptr_t until = next == segments_.end() ? end : std::min(end, next->first);
  return segments_.emplace_hint(next, at, Segment{until, false, {}, {}});
}

void HappensBefore::add_read(Segment& segment, const Stamp& over) {
  const auto same_line = std::find_if(segment.reads.begin(), segment.reads.end(),
                                      [&](const Stamp& read) { return read.line == over.line; });
  if (same_line == segment.reads.end()) {
    segment.reads.push_back(over);
  } else if (same_line->tick < over.tick) {
    *same_line = over;
  }
}

void HappensBefore::access_late(Range range, bool write, const VectorClock& start,
                                const Stamp& over) {
  if (range.begin >= range.end) return;
  // The call itself may have been judged before, by what it then seemed to touch.
  const auto before = [&](const Stamp& other) { return other.call < over.call; };
  const auto replaced = [&](const Stamp& other) { return other.call <= over.call; };
  split(range.begin);
  split(range.end);
  auto segment = segments_.lower_bound(range.begin);
  for (std::uintptr_t at = range.begin; at < range.end; ++segment) {
    segment = segment_at(segment, at, range.end);
    Segment& bytes = segment->second;
    at = bytes.end;
    if (bytes.written && before(bytes.write)) {
      check(*segment, bytes.write, true, write, start, over);
    }
    for (const Stamp& read : bytes.reads) {
      if (write && before(read)) check(*segment, read, false, true, start, over);
    }
    if (bytes.written && !replaced(bytes.write)) continue;
    if (write) {
      std::erase_if(bytes.reads, replaced);
      bytes.written = true;
      bytes.write = over;
    } else {
      add_read(bytes, over);
    }
  }
}

}  // namespace stand_in
