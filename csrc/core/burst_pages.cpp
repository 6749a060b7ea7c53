#include "core/burst_pages.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

/// Pages whose indices are fetched while those before them are read.
constexpr std::int64_t kPagesAhead = 16;

}  // namespace

std::int64_t host_digest(const PageLists& pages) {
  constexpr std::uint64_t kMask = (1ull << 62) - 1;
  std::uint64_t state = 0x9e3779b97f4a7c15;
  // The finaliser of splitmix64: every bit of what went in changes half of those that come out.
  const auto mix = [&](std::uint64_t word) {
    state += word + 0x9e3779b97f4a7c15;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
    state = (state ^ (state >> 27)) * 0x94d049bb133111eb;
    state ^= state >> 31;
  };
  for (std::size_t pool = 0; pool < pages.list_of_pool.size(); ++pool) {
    const std::span<const PagePair> pairs = pages.of_pool(pool);
    mix(pairs.size());
    for (const PagePair& pair : pairs) mix(static_cast<std::uint64_t>(pair.host));
  }
  return static_cast<std::int64_t>(state & kMask);
}

BurstPages::BurstPages(std::span<const PoolLayout> layouts, Direction direction,
                       std::int64_t page_size, IndexCheck check)
    : direction_(direction), page_size_(page_size), check_(check) {
  if (layouts.empty()) throw LayoutError("layouts: 0 pools, at least 1 is needed");
  if (page_size < 1) {
    throw LayoutError(text("page_size: ", page_size, " slots is below the minimum of 1"));
  }
  for (const PoolLayout& layout : layouts) {
    bounds_.push_back({layout.device_pages(), layout.host_pages()});
  }
  start_burst();
}

void BurstPages::start_burst() {
  now_.lists.resize(std::max<std::size_t>(now_.lists.size(), 1));
  for (auto& list : now_.lists) list.clear();
  now_.deferred.clear();
  now_.list_of_pool.assign(bounds_.size(), 0);
  seen_.resize(std::max(seen_.size(), now_.lists.size()));
  if (++epoch_ == 0) {  // wrapped: no stamp of the past may look current
    for (Seen& seen : seen_) std::fill(seen.epoch_of_page.begin(), seen.epoch_of_page.end(), 0u);
    epoch_ = 1;
  }
}

PageLists BurstPages::take(PageLists spent) {
  PageLists taken = std::exchange(now_, std::move(spent));
  start_burst();
  return taken;
}

/// Lists in use; memory of further ones may be left from earlier bursts.
std::size_t BurstPages::num_lists() const {
  return static_cast<std::size_t>(
      *std::max_element(now_.list_of_pool.begin(), now_.list_of_pool.end()) + 1);
}

/// A pool's own list, begun as a copy of the common one when the pool first departs from it.
std::size_t BurstPages::list_for(std::size_t pool) {
  if (now_.list_of_pool[pool] != 0) return static_cast<std::size_t>(now_.list_of_pool[pool]);
  const std::size_t list = num_lists();
  if (now_.lists.size() <= list) now_.lists.resize(list + 1);
  if (seen_.size() <= list) seen_.resize(list + 1);
  now_.lists[list] = now_.lists[0];
  seen_[list].epoch_of_page = seen_[0].epoch_of_page;
  now_.list_of_pool[pool] = static_cast<int>(list);
  return list;
}

BurstPages::Bounds BurstPages::bounds_of(std::size_t list) const {
  Bounds bounds{std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::max()};
  for (std::size_t pool = 0; pool < bounds_.size(); ++pool) {
    if (static_cast<std::size_t>(now_.list_of_pool[pool]) != list) continue;
    bounds.device = std::min(bounds.device, bounds_[pool].device);
    bounds.host = std::min(bounds.host, bounds_[pool].host);
  }
  return bounds;
}

void BurstPages::check_pairing(const IndexView& device, const IndexView& host) const {
  check_shape(device, page_size_);
  check_shape(host, page_size_);
  if (device.count != host.count) {
    throw PageError(text(device.name, " has ", device.count, " slots, ", host.name, " has ",
                         host.count, ": the two must be equal"));
  }
}

void BurstPages::append_to(std::size_t list, const IndexView& device, const IndexView& host) {
  const Bounds bounds = bounds_of(list);
  const bool to_device = direction_ == Direction::load;
  std::vector<PagePair>& pairs = now_.lists[list];
  std::vector<std::uint32_t>& seen = seen_[list].epoch_of_page;
  if (const auto pages = static_cast<std::size_t>(to_device ? bounds.device : bounds.host);
      seen.size() < pages) {
    seen.resize(pages, 0);
  }
  const std::int64_t ahead = kPagesAhead * page_size_;
  for (std::int64_t first = 0; first < std::min(ahead, device.count); first += page_size_) {
    device.prefetch(first);
    host.prefetch(first);
  }
  for (std::int64_t first = 0; first < device.count; first += page_size_) {
    device.prefetch(first + ahead);
    host.prefetch(first + ahead);
    const PagePair pair{page_at(device, first, page_size_, bounds.device, check_),
                        page_at(host, first, page_size_, bounds.host, check_)};
    const std::int64_t destination = to_device ? pair.device : pair.host;
    std::uint32_t& stamp = seen[static_cast<std::size_t>(destination)];
    if (stamp == epoch_) {
      throw PageError(taken_twice(to_device ? device : host, first, destination));
    }
    pairs.push_back(pair);
    stamp = epoch_;
  }
}

