#include "streams.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace stand_in {

bool Stream::runnable() const {
  if (running || queue.empty()) return false;
  const Operation& first = queue.front();
  if (first.gate && !first.gate->open) return false;
  if (first.held && needed <= retired) return false;
  return std::all_of(first.after.begin(), first.after.end(),
                     [](const Point& point) { return point.reached(); });
}

void Scheduler::set_order(Order order, std::uint64_t seed) {
  order_ = order;
  random_.seed(seed);
}

void Scheduler::make_room(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Stream>& stream,
                          std::size_t depth) {
  while (stream->queue.size() >= depth) {
    need({stream, stream->retired + 1});
    progress_.wait(lock);
  }
}

void Scheduler::push(const std::shared_ptr<Stream>& stream, Operation operation) {
  std::erase_if(operation.after, [](const Point& point) { return point.reached(); });
  operation.held = order_ == Order::latest || (order_ == Order::random && random_() % 2 == 0);
  stream->queue.push_back(std::move(operation));
  ++stream->enqueued;
  if (!stream->has_thread) {
    stream->has_thread = true;
    working_.push_back(stream);
    std::thread([this, stream] { run(stream); }).detach();
  }
  if (stream->queue.size() == 1 && stream->runnable()) stream->work.notify_one();
}

void Scheduler::need(const Point& point) {
  std::vector<Point> left{point};
  while (!left.empty()) {
    const Point next = std::move(left.back());
    left.pop_back();
    Stream& stream = *next.stream;
    if (stream.needed >= next.sequence) continue;
    const std::uint64_t from = std::max(stream.needed, stream.retired);
    stream.needed = next.sequence;
    for (std::uint64_t i = from; i < next.sequence && i - stream.retired < stream.queue.size();
         ++i) {
      const Operation& operation = stream.queue[i - stream.retired];
      left.insert(left.end(), operation.after.begin(), operation.after.end());
    }
  }
  wake();
}

void Scheduler::wait(std::unique_lock<std::mutex>& lock, const Point& point) {
  need(point);
  progress_.wait(lock, [&] { return point.reached(); });
}

void Scheduler::destroy(const std::shared_ptr<Stream>& stream) {
  stream->destroyed = true;
  stream->work.notify_one();
}

void Scheduler::open(Gate& gate) {
  gate.open = true;
  wake();
}

void Scheduler::settle(std::unique_lock<std::mutex>& lock) {
  progress_.wait(lock, [&] {
    return std::none_of(working_.begin(), working_.end(),
                        [](const auto& stream) { return stream->running || stream->runnable(); });
  });
}

bool Scheduler::finish(std::unique_lock<std::mutex>& lock, std::chrono::duration<double> limit) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
  for (bool left = true; left;) {
    left = false;
    for (const auto& stream : std::vector(working_)) {
      for (Operation& operation : stream->queue) {
        if (operation.gate) operation.gate->open = true;
      }
      need({stream, stream->enqueued});
      left = left || stream->retired < stream->enqueued;
    }
    wake();
    if (left && progress_.wait_until(lock, deadline) == std::cv_status::timeout) return false;
  }
  return true;
}

void Scheduler::join(std::unique_lock<std::mutex>& lock) {
  progress_.wait(lock, [&] { return working_.empty(); });
}

void Scheduler::wake() {
  for (const auto& stream : working_) {
    if (stream->runnable()) stream->work.notify_one();
  }
  progress_.notify_all();
}

void Scheduler::run(const std::shared_ptr<Stream>& stream) {
  std::unique_lock lock(mutex_);
  for (;;) {
    stream->work.wait(
        lock, [&] { return stream->runnable() || (stream->destroyed && stream->queue.empty()); });
    if (stream->queue.empty()) break;
    stream->running = true;
    {
      // Out of the queue, so that what it holds is let go of outside the lock.
      const std::function<void()> body = std::move(stream->queue.front().body);
      lock.unlock();
      if (body) body();
    }
    lock.lock();
    stream->running = false;
    stream->queue.pop_front();
    ++stream->retired;
    wake();
  }
  std::erase(working_, stream);
  progress_.notify_all();
}

}  // namespace stand_in
