#include "core/current_streams.h"

#include <algorithm>

#include "core/error.h"

namespace kvburst {

StreamHandle ThreadStreams::current() {
  const std::lock_guard lock(mutex_);
  const auto found = pushed_.find(std::this_thread::get_id());
  return found == pushed_.end() ? shared_ : found->second.back();
}

void ThreadStreams::push(StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  pushed_[std::this_thread::get_id()].push_back(stream);
}

void ThreadStreams::pop() {
  const std::lock_guard lock(mutex_);
  const auto found = pushed_.find(std::this_thread::get_id());
  if (found == pushed_.end()) throw DeviceError("current stream: this thread has set none");
  found->second.pop_back();
  if (found->second.empty()) pushed_.erase(found);
}

void ThreadStreams::forget(StreamHandle stream) {
  if (stream == shared_) throw DeviceError("stream: the default stream stays");
  const std::lock_guard lock(mutex_);
  for (auto& [thread, streams] : pushed_) std::erase(streams, stream);
  std::erase_if(pushed_, [](const auto& entry) { return entry.second.empty(); });
}

}  // namespace kvburst
