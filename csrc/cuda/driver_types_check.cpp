// Compares our declarations of the driver's types with a toolkit's. Compiled with its nvcc, where
// one takes part in the build; it defines nothing.

#if __has_include(<cudaTypedefs.h>)  // not every nvcc comes with the headers

#include <cstddef>
#include <type_traits>

#include "cuda/driver_types.h"
// After ours: it defines macros with the names of functions that our list names.
#include <cuda.h>
#include <cudaTypedefs.h>

namespace ours = kvburst::cuda;

namespace kvburst::cuda {
#define POINTER_TO(name, version, parameters) using PFN_##name = CUresult(*) parameters;
KVBURST_DRIVER_FUNCTIONS(POINTER_TO)
}  // namespace kvburst::cuda

namespace {

/// As many parameters on either side, each of the same size, addresses where addresses are.
template <class Ours, class Theirs>
struct Alike : std::false_type {};
template <class... Ours, class... Theirs>
  requires(sizeof...(Ours) == sizeof...(Theirs))
struct Alike<ours::CUresult (*)(Ours...), ::CUresult (*)(Theirs...)>
    : std::bool_constant<((sizeof(Ours) == sizeof(Theirs) &&
                           std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>) &&
                          ...)> {};

}  // namespace

#define CHECK_NUMBER(name) \
  static_assert(static_cast<long long>(ours::name) == static_cast<long long>(::name))
#define CHECK_OFFSET(type, field) \
  static_assert(offsetof(ours::type, field) == offsetof(::type, field))
#define CHECK_FIELD(type, field)                                         \
  static_assert(offsetof(ours::type, field) == offsetof(::type, field)); \
  static_assert(sizeof(ours::type::field) == sizeof(::type::field))
#define CHECK_SIZE(type)                               \
  static_assert(sizeof(ours::type) == sizeof(::type)); \
  static_assert(alignof(ours::type) == alignof(::type))

