#include "driver.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>

namespace stand_in {
namespace {

void report_at_exit() {
  Driver& state = driver();
  if (forked(state)) return;
  const std::lock_guard lock(state.mutex);
  if (state.settings.report) std::fputs(state.report().c_str(), stderr);
  if (state.settings.strict && !state.checker.findings().empty()) {
    std::fflush(nullptr);
    _exit(86);
  }
}

/// A wrong setting ends the process: what runs with others than it was told proves nothing.
Settings from_environment() {
  const char* text = std::getenv("KVBURST_STAND_IN");
  if (text == nullptr) return {};
  try {
    return changed({}, text);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "KVBURST_STAND_IN: %s\n", error.what());
    std::abort();
  }
}

}  // namespace

bool forked(const Driver& driver) { return driver.process != getpid(); }

Thread& this_thread() {
  thread_local Thread thread;
  return thread;
}

Driver& driver() {
  static Driver* const state = new Driver;
  return *state;
}

Driver::Driver() : process(getpid()), settings(from_environment()) {
  scheduler.set_order(settings.order, settings.seed);
  std::atexit(report_at_exit);
}

std::uintptr_t Driver::new_handle() { return last_handle_ += 16; }

std::shared_ptr<Stream> Driver::new_stream(std::uintptr_t context) {
  auto stream = std::make_shared<Stream>();
  stream->context = context;
  // A line whose every step the host knows of is before all that is new.
  const auto free = std::find_if(free_lines_.begin(), free_lines_.end(), [&](const auto& line) {
    return host.at(line.first) >= line.second;
  });
  if (free == free_lines_.end()) {
    stream->line = lines_++;
  } else {
    stream->line = free->first;
    stream->enqueued = stream->retired = stream->needed = free->second;
    free_lines_.erase(free);
  }
  return stream;
}

void Driver::retire_line(const Stream& stream) {
  free_lines_.emplace_back(stream.line, stream.enqueued);
}

Context& Driver::primary_context(CUdevice device) {
  for (auto& [handle, context] : contexts) {
    if (context.device == device) return context;
  }
  const std::uintptr_t handle = new_handle();
  return contexts.emplace(handle, Context{handle, device, 0, nullptr, {}, {}}).first->second;
}

std::shared_ptr<Stream> Driver::find_stream(std::uintptr_t handle) {
  if (handle > kStreamPerThread) {
    const auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second;
  }
  const auto current = contexts.find(this_thread().context);
  if (current == contexts.end()) return nullptr;
  Context& context = current->second;
  std::shared_ptr<Stream>& stream =
      handle == kStreamPerThread ? context.by_thread[this_thread().number] : context.legacy;
  if (!stream) {
    stream = new_stream(context.handle);
    stream->handle = handle == kStreamPerThread ? kStreamPerThread : kStreamLegacy;
    stream->legacy = handle != kStreamPerThread;
  }
  return stream;
}

