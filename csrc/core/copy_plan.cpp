#include "core/copy_plan.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

/// The two ends of a copy, put the right way round for the direction.
struct Ends {
  std::uintptr_t device;
  std::uintptr_t host;
  std::size_t device_pitch;
  std::size_t host_pitch;
};

Copy copy_between(Direction direction, const Ends& ends, std::size_t width, std::size_t height) {
  if (direction == Direction::load) {
    return {ends.device, ends.host, width, height, ends.device_pitch, ends.host_pitch};
  }
  return {ends.host, ends.device, width, height, ends.host_pitch, ends.device_pitch};
}

bool pages_adjoin(const PoolLayout& pool) { return pool.host_page_stride() == pool.page_bytes(); }

/// Of a run of `pages` in a span of `layers`, where the device allows rows of either.
std::int64_t fewest_copies(const PoolLayout& pool, std::int64_t pages, std::int64_t layers) {
  return pages_adjoin(pool) ? 1 : std::min(pages, layers);
}

}  // namespace

/// Gathers copies into batches for the device; on the way every copy that crosses from one
/// registration into the next is cut, by rows where that is enough and else by bytes.
class CopyPlanner::Batcher {
 public:
  Batcher(Direction direction, std::span<const MemoryRange> registrations,
          std::size_t copies_per_call, std::vector<Copy>& batch, const BatchSink& sink)
      : to_device_(direction == Direction::load),
        registrations_(registrations),
        copies_per_call_(copies_per_call),
        batch_(batch),
        sink_(sink) {
    batch_.clear();
  }

  void add(Copy copy) {
    if (registrations_.size() > 1) {
      split(copy);
    } else {
      push(copy);
    }
  }

  void flush() {
    if (batch_.empty()) return;
    sink_(batch_);
    batch_.clear();
  }

  std::int64_t splits() const { return splits_; }

 private:
  void push(const Copy& copy) {
    if (batch_.size() == copies_per_call_) flush();
    batch_.push_back(copy);
  }

  const MemoryRange& registration_of(std::uintptr_t address) {
    if (!registrations_[last_].contains(address, 1)) {
      const auto after = std::upper_bound(
          registrations_.begin(), registrations_.end(), address,
          [](std::uintptr_t a, const MemoryRange& range) { return a < range.address; });
      last_ = static_cast<std::size_t>(after - registrations_.begin()) - 1;
    }
    return registrations_[last_];
  }

  void split(Copy rest) {
    for (;;) {
      const std::uintptr_t host = to_device_ ? rest.src : rest.dst;
      const std::size_t pitch = to_device_ ? rest.src_pitch : rest.dst_pitch;
      const std::size_t left = registration_of(host).end() - host;
      if ((rest.height - 1) * pitch + rest.width <= left) {
        push(rest);
        return;
      }
      ++splits_;
      if (rest.width > left) {  // the boundary runs through the first row
        push({rest.dst, rest.src, left, 1, 0, 0});
        const Copy tail{rest.dst + left, rest.src + left, rest.width - left, 1, 0, 0};
        if (rest.height == 1) {
          rest = tail;
          continue;
        }
        ++splits_;
        split(tail);
        advance(rest, 1);
      } else {
        const std::size_t rows = (left - rest.width) / pitch + 1;
        push({rest.dst, rest.src, rest.width, rows, rest.dst_pitch, rest.src_pitch});
        advance(rest, rows);
      }
    }
  }

  static void advance(Copy& copy, std::size_t rows) {
    copy.dst += rows * copy.dst_pitch;
    copy.src += rows * copy.src_pitch;
    copy.height -= rows;
  }

  const bool to_device_;
  const std::span<const MemoryRange> registrations_;
  const std::size_t copies_per_call_;
  std::vector<Copy>& batch_;
  const BatchSink& sink_;
  std::size_t last_ = 0;
  std::int64_t splits_ = 0;
};

