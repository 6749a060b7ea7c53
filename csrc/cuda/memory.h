#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/pool_layout.h"
#include "cuda/context.h"

namespace kvburst::cuda {

/// Memory of the device. Freed with its owner, which keeps the context.
class DeviceMemory {
 public:
  /// Throws DeviceError if there is not as much.
  DeviceMemory(std::shared_ptr<const Context> context, std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::uintptr_t address() const { return address_; }
  std::size_t bytes() const { return bytes_; }
  const Context& context() const { return *context_; }

 private:
  std::shared_ptr<const Context> context_;
  CUdeviceptr address_ = 0;
  std::size_t bytes_;
};

/// New pinned host memory, which every context may use. Freed with its last owner.
std::shared_ptr<std::byte[]> allocate_pinned(std::shared_ptr<const Context> context,
                                             std::size_t bytes);

/// Largest chunk to register at a time: far below the 512 GiB at which drivers refuse.
constexpr std::size_t kLargestChunk = std::size_t{256} << 30;

/// Host memory that somebody allocated, pinned while this lives.
///
/// It is registered in chunks, since drivers refuse very large ones; a chunk ends where a unit
/// does, since a copy across the border of two registrations fails. What was registered already is
/// used as it is and left so. The memory must live longer than this.
class PinnedMemory {
 public:
  /// `unit`: bytes that are to stay in one chunk, counted from the start of `buffer`: a page, or a
  /// page of all layers. Throws LayoutError if `unit` does not fit a chunk of `largest_chunk`, and
  /// DeviceError if the driver refuses; nothing stays registered then.
  PinnedMemory(std::shared_ptr<const Context> context, MemoryRange buffer, std::size_t unit,
               std::size_t largest_chunk = kLargestChunk);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  /// By address. No copy may reach from one into the next.
  std::span<const MemoryRange> ranges() const { return ranges_; }

 private:
  void register_chunk(const MemoryRange& chunk);
  void adopt(const MemoryRange& chunk);
  void unregister() noexcept;

  std::shared_ptr<const Context> context_;
  std::vector<MemoryRange> ranges_;
  /// Those of ours, in the order of registration.
  std::vector<std::uintptr_t> registered_;
};

}  // namespace kvburst::cuda
