#include "control.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <string>
#include <thread>

#include "driver.h"

using namespace stand_in;

namespace {

std::string& last_error() {
  thread_local std::string text;
  return text;
}

std::size_t write_out(const std::string& from, char* text, std::size_t size) {
  if (size > 0) {
    const std::size_t length = std::min(from.size(), size - 1);
    std::memcpy(text, from.data(), length);
    text[length] = '\0';
  }
  return from.size();
}

/// Runs `body(scope)` as work that a test enqueues: recorded, so that a finding can name it.
template <class Body>
int enqueue(const char* what, std::uint64_t handle, Body body) {
  Driver& state = driver();
  std::unique_lock lock(state.mutex);
  const auto stream = state.find_stream(handle);
  if (!stream) return 1;
  Thread& thread = this_thread();
  if (thread.number == 0) thread.number = ++state.threads;
  Scope scope{state, lock, thread,
              state.record.begin(what, thread.number, {.stream = stream->handle})};
  Place place = scope.place(stream);
  Operation operation = body(scope, *stream, place);
  scope.push(stream, std::move(place), std::move(operation));
  return 0;
}

void host_access(const char* what, std::uintptr_t address, std::size_t bytes, bool write) {
  Driver& state = driver();
  const std::lock_guard lock(state.mutex);
  Thread& thread = this_thread();
  if (thread.number == 0) thread.number = ++state.threads;
  const std::uint64_t call =
      state.record.begin(what, thread.number, {.address = address, .bytes = bytes});
  state.host_access({address, address + bytes}, write, call);
}

}  // namespace

STAND_IN_EXPORT int stand_in_configure(const char* settings) {
  Driver& state = driver();
  const std::lock_guard lock(state.mutex);
  try {
    state.settings = changed(state.settings, settings);
  } catch (const std::exception& error) {
    last_error() = error.what();
    return 1;
  }
  state.scheduler.set_order(state.settings.order, state.settings.seed);
  return 0;
}

STAND_IN_EXPORT const char* stand_in_error() { return last_error().c_str(); }

STAND_IN_EXPORT void stand_in_fail(const char* function, std::uint64_t nth, unsigned int code) {
  Driver& state = driver();
  const std::lock_guard lock(state.mutex);
  if (code == 0) {
    state.failures.clear();
  } else {
    state.failures.push_back(
        {function, std::max<std::uint64_t>(nth, 1), static_cast<CUresult>(code)});
  }
}

STAND_IN_EXPORT std::uint64_t stand_in_call_count(const char* function) {
  Driver& state = driver();
  const std::lock_guard lock(state.mutex);
  return state.record.count(function == nullptr ? "" : function);
}

STAND_IN_EXPORT std::uint64_t stand_in_recorded() {
  Driver& state = driver();
  const std::lock_guard lock(state.mutex);
  return state.record.calls().size();
}

STAND_IN_EXPORT int stand_in_call(std::uint64_t index, StandInCall* call) {
  Driver& state = driver();
  const std::lock_guard lock(state.mutex);
  if (index >= state.record.calls().size()) return 1;
  const RecordedCall& from = state.record.calls()[index];
  *call = {from.function,       from.thread,        static_cast<std::uint32_t>(from.result),
           from.subject.stream, from.subject.event, from.subject.address,
           from.subject.bytes,  from.subject.copies};
  return 0;
}

STAND_IN_EXPORT std::uint64_t stand_in_finding_count() {
  Driver& state = driver();
  const std::lock_guard lock(state.mutex);
  return state.checker.findings().size();
}

STAND_IN_EXPORT std::size_t stand_in_finding(std::uint64_t index, char* text, std::size_t size) {
  Driver& state = driver();
  const std::lock_guard lock(state.mutex);
  if (index >= state.checker.findings().size()) return write_out("", text, size);
  return write_out(state.describe(state.checker.findings()[index]), text, size);
}

STAND_IN_EXPORT std::size_t stand_in_report(char* text, std::size_t size) {
  Driver& state = driver();
  const std::lock_guard lock(state.mutex);
  return write_out(state.report(), text, size);
}

