#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <variant>
#include <vector>

#include "core/device.h"
#include "core/row_moves.h"
#include "host/link_model.h"

/// A stream of the `host` device: a thread that works off a queue.
///
/// Time on a stream is kept by the stream and not read off the clock: an operation starts when it
/// has been enqueued, the one before it has ended, and what it waits for has been reached. Where
/// its length is modelled (a link, a busy kernel) its end is computed, and the thread sleeps until
/// then; a late wake-up delays the bytes but not the timeline. Without a model an operation ends
/// when it has been done.
namespace kvburst {

/// Nanoseconds of the steady clock.
using Time = std::int64_t;
Time now();

/// One recording of an event. Shared by the event, the operation that will reach it and those that
/// wait for it, so that recording the event again leaves earlier waits alone.
class Mark {
 public:
  void reach(Time time);
  bool reached() const;
  /// Blocks; returns when the stream had reached it.
  Time wait() const;
  /// For an event that alone still holds it.
  void rearm();

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::optional<Time> time_;
};

/// The link in one direction, shared by all streams: one copy after the other.
class Link {
 public:
  /// When `copies` are done, if their stream is ready for them at `start` and the calling thread
  /// began to issue them, one after the other, at `issue_begin`.
  Time transfer(Time start, Time issue_begin, std::span<const Copy> copies, const LinkModel& model);

 private:
  std::mutex mutex_;
  Time free_at_ = 0;
};

class HostStream {
 public:
  struct Copies {
    std::vector<Copy> copies;
    /// Null for a copy that crosses no link.
    Link* link;
  };
  /// One thread alone moves the rows: they are not cut.
  static constexpr std::uint64_t kWholeRows = std::numeric_limits<std::uint64_t>::max();
  /// Rows of which `parts` have the ids in `ids`.
  struct Rows {
    RowDirection direction;
    std::vector<std::int64_t> ids;
    std::vector<RowPart> parts;
    std::uint64_t rows;
  };
  struct Fill {
    std::uintptr_t dst;
    std::uint8_t value;
    std::size_t size;
  };
  struct Busy {
    Time duration;
  };
  struct Reach {
    std::shared_ptr<Mark> mark;
  };
  struct WaitFor {
    std::shared_ptr<Mark> mark;
  };
  using Operation = std::variant<Copies, Rows, Fill, Busy, Reach, WaitFor>;

  explicit HostStream(const std::optional<LinkModel>& model);
  /// Works off the queue first.
  ~HostStream();

  /// Blocks while the operation's copies would pass the model's queue depth.
  void push(Operation operation);
  /// Works off the queue and ends the thread; nothing may be pushed after it.
  void finish();
  bool idle() const;
  /// Blocks until all that has been pushed so far is done.
  void synchronize();
  /// An empty vector with memory that was used before, where there is one.
  std::vector<Copy> spare();

 private:
  struct Entry {
    Operation operation;
    Time enqueued;
  };

  void run();
  void sleep_until(Time time) const;

  void perform(const Copies& work, Time enqueued);
  void perform(const Rows& work, Time enqueued);
  void perform(const Fill& work, Time enqueued);
  void perform(const Busy& work, Time enqueued);
  void perform(const Reach& work, Time enqueued);
  void perform(const WaitFor& work, Time enqueued);
  /// Ends an operation whose length is not modelled.
  void ended_now();

  const std::optional<LinkModel> model_;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable progress_;
  std::deque<Entry> queue_;
  std::vector<std::vector<Copy>> spare_;
  std::size_t copies_outstanding_ = 0;
  std::uint64_t pushed_ = 0;
  std::uint64_t done_ = 0;
  bool finishing_ = false;
  /// Where the stream's own time stands. Of the worker alone.
  Time time_ = 0;
  std::thread worker_;
};

}  // namespace kvburst