#define CHECK_FUNCTION(name, version, parameters) \
  static_assert(Alike<ours::PFN_##name, ::PFN_##name##_v##version>::value);

KVBURST_DRIVER_FUNCTIONS(CHECK_FUNCTION)
static_assert(Alike<ours::GetProcAddressV1, PFN_cuGetProcAddress_v11030>::value);

CHECK_SIZE(CUdevice);
CHECK_SIZE(CUdeviceptr);
CHECK_SIZE(CUresult);
CHECK_SIZE(CUhostFn);
static_assert(ours::kStreamLegacy == 1 && ours::kStreamPerThread == 2);
static_assert(ours::kGetProcAddressLegacyStream == CU_GET_PROC_ADDRESS_LEGACY_STREAM);
static_assert(ours::kHostPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(ours::kHostPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(ours::kHostDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(ours::kHostDeviceMap == CU_MEMHOSTALLOC_DEVICEMAP);

CHECK_NUMBER(CUDA_SUCCESS);
CHECK_NUMBER(CUDA_ERROR_INVALID_VALUE);
CHECK_NUMBER(CUDA_ERROR_OUT_OF_MEMORY);
CHECK_NUMBER(CUDA_ERROR_NOT_INITIALIZED);
CHECK_NUMBER(CUDA_ERROR_DEINITIALIZED);
CHECK_NUMBER(CUDA_ERROR_STUB_LIBRARY);
CHECK_NUMBER(CUDA_ERROR_NO_DEVICE);
CHECK_NUMBER(CUDA_ERROR_INVALID_DEVICE);
CHECK_NUMBER(CUDA_ERROR_INVALID_CONTEXT);
CHECK_NUMBER(CUDA_ERROR_INVALID_HANDLE);
CHECK_NUMBER(CUDA_ERROR_NOT_FOUND);
CHECK_NUMBER(CUDA_ERROR_NOT_READY);
CHECK_NUMBER(CUDA_ERROR_ILLEGAL_ADDRESS);
CHECK_NUMBER(CUDA_ERROR_CONTEXT_IS_DESTROYED);
CHECK_NUMBER(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
CHECK_NUMBER(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
CHECK_NUMBER(CUDA_ERROR_NOT_PERMITTED);
CHECK_NUMBER(CUDA_ERROR_NOT_SUPPORTED);
CHECK_NUMBER(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
CHECK_NUMBER(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
CHECK_NUMBER(CUDA_ERROR_STREAM_CAPTURE_MERGE);
CHECK_NUMBER(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
CHECK_NUMBER(CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
CHECK_NUMBER(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
CHECK_NUMBER(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
CHECK_NUMBER(CUDA_ERROR_CAPTURED_EVENT);
CHECK_NUMBER(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
CHECK_NUMBER(CUDA_ERROR_UNKNOWN);

CHECK_SIZE(CUdevice_attribute);
CHECK_NUMBER(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
CHECK_NUMBER(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
CHECK_NUMBER(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
CHECK_NUMBER(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
CHECK_NUMBER(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
CHECK_NUMBER(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
CHECK_NUMBER(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);

CHECK_SIZE(CUpointer_attribute);
CHECK_NUMBER(CU_POINTER_ATTRIBUTE_CONTEXT);
CHECK_NUMBER(CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
CHECK_NUMBER(CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
CHECK_NUMBER(CU_POINTER_ATTRIBUTE_HOST_POINTER);
CHECK_NUMBER(CU_POINTER_ATTRIBUTE_IS_MANAGED);
CHECK_NUMBER(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
CHECK_NUMBER(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
CHECK_NUMBER(CU_POINTER_ATTRIBUTE_RANGE_SIZE);

CHECK_SIZE(CUmemorytype);
CHECK_NUMBER(CU_MEMORYTYPE_HOST);
CHECK_NUMBER(CU_MEMORYTYPE_DEVICE);
CHECK_NUMBER(CU_MEMORYTYPE_ARRAY);
CHECK_NUMBER(CU_MEMORYTYPE_UNIFIED);

CHECK_SIZE(CUstreamCaptureStatus);
CHECK_NUMBER(CU_STREAM_CAPTURE_STATUS_NONE);
CHECK_NUMBER(CU_STREAM_CAPTURE_STATUS_ACTIVE);
CHECK_NUMBER(CU_STREAM_CAPTURE_STATUS_INVALIDATED);

CHECK_SIZE(CUstreamCaptureMode);
CHECK_NUMBER(CU_STREAM_CAPTURE_MODE_GLOBAL);
CHECK_NUMBER(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
CHECK_NUMBER(CU_STREAM_CAPTURE_MODE_RELAXED);

CHECK_NUMBER(CU_STREAM_DEFAULT);
CHECK_NUMBER(CU_STREAM_NON_BLOCKING);
CHECK_NUMBER(CU_EVENT_DEFAULT);
CHECK_NUMBER(CU_EVENT_BLOCKING_SYNC);
CHECK_NUMBER(CU_EVENT_DISABLE_TIMING);

CHECK_SIZE(CUDA_MEMCPY2D);
CHECK_FIELD(CUDA_MEMCPY2D, srcXInBytes);
CHECK_FIELD(CUDA_MEMCPY2D, srcY);
CHECK_FIELD(CUDA_MEMCPY2D, srcMemoryType);
CHECK_FIELD(CUDA_MEMCPY2D, srcHost);
CHECK_FIELD(CUDA_MEMCPY2D, srcDevice);
CHECK_FIELD(CUDA_MEMCPY2D, srcArray);
CHECK_FIELD(CUDA_MEMCPY2D, srcPitch);
CHECK_FIELD(CUDA_MEMCPY2D, dstXInBytes);
CHECK_FIELD(CUDA_MEMCPY2D, dstY);
CHECK_FIELD(CUDA_MEMCPY2D, dstMemoryType);
CHECK_FIELD(CUDA_MEMCPY2D, dstHost);
CHECK_FIELD(CUDA_MEMCPY2D, dstDevice);
CHECK_FIELD(CUDA_MEMCPY2D, dstArray);
CHECK_FIELD(CUDA_MEMCPY2D, dstPitch);
CHECK_FIELD(CUDA_MEMCPY2D, WidthInBytes);
CHECK_FIELD(CUDA_MEMCPY2D, Height);

#if CUDA_VERSION >= 12000
CHECK_SIZE(CUdriverProcAddressQueryResult);
CHECK_NUMBER(CU_GET_PROC_ADDRESS_SUCCESS);
CHECK_NUMBER(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
CHECK_NUMBER(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
static_assert(Alike<ours::GetProcAddressV2, PFN_cuGetProcAddress_v12000>::value);
#endif

#if CUDA_VERSION >= 12080
CHECK_SIZE(CUmemLocationType);
CHECK_NUMBER(CU_MEM_LOCATION_TYPE_INVALID);
CHECK_NUMBER(CU_MEM_LOCATION_TYPE_DEVICE);
CHECK_NUMBER(CU_MEM_LOCATION_TYPE_HOST);

CHECK_SIZE(CUmemLocation);
CHECK_FIELD(CUmemLocation, type);
CHECK_FIELD(CUmemLocation, id);

CHECK_SIZE(CUmemcpySrcAccessOrder);
CHECK_NUMBER(CU_MEMCPY_SRC_ACCESS_ORDER_INVALID);
CHECK_NUMBER(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
CHECK_NUMBER(CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL);
CHECK_NUMBER(CU_MEMCPY_SRC_ACCESS_ORDER_ANY);

CHECK_SIZE(CUmemcpy3DOperandType);
CHECK_NUMBER(CU_MEMCPY_OPERAND_TYPE_POINTER);
CHECK_NUMBER(CU_MEMCPY_OPERAND_TYPE_ARRAY);

CHECK_SIZE(CUmemcpyAttributes);
CHECK_FIELD(CUmemcpyAttributes, srcAccessOrder);
CHECK_FIELD(CUmemcpyAttributes, srcLocHint);
CHECK_FIELD(CUmemcpyAttributes, dstLocHint);
CHECK_FIELD(CUmemcpyAttributes, flags);

CHECK_SIZE(CUextent3D);
CHECK_FIELD(CUextent3D, width);
CHECK_FIELD(CUextent3D, height);
CHECK_FIELD(CUextent3D, depth);

CHECK_SIZE(CUoffset3D);
CHECK_FIELD(CUoffset3D, x);
CHECK_FIELD(CUoffset3D, y);
CHECK_FIELD(CUoffset3D, z);

CHECK_SIZE(CUmemcpy3DOperand);
CHECK_OFFSET(CUmemcpy3DOperand, type);
CHECK_OFFSET(CUmemcpy3DOperand, op.ptr.ptr);
CHECK_OFFSET(CUmemcpy3DOperand, op.ptr.rowLength);
CHECK_OFFSET(CUmemcpy3DOperand, op.ptr.layerHeight);
CHECK_OFFSET(CUmemcpy3DOperand, op.ptr.locHint);
CHECK_OFFSET(CUmemcpy3DOperand, op.array.array);
CHECK_OFFSET(CUmemcpy3DOperand, op.array.offset);

CHECK_SIZE(CUDA_MEMCPY3D_BATCH_OP);
CHECK_FIELD(CUDA_MEMCPY3D_BATCH_OP, src);
CHECK_FIELD(CUDA_MEMCPY3D_BATCH_OP, dst);
CHECK_FIELD(CUDA_MEMCPY3D_BATCH_OP, extent);
CHECK_FIELD(CUDA_MEMCPY3D_BATCH_OP, srcAccessOrder);
CHECK_FIELD(CUDA_MEMCPY3D_BATCH_OP, flags);

static_assert(Alike<ours::CopyBatchV12080, PFN_cuMemcpyBatchAsync_v12080>::value);
static_assert(Alike<ours::CopyBatch3DV12080, PFN_cuMemcpy3DBatchAsync_v12080>::value);
#endif

#if CUDA_VERSION >= 13000
static_assert(Alike<ours::CopyBatchV13000, PFN_cuMemcpyBatchAsync_v13000>::value);
static_assert(Alike<ours::CopyBatch3DV13000, PFN_cuMemcpy3DBatchAsync_v13000>::value);
#endif

#endif
