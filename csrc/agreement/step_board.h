#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "agreement/board_error.h"
#include "agreement/round_ring.h"

/// On one node ranks need no collective to agree on a minimum.
///
/// Each rank publishes its counters of round *r* in memory that all of them share, and goes on. A
/// step later it reads everybody's entry of that round and takes the minimum: all read the same
/// entries, so all decide alike, and by then the others have long published theirs.
///
/// In a step a rank first reads round *r - lag*, then publishes round *r*. So it can be ahead of
/// the slowest by `lag` rounds that it has published, and behind the fastest by as many that it has
/// not read: a ring of 2 x lag rounds is the least that is never written over while it is read
/// (publishing first would need 2 x lag + 2). A board has at least 4.
///
/// A reader that finds a rank late spins for some microseconds and then sleeps in the kernel.
/// Yielding instead would burn the core that the late rank may need.
namespace kvburst {

/// What must be the same at every rank.
struct BoardShape {
  int ranks = 1;
  /// Of a round, of each rank.
  int values = 1;
  /// Rounds that a rank may publish before it reads the oldest of them.
  int lag = 1;

  static constexpr int kMaxRanks = 1024;
  static constexpr int kMaxLag = 16;

  /// Throws BoardUseError, naming value and bound.
  void check() const;
  void check_rank(int rank) const;
  /// Rounds that the ring holds: a power of two.
  int ring() const;
  std::size_t bytes() const;
};

/// What a board asks about the processes behind its ranks.
class BoardPeers {
 public:
  virtual ~BoardPeers() = default;
  /// Whether the rank's process has ended. False where nobody can tell.
  virtual bool ended(int rank) const = 0;
  /// The process in words, such as "pid 4242".
  virtual std::string process(int rank) const = 0;
};

struct BoardPatience {
  /// How long a round may be waited for.
  std::chrono::nanoseconds timeout = std::chrono::minutes(5);
  /// How long a wait spins. Our choice: about what falling asleep and being woken costs.
  std::chrono::nanoseconds spin = std::chrono::microseconds(5);
  /// How often a sleeping reader looks whether those it waits for are still there.
  std::chrono::nanoseconds look_up = std::chrono::milliseconds(50);
};

/// How the rounds went at this rank.
struct BoardStats {
  /// Rounds that were not complete when they were to be read.
  std::int64_t spins = 0;
  /// Times that this rank slept, and woke sleepers.
  std::int64_t sleeps = 0;
  std::int64_t wakes = 0;
  /// Times that it woke since nothing had come for `look_up`.
  std::int64_t look_ups = 0;
};

/// One rank's side of a board. Not thread-safe: it belongs to one thread at a time, and not to a
/// child that its process forks.
class StepBoard {
 public:
  /// `memory`: `shape.bytes()` of it, aligned to 256 bytes, zeroed before the first rank came, and
  /// there for as long as the board is. Every rank gives the same `shape` and `first_round` (not
  /// 0). Throws BoardUseError on a shape, rank or timeout out of bounds.
  StepBoard(std::byte* memory, const BoardShape& shape, int rank,
            std::shared_ptr<const BoardPeers> peers, const BoardPatience& patience,
            std::uint64_t first_round = 1);
  StepBoard(const StepBoard&) = delete;
  StepBoard& operator=(const StepBoard&) = delete;
  /// Closes.
  ~StepBoard();

  const BoardShape& shape() const { return shape_; }
  int rank() const { return rank_; }
  /// Rounds published by this rank.
  std::int64_t rounds() const { return static_cast<std::int64_t>(next_write_ - first_round_); }
  const BoardStats& stats() const { return stats_; }

  /// Publishes this rank's values of the next round; one a value of the shape. Never blocks. Throws
  /// BoardUseError on another number of values, and where `lag` rounds are published and not read.
  void publish(std::span<const std::int64_t> values);

  // The oldest round that was published and not read. Throw BoardUseError where there is none, and
  // BoardError, from then on always, once a rank that has not published it has ended, has closed or
  // given up its board, or is later than the timeout.

  /// Whether every rank has published it; spins for a few microseconds before it says no.
  bool ready();
  /// Sleeps until every rank has published it, until `look_up` has passed, or until a signal comes;
  /// returns whether they have. What counts towards the timeout is the time in here: a process that
  /// was itself stopped meanwhile does not blame the others.
  bool wait();
  /// Takes it: the element-wise minimum over all ranks into `out`, one a value. Blocks in `wait`
  /// until they all have published it.
  void read(std::span<std::int64_t> out);

  /// Tells the others, who then raise instead of waiting for rounds that will not come. What this
  /// rank published stays readable. Idempotent; afterwards nothing may be published or read.
  void close();

 private:
  struct Line;

  Line& line(int rank) const;
  void check_usable() const;
  void check_in_flight() const;
  /// The first rank that has not published the round, from `waits_for_` on; none if all have.
  std::optional<int> missing();
  void sleep_for(int rank);
  void look_up();
  template <class Reason>
  void give_up_if(Reason reason);

  BoardShape shape_;
  int rank_;
  std::shared_ptr<const BoardPeers> peers_;
  BoardPatience patience_;
  pid_t process_;
  Line* lines_;
  RoundRing<> ring_;
  std::uint64_t first_round_;
  std::uint64_t next_write_;
  std::uint64_t next_read_;
  /// All ranks before this one have published the round that is to be read next.
  int waits_for_ = 0;
  std::chrono::nanoseconds waited_{0};
  std::chrono::steady_clock::time_point next_look_up_;
  BoardStats stats_;
  bool closed_ = false;
  std::optional<BoardError> failure_;
};

}  // namespace kvburst
