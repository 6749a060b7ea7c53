#include "host/host_stream.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "host/streaming_copy.h"

namespace kvburst {

Time now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Mark::reach(Time time) {
  const std::lock_guard lock(mutex_);
  time_ = time;
  changed_.notify_all();
}

bool Mark::reached() const {
  const std::lock_guard lock(mutex_);
  return time_.has_value();
}

Time Mark::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return time_.has_value(); });
  return *time_;
}

void Mark::rearm() {
  const std::lock_guard lock(mutex_);
  time_.reset();
}

Time Link::transfer(Time start, Time issue_begin, std::span<const Copy> copies,
                    const LinkModel& model) {
  const std::lock_guard lock(mutex_);
  const double ns_per_byte = model.byte_scale / model.gigabytes_per_second;
  auto issued = static_cast<double>(issue_begin);
  auto done = static_cast<double>(std::max(start, free_at_));
  for (const Copy& copy : copies) {
    issued += 1000 * (copy.height > 1 ? model.tall_issue_us : model.issue_us);
    done = std::max(done, issued) + static_cast<double>(copy.bytes()) * ns_per_byte;
  }
  free_at_ = static_cast<Time>(done);
  return free_at_;
}

namespace {

/// What an operation adds to the copies outstanding on the link.
std::size_t link_copies(const HostStream::Operation& operation) {
  const auto* work = std::get_if<HostStream::Copies>(&operation);
  return work && work->link ? work->copies.size() : 0;
}

}  // namespace

HostStream::HostStream(const std::optional<LinkModel>& model)
    : model_(model), worker_([this] { run(); }) {}

HostStream::~HostStream() { finish(); }

void HostStream::finish() {
  {
    const std::lock_guard lock(mutex_);
    finishing_ = true;
  }
  work_.notify_one();
  if (worker_.joinable()) worker_.join();
}

void HostStream::push(Operation operation) {
  const std::size_t copies = link_copies(operation);
  {
    std::unique_lock lock(mutex_);
    if (model_ && model_->queue_depth > 0 && copies > 0) {
      progress_.wait(lock, [&] {
        return copies_outstanding_ == 0 ||
               copies_outstanding_ + copies <= static_cast<std::size_t>(model_->queue_depth);
      });
    }
    copies_outstanding_ += copies;
    queue_.push_back({std::move(operation), now()});
    ++pushed_;
  }
  work_.notify_one();
}

bool HostStream::idle() const {
  const std::lock_guard lock(mutex_);
  return done_ == pushed_;
}

void HostStream::synchronize() {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&, so_far = pushed_] { return done_ >= so_far; });
}

std::vector<Copy> HostStream::spare() {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) return {};
  std::vector<Copy> copies = std::move(spare_.back());
  spare_.pop_back();
  return copies;
}

void HostStream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return finishing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Entry entry = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();

    time_ = std::max(time_, entry.enqueued);
    std::visit([&](const auto& work) { perform(work, entry.enqueued); }, entry.operation);

    lock.lock();
    ++done_;
    copies_outstanding_ -= link_copies(entry.operation);
    if (auto* work = std::get_if<Copies>(&entry.operation)) {
      work->copies.clear();
      spare_.push_back(std::move(work->copies));
    }
    progress_.notify_all();
  }
}

void HostStream::perform(const Copies& work, Time enqueued) {
  for (const Copy& copy : work.copies) {
    for (std::size_t row = 0; row < copy.height; ++row) {
      streaming_copy(reinterpret_cast<void*>(copy.dst + row * copy.dst_pitch),
                     reinterpret_cast<const void*>(copy.src + row * copy.src_pitch), copy.width);
    }
  }
  streaming_fence();
  if (model_ && work.link) {
    time_ = work.link->transfer(time_, enqueued, work.copies, *model_);
    sleep_until(time_);
  } else {
    ended_now();
  }
}

void HostStream::perform(const Rows& work, Time) {
  // A kernel's rows, but a processor's bytes, as in all that this device copies: it takes any
  // alignment and has no lanes. A LaneCopy of one lane took twice as long for rows of 132 bytes,
  // and plain stores take half as long again for rows of 40 KiB.
  const auto copy = [](std::uintptr_t dst, std::uintptr_t src, std::uint64_t bytes) {
    streaming_copy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes);
  };
  move_rows(work.parts.data(), work.rows, kWholeRows, work.direction, 0, 1, copy);
  streaming_fence();
  ended_now();
}

void HostStream::perform(const Fill& work, Time) {
  std::memset(reinterpret_cast<void*>(work.dst), work.value, work.size);
  ended_now();
}

void HostStream::perform(const Busy& work, Time) {
  time_ += work.duration;
  sleep_until(time_);
}

void HostStream::perform(const Reach& work, Time) { work.mark->reach(time_); }

void HostStream::perform(const WaitFor& work, Time) { time_ = std::max(time_, work.mark->wait()); }

/// With a link model only what is modelled takes time; without one, time is the clock's.
void HostStream::ended_now() {
  if (!model_) time_ = now();
}

void HostStream::sleep_until(Time time) const {
  std::this_thread::sleep_until(
      std::chrono::steady_clock::time_point(std::chrono::nanoseconds(time)));
}

}  // namespace kvburst
