#pragma once

#include <cstdint>
#include <string>

namespace kvburst {

/// Which process it is, for another that asks later whether it has ended. Plain data, for shared
/// memory; all zero is nobody.
///
/// A lock that the kernel drops with its process does not tell it all: a child forked without exec
/// keeps the lock of a parent that was killed, and a process with much pinned memory holds its
/// locks for seconds while that is given back.
struct ProcessIdentity {
  std::int64_t pid = 0;
  /// Clock ticks from boot to its start: tells it from a later process that has the same pid.
  std::uint64_t started = 0;
  /// The pid namespace's inode: in another one the pid means nothing. 0 where /proc does not tell.
  std::uint64_t name_space = 0;

  static ProcessIdentity own();

  /// Whether it has ended or is about to. False where that cannot be told: in another pid
  /// namespace, or without /proc. Reads /proc.
  bool ended() const;
  std::string words() const;
};

}  // namespace kvburst
