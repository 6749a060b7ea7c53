#include <chrono>

#include "capture.h"
#include "driver.h"

/// Events, as the driver API has them: one that was never recorded is done, and one that was last
/// recorded in a capture can be waited for by a stream only.

using namespace stand_in;

namespace {

double now_ms() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Before a question about the event's progress.
std::optional<CUresult> unanswerable(Scope& scope, const Event& event) {
  if (event.capture) {
    event.capture->invalidated = true;
    return CUDA_ERROR_CAPTURED_EVENT;
  }
  return unsafe_call(scope);
}

}  // namespace

STAND_IN_EXPORT CUresult cuEventCreate(CUevent* event, unsigned int flags) {
  return call("cuEventCreate", Needs::context, {}, [&](Scope& scope) {
    if (event == nullptr || flags > (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const std::uintptr_t handle = scope.driver.new_handle();
    const bool timed = (flags & CU_EVENT_DISABLE_TIMING) == 0;
    scope.driver.events.emplace(
        handle, std::make_shared<Event>(Event{
                    handle, scope.thread.context, timed, std::nullopt, {}, nullptr, nullptr, {}}));
    *event = reinterpret_cast<CUevent>(handle);
    scope.amend({.event = handle});
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuEventDestroy_v2(CUevent event) {
  const CallSubject subject{.event = number_of(event)};
  return call("cuEventDestroy", Needs::context, subject, [&](Scope& scope) {
    return scope.driver.events.erase(number_of(event)) == 1 ? CUDA_SUCCESS
                                                            : CUDA_ERROR_INVALID_HANDLE;
  });
}

STAND_IN_EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
  const CallSubject subject{.stream = number_of(stream), .event = number_of(event)};
  return call("cuEventRecord", Needs::context, subject, [&](Scope& scope) {
    const auto recorded = scope.driver.find_event(number_of(event));
    const auto on = scope.driver.find_stream(number_of(stream));
    if (!recorded || !on || recorded->context != on->context) return CUDA_ERROR_INVALID_HANDLE;
    const Captured by = captured(scope, *on);
    if (by.refusal) return *by.refusal;
    if (by.swallowed) {
      recorded->capture = on->capture;
      recorded->captured = on->captured;
      recorded->point.reset();
      return CUDA_SUCCESS;
    }
    Place place = scope.place(on);
    const auto reached_ms = std::make_shared<double>(0);
    scope.push(on, std::move(place),
               {.after = {}, .gate = {}, .body = [reached_ms] { *reached_ms = now_ms(); }});
    recorded->capture.reset();
    recorded->point = Point{on, on->enqueued};
    recorded->clock = on->clock;
    recorded->reached_ms = reached_ms;
    return CUDA_SUCCESS;
  });
}

/// Not ready the first time, in the order `latest`: only the question lets the work run.
STAND_IN_EXPORT CUresult cuEventQuery(CUevent event) {
  const CallSubject subject{.event = number_of(event)};
  return call("cuEventQuery", Needs::context, subject, [&](Scope& scope) {
    const auto found = scope.driver.find_event(number_of(event));
    if (!found) return CUDA_ERROR_INVALID_HANDLE;
    if (const auto refusal = unanswerable(scope, *found)) return *refusal;
    if (!found->point) return CUDA_SUCCESS;
    if (!found->point->reached()) {
      scope.driver.scheduler.need(*found->point);
      return CUDA_ERROR_NOT_READY;
    }
    scope.driver.host.join(found->clock);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuEventSynchronize(CUevent event) {
  const CallSubject subject{.event = number_of(event)};
  return call("cuEventSynchronize", Needs::context, subject, [&](Scope& scope) {
    const auto found = scope.driver.find_event(number_of(event));
    if (!found) return CUDA_ERROR_INVALID_HANDLE;
    if (const auto refusal = unanswerable(scope, *found)) return *refusal;
    if (!found->point) return CUDA_SUCCESS;
    const Point point = *found->point;
    const VectorClock clock = found->clock;
    scope.driver.scheduler.wait(scope.lock, point);
    scope.driver.host.join(clock);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  const CallSubject subject{.event = number_of(start)};
  return call("cuEventElapsedTime", Needs::context, subject, [&](Scope& scope) {
    if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto from = scope.driver.find_event(number_of(start));
    const auto to = scope.driver.find_event(number_of(end));
    if (!from || !to) return CUDA_ERROR_INVALID_HANDLE;
    for (const auto& event : {from, to}) {
      if (const auto refusal = unanswerable(scope, *event)) return *refusal;
      if (!event->timed || !event->point) return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!from->point->reached() || !to->point->reached()) return CUDA_ERROR_NOT_READY;
    *milliseconds = static_cast<float>(*to->reached_ms - *from->reached_ms);
    return CUDA_SUCCESS;
  });
}
