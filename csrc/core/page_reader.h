#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/burst_pages.h"
#include "core/device.h"

namespace kvburst {

/// Reads page ids that lie on the device.
///
/// They are only there once the stream that writes them has caught up, so whoever needs them on the
/// host has to wait. That is done here, on a stream of its own: behind the submitter's work and
/// nothing else, so that the ids of a burst are not stuck behind the copies of earlier bursts. One
/// thread at a time.
class PageReader {
 public:
  explicit PageReader(const std::shared_ptr<Device>& device);

  /// Fills in the deferred device pages of `pages` once `ready` is reached; blocks until then.
  /// Returns at once if there are none. Throws PageError on indices that turn out bad.
  void read(PageLists& pages, EventHandle ready, Direction direction);

 private:
  void refuse_repeats(const std::vector<PagePair>& pairs);
  void fill_in(const DeferredPages& deferred, const std::byte* slots, PageLists& pages) const;

  std::shared_ptr<Device> device_;
  Stream stream_;
  std::shared_ptr<std::byte[]> landing_;
  std::size_t landing_bytes_ = 0;
  std::vector<std::int64_t> sorted_;
};

}  // namespace kvburst
