#include "capture.h"

#include <algorithm>

namespace stand_in {

std::optional<CUresult> unsafe_call(Scope& scope) {
  if (scope.thread.capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return std::nullopt;
  bool forbidden = false;
  for (const auto& capture : scope.driver.captures) {
    const bool own =
        capture->thread == scope.thread.number && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    const bool others = scope.thread.capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                        capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!own && !others) continue;
    capture->invalidated = true;
    forbidden = true;
  }
  if (!forbidden) return std::nullopt;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

std::optional<CUresult> implicit_use(Scope& scope, const Stream& stream) {
  if (!stream.legacy) return std::nullopt;
  bool forbidden = false;
  for (const auto& capture : scope.driver.captures) {
    if (capture->context != stream.context) continue;
    capture->invalidated = true;
    forbidden = true;
  }
  if (!forbidden) return std::nullopt;
  return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

Captured captured(Scope& scope, Stream& stream) {
  if (const auto refusal = implicit_use(scope, stream)) return {refusal};
  if (!stream.capture) return {};
  if (stream.capture->invalidated) return {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED};
  stream.captured.set(stream.line, ++stream.nodes);
  return {std::nullopt, true};
}

std::optional<CUresult> invalid_while_capturing(Scope& scope, const Stream& stream) {
  if (const auto refusal = implicit_use(scope, stream)) return refusal;
  if (!stream.capture) return std::nullopt;
  stream.capture->invalidated = true;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

}  // namespace stand_in

using namespace stand_in;

STAND_IN_EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  const CallSubject subject{.stream = number_of(stream)};
  return call("cuStreamBeginCapture", Needs::context, subject, [&](Scope& scope) {
    const auto found = scope.driver.find_stream(number_of(stream));
    if (!found) return CUDA_ERROR_INVALID_HANDLE;
    if (mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    if (found->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (found->capture) return CUDA_ERROR_INVALID_VALUE;
    found->capture = std::make_shared<Capture>(
        Capture{mode, scope.thread.number, found->handle, found->context});
    found->captured = {};
    found->nodes = 0;
    scope.driver.captures.push_back(found->capture);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  const CallSubject subject{.stream = number_of(stream)};
  return call("cuStreamEndCapture", Needs::context, subject, [&](Scope& scope) {
    Driver& state = scope.driver;
    const auto found = state.find_stream(number_of(stream));
    if (!found) return CUDA_ERROR_INVALID_HANDLE;
    if (graph == nullptr || !found->capture) return CUDA_ERROR_INVALID_VALUE;
    const std::shared_ptr<Capture> capture = found->capture;
    if (capture->stream != found->handle) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != scope.thread.number) {
      return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    bool unjoined = false;
    for (const auto& other : state.streams_of(0)) {
      if (other->capture != capture) continue;
      unjoined = unjoined || found->captured.at(other->line) < other->nodes;
      other->capture.reset();
    }
    std::erase(state.captures, capture);
    capture->active = false;
    *graph = nullptr;
    if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (unjoined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    const std::uintptr_t handle = state.new_handle();
    state.graphs.emplace(handle, capture);
    *graph = reinterpret_cast<CUgraph>(handle);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  const CallSubject subject{.stream = number_of(stream)};
  return call("cuStreamIsCapturing", Needs::context, subject, [&](Scope& scope) {
    const auto found = scope.driver.find_stream(number_of(stream));
    if (!found) return CUDA_ERROR_INVALID_HANDLE;
    if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (found->legacy) {
      // The one use of the legacy stream that leaves the captures as they are.
      const auto& captures = scope.driver.captures;
      const bool any = std::any_of(captures.begin(), captures.end(), [&](const auto& capture) {
        return capture->context == found->context;
      });
      if (any) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    *status = !found->capture               ? CU_STREAM_CAPTURE_STATUS_NONE
              : found->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                            : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return call("cuThreadExchangeStreamCaptureMode", Needs::driver, {}, [&](Scope& scope) {
    if (mode == nullptr || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    std::swap(scope.thread.capture_mode, *mode);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuGraphDestroy(CUgraph graph) {
  return call("cuGraphDestroy", Needs::driver, {}, [&](Scope& scope) {
    return scope.driver.graphs.erase(number_of(graph)) == 1 ? CUDA_SUCCESS
                                                            : CUDA_ERROR_INVALID_VALUE;
  });
}
