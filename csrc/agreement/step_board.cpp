#include "agreement/step_board.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <climits>
#include <ctime>
#include <utility>
#include <vector>

#include "core/format.h"

namespace kvburst {
namespace {

using Clock = std::chrono::steady_clock;

enum class LineState : std::uint32_t { open = 0, closed, gave_up };

/// Without FUTEX_PRIVATE_FLAG: the word is shared between processes.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen,
                std::chrono::nanoseconds most) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(most);
  const timespec limit{static_cast<time_t>(seconds.count()),
                       static_cast<long>((most - seconds).count())};
  // Whatever it returns, the caller looks again.
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr,
          0);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

void check_between(const char* name, std::int64_t value, std::int64_t lowest,
                   std::int64_t highest) {
  if (value < lowest || value > highest) {
    throw BoardUseError(text(name, ": ", value, " must be from ", lowest, " to ", highest));
  }
}

const BoardShape& checked(const BoardShape& shape, int rank) {
  shape.check();
  shape.check_rank(rank);
  return shape;
}

}  // namespace

/// What a rank says of itself besides its entries.
struct alignas(128) StepBoard::Line {
  /// The low half of the last round published: what sleepers wait for to change.
  std::atomic<std::uint32_t> sequence;
  std::atomic<std::uint32_t> sleepers;
  std::atomic<std::uint64_t> last_round;
  std::atomic<LineState> state;
};

// --- shape ---------------------------------------------------------------------------------------

void BoardShape::check() const {
  check_between("ranks", ranks, 1, kMaxRanks);
  check_between("values", values, 1, RoundRing<>::kMaxValues);
  check_between("lag", lag, 1, kMaxLag);
}

void BoardShape::check_rank(int rank) const { check_between("rank", rank, 0, ranks - 1); }

int BoardShape::ring() const {
  return std::max(4, static_cast<int>(std::bit_ceil(2 * static_cast<unsigned>(lag))));
}

std::size_t BoardShape::bytes() const {
  // A line is half an entry; the entries stay aligned to 256 bytes with one line more.
  const std::size_t lines = (static_cast<std::size_t>(ranks) + 1) / 2 * 256;
  return lines + RoundRing<>::bytes(ranks, ring());
}

// --- board ---------------------------------------------------------------------------------------

StepBoard::StepBoard(std::byte* memory, const BoardShape& shape, int rank,
                     std::shared_ptr<const BoardPeers> peers, const BoardPatience& patience,
                     std::uint64_t first_round)
    : shape_(checked(shape, rank)),
      rank_(rank),
      peers_(std::move(peers)),
      patience_(patience),
      process_(getpid()),
      lines_(reinterpret_cast<Line*>(memory)),
      ring_(memory + shape.bytes() - RoundRing<>::bytes(shape.ranks, shape.ring()), shape.ranks,
            shape.values, shape.ring()),
      first_round_(first_round),
      next_write_(first_round),
      next_read_(first_round) {
  static_assert(sizeof(Line) == 128 && std::atomic<LineState>::is_always_lock_free &&
                std::atomic<std::uint32_t>::is_always_lock_free);
  if (patience.timeout.count() <= 0) {
    throw BoardUseError(text("timeout: ", patience.timeout.count(), " ns is not above 0"));
  }
}

StepBoard::~StepBoard() { close(); }

StepBoard::Line& StepBoard::line(int rank) const { return lines_[rank]; }

void StepBoard::check_usable() const {
  if (closed_) throw BoardUseError(text("rank ", rank_, ": its board is closed"));
  if (failure_) throw *failure_;
  if (const pid_t here = getpid(); here != process_) {
    throw BoardUseError(text("rank ", rank_, ": its board belongs to process ", process_,
                             ", and not to process ", here, " that was forked from it"));
  }
}

void StepBoard::check_in_flight() const {
  check_usable();
  if (next_read_ == next_write_) {
    throw BoardUseError(text("read: nothing is published that has not been read; publish round ",
                             next_write_, " first"));
  }
}

void StepBoard::publish(std::span<const std::int64_t> values) {
  check_usable();
  if (values.size() != static_cast<std::size_t>(shape_.values)) {
    throw BoardUseError(
        text("values: ", values.size(), " are given, a round of this board has ", shape_.values));
  }
  if (next_write_ - next_read_ >= static_cast<std::uint64_t>(shape_.lag)) {
    throw BoardUseError(text("publish: round ", next_read_, " is not read yet, and with a lag of ",
                             shape_.lag, " it must be before round ", next_write_,
                             " is published"));
  }
  ring_.write(next_write_, rank_, values);
  Line& own = line(rank_);
  own.last_round.store(next_write_, std::memory_order_relaxed);
  // In one order with the reader's, which counts itself, looks at the sequence and then falls
  // asleep: either it sees this round, or it is seen here.
  own.sequence.exchange(static_cast<std::uint32_t>(next_write_), std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(own.sequence);
    ++stats_.wakes;
  }
  ++next_write_;
}

