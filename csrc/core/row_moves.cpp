#include "core/row_moves.h"

#include <cstddef>
#include <limits>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

/// What the whole of packed memory may be: addresses beyond have no meaning.
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 56;

void check_address(const char* name, std::uintptr_t address) {
  if (address == 0) throw DeviceError(text(name, ": 0 is no address"));
}

}  // namespace

void RowMove::check() const {
  if (row_bytes == 0) throw DeviceError("row_bytes: 0 is below the minimum of 1");
  if (row_bytes > kMostBytes || count > kMostBytes / row_bytes) {
    throw DeviceError(text("count: ", count, " rows of ", row_bytes, " bytes are more than the ",
                           kMostBytes, " bytes that there can be"));
  }
  if (count == 0) return;
  check_address("packed", packed);
  check_address("rows", rows);
  check_address("ids", ids);
  if (ids % alignof(std::int64_t) != 0) {
    throw DeviceError(text("ids: address 0x", std::hex, ids, std::dec, " must be a multiple of ",
                           alignof(std::int64_t)));
  }
}

std::uint64_t cut(std::span<const RowMove> moves, std::uint64_t piece_bytes, RowPart* parts) {
  std::uint64_t end = 0;
  for (const RowMove& move : moves) {
    const std::uint64_t whole = move.row_bytes / piece_bytes;
    const std::uint64_t pieces_per_row = whole + (move.row_bytes % piece_bytes != 0 ? 1 : 0);
    end += move.count * pieces_per_row;
    *parts++ = {move, pieces_per_row, end};
  }
  return end;
}

}  // namespace kvburst
