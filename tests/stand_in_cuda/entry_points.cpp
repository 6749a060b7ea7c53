#include "entry_points.h"

#include <dlfcn.h>

#include <array>
#include <string_view>

#include "driver.h"

/// Which functions there are at which version, and the errors' names.

namespace stand_in {
namespace {

struct EntryPoint {
  std::string_view symbol;
  int since;             ///< the first version of the interface that has this form
  const char* exported;  ///< the name it has in the library
};

// Older forms, with other parameters, are not here: asking for one finds nothing.
constexpr std::array kEntryPoints{
    EntryPoint{"cuInit", 2000, "cuInit"},
    EntryPoint{"cuDriverGetVersion", 2020, "cuDriverGetVersion"},
    EntryPoint{"cuGetErrorName", 6000, "cuGetErrorName"},
    EntryPoint{"cuGetErrorString", 6000, "cuGetErrorString"},
    EntryPoint{"cuGetProcAddress", 11030, "cuGetProcAddress"},
    EntryPoint{"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    EntryPoint{"cuDeviceGetCount", 2000, "cuDeviceGetCount"},
    EntryPoint{"cuDeviceGet", 2000, "cuDeviceGet"},
    EntryPoint{"cuDeviceGetName", 2000, "cuDeviceGetName"},
    EntryPoint{"cuDeviceGetAttribute", 2000, "cuDeviceGetAttribute"},
    EntryPoint{"cuDevicePrimaryCtxRetain", 7000, "cuDevicePrimaryCtxRetain"},
    EntryPoint{"cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2"},
    EntryPoint{"cuCtxGetCurrent", 4000, "cuCtxGetCurrent"},
    EntryPoint{"cuCtxSetCurrent", 4000, "cuCtxSetCurrent"},
    EntryPoint{"cuCtxSynchronize", 2000, "cuCtxSynchronize"},
    EntryPoint{"cuStreamCreate", 2000, "cuStreamCreate"},
    EntryPoint{"cuStreamDestroy", 4000, "cuStreamDestroy_v2"},
    EntryPoint{"cuStreamSynchronize", 2000, "cuStreamSynchronize"},
    EntryPoint{"cuStreamQuery", 2000, "cuStreamQuery"},
    EntryPoint{"cuStreamWaitEvent", 3020, "cuStreamWaitEvent"},
    EntryPoint{"cuStreamBeginCapture", 10010, "cuStreamBeginCapture_v2"},
    EntryPoint{"cuStreamEndCapture", 10000, "cuStreamEndCapture"},
    EntryPoint{"cuStreamIsCapturing", 10000, "cuStreamIsCapturing"},
    EntryPoint{"cuThreadExchangeStreamCaptureMode", 10010, "cuThreadExchangeStreamCaptureMode"},
    EntryPoint{"cuGraphDestroy", 10000, "cuGraphDestroy"},
    EntryPoint{"cuEventCreate", 2000, "cuEventCreate"},
    EntryPoint{"cuEventDestroy", 4000, "cuEventDestroy_v2"},
    EntryPoint{"cuEventRecord", 2000, "cuEventRecord"},
    EntryPoint{"cuEventQuery", 2000, "cuEventQuery"},
    EntryPoint{"cuEventSynchronize", 2000, "cuEventSynchronize"},
    EntryPoint{"cuEventElapsedTime", 2000, "cuEventElapsedTime"},
    EntryPoint{"cuMemcpyAsync", 4000, "cuMemcpyAsync"},
    EntryPoint{"cuMemcpyHtoDAsync", 3020, "cuMemcpyHtoDAsync_v2"},
    EntryPoint{"cuMemcpyDtoHAsync", 3020, "cuMemcpyDtoHAsync_v2"},
    EntryPoint{"cuMemcpyDtoDAsync", 3020, "cuMemcpyDtoDAsync_v2"},
    EntryPoint{"cuMemcpy2DAsync", 3020, "cuMemcpy2DAsync_v2"},
    EntryPoint{"cuMemcpyBatchAsync", 12080, "cuMemcpyBatchAsync"},
    EntryPoint{"cuMemcpyBatchAsync", 13000, "cuMemcpyBatchAsync_v2"},
    EntryPoint{"cuMemcpy3DBatchAsync", 12080, "cuMemcpy3DBatchAsync"},
    EntryPoint{"cuMemcpy3DBatchAsync", 13000, "cuMemcpy3DBatchAsync_v2"},
    EntryPoint{"cuMemsetD8Async", 3020, "cuMemsetD8Async"},
    EntryPoint{"cuLaunchHostFunc", 10000, "cuLaunchHostFunc"},
    EntryPoint{"cuLaunchKernel", 4000, "cuLaunchKernel"},
    EntryPoint{"cuLibraryLoadData", 12000, "cuLibraryLoadData"},
    EntryPoint{"cuLibraryGetKernel", 12000, "cuLibraryGetKernel"},
    EntryPoint{"cuKernelGetFunction", 12000, "cuKernelGetFunction"},
    EntryPoint{"cuMemHostRegister", 6050, "cuMemHostRegister_v2"},
    EntryPoint{"cuMemHostUnregister", 4000, "cuMemHostUnregister"},
    EntryPoint{"cuMemHostAlloc", 2020, "cuMemHostAlloc"},
    EntryPoint{"cuMemFreeHost", 2000, "cuMemFreeHost"},
    EntryPoint{"cuMemHostGetDevicePointer", 3020, "cuMemHostGetDevicePointer_v2"},
    EntryPoint{"cuMemAlloc", 3020, "cuMemAlloc_v2"},
    EntryPoint{"cuMemFree", 3020, "cuMemFree_v2"},
    EntryPoint{"cuMemGetInfo", 3020, "cuMemGetInfo_v2"},
    EntryPoint{"cuMemGetAddressRange", 3020, "cuMemGetAddressRange_v2"},
    EntryPoint{"cuPointerGetAttribute", 4000, "cuPointerGetAttribute"},
    EntryPoint{"cuPointerGetAttributes", 7000, "cuPointerGetAttributes"},
};

/// This library's own function of that name.
void* own_function(const char* exported) {
  Dl_info self{};
  if (dladdr(reinterpret_cast<void*>(&get_proc_address), &self) == 0) return nullptr;
  void* const library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void* const function = dlsym(library, exported);
  dlclose(library);  // gives back the reference just taken
  return function;
}

struct ErrorText {
  CUresult code;
  const char* name;
  const char* text;
};

constexpr std::array kErrors{
    ErrorText{CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    ErrorText{CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    ErrorText{CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    ErrorText{CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    ErrorText{CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    ErrorText{CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    ErrorText{CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    ErrorText{CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE",
              "device kernel image is invalid"},
    ErrorText{CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
              "no kernel image is available for execution on the device"},
    ErrorText{CUDA_ERROR_JIT_COMPILER_NOT_FOUND, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
              "PTX JIT compiler library not found"},
    ErrorText{CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
              "the provided PTX was compiled with an unsupported toolchain."},
    ErrorText{CUDA_ERROR_JIT_COMPILATION_DISABLED, "CUDA_ERROR_JIT_COMPILATION_DISABLED",
              "PTX JIT compilation was disabled"},
    ErrorText{CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
              "too many resources requested for launch"},
    ErrorText{CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    ErrorText{CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    ErrorText{CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    ErrorText{CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    ErrorText{CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
              "an illegal memory access was encountered"},
    ErrorText{CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED",
              "context is destroyed"},
    ErrorText{CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
              "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
              "part or all of the requested memory range is already mapped"},
    ErrorText{CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
              "pointer does not correspond to a registered memory region"},
    ErrorText{CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    ErrorText{CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    ErrorText{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
              "operation not permitted when stream is capturing"},
    ErrorText{CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
              "operation failed due to a previous error during capture"},
    ErrorText{CUDA_ERROR_STREAM_CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
              "operation would result in a merge of separate capture sequences"},
    ErrorText{CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
              "capture was not ended in the same stream as it began"},
    ErrorText{CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
              "capturing stream has unjoined work"},
    ErrorText{CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
              "dependency created on uncaptured work in another stream"},
    ErrorText{CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
              "operation would make the legacy stream depend on a capturing blocking stream"},
    ErrorText{CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
              "operation not permitted on an event last recorded in a capturing stream"},
    ErrorText{CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
              "attempt to terminate a thread-local capture sequence from another thread"},
    ErrorText{CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult describe_error(const char* function, CUresult error, const char** out,
                        const char* ErrorText::* what) {
  return call(function, Needs::nothing, {}, [&](Scope&) {
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *out = nullptr;
    for (const ErrorText& known : kErrors) {
      if (known.code == error) *out = known.*what;
    }
    return *out == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  });
}

}  // namespace

CUresult get_proc_address(const char* symbol, void** entry, int version, std::uint64_t flags,
                          CUdriverProcAddressQueryResult* status) {
  return call("cuGetProcAddress", Needs::nothing, {}, [&](Scope& scope) {
    if (symbol == nullptr || entry == nullptr || flags > 2) return CUDA_ERROR_INVALID_VALUE;
    *entry = nullptr;
    if (version > scope.driver.settings.version) return CUDA_ERROR_INVALID_VALUE;
    const EntryPoint* best = nullptr;
    bool known = false;
    for (const EntryPoint& candidate : kEntryPoints) {
      if (candidate.symbol != symbol || candidate.since > scope.driver.settings.version) continue;
      known = true;
      if (candidate.since <= version && (best == nullptr || candidate.since > best->since)) {
        best = &candidate;
      }
    }
    if (best != nullptr) *entry = own_function(best->exported);
    if (status != nullptr) {
      *status = *entry != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS
                : known           ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                  : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    return CUDA_SUCCESS;
  });
}

}  // namespace stand_in

using namespace stand_in;

STAND_IN_EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  return describe_error("cuGetErrorName", error, name, &ErrorText::name);
}

STAND_IN_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  return describe_error("cuGetErrorString", error, text, &ErrorText::text);
}

STAND_IN_EXPORT CUresult cuGetProcAddress(const char* symbol, void** entry, int version,
                                          std::uint64_t flags) {
  return get_proc_address(symbol, entry, version, flags, nullptr);
}
