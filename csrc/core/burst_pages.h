#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/index_view.h"
#include "core/pool_layout.h"

namespace kvburst {

/// The device page of a pair whose indices are not known yet.
constexpr std::int64_t kDeferred = -1;

/// One page on both tiers.
struct PagePair {
  std::int64_t device;
  std::int64_t host;
  friend bool operator==(const PagePair&, const PagePair&) = default;
};

/// Device pages whose indices a stream is still to write. They can be read, and checked, once that
/// stream has caught up.
struct DeferredPages {
  /// Where they belong in the first list.
  std::size_t first;
  std::int64_t pages;
  /// In device memory, which must stay until the burst's ack is retired.
  IndexView slots;
  // What they will be checked against.
  std::int64_t page_size;
  std::int64_t tier_pages;
  IndexCheck check;
};

/// The pages of one burst, by value: one list serves every pool that was not given its own.
struct PageLists {
  std::vector<std::vector<PagePair>> lists;
  /// Index into `lists`, one a pool.
  std::vector<int> list_of_pool;
  /// Of pairs whose device page is `kDeferred`.
  std::vector<DeferredPages> deferred = {};

  std::span<const PagePair> of_pool(std::size_t pool) const {
    return lists[static_cast<std::size_t>(list_of_pool[pool])];
  }
};

/// A number from the host pages of every pool, in order: equal on ranks that loaded the same pages,
/// and all but certainly different on ranks that did not. 62 bits, so that it can be negated, and
/// summed with another, in 64.
std::int64_t host_digest(const PageLists& pages);

/// Collects the pages of the burst that is being put together, and checks them.
///
/// Everything a caller can get wrong about indices is found here, while the call that brought them
/// is still on the stack and before anything moves: length, alignment, range, a destination that
/// occurs twice (also across calls). A refused call leaves the collection as it was. Page ids are
/// copied: the tensors may be reused or freed as soon as `append` returns.
///
/// Not thread-safe; belongs to the thread that submits. Steady state allocates nothing.
class BurstPages {
 public:
  /// Pages of one pool that differ from those of the rest.
  struct Own {
    std::size_t pool;
    IndexView device;
    IndexView host;
  };

  /// `page_size` in slots. Throws LayoutError on no layouts or a page size below 1.
  BurstPages(std::span<const PoolLayout> layouts, Direction direction, std::int64_t page_size,
             IndexCheck check);

  /// Adds `device.count / page_size` pages and returns how many that is; 0 is fine. A pool in `own`
  /// takes those pages instead, of which there must be as many. Throws PageError.
  std::int64_t append(const IndexView& device, const IndexView& host,
                      std::span<const Own> own = {});

  /// The same with device indices that lie on the device, and are read by the issuer behind the
  /// work that is on the submitter's stream: checked now are their type and number, and the rest
  /// then. A burst that has such pages has none of a pool's own.
  std::int64_t append_deferred(const IndexView& device, const IndexView& host);

  /// Pages collected, counted once for all pools.
  std::int64_t num_pages() const { return static_cast<std::int64_t>(now_.lists[0].size()); }
  const PageLists& lists() const { return now_; }
  Direction direction() const { return direction_; }
  std::size_t num_pools() const { return bounds_.size(); }

  /// Exchanges what was collected against `spent`, whose memory is used for the next burst.
  PageLists take(PageLists spent);
  /// Drops all but the first `pages` pages. Throws PageError if there are fewer.
  void truncate(std::int64_t pages);

 private:
  struct Bounds {
    std::int64_t device;
    std::int64_t host;
  };
  /// Which burst last used a page as its destination, one a list.
  struct Seen {
    std::vector<std::uint32_t> epoch_of_page;
  };

  void start_burst();
  std::size_t list_for(std::size_t pool);
  Bounds bounds_of(std::size_t list) const;
  void append_to(std::size_t list, const IndexView& device, const IndexView& host);
  void truncate_list(std::size_t list, std::size_t pages);
  std::size_t num_lists() const;
  std::string taken_twice(const IndexView& view, std::int64_t first, std::int64_t page) const;
  void check_pairing(const IndexView& device, const IndexView& host) const;

  Direction direction_;
  std::int64_t page_size_;
  IndexCheck check_;
  std::vector<Bounds> bounds_;
  PageLists now_;
  std::vector<Seen> seen_;
  std::uint32_t epoch_ = 0;
};

}  // namespace kvburst
