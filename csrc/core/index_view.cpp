#include "core/index_view.h"

namespace kvburst {

void check_shape(const IndexView& view, std::int64_t page_size) {
  if (view.itemsize != 4 && view.itemsize != 8) {
    throw PageError(
        text(view.name, ": elements of ", view.itemsize, " bytes, must be int32 (4) or int64 (8)"));
  }
  if (!view.data && view.count > 0) {
    throw PageError(text(view.name, ": ", view.count, " slots in no memory"));
  }
  if (view.count < 0 || view.count % page_size != 0) {
    throw PageError(
        text(view.name, ": ", view.count, " slots is not a multiple of page_size ", page_size));
  }
}

void check_page(const IndexView& view, std::int64_t first, std::int64_t page_size,
                std::int64_t pages, IndexCheck check) {
  const std::int64_t slot = view[first];
  const std::int64_t page = slot / page_size;
  if (slot < 0 || page >= pages) {
    throw PageError(text(view.name, "[", first, "]: slot ", slot, " is out of range, the tier has ",
                         pages, " pages of ", page_size, " slots"));
  }
  if (slot != page * page_size) {
    throw PageError(text(view.name, "[", first, "]: slot ", slot,
                         " does not start a page, it is not a multiple of page_size ", page_size));
  }
  if (check == IndexCheck::slots) {
    for (std::int64_t i = 1; i < page_size; ++i) {
      if (view[first + i] != slot + i) {
        throw PageError(text(view.name, "[", first + i, "]: slot ", view[first + i], " must be ",
                             slot + i, ", the slots of a page of ", page_size,
                             " follow each other"));
      }
    }
  }
}

}  // namespace kvburst
