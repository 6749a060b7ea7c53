#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "driver.h"

/// What the copy calls have in common: operands are checked before anything is enqueued, and every
/// byte that will be touched is told to the checker.
namespace stand_in {

/// When the source is read.
enum class ReadTime : std::uint8_t {
  in_order,    ///< when the stream gets there
  early,       ///< here at the call, but by the rules any time until the stream gets there
  during_call  ///< at the call
};

struct Transfer {
  Operand dst;
  Operand src;
  std::size_t width;
  std::size_t height;
  std::size_t dst_pitch;
  std::size_t src_pitch;
  ReadTime reads = ReadTime::in_order;
};

/// Bytes from the first to the last of `height` rows; nothing if that overflows.
std::optional<std::size_t> hull(std::size_t width, std::size_t height, std::size_t pitch);

/// An address of the driver's: all of it device memory.
std::optional<Operand> device_operand(const Scope& scope, std::uintptr_t address,
                                      std::size_t bytes);
/// The address of a host buffer: all of it in one registration or in none.
std::optional<Operand> host_operand(const Scope& scope, std::uintptr_t address, std::size_t bytes);
/// An address of which the driver finds out itself what it is.
std::optional<Operand> unified_operand(const Scope& scope, std::uintptr_t address,
                                       std::size_t bytes);

/// Enqueues the transfers as one operation, without an order among them.
void enqueue(Scope& scope, const std::shared_ptr<Stream>& stream, std::vector<Transfer> transfers);

/// A single copy call: captured by a capturing stream; a pageable source is read early; into
/// pageable memory the call waits until the copy is done.
CUresult single_copy(Scope& scope, CUstream stream, const std::optional<Operand>& dst,
                     const std::optional<Operand>& src, std::size_t width, std::size_t height = 1,
                     std::size_t dst_pitch = 0, std::size_t src_pitch = 0);

}  // namespace stand_in
