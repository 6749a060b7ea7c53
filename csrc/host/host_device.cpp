#include "host/host_device.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {

HostDevice::HostDevice(std::optional<LinkModel> link, CopyLimits limits)
    : link_(link), limits_(limits), process_(getpid()) {
  if (link_) link_->check();
  limits_.check();
  current_streams_.emplace(create_stream());
}

HostDevice::~HostDevice() {
  if (process_ != getpid()) {
    // Not even their condition variables can be destroyed: threads that are not here wait on them.
    new auto(std::move(streams_));
    return;
  }
  for (const auto& [handle, stream] : streams_) stream->finish();
}

StreamHandle HostDevice::create_stream() {
  auto stream = std::make_shared<HostStream>(link_);
  const std::lock_guard lock(mutex_);
  const StreamHandle handle = next_handle_++;
  streams_.emplace(handle, std::move(stream));
  return handle;
}

void HostDevice::destroy_stream(StreamHandle handle) {
  // Of a forked child: the lock may have been another thread's at the fork, and the stream's own
  // thread is not here. It all stays as it is.
  if (process_ != getpid()) return;
  const std::shared_ptr<HostStream> stream = find_stream(handle);
  current_streams_->forget(handle);
  {
    const std::lock_guard lock(mutex_);
    streams_.erase(handle);
  }
  stream->finish();
}

EventHandle HostDevice::create_event() {
  auto event = std::make_shared<HostEvent>();
  const std::lock_guard lock(mutex_);
  const EventHandle handle = next_handle_++;
  events_.emplace(handle, std::move(event));
  return handle;
}

void HostDevice::destroy_event(EventHandle handle) {
  if (process_ != getpid()) return;
  find_event(handle);
  const std::lock_guard lock(mutex_);
  events_.erase(handle);
}

void HostDevice::push_current_stream(StreamHandle stream) {
  find_stream(stream);
  current_streams_->push(stream);
}

std::shared_ptr<HostStream> HostDevice::find_stream(StreamHandle handle) const {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(handle);
  if (found == streams_.end()) {
    throw DeviceError(text("stream: handle ", handle, " is not one of this device's ",
                           streams_.size(), " streams"));
  }
  return found->second;
}

std::shared_ptr<HostDevice::HostEvent> HostDevice::find_event(EventHandle handle) const {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(handle);
  if (found == events_.end()) {
    throw DeviceError(
        text("event: handle ", handle, " is not one of this device's ", events_.size(), " events"));
  }
  return found->second;
}

/// Under the lock a mark reaches its stream before anybody sees it: a wait on the same stream that
/// came in between would be ahead of what it waits for.
void HostDevice::HostEvent::record(HostStream& on) {
  const std::lock_guard lock(mutex_);
  // Reused if nobody else can still see it: only this event hands it out.
  if (mark_ && mark_.use_count() == 1) {
    mark_->rearm();
  } else {
    mark_ = std::make_shared<Mark>();
  }
  on.push(HostStream::Reach{mark_});
}

std::shared_ptr<Mark> HostDevice::HostEvent::mark() const {
  const std::lock_guard lock(mutex_);
  return mark_;
}

void HostDevice::record(EventHandle event, StreamHandle stream) {
  const std::shared_ptr<HostStream> on = find_stream(stream);
  find_event(event)->record(*on);
}

void HostDevice::wait(StreamHandle stream, EventHandle event) {
  const std::shared_ptr<HostStream> on = find_stream(stream);
  if (std::shared_ptr<Mark> mark = find_event(event)->mark()) {
    on->push(HostStream::WaitFor{std::move(mark)});
  }
}

bool HostDevice::query(EventHandle event) {
  const std::shared_ptr<Mark> mark = find_event(event)->mark();
  return !mark || mark->reached();
}

bool HostDevice::query_stream(StreamHandle stream) { return find_stream(stream)->idle(); }

void HostDevice::synchronize(EventHandle event) {
  if (const std::shared_ptr<Mark> mark = find_event(event)->mark()) mark->wait();
}

void HostDevice::synchronize_stream(StreamHandle stream) { find_stream(stream)->synchronize(); }

void HostDevice::synchronize() {
  std::vector<std::shared_ptr<HostStream>> streams;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [handle, stream] : streams_) streams.push_back(stream);
  }
  for (const auto& stream : streams) stream->synchronize();
}

double HostDevice::elapsed_ms(EventHandle start, EventHandle end) {
  const std::shared_ptr<Mark> from = find_event(start)->mark();
  const std::shared_ptr<Mark> to = find_event(end)->mark();
  if (!from || !to) throw DeviceError("elapsed time: an event that was never recorded");
  if (!from->reached() || !to->reached()) {
    throw DeviceError("elapsed time: an event that is not reached yet");
  }
  return static_cast<double>(to->wait() - from->wait()) / 1e6;
}

