#pragma once

#include <cstddef>
#include <cstdint>

/// Our own declarations of the few driver types that the copy path uses, so that it builds on a
/// machine without a CUDA toolkit. They keep the names of `cuda.h`, in a namespace of their own;
/// where `cuda.h` has a macro, ours is a constant. driver_types_check.cpp compares every size,
/// offset, number and signature here with a toolkit's, where one is found.
namespace kvburst::cuda {

// --- handles and addresses -------------------------------------------------------------------

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUgraph = struct CUgraph_st*;
using CUarray = struct CUarray_st*;
using CUfunction = struct CUfunc_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUhostFn = void (*)(void* user_data);

/// The legacy default stream: handle 0 or 1. Every blocking stream of the context and it wait for
/// each other; the batch calls refuse it.
constexpr std::uintptr_t kStreamLegacy = 1;
/// The calling thread's own default stream.
constexpr std::uintptr_t kStreamPerThread = 2;

// --- codes -----------------------------------------------------------------------------------

enum CUresult : unsigned int {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_STUB_LIBRARY = 34,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
  CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221,
  CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
  CUDA_ERROR_JIT_COMPILATION_DISABLED = 223,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
  CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
  CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
  CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
  CUDA_ERROR_NOT_PERMITTED = 800,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
  CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
  CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
  CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
  CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
  CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
  CUDA_ERROR_CAPTURED_EVENT = 907,
  CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
  CUDA_ERROR_UNKNOWN = 999,
};

enum CUdevice_attribute : unsigned int {
  CU_DEVICE_ATTRIBUTE_MAX_PITCH = 11,
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT = 40,
  CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  /// 0: the device knows registered host memory under another address only.
  CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
  CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
};

enum CUpointer_attribute : unsigned int {
  CU_POINTER_ATTRIBUTE_CONTEXT = 1,
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
  CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
  CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
  CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
  CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
  CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
};

enum CUmemorytype : unsigned int {
  CU_MEMORYTYPE_HOST = 1,
  CU_MEMORYTYPE_DEVICE = 2,
  CU_MEMORYTYPE_ARRAY = 3,
  CU_MEMORYTYPE_UNIFIED = 4,
};

enum CUstreamCaptureStatus : unsigned int {
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
  CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
};

enum CUstreamCaptureMode : unsigned int {
  CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,
};

enum CUdriverProcAddressQueryResult : unsigned int {
  CU_GET_PROC_ADDRESS_SUCCESS = 0,
  CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
  CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2,
};

constexpr unsigned int CU_STREAM_DEFAULT = 0;
constexpr unsigned int CU_STREAM_NON_BLOCKING = 1;
constexpr unsigned int CU_EVENT_DEFAULT = 0;
constexpr unsigned int CU_EVENT_BLOCKING_SYNC = 1;
constexpr unsigned int CU_EVENT_DISABLE_TIMING = 2;

constexpr std::uint64_t kGetProcAddressLegacyStream = 1;
/// Of cuMemHostRegister and cuMemHostAlloc alike.
constexpr unsigned int kHostPortable = 1;
constexpr unsigned int kHostDeviceMap = 2;

// --- what a copy is described with -----------------------------------------------------------

struct CUDA_MEMCPY2D {
  std::size_t srcXInBytes;
  std::size_t srcY;
  CUmemorytype srcMemoryType;
  const void* srcHost;
  CUdeviceptr srcDevice;
  CUarray srcArray;
  std::size_t srcPitch;
  std::size_t dstXInBytes;
  std::size_t dstY;
  CUmemorytype dstMemoryType;
  void* dstHost;
  CUdeviceptr dstDevice;
  CUarray dstArray;
  std::size_t dstPitch;
  std::size_t WidthInBytes;
  std::size_t Height;
};

enum CUmemLocationType : unsigned int {
  CU_MEM_LOCATION_TYPE_INVALID = 0,
  CU_MEM_LOCATION_TYPE_DEVICE = 1,
  CU_MEM_LOCATION_TYPE_HOST = 2,
};

struct CUmemLocation {
  CUmemLocationType type;
  int id;
};

enum CUmemcpySrcAccessOrder : unsigned int {
  CU_MEMCPY_SRC_ACCESS_ORDER_INVALID = 0,
  CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
  CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL = 2,
  CU_MEMCPY_SRC_ACCESS_ORDER_ANY = 3,
};

struct CUmemcpyAttributes {
  CUmemcpySrcAccessOrder srcAccessOrder;
  CUmemLocation srcLocHint;
  CUmemLocation dstLocHint;
  unsigned int flags;
};

enum CUmemcpy3DOperandType : unsigned int {
  CU_MEMCPY_OPERAND_TYPE_POINTER = 1,
  CU_MEMCPY_OPERAND_TYPE_ARRAY = 2,
};

struct CUextent3D {
  std::size_t width;
  std::size_t height;
  std::size_t depth;
};

struct CUoffset3D {
  std::size_t x;
  std::size_t y;
  std::size_t z;
};

/// Of a pointer operand: `rowLength` is in bytes, `layerHeight` in rows; 0 means packed.
struct CUmemcpy3DOperand {
  CUmemcpy3DOperandType type;
  union {
    struct {
      CUdeviceptr ptr;
      std::size_t rowLength;
      std::size_t layerHeight;
      CUmemLocation locHint;
    } ptr;
    struct {
      CUarray array;
      CUoffset3D offset;
    } array;
  } op;
};

struct CUDA_MEMCPY3D_BATCH_OP {
  CUmemcpy3DOperand src;
  CUmemcpy3DOperand dst;
  CUextent3D extent;
  CUmemcpySrcAccessOrder srcAccessOrder;
  unsigned int flags;
};

// --- the driver's functions ------------------------------------------------------------------

/// `dlsym` finds the first two; the rest come from whichever of them is there. The second since
/// driver 12.0.
using GetProcAddressV1 = CUresult (*)(const char* symbol, void** entry, int version,
                                      std::uint64_t flags);
using GetProcAddressV2 = CUresult (*)(const char* symbol, void** entry, int version,
                                      std::uint64_t flags, CUdriverProcAddressQueryResult* status);

/// Every function that any supported driver (11.3 on) has: its name, the version of the driver's
/// interface to ask for, which fixes the form, and its parameters. `cuMemAlloc` at 3020 is the one
/// that a library exports as `cuMemAlloc_v2`.
// clang-format off
#define KVBURST_DRIVER_FUNCTIONS(FUNCTION)                                                        \
  FUNCTION(cuInit, 2000, (unsigned int flags))                                                    \
  FUNCTION(cuDriverGetVersion, 2020, (int* version))                                              \
  FUNCTION(cuGetErrorName, 6000, (CUresult error, const char** name))                             \
  FUNCTION(cuGetErrorString, 6000, (CUresult error, const char** text))                           \
  FUNCTION(cuDeviceGetCount, 2000, (int* count))                                                  \
  FUNCTION(cuDeviceGet, 2000, (CUdevice* device, int ordinal))                                    \
  FUNCTION(cuDeviceGetName, 2000, (char* name, int size, CUdevice device))                        \
  FUNCTION(cuDeviceGetAttribute, 2000, (int* value, CUdevice_attribute which, CUdevice device))   \
  FUNCTION(cuDevicePrimaryCtxRetain, 7000, (CUcontext* context, CUdevice device))                 \
  FUNCTION(cuDevicePrimaryCtxRelease, 11000, (CUdevice device))                                   \
  FUNCTION(cuCtxGetCurrent, 4000, (CUcontext* context))                                           \
  FUNCTION(cuCtxSetCurrent, 4000, (CUcontext context))                                            \
  FUNCTION(cuStreamCreate, 2000, (CUstream* stream, unsigned int flags))                          \
  FUNCTION(cuStreamDestroy, 4000, (CUstream stream))                                              \
  FUNCTION(cuStreamSynchronize, 2000, (CUstream stream))                                          \
  FUNCTION(cuStreamQuery, 2000, (CUstream stream))                                                \
  FUNCTION(cuStreamWaitEvent, 3020, (CUstream stream, CUevent event, unsigned int flags))         \
  FUNCTION(cuStreamIsCapturing, 10000, (CUstream stream, CUstreamCaptureStatus* status))          \
  FUNCTION(cuThreadExchangeStreamCaptureMode, 10010, (CUstreamCaptureMode* mode))                 \
  FUNCTION(cuEventCreate, 2000, (CUevent* event, unsigned int flags))                             \
  FUNCTION(cuEventDestroy, 4000, (CUevent event))                                                 \
  FUNCTION(cuEventRecord, 2000, (CUevent event, CUstream stream))                                 \
  FUNCTION(cuEventQuery, 2000, (CUevent event))                                                   \
  FUNCTION(cuEventSynchronize, 2000, (CUevent event))                                             \
  FUNCTION(cuEventElapsedTime, 2000, (float* milliseconds, CUevent start, CUevent end))           \
  FUNCTION(cuMemcpyHtoDAsync, 3020, (CUdeviceptr dst, const void* src, std::size_t bytes,         \
                                     CUstream stream))                                            \
  FUNCTION(cuMemcpyDtoHAsync, 3020, (void* dst, CUdeviceptr src, std::size_t bytes,               \
                                     CUstream stream))                                            \
  FUNCTION(cuMemcpyDtoDAsync, 3020, (CUdeviceptr dst, CUdeviceptr src, std::size_t bytes,         \
                                     CUstream stream))                                            \
  FUNCTION(cuMemcpy2DAsync, 3020, (const CUDA_MEMCPY2D* copy, CUstream stream))                   \
  FUNCTION(cuMemsetD8Async, 3020, (CUdeviceptr dst, unsigned char value, std::size_t bytes,       \
                                   CUstream stream))                                              \
  FUNCTION(cuLaunchHostFunc, 10000, (CUstream stream, CUhostFn function, void* user_data))        \
  FUNCTION(cuLaunchKernel, 4000, (CUfunction function, unsigned int grid_x, unsigned int grid_y,  \
                                  unsigned int grid_z, unsigned int block_x,                      \
                                  unsigned int block_y, unsigned int block_z,                     \
                                  unsigned int shared_bytes, CUstream stream, void** parameters,  \
                                  void** extra))                                                  \
  FUNCTION(cuMemHostRegister, 6050, (void* address, std::size_t bytes, unsigned int flags))       \
  FUNCTION(cuMemHostUnregister, 4000, (void* address))                                            \
  FUNCTION(cuMemHostAlloc, 2020, (void** address, std::size_t bytes, unsigned int flags))         \
  FUNCTION(cuMemFreeHost, 2000, (void* address))                                                  \
  FUNCTION(cuMemHostGetDevicePointer, 3020, (CUdeviceptr* alias, void* address,                   \
                                             unsigned int flags))                                 \
  FUNCTION(cuMemAlloc, 3020, (CUdeviceptr* address, std::size_t bytes))                           \
  FUNCTION(cuMemFree, 3020, (CUdeviceptr address))                                                \
  FUNCTION(cuMemGetInfo, 3020, (std::size_t* free, std::size_t* total))                           \
  FUNCTION(cuMemGetAddressRange, 3020, (CUdeviceptr* base, std::size_t* bytes,                    \
                                        CUdeviceptr address))                                     \
  FUNCTION(cuPointerGetAttribute, 4000, (void* value, CUpointer_attribute which,                  \
                                         CUdeviceptr address))

/// What kernels are loaded with, since 12.0. The options, of which there are none here, are numbers.
#define KVBURST_LIBRARY_FUNCTIONS(FUNCTION)                                                       \
  FUNCTION(cuLibraryLoadData, 12000, (CUlibrary* library, const void* image, void* jit_options,   \
                                      void** jit_values, unsigned int jit_count, void* options,   \
                                      void** values, unsigned int count))                         \
  FUNCTION(cuLibraryGetKernel, 12000, (CUkernel* kernel, CUlibrary library, const char* name))    \
  FUNCTION(cuKernelGetFunction, 12000, (CUfunction* function, CUkernel kernel))
// clang-format on

// The batch calls changed form: a driver from 12.8 to 12.9 has the first of each pair, one from
// 13.0 on has both, and which one it hands out depends on the version asked for.

/// cuMemcpyBatchAsync at 12080.
using CopyBatchV12080 = CUresult (*)(CUdeviceptr* dsts, CUdeviceptr* srcs, std::size_t* sizes,
                                     std::size_t count, CUmemcpyAttributes* attributes,
                                     std::size_t* first_copy_of_attributes,
                                     std::size_t attribute_count, std::size_t* failed_copy,
                                     CUstream stream);
/// cuMemcpyBatchAsync at 13000.
using CopyBatchV13000 = CUresult (*)(CUdeviceptr* dsts, CUdeviceptr* srcs, std::size_t* sizes,
                                     std::size_t count, CUmemcpyAttributes* attributes,
                                     std::size_t* first_copy_of_attributes,
                                     std::size_t attribute_count, CUstream stream);
/// cuMemcpy3DBatchAsync at 12080.
using CopyBatch3DV12080 = CUresult (*)(std::size_t count, CUDA_MEMCPY3D_BATCH_OP* copies,
                                       std::size_t* failed_copy, unsigned long long flags,
                                       CUstream stream);
/// cuMemcpy3DBatchAsync at 13000.
using CopyBatch3DV13000 = CUresult (*)(std::size_t count, CUDA_MEMCPY3D_BATCH_OP* copies,
                                       unsigned long long flags, CUstream stream);

// The tests also call, by the names that the library exports: cuStreamBeginCapture_v2,
// cuStreamEndCapture, cuGraphDestroy, cuMemcpyAsync, cuPointerGetAttributes.

/// A library that exports a symbol of this name stands in for a driver: there is no GPU behind it,
/// so its device memory is host memory, and torch knows nothing of its streams.
constexpr const char* kStandInSymbol = "stand_in_configure";

}  // namespace kvburst::cuda
