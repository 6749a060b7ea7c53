#include <cstring>

#include "capture.h"
#include "transfers.h"

/// The single copies, and the fill.

using namespace stand_in;

STAND_IN_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, std::size_t bytes,
                                              CUstream stream) {
  const CallSubject subject{.stream = number_of(stream), .bytes = bytes};
  return call("cuMemcpyHtoDAsync", Needs::context, subject, [&](Scope& scope) {
    return single_copy(scope, stream, device_operand(scope, dst, bytes),
                       host_operand(scope, number_of(src), bytes), bytes);
  });
}

STAND_IN_EXPORT CUresult cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, std::size_t bytes,
                                              CUstream stream) {
  const CallSubject subject{.stream = number_of(stream), .bytes = bytes};
  return call("cuMemcpyDtoHAsync", Needs::context, subject, [&](Scope& scope) {
    return single_copy(scope, stream, host_operand(scope, number_of(dst), bytes),
                       device_operand(scope, src, bytes), bytes);
  });
}

STAND_IN_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes,
                                              CUstream stream) {
  const CallSubject subject{.stream = number_of(stream), .bytes = bytes};
  return call("cuMemcpyDtoDAsync", Needs::context, subject, [&](Scope& scope) {
    return single_copy(scope, stream, device_operand(scope, dst, bytes),
                       device_operand(scope, src, bytes), bytes);
  });
}

STAND_IN_EXPORT CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes,
                                       CUstream stream) {
  const CallSubject subject{.stream = number_of(stream), .bytes = bytes};
  return call("cuMemcpyAsync", Needs::context, subject, [&](Scope& scope) {
    return single_copy(scope, stream, unified_operand(scope, dst, bytes),
                       unified_operand(scope, src, bytes), bytes);
  });
}

namespace {

/// One side of a 2D copy.
struct Side {
  CUmemorytype type;
  std::uintptr_t host;
  CUdeviceptr device;
  std::size_t pitch;
  std::size_t x;
  std::size_t y;
};

/// Nothing if the documentation forbids the pitch or the range.
std::optional<Operand> operand_of(const Scope& scope, const Side& side, const CUDA_MEMCPY2D& copy) {
  const std::size_t max_pitch = scope.driver.settings.max_pitch;
  if (side.pitch > max_pitch || (side.pitch != 0 && side.pitch < copy.WidthInBytes + side.x)) {
    return std::nullopt;
  }
  if (side.pitch == 0 && copy.Height + side.y > 1) return std::nullopt;
  const std::optional<std::size_t> bytes = hull(copy.WidthInBytes, copy.Height, side.pitch);
  if (!bytes) return std::nullopt;
  const std::size_t offset = side.y * side.pitch + side.x;
  switch (side.type) {
    case CU_MEMORYTYPE_HOST:
      return host_operand(scope, side.host + offset, *bytes);
    case CU_MEMORYTYPE_DEVICE:
      return device_operand(scope, side.device + offset, *bytes);
    case CU_MEMORYTYPE_UNIFIED:
      return unified_operand(scope, side.device + offset, *bytes);
    case CU_MEMORYTYPE_ARRAY:
      break;
  }
  return std::nullopt;
}

}  // namespace

STAND_IN_EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* copy, CUstream stream) {
  const CallSubject subject{.stream = number_of(stream)};
  return call("cuMemcpy2DAsync", Needs::context, subject, [&](Scope& scope) {
    if (copy == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Side dst{copy->dstMemoryType, number_of(copy->dstHost), copy->dstDevice,
                   copy->dstPitch,      copy->dstXInBytes,        copy->dstY};
    const Side src{copy->srcMemoryType, number_of(copy->srcHost), copy->srcDevice,
                   copy->srcPitch,      copy->srcXInBytes,        copy->srcY};
    return single_copy(scope, stream, operand_of(scope, dst, *copy), operand_of(scope, src, *copy),
                       copy->WidthInBytes, copy->Height, dst.pitch, src.pitch);
  });
}

STAND_IN_EXPORT CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, std::size_t bytes,
                                         CUstream stream) {
  const CallSubject subject{.stream = number_of(stream), .bytes = bytes};
  return call("cuMemsetD8Async", Needs::context, subject, [&](Scope& scope) {
    Driver& state = scope.driver;
    const auto on = state.find_stream(number_of(stream));
    if (!on) return CUDA_ERROR_INVALID_HANDLE;
    std::optional<Operand> operand = device_operand(scope, dst, bytes);
    if (!operand || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const Captured by = captured(scope, *on);
    if (by.refusal) return *by.refusal;
    if (by.swallowed) return CUDA_SUCCESS;
    Place place = scope.place(on);
    if (state.settings.checker) {
      state.checker.access({operand->address, operand->address + bytes}, true, place.start,
                           {on->line, place.tick, scope.call});
    }
    auto body = [operand = std::move(*operand), value, bytes] {
      std::memset(reinterpret_cast<void*>(operand.address), value, bytes);
    };
    scope.push(on, std::move(place), {.after = {}, .gate = {}, .body = std::move(body)});
    return CUDA_SUCCESS;
  });
}
