#include "capture.h"
#include "driver.h"

/// Streams, as the driver API has them.

using namespace stand_in;

STAND_IN_EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
  return call("cuStreamCreate", Needs::context, {}, [&](Scope& scope) {
    if (stream == nullptr || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    Driver& state = scope.driver;
    std::shared_ptr<Stream> made = state.new_stream(scope.thread.context);
    made->handle = state.new_handle();
    made->blocking = flags != CU_STREAM_NON_BLOCKING;
    *stream = reinterpret_cast<CUstream>(made->handle);
    scope.amend({.stream = made->handle});
    state.streams.emplace(made->handle, std::move(made));
    return CUDA_SUCCESS;
  });
}

/// Work that is left goes on, and its memory stays.
STAND_IN_EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
  const CallSubject subject{.stream = number_of(stream)};
  return call("cuStreamDestroy", Needs::context, subject, [&](Scope& scope) {
    Driver& state = scope.driver;
    const auto found = state.streams.find(number_of(stream));
    if (found == state.streams.end()) return CUDA_ERROR_INVALID_HANDLE;
    const std::shared_ptr<Stream> gone = found->second;
    if (gone->capture) gone->capture->invalidated = true;
    state.streams.erase(found);
    if (gone->retired < gone->enqueued || state.host.at(gone->line) < gone->enqueued) {
      state.contexts.at(gone->context).leaving.push_back(gone);
    }
    state.scheduler.destroy(gone);
    state.retire_line(*gone);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuStreamSynchronize(CUstream stream) {
  const CallSubject subject{.stream = number_of(stream)};
  return call("cuStreamSynchronize", Needs::context, subject, [&](Scope& scope) {
    const auto found = scope.driver.find_stream(number_of(stream));
    if (!found) return CUDA_ERROR_INVALID_HANDLE;
    if (const auto refusal = invalid_while_capturing(scope, *found)) return *refusal;
    if (const auto refusal = unsafe_call(scope)) return *refusal;
    scope.synchronize(found);
    return CUDA_SUCCESS;
  });
}

/// Not ready the first time, in the order `latest`: only the question lets the work run.
STAND_IN_EXPORT CUresult cuStreamQuery(CUstream stream) {
  const CallSubject subject{.stream = number_of(stream)};
  return call("cuStreamQuery", Needs::context, subject, [&](Scope& scope) {
    const auto found = scope.driver.find_stream(number_of(stream));
    if (!found) return CUDA_ERROR_INVALID_HANDLE;
    if (const auto refusal = invalid_while_capturing(scope, *found)) return *refusal;
    if (const auto refusal = unsafe_call(scope)) return *refusal;
    bool done = true;
    VectorClock clock;
    std::vector<std::shared_ptr<Stream>> asked{found};
    if (found->legacy) {
      const auto others = scope.driver.blocking_streams_of(found->context);
      asked.insert(asked.end(), others.begin(), others.end());
    }
    for (const auto& each : asked) {
      const Point end{each, each->enqueued};
      clock.join(each->clock);
      if (end.reached()) continue;
      scope.driver.scheduler.need(end);
      done = false;
    }
    if (!done) return CUDA_ERROR_NOT_READY;
    scope.driver.host.join(clock);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
  const CallSubject subject{.stream = number_of(stream), .event = number_of(event)};
  return call("cuStreamWaitEvent", Needs::context, subject, [&](Scope& scope) {
    const auto on = scope.driver.find_stream(number_of(stream));
    const auto waited_for = scope.driver.find_event(number_of(event));
    if (!on || !waited_for) return CUDA_ERROR_INVALID_HANDLE;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const Captured by = captured(scope, *on);
    if (by.refusal) return *by.refusal;
    if (const std::shared_ptr<Capture>& origin = waited_for->capture) {
      if (!origin->active) return CUDA_ERROR_CAPTURED_EVENT;
      if (origin->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
      if (on->capture && on->capture != origin) {
        on->capture->invalidated = origin->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
      }
      if (!on->capture) {
        on->capture = origin;
        on->captured = {};
        on->nodes = 1;  // its begin, which the capture has to get back
        on->captured.set(on->line, 1);
      }
      on->captured.join(waited_for->captured);
      return CUDA_SUCCESS;
    }
    if (!waited_for->point) return CUDA_SUCCESS;
    if (by.swallowed) {
      on->capture->invalidated = true;
      return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    const Point point = *waited_for->point;
    const VectorClock clock = waited_for->clock;
    Place place = scope.place(on);
    place.start.join(clock);
    scope.push(on, std::move(place), {.after = {point}, .gate = {}, .body = {}});
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* user_data) {
  const CallSubject subject{.stream = number_of(stream)};
  return call("cuLaunchHostFunc", Needs::context, subject, [&](Scope& scope) {
    const auto on = scope.driver.find_stream(number_of(stream));
    if (!on) return CUDA_ERROR_INVALID_HANDLE;
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Captured by = captured(scope, *on);
    if (by.refusal) return *by.refusal;
    if (by.swallowed) return CUDA_SUCCESS;
    Place place = scope.place(on);
    const HostFunction where{place.start, {on->line, place.tick, scope.call}};
    auto body = [where, function, user_data] {
      this_thread().host_function = &where;
      function(user_data);
      this_thread().host_function = nullptr;
    };
    scope.push(on, std::move(place), {.after = {}, .gate = {}, .body = std::move(body)});
    return CUDA_SUCCESS;
  });
}
