#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "core/burst_pages.h"

namespace kvburst {

/// Which side of a page pair.
enum class Tier : std::uint8_t { device, host };

/// Where freed pages join the free list; pages are always taken from its front.
enum class FreeOrder : std::uint8_t {
  lifo,  ///< at the front, as SGLang's device allocator does
  fifo,  ///< at the back, as its host pools do
};

/// Hands out the pages of one tier, and takes them back late: a page that a burst still uses may be
/// freed by its owner, but is not handed out again until the burst lets go of it.
///
/// Not thread-safe; belongs to the scheduler thread. The same calls in the same order give the same
/// pages, so ranks that agree on the calls agree on the pages.
class PageAllocator {
 public:
  /// `page_size` in slots. Throws LayoutError on a size below 1.
  PageAllocator(std::string name, std::int64_t pages, std::int64_t page_size, FreeOrder order);

  const std::string& name() const { return name_; }
  std::int64_t pages() const { return static_cast<std::int64_t>(state_.size()); }
  std::int64_t page_size() const { return page_size_; }
  /// Pages that `allocate` could hand out now; those freed but still held are not among them.
  std::int64_t available_pages() const { return static_cast<std::int64_t>(free_.size()); }

  /// Writes the slots of `slots / page_size` pages to `out`, or returns false and changes nothing
  /// if there are not as many. Throws PageError if `slots` is not a multiple of the page size.
  bool allocate(std::int64_t slots, std::int64_t* out);
  /// Undoes the last `allocate`, of which nothing has come: the free list is as it was before, so
  /// that ranks of which only some had to undo go on handing out the same pages.
  void take_back(std::int64_t slots, const std::int64_t* in);
  /// Takes back whole pages, given by their slots. All or none: throws PageError, naming the page,
  /// on one that is out of range, not allocated, or given twice.
  void free(const IndexView& slots);

  /// Keeps pages from being handed out until they are released as often as they were held. All or
  /// none: throws PageError on a page that is not allocated. Deferred pages, which nobody knows
  /// yet, are passed over. Returns the reset that it belongs to.
  std::int64_t hold(std::span<const PagePair> pages, Tier tier);
  /// Undoes a hold; of no effect if the allocator has been reset since. Throws PageError on a page
  /// that is not held.
  void release(std::span<const PagePair> pages, Tier tier, std::int64_t reset);

  /// Everything is free again, in the order of construction. Bursts must be drained first.
  void reset();

 private:
  enum class State : std::uint8_t { free, used, freed_while_held };

  void give_back(const std::vector<std::int64_t>& pages);

  std::string name_;
  std::int64_t page_size_;
  FreeOrder order_;
  std::deque<std::int64_t> free_;
  std::vector<State> state_;
  std::vector<std::int32_t> holds_;
  std::vector<std::int64_t> scratch_;
  std::int64_t resets_ = 0;
};

}  // namespace kvburst