CopyPlanner::CopyPlanner(std::vector<PoolLayout> pools, Direction direction,
                         const CopyLimits& limits, const PlanOptions& options)
    : pools_(std::move(pools)),
      direction_(direction),
      limits_(limits),
      options_(options),
      groups_(layer_groups(pools_, direction, options, limits)) {
  if (pools_.empty()) throw LayoutError("layouts: 0 pools, at least 1 is needed");
  for (const PoolLayout& pool : pools_) {
    if (!limits_.pinned_only || !pool.registrations().empty() || pool.stored().empty()) continue;
    throw LayoutError(text("pool '", pool.name(), "': its host buffer is not pinned, and of such",
                           " memory the device may read too early or too late: pass pin to",
                           " HostPool.allocate, or registrations to HostPool.from_tensor"));
  }
}

/// Pages after which a run and a batch end; 0 if they need not.
std::int64_t CopyPlanner::chunk_pages() const {
  return direction_ == Direction::backup ? options_.chunk_pages : 0;
}

/// Whether the pages of a run may be the rows of one copy.
bool CopyPlanner::rows_of_pages(const PoolLayout& pool) const {
  return limits_.tall_copies && pool.host_page_stride() <= limits_.max_pitch &&
         pool.page_bytes() <= limits_.max_pitch;
}

std::int64_t CopyPlanner::copies_of(const PoolLayout& pool, std::int64_t pages,
                                    std::int64_t layers) const {
  if (pages_adjoin(pool) || rows_of_pages(pool)) return fewest_copies(pool, pages, layers);
  return pages;
}

/// Fallbacks are what the spans cost beyond one span of all the group's layers, charged span by
/// span to what ended the one before, and what that one span costs where pages may not be its rows.
void CopyPlanner::count(const LayerGroup& group, std::span<const RunLength> lengths,
                        CopyCount& count) const {
  const PoolLayout& pool = pools_[static_cast<std::size_t>(group.pool)];
  const SpanBreak no_rows_of_pages =
      limits_.tall_copies ? SpanBreak::pitch_above_maximum : SpanBreak::tall_copies_off;
  for (const auto& [pages, runs] : lengths) {
    std::int64_t merged_layers = 0;
    std::int64_t merged = 0;
    for (std::size_t s = 0; s < group.spans.size(); ++s) {
      const LayerSpan& span = group.spans[s];
      const std::int64_t copies = copies_of(pool, pages, span.layers);
      count.copies += runs * copies;
      merged_layers += span.layers;
      const std::int64_t together = copies_of(pool, pages, merged_layers);
      if (s > 0) {
        count.fallbacks[static_cast<std::size_t>(group.spans[s - 1].ends)] +=
            runs * (merged + copies - together);
      }
      merged = together;
    }
    count.fallbacks[static_cast<std::size_t>(no_rows_of_pages)] +=
        runs * (merged - fewest_copies(pool, pages, group.layers));
    count.one_per_page_and_layer += runs * pages * group.layers;
    count.neighbours_merged += runs * group.layers;
    count.bytes += runs * pages * group.layers * static_cast<std::int64_t>(pool.page_bytes());
  }
}

