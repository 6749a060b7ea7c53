#include <limits>
#include <utility>
#include <vector>

#include "capture.h"
#include "transfers.h"

/// The batch calls: refused on the legacy stream and on a capturing one, whose capture goes on
/// without the copies.

using namespace stand_in;

namespace {

/// Where an order says that the source is read, here as early as that allows.
std::optional<ReadTime> read_time(CUmemcpySrcAccessOrder order) {
  switch (order) {
    case CU_MEMCPY_SRC_ACCESS_ORDER_STREAM:
      return ReadTime::in_order;
    case CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL:
      return ReadTime::during_call;
    case CU_MEMCPY_SRC_ACCESS_ORDER_ANY:
      return ReadTime::early;
    case CU_MEMCPY_SRC_ACCESS_ORDER_INVALID:
      break;
  }
  return std::nullopt;
}

bool valid_flags(unsigned int flags) { return flags <= 1; }

/// What forbids the whole batch.
std::optional<CUresult> batch_refused(Scope& scope, const Stream& stream, std::size_t count) {
  if (const auto refusal = implicit_use(scope, stream)) return refusal;
  if (stream.legacy) return CUDA_ERROR_INVALID_VALUE;
  if (stream.capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (count == 0 || count > scope.driver.settings.batch_cap) return CUDA_ERROR_INVALID_VALUE;
  return std::nullopt;
}

void fail_at(std::size_t* failed, std::size_t index) {
  if (failed != nullptr) *failed = index;
}

/// Each entry is for the copies from its index on; the first index is 0, and they increase.
bool valid_attributes(const CUmemcpyAttributes* attributes, const std::size_t* first_copies,
                      std::size_t attribute_count, std::size_t count) {
  if (attributes == nullptr || first_copies == nullptr) return false;
  if (attribute_count == 0 || attribute_count > count || first_copies[0] != 0) return false;
  for (std::size_t i = 0; i < attribute_count; ++i) {
    if (i > 0 && first_copies[i] <= first_copies[i - 1]) return false;
    if (first_copies[i] >= count) return false;
    if (!read_time(attributes[i].srcAccessOrder) || !valid_flags(attributes[i].flags)) return false;
  }
  return true;
}

CUresult copy_batch(const CUdeviceptr* dsts, const CUdeviceptr* srcs, const std::size_t* sizes,
                    std::size_t count, const CUmemcpyAttributes* attributes,
                    const std::size_t* first_copies, std::size_t attribute_count,
                    std::size_t* failed, CUstream stream) {
  const CallSubject subject{.stream = number_of(stream), .copies = count};
  return call("cuMemcpyBatchAsync", Needs::context, subject, [&](Scope& scope) {
    fail_at(failed, std::numeric_limits<std::size_t>::max());
    const auto on = scope.driver.find_stream(number_of(stream));
    if (!on) return CUDA_ERROR_INVALID_HANDLE;
    if (const auto refusal = batch_refused(scope, *on, count)) return *refusal;
    if (dsts == nullptr || srcs == nullptr || sizes == nullptr ||
        !valid_attributes(attributes, first_copies, attribute_count, count)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    std::vector<Transfer> transfers;
    transfers.reserve(count);
    std::size_t entry = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (entry + 1 < attribute_count && first_copies[entry + 1] == i) ++entry;
      auto dst = unified_operand(scope, dsts[i], sizes[i]);
      auto src = unified_operand(scope, srcs[i], sizes[i]);
      if (!dst || !src || sizes[i] == 0) {
        fail_at(failed, i);
        return CUDA_ERROR_INVALID_VALUE;
      }
      transfers.push_back({std::move(*dst), std::move(*src), sizes[i], 1, 0, 0,
                           *read_time(attributes[entry].srcAccessOrder)});
    }
    enqueue(scope, on, std::move(transfers));
    return CUDA_SUCCESS;
  });
}

/// A pointer operand, its pitches filled in. The documentation has no maximum pitch here; taking it
/// for the one of 2D copies is the strict reading.
struct Layers {
  std::uintptr_t address;
  std::size_t row_pitch;
  std::size_t layer_pitch;
};

std::optional<Layers> layers_of(const Scope& scope, const CUmemcpy3DOperand& operand,
                                const CUextent3D& extent) {
  if (operand.type != CU_MEMCPY_OPERAND_TYPE_POINTER) return std::nullopt;
  const auto& pointer = operand.op.ptr;
  if (pointer.rowLength != 0 && pointer.rowLength < extent.width) return std::nullopt;
  if (pointer.layerHeight != 0 && pointer.layerHeight < extent.height) return std::nullopt;
  const std::size_t row = pointer.rowLength != 0 ? pointer.rowLength : extent.width;
  const std::size_t rows = pointer.layerHeight != 0 ? pointer.layerHeight : extent.height;
  if (row > scope.driver.settings.max_pitch && extent.height * extent.depth > 1) {
    return std::nullopt;
  }
  std::size_t layer = 0;
  if (__builtin_mul_overflow(row, rows, &layer)) return std::nullopt;
  return Layers{pointer.ptr, row, layer};
}

/// Adds a transfer for each layer of one entry; false if the entry is not valid.
bool add_layers(const Scope& scope, const CUDA_MEMCPY3D_BATCH_OP& copy,
                std::vector<Transfer>& transfers) {
  const CUextent3D& extent = copy.extent;
  if (extent.width == 0 || extent.height == 0 || extent.depth == 0) return false;
  const std::optional<ReadTime> reads = read_time(copy.srcAccessOrder);
  const std::optional<Layers> dst = layers_of(scope, copy.dst, extent);
  const std::optional<Layers> src = layers_of(scope, copy.src, extent);
  if (!reads || !dst || !src || !valid_flags(copy.flags)) return false;
  for (const Layers* layers : {&*dst, &*src}) {
    const std::optional<std::size_t> in_a_layer =
        hull(extent.width, extent.height, layers->row_pitch);
    const std::optional<std::size_t> bytes =
        in_a_layer ? hull(*in_a_layer, extent.depth, layers->layer_pitch) : std::nullopt;
    if (!bytes || !unified_operand(scope, layers->address, *bytes)) return false;
  }
  for (std::size_t z = 0; z < extent.depth; ++z) {
    const auto at = [&](const Layers& layers) {
      return *unified_operand(scope, layers.address + z * layers.layer_pitch,
                              *hull(extent.width, extent.height, layers.row_pitch));
    };
    transfers.push_back(
        {at(*dst), at(*src), extent.width, extent.height, dst->row_pitch, src->row_pitch, *reads});
  }
  return true;
}

CUresult copy_batch_3d(std::size_t count, const CUDA_MEMCPY3D_BATCH_OP* copies, std::size_t* failed,
                       unsigned long long flags, CUstream stream) {
  const CallSubject subject{.stream = number_of(stream), .copies = count};
  return call("cuMemcpy3DBatchAsync", Needs::context, subject, [&](Scope& scope) {
    fail_at(failed, std::numeric_limits<std::size_t>::max());
    const auto on = scope.driver.find_stream(number_of(stream));
    if (!on) return CUDA_ERROR_INVALID_HANDLE;
    if (const auto refusal = batch_refused(scope, *on, count)) return *refusal;
    if (copies == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    std::vector<Transfer> transfers;
    for (std::size_t i = 0; i < count; ++i) {
      if (!add_layers(scope, copies[i], transfers)) {
        fail_at(failed, i);
        return CUDA_ERROR_INVALID_VALUE;
      }
    }
    enqueue(scope, on, std::move(transfers));
    return CUDA_SUCCESS;
  });
}

}  // namespace

// The forms of 12.8 and of 13.0, the second without the index of the copy that failed.

STAND_IN_EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr* dsts, CUdeviceptr* srcs,
                                            std::size_t* sizes, std::size_t count,
                                            CUmemcpyAttributes* attributes,
                                            std::size_t* first_copies, std::size_t attribute_count,
                                            std::size_t* failed, CUstream stream) {
  return copy_batch(dsts, srcs, sizes, count, attributes, first_copies, attribute_count, failed,
                    stream);
}

STAND_IN_EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* dsts, CUdeviceptr* srcs,
                                               std::size_t* sizes, std::size_t count,
                                               CUmemcpyAttributes* attributes,
                                               std::size_t* first_copies,
                                               std::size_t attribute_count, CUstream stream) {
  return copy_batch(dsts, srcs, sizes, count, attributes, first_copies, attribute_count, nullptr,
                    stream);
}

STAND_IN_EXPORT CUresult cuMemcpy3DBatchAsync(std::size_t count, CUDA_MEMCPY3D_BATCH_OP* copies,
                                              std::size_t* failed, unsigned long long flags,
                                              CUstream stream) {
  return copy_batch_3d(count, copies, failed, flags, stream);
}

STAND_IN_EXPORT CUresult cuMemcpy3DBatchAsync_v2(std::size_t count, CUDA_MEMCPY3D_BATCH_OP* copies,
                                                 unsigned long long flags, CUstream stream) {
  return copy_batch_3d(count, copies, nullptr, flags, stream);
}
