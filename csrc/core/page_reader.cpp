#include "core/page_reader.h"

#include <algorithm>
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

/// A strided copy that packs the wanted indices.
Copy gather(const DeferredPages& deferred, std::byte* to) {
  const auto itemsize = static_cast<std::size_t>(deferred.slots.itemsize);
  const auto slots = static_cast<std::size_t>(deferred.pages * slots_read(deferred));
  const auto step =
      static_cast<std::size_t>(deferred.slots.stride * deferred.page_size / slots_read(deferred));
  return {reinterpret_cast<std::uintptr_t>(to),
          reinterpret_cast<std::uintptr_t>(deferred.slots.data),
          itemsize,
          slots,
          itemsize,
          step * itemsize};
}

}  // namespace

PageReader::PageReader(const std::shared_ptr<Device>& device) : device_(device), stream_(device) {}

void PageReader::read(PageLists& pages, EventHandle ready, Direction direction) {
  if (pages.deferred.empty()) return;
  std::size_t bytes = 0;
  for (const DeferredPages& deferred : pages.deferred) bytes += bytes_read(deferred);
  if (bytes > landing_bytes_) {
    landing_ = device_->landing(bytes);
    landing_bytes_ = bytes;
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