std::shared_ptr<Event> Driver::find_event(std::uintptr_t handle) const {
  const auto found = events.find(handle);
  return found == events.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Stream>> Driver::streams_of(std::uintptr_t context) const {
  std::vector<std::shared_ptr<Stream>> all;
  for (const auto& [handle, stream] : streams) all.push_back(stream);
  for (const auto& [handle, owner] : contexts) {
    if (owner.legacy) all.push_back(owner.legacy);
    for (const auto& [thread, stream] : owner.by_thread) all.push_back(stream);
  }
  if (context != 0) {
    std::erase_if(all, [&](const auto& stream) { return stream->context != context; });
  }
  return all;
}

std::vector<std::shared_ptr<Stream>> Driver::blocking_streams_of(std::uintptr_t context) {
  std::vector<std::shared_ptr<Stream>> all = streams_of(context);
  const auto owner = contexts.find(context);
  if (owner != contexts.end()) {
    std::vector<std::shared_ptr<Stream>>& leaving = owner->second.leaving;
    std::erase_if(leaving,
                  [&](const auto& stream) { return host.at(stream->line) >= stream->enqueued; });
    all.insert(all.end(), leaving.begin(), leaving.end());
  }
  std::erase_if(all, [](const auto& stream) { return stream->legacy || !stream->blocking; });
  return all;
}

void Driver::tear_down(std::unique_lock<std::mutex>& lock, Context& context) {
  for (const auto& stream : context.leaving) {
    scheduler.wait(lock, {stream, stream->enqueued});
    host.join(stream->clock);
  }
  context.leaving.clear();
  for (const auto& stream : streams_of(context.handle)) {
    scheduler.wait(lock, {stream, stream->enqueued});
    host.join(stream->clock);
    scheduler.destroy(stream);
    retire_line(*stream);
    streams.erase(stream->handle);
  }
  context.legacy.reset();
  context.by_thread.clear();
  std::erase_if(events, [&](const auto& entry) { return entry.second->context == context.handle; });
  std::erase_if(captures, [&](const auto& capture) { return capture->context == context.handle; });
  for (auto block = memory->blocks().begin(); block != memory->blocks().end();) {
    const std::shared_ptr<Block> gone = (block++)->second;
    if (gone->context == context.handle) memory->forget(*gone);
  }
}

bool Driver::reset(std::unique_lock<std::mutex>& lock, std::chrono::duration<double> limit) {
  if (!scheduler.finish(lock, limit)) return false;
  for (const auto& stream : streams_of(0)) scheduler.destroy(stream);
  streams.clear();
  contexts.clear();
  scheduler.join(lock);
  events.clear();
  captures.clear();
  graphs.clear();
  libraries.clear();
  kernels.clear();
  functions.clear();
  gates.clear();
  failures.clear();
  memory = std::make_unique<Memory>();
  checker = {};
  record = {};
  counts = {};
  host = {};
  free_lines_.clear();
  lines_ = 1;
  settings = from_environment();
  scheduler.set_order(settings.order, settings.seed);
  return true;
}

Stamp Driver::host_step(std::uint64_t call) {
  const std::uint64_t tick = host.at(0) + 1;
  host.set(0, tick);
  return {0, tick, call};
}

void Driver::host_access(Range range, bool write, std::uint64_t call) {
  if (!settings.checker) return;
  if (const HostFunction* in = this_thread().host_function) {
    checker.access(range, write, in->start, {in->over.line, in->over.tick, call});
    return;
  }
  const VectorClock start = host;
  checker.access(range, write, start, host_step(call));
}

Place Scope::place(const std::shared_ptr<Stream>& stream) {
  driver.scheduler.make_room(lock, stream, driver.settings.queue_depth);
  Place place{stream->clock, {}, stream->enqueued + 1};
  place.start.join(driver.host);
  const auto behind = [&](const std::shared_ptr<Stream>& other) {
    place.start.join(other->clock);
    place.after.push_back({other, other->enqueued});
  };
  if (stream->legacy) {
    for (const auto& other : driver.blocking_streams_of(stream->context)) behind(other);
  } else if (stream->blocking) {
    const auto context = driver.contexts.find(stream->context);
    if (context != driver.contexts.end() && context->second.legacy) {
      behind(context->second.legacy);
    }
  }
  return place;
}

void Scope::push(const std::shared_ptr<Stream>& stream, Place place, Operation operation) {
  stream->clock = std::move(place.start);
  stream->clock.set(stream->line, place.tick);
  operation.after.insert(operation.after.end(), place.after.begin(), place.after.end());
  driver.scheduler.push(stream, std::move(operation));
}

void Scope::synchronize(const std::shared_ptr<Stream>& stream) {
  VectorClock clock = stream->clock;
  std::vector<Point> points{{stream, stream->enqueued}};
  if (stream->legacy) {
    for (const auto& other : driver.blocking_streams_of(stream->context)) {
      clock.join(other->clock);
      points.push_back({other, other->enqueued});
    }
  }
  for (const Point& point : points) driver.scheduler.wait(lock, point);
  driver.host.join(clock);
}

std::optional<CUresult> refused(Driver& driver, Thread& thread, const char* function, Needs needs) {
  if (thread.host_function != nullptr) return CUDA_ERROR_NOT_PERMITTED;
  for (auto failure = driver.failures.begin(); failure != driver.failures.end(); ++failure) {
    if (failure->function == "*") {
      if (needs != Needs::nothing) return failure->code;
    } else if (failure->function == function && --failure->calls_left == 0) {
      const CUresult code = failure->code;
      driver.failures.erase(failure);
      return code;
    }
  }
  if (needs == Needs::nothing) return std::nullopt;
  if (!driver.initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (needs == Needs::driver) return std::nullopt;
  if (thread.context == 0) return CUDA_ERROR_INVALID_CONTEXT;
  const auto context = driver.contexts.find(thread.context);
  if (context == driver.contexts.end() || context->second.retained == 0) {
    return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  }
  return std::nullopt;
}

std::string Driver::report() const {
  char text[400];
  std::snprintf(text, sizeof text,
                "stand-in driver %d.%d: %llu calls, %llu copies, %zu findings; open: %zu streams, "
                "%zu events, %zu blocks of memory; registered %llu, unregistered %llu\n",
                settings.version / 1000, settings.version % 1000 / 10,
                static_cast<unsigned long long>(record.count("")),
                static_cast<unsigned long long>(counts.copies), checker.findings().size(),
                streams.size(), events.size(), memory->blocks().size(),
                static_cast<unsigned long long>(counts.registered),
                static_cast<unsigned long long>(counts.unregistered));
  std::string result = text;
  for (const Finding& finding : checker.findings()) result += describe(finding) + "\n";
  return result;
}

std::string Driver::describe(const Finding& finding) const {
  char range[80];
  std::snprintf(range, sizeof range, "%#llx + %llu bytes",
                static_cast<unsigned long long>(finding.range.begin),
                static_cast<unsigned long long>(finding.range.end - finding.range.begin));
  const auto verb = [](bool writes) { return writes ? " writes " : " reads "; };
  return "unordered: " + record.describe(finding.later_call) + verb(finding.later_writes) + range +
         (finding.earlier_call == finding.later_call
              ? std::string(" more than once")
              : ", which " + record.describe(finding.earlier_call) + verb(finding.earlier_writes) +
                    "with no order between them");
}

}  // namespace stand_in
