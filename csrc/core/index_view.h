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

  /// Asks for the memory of element `i`, if there is one. One slot a page is read, so every read is
  /// another cache line, and a tensor that was kept since an earlier step is in no cache.
  void prefetch(std::int64_t i) const {
    if (i < count) __builtin_prefetch(static_cast<const char*>(data) + i * stride * itemsize);
  }
};

/// How much of an index tensor is read when it is checked.
enum class IndexCheck : std::uint8_t {
  pages,  ///< the first slot of every page
  slots,  ///< every slot
};

/// Throws PageError unless the view holds whole pages of 4- or 8-byte integers.
void check_shape(const IndexView& view, std::int64_t page_size);

/// Throws PageError, naming position and slot, unless the slots from position `first` on begin a
/// page of a tier of `pages` pages and, where every slot is checked, follow each other.
void check_page(const IndexView& view, std::int64_t first, std::int64_t page_size,
                std::int64_t pages, IndexCheck check);

/// The page whose slots begin at position `first`. Throws PageError as `check_page` does.
inline std::int64_t page_at(const IndexView& view, std::int64_t first, std::int64_t page_size,
                            std::int64_t pages, IndexCheck check) {
  const std::int64_t slot = view[first];
  const std::int64_t page = slot / page_size;
  const bool starts_page = slot >= 0 && page < pages && slot == page * page_size;
  if (!starts_page || check != IndexCheck::pages) {
    check_page(view, first, page_size, pages, check);
  }
  return page;
}

}  // namespace kvburst
