#include <algorithm>

#include "capture.h"
#include "driver.h"

/// Allocating, pinning and asking about memory. Giving memory back while an operation that uses it
/// is not known to be done is a finding: the host's end of the memory is a write that nothing
/// orders. The memory itself stays until the operation is done.

using namespace stand_in;

namespace {

void give_back(Scope& scope, const Block& block) {
  scope.driver.host_access({block.begin, block.end()}, true, scope.call);
  scope.driver.memory->forget(block);
}

}  // namespace

STAND_IN_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
  return call("cuMemAlloc", Needs::context, {.bytes = bytes}, [&](Scope& scope) {
    if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (const auto refusal = unsafe_call(scope)) return *refusal;
    Driver& state = scope.driver;
    const auto block = state.memory->allocate(bytes, scope.thread.context, state.settings.memory);
    if (!block) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = block->begin;
    scope.amend({.address = block->begin, .bytes = bytes});
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
  return call("cuMemFree", Needs::context, {.address = address}, [&](Scope& scope) {
    if (address == 0) return CUDA_SUCCESS;
    const auto block = scope.driver.memory->beginning_at(address);
    if (!block || !block->on_device() || block->adopted) return CUDA_ERROR_INVALID_VALUE;
    if (const auto refusal = unsafe_call(scope)) return *refusal;
    give_back(scope, *block);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuMemHostAlloc(void** address, std::size_t bytes, unsigned int flags) {
  return call("cuMemHostAlloc", Needs::context, {.bytes = bytes}, [&](Scope& scope) {
    if (address == nullptr || bytes == 0 || flags > 7) return CUDA_ERROR_INVALID_VALUE;
    if (const auto refusal = unsafe_call(scope)) return *refusal;
    Driver& state = scope.driver;
    const auto block = state.memory->allocate_host(bytes, scope.thread.context);
    if (!block) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = reinterpret_cast<void*>(block->begin);
    scope.amend({.address = block->begin, .bytes = bytes});
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuMemFreeHost(void* address) {
  return call("cuMemFreeHost", Needs::context, {.address = number_of(address)}, [&](Scope& scope) {
    const auto block = scope.driver.memory->beginning_at(number_of(address));
    if (!block || block->kind != Kind::allocated) return CUDA_ERROR_INVALID_VALUE;
    if (const auto refusal = unsafe_call(scope)) return *refusal;
    give_back(scope, *block);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuMemHostRegister_v2(void* address, std::size_t bytes,
                                              unsigned int flags) {
  const CallSubject subject{.address = number_of(address), .bytes = bytes};
  return call("cuMemHostRegister", Needs::context, subject, [&](Scope& scope) {
    if (address == nullptr || bytes == 0 || flags > 15) return CUDA_ERROR_INVALID_VALUE;
    if (const auto refusal = unsafe_call(scope)) return *refusal;
    Driver& state = scope.driver;
    if (!state.memory->register_host(number_of(address), bytes, scope.thread.context,
                                     !state.settings.host_pointers)) {
      return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    ++state.counts.registered;
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuMemHostUnregister(void* address) {
  const CallSubject subject{.address = number_of(address)};
  return call("cuMemHostUnregister", Needs::context, subject, [&](Scope& scope) {
    const auto block = scope.driver.memory->beginning_at(number_of(address));
    if (!block || block->kind != Kind::registered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    if (const auto refusal = unsafe_call(scope)) return *refusal;
    give_back(scope, *block);
    ++scope.driver.counts.unregistered;
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* alias, void* address,
                                                      unsigned int flags) {
  const CallSubject subject{.address = number_of(address)};
  return call("cuMemHostGetDevicePointer", Needs::context, subject, [&](Scope& scope) {
    const auto block = scope.driver.memory->holding(number_of(address));
    if (alias == nullptr || flags != 0 || !block || block->on_device() ||
        number_of(address) < block->begin || number_of(address) >= block->end()) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    *alias =
        block->alias == 0 ? number_of(address) : block->alias + (number_of(address) - block->begin);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  return call("cuMemGetInfo", Needs::context, {}, [&](Scope& scope) {
    if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *total = scope.driver.settings.memory;
    *free = *total - std::min(*total, scope.driver.memory->device_bytes());
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* bytes,
                                                 CUdeviceptr address) {
  return call("cuMemGetAddressRange", Needs::context, {.address = address}, [&](Scope& scope) {
    const auto block = scope.driver.memory->holding(address);
    if (!block || !block->on_device()) return CUDA_ERROR_NOT_FOUND;
    if (base != nullptr) *base = block->begin;
    if (bytes != nullptr) *bytes = block->bytes;
    return CUDA_SUCCESS;
  });
}

namespace {

template <class Value>
CUresult set(void* value, Value to) {
  *static_cast<Value*>(value) = to;
  return CUDA_SUCCESS;
}

CUresult pointer_attribute(Scope& scope, void* value, CUpointer_attribute which, const Block& block,
                           CUdeviceptr address) {
  const bool by_alias = address < block.begin || address >= block.end();
  const std::uintptr_t host = by_alias ? address - block.alias + block.begin : address;
  switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return set(value, reinterpret_cast<CUcontext>(block.context));
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return set(value, block.on_device() ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return set(value, CUdeviceptr{block.alias == 0 ? host : block.alias + (host - block.begin)});
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (block.on_device()) return CUDA_ERROR_INVALID_VALUE;
      return set(value, reinterpret_cast<void*>(host));
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return set(value, 0U);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: {
      const auto context = scope.driver.contexts.find(block.context);
      if (context == scope.driver.contexts.end()) return CUDA_ERROR_INVALID_VALUE;
      return set(value, context->second.device);
    }
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return set(value, CUdeviceptr{block.begin});
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return set(value, block.bytes);
  }
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

STAND_IN_EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which,
                                               CUdeviceptr address) {
  return call("cuPointerGetAttribute", Needs::context, {.address = address}, [&](Scope& scope) {
    const auto block = scope.driver.memory->holding(address);
    if (value == nullptr || !block) return CUDA_ERROR_INVALID_VALUE;
    return pointer_attribute(scope, value, which, *block, address);
  });
}

/// Unlike the call above it does not fail for an address that the driver does not know.
STAND_IN_EXPORT CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute* which,
                                                void** values, CUdeviceptr address) {
  return call("cuPointerGetAttributes", Needs::context, {.address = address}, [&](Scope& scope) {
    if (count == 0 || which == nullptr || values == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto block = scope.driver.memory->holding(address);
    for (unsigned int i = 0; i < count; ++i) {
      if (block && pointer_attribute(scope, values[i], which[i], *block, address) == CUDA_SUCCESS) {
        continue;
      }
      switch (which[i]) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
          set(values[i], 0U);
          break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
          set(values[i], -2);
          break;
        default:
          set(values[i], std::uint64_t{0});
      }
    }
    return CUDA_SUCCESS;
  });
}
