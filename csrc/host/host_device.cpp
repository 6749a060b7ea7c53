#include "host/host_device.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

/// A day: far more than any forward, far less than a clock holds.
constexpr double kLongestBusyUs = 86'400e6;

}  // namespace

HostDevice::HostDevice(std::optional<LinkModel> link, CopyLimits limits)
    : link_(link), limits_(limits), process_(getpid()) {
  if (link_) link_->check();
  limits_.check();
  default_stream_ = create_stream();
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
  {
    const std::lock_guard lock(mutex_);
    if (handle == default_stream_) throw DeviceError("stream: the default stream stays");
    streams_.erase(handle);
    for (auto& [thread, streams] : current_streams_) std::erase(streams, handle);
    std::erase_if(current_streams_, [](const auto& entry) { return entry.second.empty(); });
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

StreamHandle HostDevice::current_stream() {
  const std::lock_guard lock(mutex_);
  const auto found = current_streams_.find(std::this_thread::get_id());
  return found == current_streams_.end() ? default_stream_ : found->second.back();
}

void HostDevice::push_current_stream(StreamHandle stream) {
  find_stream(stream);
  const std::lock_guard lock(mutex_);
  current_streams_[std::this_thread::get_id()].push_back(stream);
}

void HostDevice::pop_current_stream() {
  const std::lock_guard lock(mutex_);
  const auto found = current_streams_.find(std::this_thread::get_id());
  if (found == current_streams_.end()) {
    throw DeviceError("current stream: this thread has set none");
  }
  found->second.pop_back();
  if (found->second.empty()) current_streams_.erase(found);
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

void HostDevice::check(const Copy& copy) const {
  if (copy.width == 0 || copy.height == 0) {
    throw DeviceError(
        text("copy: ", copy.width, " bytes x ", copy.height, " rows, both must be at least 1"));
  }
  if (copy.height == 1) return;
  if (!limits_.tall_copies) {
    throw DeviceError(text("copy: ", copy.height, " rows, tall copies are switched off"));
  }
  for (const std::size_t pitch : {copy.dst_pitch, copy.src_pitch}) {
    if (pitch < copy.width || pitch > limits_.max_pitch) {
      throw DeviceError(text("copy: pitch ", pitch, " must be from the width ", copy.width,
                             " to the maximum pitch ", limits_.max_pitch));
    }
  }
}

std::shared_ptr<std::byte[]> HostDevice::landing(std::size_t bytes) {
  return std::make_shared<std::byte[]>(bytes);
}

void HostDevice::copy(StreamHandle handle, Direction direction, std::span<const Copy> copies) {
  const std::shared_ptr<HostStream> stream = find_stream(handle);
  if (copies.empty() || copies.size() > limits_.copies_per_call) {
    throw DeviceError(text("copy: ", copies.size(), " copies in a call, must be from 1 to ",
                           limits_.copies_per_call));
  }
  if (calls_until_failure_ > 0 && --calls_until_failure_ == 0) {
    throw DeviceError("copy: failed, as it was told to");
  }
  std::int64_t bytes = 0;
  for (const Copy& copy : copies) {
    check(copy);
    bytes += static_cast<std::int64_t>(copy.bytes());
  }
  Link& link = links_[static_cast<std::size_t>(direction)];
  if (link_) {
    issue_modelled(*stream, link, copies);
  } else {
    std::vector<Copy> work = stream->spare();
    work.assign(copies.begin(), copies.end());
    stream->push(HostStream::Copies{std::move(work), &link});
  }
  Counts& counts = counts_[static_cast<std::size_t>(direction)];
  counts.calls += 1;
  counts.copies += static_cast<std::int64_t>(copies.size());
  counts.bytes += bytes;
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

CopyCounters HostDevice::counters(Direction direction) const {
  const Counts& counts = counts_[static_cast<std::size_t>(direction)];
  return {counts.calls, counts.copies, counts.bytes};
}

void HostDevice::fail_copy_call(std::int64_t nth) {
  if (nth < 1) throw DeviceError(text("fail_copy_call: ", nth, " is below the minimum of 1"));
  calls_until_failure_ = nth;
}

void HostDevice::copy_on_device(StreamHandle handle, const Copy& copy) {
  check(copy);
  enqueue(handle, copy);
}

/// One copy that crosses no link.
void HostDevice::enqueue(StreamHandle handle, const Copy& copy) {
  const std::shared_ptr<HostStream> stream = find_stream(handle);
  std::vector<Copy> work = stream->spare();
  work.assign(1, copy);
  stream->push(HostStream::Copies{std::move(work), nullptr});
}

void HostDevice::fill(StreamHandle stream, std::uintptr_t dst, std::uint8_t value,
                      std::size_t size) {
  find_stream(stream)->push(HostStream::Fill{dst, value, size});
}

void HostDevice::busy(StreamHandle stream, double microseconds) {
  if (!(microseconds >= 0 && microseconds <= kLongestBusyUs)) {
    throw DeviceError(
        text("busy: ", microseconds, " microseconds must be from 0 to ", kLongestBusyUs));
  }
  find_stream(stream)->push(HostStream::Busy{static_cast<Time>(1000 * microseconds)});
}

std::shared_ptr<Mark> HostDevice::stall(StreamHandle stream) {
  auto mark = std::make_shared<Mark>();
  find_stream(stream)->push(HostStream::WaitFor{mark});
  return mark;
}

}  // namespace kvburst