std::optional<int> StepBoard::missing() {
  while (waits_for_ < shape_.ranks && ring_.has(next_read_, waits_for_)) ++waits_for_;
  return waits_for_ == shape_.ranks ? std::nullopt : std::optional(waits_for_);
}

bool StepBoard::ready() {
  check_in_flight();
  if (!missing()) return true;
  if (waited_.count() != 0) return false;
  ++stats_.spins;
  const Clock::time_point end = Clock::now() + patience_.spin;
  while (missing()) {
    if (Clock::now() >= end) return false;
    relax();
  }
  return true;
}

bool StepBoard::wait() {
  check_in_flight();
  const std::optional<int> late = missing();
  if (!late) return true;
  const Clock::time_point begin = Clock::now();
  if (waited_.count() == 0) next_look_up_ = begin + patience_.look_up;
  sleep_for(*late);
  const Clock::time_point end = Clock::now();
  waited_ += std::clamp<std::chrono::nanoseconds>(end - begin, std::chrono::nanoseconds(1),
                                                  2 * patience_.look_up);
  if (!missing()) return true;
  give_up_if([this](int rank) -> const char* {
    const LineState state = line(rank).state.load(std::memory_order_acquire);
    if (state == LineState::closed) return "closed its board";
    return state == LineState::gave_up ? "gave up on another rank" : nullptr;
  });
  if (end >= next_look_up_) {
    next_look_up_ = end + patience_.look_up;
    look_up();
  }
  return !missing();
}

void StepBoard::sleep_for(int rank) {
  Line& late = line(rank);
  late.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t seen = late.sequence.load(std::memory_order_seq_cst);
  if (!ring_.has(next_read_, rank)) {
    ++stats_.sleeps;
    futex_wait(late.sequence, seen, patience_.look_up);
  }
  late.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void StepBoard::look_up() {
  ++stats_.look_ups;
  give_up_if([this](int rank) {
    return peers_->ended(rank) ? "ended without closing its board" : nullptr;
  });
  if (waited_ < patience_.timeout) return;
  const std::string reason = text("did not publish it within ",
                                  std::chrono::duration<double>(patience_.timeout).count(), " s");
  give_up_if([&](int) { return reason.c_str(); });
}

/// Throws if there are ranks that have not published the round, and will not, for the reason that
/// is given for each: null where there is none.
template <class Reason>
void StepBoard::give_up_if(Reason reason) {
  std::vector<int> gone;
  std::string message;
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    if (ring_.has(next_read_, rank)) continue;
    const char* const why = reason(rank);
    // It may have published the round first, and only then have gone.
    if (!why || ring_.has(next_read_, rank)) continue;
    const std::uint64_t last = line(rank).last_round.load(std::memory_order_relaxed);
    const std::string published =
        last == 0 ? "it has published none" : text("its last one is ", last);
    message += text(gone.empty() ? "" : "; ", "rank ", rank, " (", peers_->process(rank), ") ", why,
                    ", ", published);
    gone.push_back(rank);
  }
  if (gone.empty()) return;
  failure_.emplace(text("round ", next_read_, " of the board: ", message), std::move(gone));
  line(rank_).state.store(LineState::gave_up, std::memory_order_release);
  futex_wake_all(line(rank_).sequence);
  throw *failure_;
}

void StepBoard::read(std::span<std::int64_t> out) {
  if (out.size() != static_cast<std::size_t>(shape_.values)) {
    throw BoardUseError(
        text("out: room for ", out.size(), " values, a round of this board has ", shape_.values));
  }
  if (!ready()) {
    while (!wait()) continue;
  }
  ring_.minimum(next_read_, out);
  ++next_read_;
  waits_for_ = 0;
  waited_ = std::chrono::nanoseconds(0);
}

void StepBoard::close() {
  if (std::exchange(closed_, true) || getpid() != process_) return;
  // Who gave up first, stays so.
  LineState open = LineState::open;
  line(rank_).state.compare_exchange_strong(open, LineState::closed, std::memory_order_release,
                                            std::memory_order_relaxed);
  futex_wake_all(line(rank_).sequence);
}

}  // namespace kvburst