STAND_IN_EXPORT void stand_in_counts(StandInCounts* counts) {
  Driver& state = driver();
  const std::lock_guard lock(state.mutex);
  const auto blocks = [&](Kind kind) {
    const auto& all = state.memory->blocks();
    return static_cast<std::uint64_t>(std::count_if(all.begin(), all.end(), [&](const auto& entry) {
      return entry.second->kind == kind && !entry.second->adopted;
    }));
  };
  std::uint64_t retained = 0;
  for (const auto& [handle, context] : state.contexts) {
    retained += static_cast<std::uint64_t>(context.retained);
  }
  *counts = {state.streams.size(),     state.events.size(),       blocks(Kind::device),
             blocks(Kind::allocated),  blocks(Kind::registered),  retained,
             state.counts.registered,  state.counts.unregistered, state.counts.copies,
             state.counts.copied_bytes};
}

STAND_IN_EXPORT void stand_in_host_read(const void* address, std::size_t bytes) {
  host_access("stand_in_host_read", number_of(address), bytes, false);
}

STAND_IN_EXPORT void stand_in_host_write(void* address, std::size_t bytes) {
  host_access("stand_in_host_write", number_of(address), bytes, true);
}

STAND_IN_EXPORT int stand_in_adopt(void* address, std::size_t bytes, int device) {
  Driver& state = driver();
  const std::lock_guard lock(state.mutex);
  if (bytes == 0) return 1;
  const std::uintptr_t context = state.primary_context(device).handle;
  if (!state.memory->adopt(number_of(address), bytes, context)) return 1;
  return 0;
}

STAND_IN_EXPORT int stand_in_disown(void* address) {
  Driver& state = driver();
  const std::lock_guard lock(state.mutex);
  const auto block = state.memory->beginning_at(number_of(address));
  if (!block || !block->adopted) return 1;
  const std::uint64_t call = state.record.begin("stand_in_disown", this_thread().number,
                                                {.address = block->begin, .bytes = block->bytes});
  state.host_access({block->begin, block->end()}, true, call);
  state.memory->forget(*block);
  return 0;
}

STAND_IN_EXPORT std::uint64_t stand_in_stall(std::uint64_t stream) {
  std::uint64_t handle = 0;
  enqueue("stand_in_stall", stream, [&](Scope& scope, const Stream&, const Place&) {
    handle = scope.driver.new_handle();
    const auto gate = std::make_shared<Gate>();
    scope.driver.gates.emplace(handle, gate);
    return Operation{.after = {}, .gate = gate, .body = {}};
  });
  return handle;
}

STAND_IN_EXPORT int stand_in_release(std::uint64_t gate) {
  Driver& state = driver();
  const std::lock_guard lock(state.mutex);
  const auto found = state.gates.find(gate);
  if (found == state.gates.end()) return 1;
  state.scheduler.open(*found->second);
  state.gates.erase(found);
  return 0;
}

STAND_IN_EXPORT int stand_in_busy(std::uint64_t stream, double microseconds) {
  return enqueue("stand_in_busy", stream, [&](Scope&, const Stream&, const Place&) {
    return Operation{
        .after = {}, .gate = {}, .body = [microseconds] {
          std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(microseconds));
        }};
  });
}

STAND_IN_EXPORT int stand_in_touch(std::uint64_t stream, const void* address, std::size_t bytes,
                                   int write) {
  return enqueue("stand_in_touch", stream, [&](Scope& scope, const Stream& on, const Place& place) {
    if (scope.driver.settings.checker) {
      scope.driver.checker.access({number_of(address), number_of(address) + bytes}, write != 0,
                                  place.start, {on.line, place.tick, scope.call});
    }
    return Operation{};
  });
}

STAND_IN_EXPORT void stand_in_settle() {
  Driver& state = driver();
  std::unique_lock lock(state.mutex);
  state.scheduler.settle(lock);
}

STAND_IN_EXPORT int stand_in_finish(double seconds) {
  Driver& state = driver();
  std::unique_lock lock(state.mutex);
  return state.scheduler.finish(lock, std::chrono::duration<double>(seconds)) ? 0 : 1;
}

STAND_IN_EXPORT int stand_in_reset(double seconds) {
  Driver& state = driver();
  std::unique_lock lock(state.mutex);
  return state.reset(lock, std::chrono::duration<double>(seconds)) ? 0 : 1;
}
