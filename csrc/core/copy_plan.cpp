#include "core/copy_plan.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

/// Gathers copies into batches for the device; on the way every copy that crosses from one
/// registration into the next is cut, by rows where that is enough and else by bytes.
class Batcher {
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

}  // namespace

CopyPlanner::CopyPlanner(std::vector<PoolLayout> pools, Direction direction,
                         const CopyLimits& limits, const PlanOptions& options)
    : pools_(std::move(pools)),
      direction_(direction),
      limits_(limits),
      options_(options),
      groups_(layer_groups(pools_, direction, options, limits)) {
  if (pools_.empty()) throw LayoutError("layouts: 0 pools, at least 1 is needed");
}

/// Whether the pages of a run may be the rows of one copy.
bool CopyPlanner::rows_of_pages(const PoolLayout& pool) const {
  return limits_.tall_copies && pool.host_page_stride() <= limits_.max_pitch &&
         pool.page_bytes() <= limits_.max_pitch;
}

std::int64_t CopyPlanner::copies_of(const PoolLayout& pool, std::int64_t pages,
                                    std::int64_t layers) const {
  if (pages == 1 || pages_adjoin(pool)) return 1;
  return rows_of_pages(pool) ? std::min(pages, layers) : pages;
}

/// Fallbacks are what the spans cost beyond one span of all the group's layers, charged span by
/// span to what ended the one before.
void CopyPlanner::count(const LayerGroup& group, const std::vector<Run>& runs,
                        CopyCount& count) const {
  const PoolLayout& pool = pools_[static_cast<std::size_t>(group.pool)];
  const auto add = [&](std::int64_t pages, std::int64_t times) {
    std::int64_t merged_layers = 0;
    std::int64_t merged = 0;
    for (std::size_t s = 0; s < group.spans.size(); ++s) {
      const LayerSpan& span = group.spans[s];
      const std::int64_t copies = copies_of(pool, pages, span.layers);
      count.copies += times * copies;
      merged_layers += span.layers;
      const std::int64_t together = copies_of(pool, pages, merged_layers);
      if (s > 0) {
        count.fallbacks[static_cast<std::size_t>(group.spans[s - 1].ends)] +=
            times * (merged + copies - together);
      }
      merged = together;
    }
  };
  std::int64_t single_pages = 0;
  std::int64_t pages = 0;
  for (const Run& run : runs) {
    pages += run.pages;
    if (run.pages == 1) {
      ++single_pages;
    } else {
      add(run.pages, 1);
    }
  }
  add(1, single_pages);
  count.one_per_page_and_layer += pages * group.layers;
  count.neighbours_merged += static_cast<std::int64_t>(runs.size()) * group.layers;
  count.bytes += pages * group.layers * static_cast<std::int64_t>(pool.page_bytes());
}

void CopyPlanner::plan(PageLists& pages, CopyPlan& plan) const {
  if (pages.list_of_pool.size() != pools_.size()) {
    throw PageError(text("pages: collected for ", pages.list_of_pool.size(),
                         " pools, this planner has ", pools_.size()));
  }
  plan.runs.resize(pages.lists.size());
  plan.list_of_pool = pages.list_of_pool;
  for (std::size_t i = 0; i < pages.lists.size(); ++i) {
    std::vector<PagePair>& pairs = pages.lists[i];
    std::sort(pairs.begin(), pairs.end(), [](const PagePair& a, const PagePair& b) {
      return a.device != b.device ? a.device < b.device : a.host < b.host;
    });
    std::vector<Run>& runs = plan.runs[i];
    runs.clear();
    for (const PagePair& pair : pairs) {
      if (options_.merge_neighbours && !runs.empty() &&
          pair.device == runs.back().device + runs.back().pages &&
          pair.host == runs.back().host + runs.back().pages) {
        ++runs.back().pages;
      } else {
        runs.push_back({pair.device, pair.host, 1});
      }
    }
  }
  plan.count = {};
  for (const LayerGroup& group : groups_) {
    const auto list =
        static_cast<std::size_t>(plan.list_of_pool[static_cast<std::size_t>(group.pool)]);
    count(group, plan.runs[list], plan.count);
  }
}

void CopyPlanner::emit(const CopyPlan& plan, std::size_t group_index, std::vector<Copy>& batch,
                       const BatchSink& sink, std::int64_t& registration_splits) const {
  const LayerGroup& group = groups_[group_index];
  const PoolLayout& pool = pools_[static_cast<std::size_t>(group.pool)];
  const std::vector<Run>& runs =
      plan.runs[static_cast<std::size_t>(plan.list_of_pool[static_cast<std::size_t>(group.pool)])];
  const std::size_t page_bytes = pool.page_bytes();
  const std::size_t host_stride = pool.host_page_stride();
  const bool adjoin = pages_adjoin(pool);
  const bool rows_of_pages = this->rows_of_pages(pool);
  const std::int64_t chunk = direction_ == Direction::backup ? options_.chunk_pages : 0;
  Batcher batcher(direction_, pool.registrations(), limits_.copies_per_call, batch, sink);

  const auto emit_span = [&](const LayerSpan& span, const Run& run) {
    const auto stored = pool.stored();
    const auto first = static_cast<std::size_t>(span.first);
    const auto layers = static_cast<std::size_t>(span.layers);
    const auto pages = static_cast<std::size_t>(run.pages);
    const Ends page{pool.device_address(stored[first], run.device),
                    pool.host_address(stored[first], run.host), span.device_pitch, span.host_pitch};
    if (pages == 1 || adjoin) {  // rows are layers, and a row holds the whole run
      batcher.add(copy_between(direction_, page, pages * page_bytes, layers));
    } else if (rows_of_pages && layers < pages) {  // a copy a layer, rows are pages
      for (std::size_t l = first; l < first + layers; ++l) {
        const Ends layer{pool.device_address(stored[l], run.device),
                         pool.host_address(stored[l], run.host), page_bytes, host_stride};
        batcher.add(copy_between(direction_, layer, page_bytes, pages));
      }
    } else {  // a copy a page, rows are layers
      Ends next = page;
      for (std::size_t p = 0; p < pages; ++p) {
        batcher.add(copy_between(direction_, next, page_bytes, layers));
        next.device += page_bytes;
        next.host += host_stride;
      }
    }
  };

  std::int64_t room = chunk;
  for (const Run& whole : runs) {
    for (Run run = whole; run.pages > 0;) {
      Run piece = run;
      if (chunk > 0) piece.pages = std::min(piece.pages, room);
      for (const LayerSpan& span : group.spans) emit_span(span, piece);
      run = {run.device + piece.pages, run.host + piece.pages, run.pages - piece.pages};
      if (chunk > 0 && (room -= piece.pages) == 0) {
        batcher.flush();
        room = chunk;
      }
    }
  }
  batcher.flush();
  registration_splits += batcher.splits();
}

}  // namespace kvburst
