#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/burst_pages.h"
#include "core/device.h"
#include "core/layer_groups.h"
#include "core/pool_layout.h"

namespace kvburst {

/// Pages that follow each other on both tiers; in a backup by chunks, within one chunk.
struct Run {
  std::int64_t device;
  std::int64_t host;
  std::int64_t pages;
};

/// Runs of the same length.
struct RunLength {
  std::int64_t pages;
  std::int64_t runs;
};

/// How many copies a plan takes, and how many it would have taken otherwise.
struct CopyCount {
  std::int64_t copies = 0;
  std::int64_t bytes = 0;
  /// One copy for every page of every layer of every pool.
  std::int64_t one_per_page_and_layer = 0;
  /// The same with neighbouring pages merged, but no layers.
  std::int64_t neighbours_merged = 0;
  /// Copies more than the groups would need if every span were whole, by what breaks them.
  std::array<std::int64_t, kSpanBreaks> fallbacks{};
  /// Copies more because one would have crossed from one registration into the next.
  std::int64_t registration_splits = 0;
};

/// The pages of one burst as runs. Made by a CopyPlanner, which turns it into copies.
struct CopyPlan {
  std::vector<std::vector<Run>> runs;
  /// How many runs of each length, in the same order: they are counted once and not once a group.
  std::vector<std::vector<RunLength>> lengths;
  /// Index into `runs`, one a pool.
  std::vector<int> list_of_pool;
  /// Registration splits not included: those are found when the copies are made.
  CopyCount count;
};

/// Takes the copies of one device call. The span is valid during the call.
using BatchSink = std::function<void(std::span<const Copy>)>;

/// Turns pages into the fewest copies that the layouts and the device allow.
///
/// On a server's pools neighbouring pages are rare (a public trace, SGLang's allocators: merging
/// them saves 0 to 7 %), but layers are regular: in a page-first host page they lie side by side,
/// and on the device they are evenly spaced if they live in one allocation. So the copies of a run
/// of `p` pages in a span of `l` layers are `min(p, l)`: one a page with the layers as rows, or one
/// a layer with the pages as rows.
///
/// Every copy lies in one registration and in one allocation, and keeps to the device's maximum
/// pitch; every batch keeps to its copies per call, and in a backup to `chunk_pages`.
///
/// Immutable once built; may be used from several threads, each with a plan and a batch of its own.
class CopyPlanner {
 public:
  /// Throws LayoutError on no pools, options out of their bounds, or a host buffer that is not
  /// pinned where the device needs that.
  CopyPlanner(std::vector<PoolLayout> pools, Direction direction, const CopyLimits& limits,
              const PlanOptions& options);

  std::span<const PoolLayout> pools() const { return pools_; }
  Direction direction() const { return direction_; }
  const CopyLimits& limits() const { return limits_; }
  /// In the order of issue.
  std::span<const LayerGroup> groups() const { return groups_; }

  /// Sorts each list by device page (copies are independent: order inside a burst is ours) and
  /// makes `plan` of it, reusing its memory. Linear but for the sort; allocates nothing once `plan`
  /// has held a burst of this size. Throws PageError if `pages` is of another set of pools.
  void plan(PageLists& pages, CopyPlan& plan) const;

  /// Makes the copies of one group and hands them to `sink`, a batch at a time. `batch` is working
  /// memory.
  void emit(const CopyPlan& plan, std::size_t group, std::vector<Copy>& batch,
            const BatchSink& sink, std::int64_t& registration_splits) const;

 private:
  class Batcher;

  std::int64_t copies_of(const PoolLayout& pool, std::int64_t pages, std::int64_t layers) const;
  std::int64_t chunk_pages() const;
  bool rows_of_pages(const PoolLayout& pool) const;
  void count(const LayerGroup& group, std::span<const RunLength> lengths, CopyCount& count) const;
  void emit_span(const PoolLayout& pool, const LayerSpan& span, std::span<const Run> runs,
                 Batcher& batcher) const;

  std::vector<PoolLayout> pools_;
  Direction direction_;
  CopyLimits limits_;
  PlanOptions options_;
  std::vector<LayerGroup> groups_;
};

}  // namespace kvburst
