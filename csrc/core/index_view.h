#pragma once

#include <cstdint>
#include <string_view>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {

/// A one-dimensional index tensor in host memory, in token slots. Read during the call it is passed
/// to and not after.
struct IndexView {
  /// The caller's name for it, for messages.
  std::string_view name;
  const void* data = nullptr;
  /// Slots.
  std::int64_t count = 0;
  /// Elements from one slot to the next; may be negative.
  std::int64_t stride = 1;
  /// Bytes of an element: 4 (int32) or 8 (int64).
  int itemsize = 8;

  std::int64_t operator[](std::int64_t i) const {
    if (itemsize == 4) return static_cast<const std::int32_t*>(data)[i * stride];
    return static_cast<const std::int64_t*>(data)[i * stride];
  }
};

/// How much of an index tensor is read when it is checked.
enum class IndexCheck : std::uint8_t {
  pages,  ///< the first slot of every page
  slots,  ///< every slot
};

/// Throws PageError unless the view holds whole pages of 4- or 8-byte integers.
void check_shape(const IndexView& view, std::int64_t page_size);

/// The page whose slots begin at position `first`. Throws PageError, naming position and slot, if
/// they do not begin a page of a tier of `pages` pages or, where every slot is checked, do not
/// follow each other.
std::int64_t page_at(const IndexView& view, std::int64_t first, std::int64_t page_size,
                     std::int64_t pages, IndexCheck check);

}  // namespace kvburst
