#include <algorithm>
#include <cstdio>

#include "capture.h"
#include "driver.h"

/// Initialization, devices, and primary contexts.

using namespace stand_in;

namespace {

bool known(const Scope& scope, CUdevice device) {
  return device >= 0 && device < scope.driver.settings.devices;
}

}  // namespace

STAND_IN_EXPORT CUresult cuInit(unsigned int flags) {
  return call("cuInit", Needs::nothing, {}, [&](Scope& scope) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (scope.driver.settings.devices == 0) return CUDA_ERROR_NO_DEVICE;
    scope.driver.initialized = true;
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuDriverGetVersion(int* version) {
  return call("cuDriverGetVersion", Needs::nothing, {}, [&](Scope& scope) {
    if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *version = scope.driver.settings.version;
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuDeviceGetCount(int* count) {
  return call("cuDeviceGetCount", Needs::driver, {}, [&](Scope& scope) {
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = scope.driver.settings.devices;
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return call("cuDeviceGet", Needs::driver, {}, [&](Scope& scope) {
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!known(scope, ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  return call("cuDeviceGetName", Needs::driver, {}, [&](Scope& scope) {
    if (name == nullptr || size < 1) return CUDA_ERROR_INVALID_VALUE;
    if (!known(scope, device)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, static_cast<std::size_t>(size), "kvburst stand-in %d", device);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which,
                                              CUdevice device) {
  return call("cuDeviceGetAttribute", Needs::driver, {}, [&](Scope& scope) {
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!known(scope, device)) return CUDA_ERROR_INVALID_DEVICE;
    const Settings& settings = scope.driver.settings;
    switch (which) {
      case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
        *value = static_cast<int>(std::min<std::size_t>(settings.max_pitch, 2'147'483'647));
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = 24;  // few enough that tests run every thread of a kernel, and several blocks
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        *value = 2;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
      case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
        *value = 1;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = 9;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = 0;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
        *value = settings.host_pointers ? 1 : 0;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
  });
}

STAND_IN_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return call("cuDevicePrimaryCtxRetain", Needs::driver, {}, [&](Scope& scope) {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!known(scope, device)) return CUDA_ERROR_INVALID_DEVICE;
    Context& primary = scope.driver.primary_context(device);
    ++primary.retained;
    *context = reinterpret_cast<CUcontext>(primary.handle);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return call("cuDevicePrimaryCtxRelease", Needs::driver, {}, [&](Scope& scope) {
    if (!known(scope, device)) return CUDA_ERROR_INVALID_DEVICE;
    Context& primary = scope.driver.primary_context(device);
    if (primary.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--primary.retained == 0) scope.driver.tear_down(scope.lock, primary);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  return call("cuCtxGetCurrent", Needs::driver, {}, [&](Scope& scope) {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *context = reinterpret_cast<CUcontext>(scope.thread.context);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  return call("cuCtxSetCurrent", Needs::driver, {}, [&](Scope& scope) {
    const auto found = scope.driver.contexts.find(number_of(context));
    if (context != nullptr && found == scope.driver.contexts.end()) {
      return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (context != nullptr && found->second.retained == 0) {
      return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    scope.thread.context = number_of(context);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuCtxSynchronize() {
  return call("cuCtxSynchronize", Needs::context, {}, [&](Scope& scope) {
    const std::uintptr_t context = scope.thread.context;
    bool capturing = false;
    for (const auto& capture : scope.driver.captures) {
      if (capture->context != context) continue;
      capture->invalidated = true;
      capturing = true;
    }
    if (capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    for (const auto& stream : scope.driver.streams_of(context)) scope.synchronize(stream);
    return CUDA_SUCCESS;
  });
}