void BurstPages::truncate_list(std::size_t list, std::size_t pages) {
  std::vector<PagePair>& pairs = now_.lists[list];
  while (pairs.size() > pages) {
    const PagePair pair = pairs.back();
    const std::int64_t destination = direction_ == Direction::load ? pair.device : pair.host;
    if (destination != kDeferred) {
      seen_[list].epoch_of_page[static_cast<std::size_t>(destination)] = 0;
    }
    pairs.pop_back();
  }
}

void BurstPages::truncate(std::int64_t pages) {
  if (pages < 0 || pages > num_pages()) {
    throw PageError(text("pages: ", pages, " must be from 0 to the ", num_pages(), " collected"));
  }
  for (std::size_t list = 0; list < num_lists(); ++list) {
    truncate_list(list, static_cast<std::size_t>(pages));
  }
  std::erase_if(now_.deferred, [&](const DeferredPages& deferred) {
    return deferred.first >= static_cast<std::size_t>(pages);
  });
}

std::int64_t BurstPages::append_deferred(const IndexView& device, const IndexView& host) {
  check_pairing(device, host);
  if (device.stride < 1) {
    throw PageError(text(device.name, ": stride ", device.stride, " must be at least 1"));
  }
  if (num_lists() > 1) {
    throw PageError(text(device.name, ": lie on the device, but a pool has its own pages"));
  }
  const std::int64_t pages = device.count / page_size_;
  if (pages == 0) return 0;
  const std::int64_t before = num_pages();
  const Bounds bounds = bounds_of(0);
  std::vector<std::uint32_t>& seen = seen_[0].epoch_of_page;
  if (direction_ == Direction::backup && seen.size() < static_cast<std::size_t>(bounds.host)) {
    seen.resize(static_cast<std::size_t>(bounds.host), 0);
  }
  try {
    for (std::int64_t first = 0; first < host.count; first += page_size_) {
      const PagePair pair{kDeferred, page_at(host, first, page_size_, bounds.host, check_)};
      if (direction_ == Direction::backup) {
        std::uint32_t& stamp = seen[static_cast<std::size_t>(pair.host)];
        if (stamp == epoch_) throw PageError(taken_twice(host, first, pair.host));
        stamp = epoch_;
      }
      now_.lists[0].push_back(pair);
    }
  } catch (const PageError&) {
    truncate(before);
    throw;
  }
  now_.deferred.push_back(
      {static_cast<std::size_t>(before), pages, device, page_size_, bounds.device, check_});
  now_.deferred.back().slots.name = "device_indices";
  return pages;
}

std::string BurstPages::taken_twice(const IndexView& view, std::int64_t first,
                                    std::int64_t page) const {
  return text(view.name, "[", first, "]: page ", page, " is already a destination of this ",
              name_of(direction_));
}

std::int64_t BurstPages::append(const IndexView& device, const IndexView& host,
                                std::span<const Own> own) {
  check_pairing(device, host);
  for (const Own& part : own) {
    // The first pool's pages are the burst's, so there is always one pool on the common list.
    if (part.pool < 1 || part.pool >= bounds_.size()) {
      throw PageError(text(part.device.name, ": pool ", part.pool,
                           " cannot have its own pages, pools 1 to ", bounds_.size() - 1, " can"));
    }
    const auto same_pool = [&](const Own& other) { return other.pool == part.pool; };
    if (std::count_if(own.begin(), own.end(), same_pool) > 1) {
      throw PageError(
          text(part.device.name, ": pool ", part.pool, " is given its own pages twice"));
    }
    check_pairing(part.device, part.host);
    if (part.device.count != device.count) {
      throw PageError(text(part.device.name, ": ", part.device.count / page_size_, " pages, but ",
                           device.name, " has ", device.count / page_size_,
                           ": a pool with its own pages moves as many as the others"));
    }
  }
  if (!own.empty() && !now_.deferred.empty()) {
    throw PageError(text(own.front().device.name,
                         ": this burst has pages whose indices lie on the ",
                         "device, so no pool can have its own"));
  }
  for (const Own& part : own) list_for(part.pool);

  const std::int64_t before = num_pages();
  try {
    for (std::size_t list = 0; list < num_lists(); ++list) {
      const IndexView* from_device = &device;
      const IndexView* from_host = &host;
      for (const Own& part : own) {
        if (static_cast<std::size_t>(now_.list_of_pool[part.pool]) == list) {
          from_device = &part.device;
          from_host = &part.host;
        }
      }
      append_to(list, *from_device, *from_host);
    }
  } catch (const PageError&) {
    truncate(before);
    throw;
  }
  return device.count / page_size_;
}

}  // namespace kvburst
