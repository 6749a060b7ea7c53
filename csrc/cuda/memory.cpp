#include "cuda/memory.h"

#include <algorithm>
#include <new>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace kvburst::cuda {
namespace {

std::string name_of(const MemoryRange& range) {
  return text(range.size, " bytes at 0x", std::hex, range.address);
}

/// The memory around `address` that was registered or allocated as one; size 0 if it was not.
MemoryRange registration_at(const Context& context, std::uintptr_t address) {
  const auto ask = [&](void* value, CUpointer_attribute which) {
    return context.call().cuPointerGetAttribute(value, which, address) == CUDA_SUCCESS;
  };
  unsigned int type = 0;
  CUdeviceptr start = 0;
  std::size_t size = 0;
  if (!ask(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE) || type != CU_MEMORYTYPE_HOST) return {0, 0};
  if (!ask(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)) return {0, 0};
  if (!ask(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE)) return {0, 0};
  return {static_cast<std::uintptr_t>(start), size};
}

}  // namespace

DeviceMemory::DeviceMemory(std::shared_ptr<const Context> context, std::size_t bytes)
    : context_(std::move(context)), bytes_(bytes) {
  const Current current(*context_);
  context_->driver().check(context_->call().cuMemAlloc(&address_, bytes),
                           text("cuMemAlloc of ", bytes, " bytes"));
}

DeviceMemory::~DeviceMemory() {
  if (context_->forked()) return;
  const Current current(*context_, std::nothrow);
  if (!current.gone()) context_->call().cuMemFree(address_);
}

std::shared_ptr<std::byte[]> allocate_pinned(std::shared_ptr<const Context> context,
                                             std::size_t bytes) {
  void* address = nullptr;
  {
    const Current current(*context);
    context->driver().check(
        context->call().cuMemHostAlloc(&address, bytes, kHostPortable | kHostDeviceMap),
        text("cuMemHostAlloc of ", bytes, " bytes"));
  }
  return {static_cast<std::byte*>(address), [context = std::move(context)](std::byte* memory) {
            if (context->forked()) return;
            const Current current(*context, std::nothrow);
            if (!current.gone()) context->call().cuMemFreeHost(memory);
          }};
}

PinnedMemory::PinnedMemory(std::shared_ptr<const Context> context, MemoryRange buffer,
                           std::size_t unit, std::size_t largest_chunk)
    : context_(std::move(context)) {
  if (unit == 0 || unit > largest_chunk) {
    throw LayoutError(text("unit: ", unit, " bytes must be from 1 to ", largest_chunk,
                           ", the largest chunk that is registered at a time"));
  }
  const std::size_t step = largest_chunk / unit * unit;
  const Current current(*context_);
  try {
    for (std::size_t offset = 0; offset < buffer.size; offset += step) {
      register_chunk({buffer.address + offset, std::min(step, buffer.size - offset)});
    }
  } catch (...) {
    unregister();
    throw;
  }
}

PinnedMemory::~PinnedMemory() {
  if (context_->forked()) return;
  const Current current(*context_, std::nothrow);
  if (!current.gone()) unregister();
}

void PinnedMemory::register_chunk(const MemoryRange& chunk) {
  const CUresult result = context_->call().cuMemHostRegister(
      reinterpret_cast<void*>(chunk.address), chunk.size, kHostPortable | kHostDeviceMap);
  if (result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) return adopt(chunk);
  if (result != CUDA_SUCCESS) {
    context_->driver().check(result, text("cuMemHostRegister of ", name_of(chunk)));
  }
  registered_.push_back(chunk.address);
  ranges_.push_back(chunk);
}

/// Somebody has registered it, or a part of it.
void PinnedMemory::adopt(const MemoryRange& chunk) {
  for (std::uintptr_t at = chunk.address; at < chunk.end();) {
    const MemoryRange found = registration_at(*context_, at);
    if (!found.contains(at, 1)) {
      throw DeviceError(text("cuMemHostRegister of ", name_of(chunk),
                             ": a part of it is registered", " already, but 0x", std::hex, at,
                             " is not; unregister that part"));
    }
    const std::uintptr_t end = std::min(found.end(), chunk.end());
    ranges_.push_back({at, end - at});
    at = end;
  }
}

/// Last first, since nothing but the order of registration is known to be safe.
void PinnedMemory::unregister() noexcept {
  for (; !registered_.empty(); registered_.pop_back()) {
    context_->call().cuMemHostUnregister(reinterpret_cast<void*>(registered_.back()));
  }
}

}  // namespace kvburst::cuda
