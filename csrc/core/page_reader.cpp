#include "core/page_reader.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

/// Indices that are read of each page: all of them, or the first alone.
std::int64_t slots_read(const DeferredPages& deferred) {
  return deferred.check == IndexCheck::slots ? deferred.page_size : 1;
}

std::size_t bytes_read(const DeferredPages& deferred) {
  return static_cast<std::size_t>(deferred.pages * slots_read(deferred) * deferred.slots.itemsize);
}

/// A copy that packs the wanted indices: strided, unless they are packed already, since a row of
/// its own for every eight bytes is what strided copies are worst at.
Copy gather(const DeferredPages& deferred, std::byte* to) {
  const auto itemsize = static_cast<std::size_t>(deferred.slots.itemsize);
  const auto slots = static_cast<std::size_t>(deferred.pages * slots_read(deferred));
  const auto step =
      static_cast<std::size_t>(deferred.slots.stride * deferred.page_size / slots_read(deferred));
  const auto dst = reinterpret_cast<std::uintptr_t>(to);
  const auto src = reinterpret_cast<std::uintptr_t>(deferred.slots.data);
  if (step == 1) return {dst, src, slots * itemsize, 1, 0, 0};
  return {dst, src, itemsize, slots, itemsize, step * itemsize};
}

}  // namespace

PageReader::PageReader(const std::shared_ptr<Device>& device) : device_(device), stream_(device) {}

void PageReader::read(PageLists& pages, EventHandle ready, Direction direction) {
  if (pages.deferred.empty()) return;
  std::size_t bytes = 0;
  for (const DeferredPages& deferred : pages.deferred) bytes += bytes_read(deferred);
  if (bytes > landing_bytes_) {
    // Seldom: to pin memory, and to let go of it, may wait for all that the device does.
    const std::size_t grown = std::bit_ceil(bytes);
    landing_ = device_->landing(grown);
    landing_bytes_ = grown;
  }
  device_->wait(stream_.handle(), ready);
  std::byte* to = landing_.get();
  for (const DeferredPages& deferred : pages.deferred) {
    device_->read(stream_.handle(), gather(deferred, to));
    to += bytes_read(deferred);
  }
  device_->synchronize_stream(stream_.handle());

  const std::byte* from = landing_.get();
  for (const DeferredPages& deferred : pages.deferred) {
    fill_in(deferred, from, pages);
    from += bytes_read(deferred);
  }
  if (direction == Direction::load) refuse_repeats(pages.lists[0]);
}

void PageReader::refuse_repeats(const std::vector<PagePair>& pairs) {
  sorted_.clear();
  for (const PagePair& pair : pairs) sorted_.push_back(pair.device);
  std::sort(sorted_.begin(), sorted_.end());
  const auto twice = std::adjacent_find(sorted_.begin(), sorted_.end());
  if (twice != sorted_.end()) {
    throw PageError(text("device_indices: page ", *twice, " is a destination of this load twice"));
  }
}

void PageReader::fill_in(const DeferredPages& deferred, const std::byte* slots,
                         PageLists& pages) const {
  const IndexView view{deferred.slots.name, slots, deferred.pages * slots_read(deferred), 1,
                       deferred.slots.itemsize};
  for (std::int64_t page = 0; page < deferred.pages; ++page) {
    pages.lists[0][deferred.first + static_cast<std::size_t>(page)].device = page_at(
        view, page * slots_read(deferred), deferred.page_size, deferred.tier_pages, deferred.check);
  }
}

}  // namespace kvburst
