#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "settings.h"
#include "vector_clock.h"

namespace stand_in {

struct Capture;
struct Stream;

/// The `sequence`-th operation of a stream.
struct Point {
  std::shared_ptr<Stream> stream;
  std::uint64_t sequence;

  bool reached() const;
};

/// Closed until a test opens it.
struct Gate {
  bool open = false;
};

struct Operation {
  std::vector<Point> after;    ///< in other streams
  std::shared_ptr<Gate> gate;  ///< null: none
  std::function<void()> body;  ///< runs on the stream's thread, without the lock; may be empty
  bool held = false;           ///< not before somebody needs it
};

/// A stream with a thread of its own. All of it is guarded by the driver's mutex.
struct Stream {
  std::uintptr_t handle = 0;
  std::uintptr_t context = 0;
  bool legacy = false;
  bool blocking = true;  ///< waits for the legacy stream, and the legacy stream for it
  std::size_t line = 0;  ///< in vector clocks; an operation's tick is its sequence
  VectorClock clock;     ///< what has happened once everything enqueued so far is done

  std::shared_ptr<Capture> capture;  ///< null: not capturing
  VectorClock captured;              ///< of a capture: what the next node has behind it
  std::uint64_t nodes = 0;           ///< of a capture: on this stream

  std::deque<Operation> queue;  // the first one may be running
  std::uint64_t enqueued = 0;
  std::uint64_t retired = 0;
  std::uint64_t needed = 0;  ///< operations up to here may run
  bool running = false;
  bool has_thread = false;
  bool destroyed = false;
  std::condition_variable work;

  /// Whether the first operation can start now.
  bool runnable() const;
};

inline bool Point::reached() const { return stream->retired >= sequence; }

/// Runs what is enqueued on the streams: each on its own thread, when the order allows it.
/// Everything takes the lock of the driver's mutex, held.
class Scheduler {
 public:
  explicit Scheduler(std::mutex& mutex) : mutex_(mutex) {}

  void set_order(Order order, std::uint64_t seed);

  /// Blocks, the lock released, until the stream has room for another operation.
  void make_room(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Stream>& stream,
                 std::size_t depth);
  /// `stream.enqueued` is then the operation's sequence.
  void push(const std::shared_ptr<Stream>& stream, Operation operation);
  /// Lets everything up to the point run, and what that waits for.
  void need(const Point& point);
  /// `need`, then blocks until the point is reached.
  void wait(std::unique_lock<std::mutex>& lock, const Point& point);
  /// The stream's thread ends once its queue is empty.
  void destroy(const std::shared_ptr<Stream>& stream);
  void open(Gate& gate);
  /// Blocks until nothing more can run: what is left is held, or waits for something that is.
  void settle(std::unique_lock<std::mutex>& lock);
  /// Opens every gate, lets everything run, blocks until it has. False if that takes longer than
  /// `limit`: a host function does not return.
  bool finish(std::unique_lock<std::mutex>& lock, std::chrono::duration<double> limit);
  /// Blocks until every thread has ended. All streams must have been destroyed.
  void join(std::unique_lock<std::mutex>& lock);

  std::uint64_t random() { return random_(); }

 private:
  void run(const std::shared_ptr<Stream>& stream);
  void wake();

  std::mutex& mutex_;
  std::condition_variable progress_;
  std::vector<std::shared_ptr<Stream>> working_;  // those with a thread
  Order order_ = Order::eager;
  std::mt19937_64 random_{1};
};

}  // namespace stand_in