std::shared_ptr<std::byte[]> HostDevice::landing(std::size_t bytes) {
  return std::make_shared<std::byte[]>(bytes);
}

void HostDevice::copy(StreamHandle handle, Direction direction, std::span<const Copy> copies) {
  const std::shared_ptr<HostStream> stream = find_stream(handle);
  limits_.check(copies);
  tally_.begin();
  Link& link = links_[static_cast<std::size_t>(direction)];
  if (link_) {
    issue_modelled(*stream, link, copies);
  } else {
    std::vector<Copy> work = stream->spare();
    work.assign(copies.begin(), copies.end());
    stream->push(HostStream::Copies{std::move(work), &link});
  }
  tally_.count(direction, copies);
}

/// Asleep for most of it, so that a machine with few cores has them for the streams; awake for the
/// rest, to be on time.
void HostDevice::hold_until(Time end) {
  constexpr Time kWakingUp = 100'000;
  std::this_thread::sleep_until(
      std::chrono::steady_clock::time_point(std::chrono::nanoseconds(end - kWakingUp)));
  while (now() < end) {
  }
}

/// Holds the caller for what the copies cost, as a driver does, a few at a time so that the first
/// of them run while the last are being issued.
void HostDevice::issue_modelled(HostStream& stream, Link& link, std::span<const Copy> copies) {
  const std::size_t depth =
      link_->queue_depth > 0 ? static_cast<std::size_t>(link_->queue_depth) : copies.size();
  const std::size_t at_once = std::max<std::size_t>(depth / 4, 1);
  while (!copies.empty()) {
    const std::span<const Copy> part = copies.first(std::min(at_once, copies.size()));
    copies = copies.subspan(part.size());
    std::vector<Copy> work = stream.spare();
    work.assign(part.begin(), part.end());
    stream.push(HostStream::Copies{std::move(work), &link});
    const Time begin = now();
    double cost_us = 0;
    for (const Copy& copy : part) {
      cost_us += copy.height > 1 ? link_->tall_issue_us : link_->issue_us;
    }
    const Time end = begin + static_cast<Time>(1000 * cost_us);
    hold_until(end);
  }
}

void HostDevice::copy_on_device(StreamHandle handle, const Copy& copy) {
  limits_.check(copy);
  enqueue(handle, copy);
}

/// One copy that crosses no link.
void HostDevice::enqueue(StreamHandle handle, const Copy& copy) {
  const std::shared_ptr<HostStream> stream = find_stream(handle);
  std::vector<Copy> work = stream->spare();
  work.assign(1, copy);
  stream->push(HostStream::Copies{std::move(work), nullptr});
}

/// No id may be below 0; that there is such a row is for the caller to know.
void HostDevice::move_rows(StreamHandle handle, RowDirection direction,
                           std::span<const RowMove> moves) {
  const std::shared_ptr<HostStream> stream = find_stream(handle);
  HostStream::Rows work{direction, {}, {}, 0};
  std::size_t count = 0;
  for (const RowMove& move : moves) {
    move.check();
    count += move.count;
  }
  work.ids.reserve(count);
  for (const RowMove& move : moves) {
    const std::span ids(reinterpret_cast<const std::int64_t*>(move.ids), move.count);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0)
        throw DeviceError(text("ids: ", ids[i], " at ", i, " is below the minimum 0"));
      work.ids.push_back(ids[i]);
    }
  }
  if (work.ids.empty()) return;
  // From here on the ids are ours.
  std::vector<RowMove> own(moves.begin(), moves.end());
  std::size_t begin = 0;
  for (RowMove& move : own) {
    move.ids = reinterpret_cast<std::uintptr_t>(work.ids.data() + begin);
    begin += move.count;
  }
  work.parts.resize(own.size());
  work.rows = cut(own, HostStream::kWholeRows, work.parts.data());
  stream->push(std::move(work));
}

void HostDevice::fill(StreamHandle stream, std::uintptr_t dst, std::uint8_t value,
                      std::size_t size) {
  find_stream(stream)->push(HostStream::Fill{dst, value, size});
}

void HostDevice::busy(StreamHandle stream, double microseconds) {
  check_busy(microseconds);
  find_stream(stream)->push(HostStream::Busy{static_cast<Time>(1000 * microseconds)});
}

std::function<void()> HostDevice::hold(StreamHandle stream) {
  return [mark = stall(stream)] { mark->reach(now()); };
}

std::shared_ptr<Mark> HostDevice::stall(StreamHandle stream) {
  auto mark = std::make_shared<Mark>();
  hold(stream, mark);
  return mark;
}

void HostDevice::hold(StreamHandle stream, std::shared_ptr<Mark> mark) {
  find_stream(stream)->push(HostStream::WaitFor{std::move(mark)});
}

void HostDevice::release(StreamHandle stream, std::shared_ptr<Mark> mark) {
  find_stream(stream)->push(HostStream::Reach{std::move(mark)});
}

}  // namespace kvburst