void CopyPlanner::plan(PageLists& pages, CopyPlan& plan) const {
  if (pages.list_of_pool.size() != pools_.size()) {
    throw PageError(text("pages: collected for ", pages.list_of_pool.size(),
                         " pools, this planner has ", pools_.size()));
  }
  const std::int64_t chunk = chunk_pages();
  plan.runs.resize(pages.lists.size());
  plan.lengths.resize(pages.lists.size());
  plan.list_of_pool = pages.list_of_pool;
  for (std::size_t i = 0; i < pages.lists.size(); ++i) {
    std::vector<PagePair>& pairs = pages.lists[i];
    std::sort(pairs.begin(), pairs.end(), [](const PagePair& a, const PagePair& b) {
      return a.device != b.device ? a.device < b.device : a.host < b.host;
    });
    std::vector<Run>& runs = plan.runs[i];
    runs.clear();
    for (const PagePair& pair : pairs) {
      const bool chunk_begins = chunk > 0 && (&pair - pairs.data()) % chunk == 0;
      if (options_.merge_neighbours && !runs.empty() && !chunk_begins &&
          pair.device == runs.back().device + runs.back().pages &&
          pair.host == runs.back().host + runs.back().pages) {
        ++runs.back().pages;
      } else {
        runs.push_back({pair.device, pair.host, 1});
      }
    }
    std::vector<RunLength>& lengths = plan.lengths[i];
    lengths.clear();
    for (const Run& run : runs) {
      const auto found = std::find_if(lengths.begin(), lengths.end(), [&](const RunLength& length) {
        return length.pages == run.pages;
      });
      if (found == lengths.end()) {
        lengths.push_back({run.pages, 1});
      } else {
        ++found->runs;
      }
    }
  }
  plan.count = {};
  for (const LayerGroup& group : groups_) {
    const auto list =
        static_cast<std::size_t>(plan.list_of_pool[static_cast<std::size_t>(group.pool)]);
    count(group, plan.lengths[list], plan.count);
  }
}

void CopyPlanner::emit_span(const PoolLayout& pool, const LayerSpan& span,
                            std::span<const Run> runs, Batcher& batcher) const {
  const auto layers = pool.stored().subspan(static_cast<std::size_t>(span.first),
                                            static_cast<std::size_t>(span.layers));
  const std::uintptr_t device = pool.device_address(layers.front(), 0);
  const std::uintptr_t host = pool.host_address(layers.front(), 0);
  const std::size_t page_bytes = pool.page_bytes();
  const std::size_t host_stride = pool.host_page_stride();
  const bool adjoin = pages_adjoin(pool);
  const bool rows_of_pages = this->rows_of_pages(pool);
  const Direction direction = direction_;
  for (const Run& run : runs) {
    const auto pages = static_cast<std::size_t>(run.pages);
    Ends page{device + static_cast<std::size_t>(run.device) * page_bytes,
              host + static_cast<std::size_t>(run.host) * host_stride, span.device_pitch,
              span.host_pitch};
    if (pages == 1 || adjoin) {  // rows are layers, and a row holds the whole run
      batcher.add(copy_between(direction, page, pages * page_bytes, layers.size()));
    } else if (rows_of_pages && layers.size() < pages) {  // a copy a layer, rows are pages
      for (const StoredLayer& layer : layers) {
        const Ends row{pool.device_address(layer, run.device), pool.host_address(layer, run.host),
                       page_bytes, host_stride};
        batcher.add(copy_between(direction, row, page_bytes, pages));
      }
    } else {  // a copy a page, rows are layers
      for (std::size_t p = 0; p < pages; ++p) {
        batcher.add(copy_between(direction, page, page_bytes, layers.size()));
        page.device += page_bytes;
        page.host += host_stride;
      }
    }
  }
}

void CopyPlanner::emit(const CopyPlan& plan, std::size_t group_index, std::vector<Copy>& batch,
                       const BatchSink& sink, std::int64_t& registration_splits) const {
  const LayerGroup& group = groups_[group_index];
  const PoolLayout& pool = pools_[static_cast<std::size_t>(group.pool)];
  const std::vector<Run>& runs =
      plan.runs[static_cast<std::size_t>(plan.list_of_pool[static_cast<std::size_t>(group.pool)])];
  Batcher batcher(direction_, pool.registrations(), limits_.copies_per_call, batch, sink);
  const std::int64_t chunk = chunk_pages();
  if (chunk == 0) {
    for (const LayerSpan& span : group.spans) emit_span(pool, span, runs, batcher);
  } else {
    std::int64_t pages = 0;
    for (const Run& run : runs) {
      for (const LayerSpan& span : group.spans) emit_span(pool, span, {&run, 1}, batcher);
      pages += run.pages;
      if (pages % chunk == 0) batcher.flush();
    }
  }
  batcher.flush();
  registration_splits += batcher.splits();
}

}  // namespace kvburst
