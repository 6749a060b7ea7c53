#pragma once

#include <cstdint>
#include <cstring>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/copy_plan.h"
#include "core/format.h"
#include "pools.h"

namespace kvburst::testing {

/// What came of carrying out a plan with memcpy.
struct PlanOutcome {
  /// What is wrong with it, in words; empty if nothing is.
  std::string fault;
  CopyCount count;
  /// By group: every batch.
  std::vector<std::vector<std::vector<Copy>>> batches;

  std::int64_t copies() const {
    std::int64_t sum = 0;
    for (const auto& group : batches) {
      for (const auto& batch : group) sum += static_cast<std::int64_t>(batch.size());
    }
    return sum;
  }
};

inline std::size_t extent(const Copy& copy, std::size_t pitch) {
  return (copy.height - 1) * pitch + copy.width;
}

inline bool inside_one(std::span<const MemoryRange> ranges, std::uintptr_t base,
                       std::uintptr_t address, std::size_t bytes) {
  for (const MemoryRange& range : ranges) {
    if (MemoryRange{base + range.address, range.size}.contains(address, bytes)) return true;
  }
  return false;
}

/// Everything a copy promises: rows within the limits, its device side in one allocation, its host
/// side in one registration. In words what is not so.
inline std::string fault_of(const Copy& copy, const Pool& pool, Direction direction,
                            const CopyLimits& limits) {
  const bool load = direction == Direction::load;
  const std::uintptr_t device = load ? copy.dst : copy.src;
  const std::uintptr_t host = load ? copy.src : copy.dst;
  const std::size_t device_pitch = load ? copy.dst_pitch : copy.src_pitch;
  const std::size_t host_pitch = load ? copy.src_pitch : copy.dst_pitch;
  if (copy.width == 0 || copy.height == 0) return "an empty copy";
  if (copy.height > 1) {
    if (!limits.tall_copies) return "a tall copy where they are switched off";
    for (const std::size_t pitch : {device_pitch, host_pitch}) {
      if (pitch > limits.max_pitch) return text("pitch ", pitch, " above ", limits.max_pitch);
      if (pitch < copy.width) return text("pitch ", pitch, " below the width ", copy.width);
    }
  }
  const PoolShape& shape = pool.shape();
  if (!inside_one(shape.allocations, pool.device.address(), device, extent(copy, device_pitch))) {
    return "a copy whose device side is not inside one allocation";
  }
  const std::vector<MemoryRange> whole{{0, pool.host.size()}};
  if (!inside_one(shape.registrations.empty() ? whole : shape.registrations, pool.host.address(),
                  host, extent(copy, host_pitch))) {
    return "a copy whose host side is not inside one registration";
  }
  return "";
}

/// Device pages that a batch touches.
inline std::set<std::int64_t> pages_of(const std::vector<Copy>& batch, const Pool& pool,
                                       Direction direction) {
  std::set<std::int64_t> pages;
  const std::size_t page_bytes = pool.shape().page_bytes;
  for (const Copy& copy : batch) {
    for (std::size_t row = 0; row < copy.height; ++row) {
      const std::uintptr_t first = direction == Direction::load ? copy.dst + row * copy.dst_pitch
                                                                : copy.src + row * copy.src_pitch;
      for (const std::size_t offset : pool.shape().layer_offsets) {
        const MemoryRange layer{pool.device.address() + offset, pool.shape().layer_bytes()};
        if (!layer.contains(first, copy.width)) continue;
        const std::size_t begin = (first - layer.address) / page_bytes;
        const std::size_t end = (first - layer.address + copy.width - 1) / page_bytes;
        for (std::size_t page = begin; page <= end; ++page) {
          pages.insert(static_cast<std::int64_t>(page));
        }
      }
    }
  }
  return pages;
}

inline void move_bytes(const Copy& copy) {
  for (std::size_t row = 0; row < copy.height; ++row) {
    std::memcpy(reinterpret_cast<void*>(copy.dst + row * copy.dst_pitch),
                reinterpret_cast<const void*>(copy.src + row * copy.src_pitch), copy.width);
  }
}

/// Plans `pages`, carries out every copy, and compares the pools with the naive copy, canaries and
/// all. `options` are those of the planner.
inline PlanOutcome carry_out(std::vector<Pool>& pools, const CopyPlanner& planner,
                             const PlanOptions& options, PageLists pages) {
  const Direction direction = planner.direction();
  std::vector<std::vector<std::uint8_t>> expected;
  std::vector<std::vector<std::uint8_t>> sources;
  std::int64_t bytes = 0;
  for (std::size_t p = 0; p < pools.size(); ++p) {
    expected.push_back(pools[p].after(direction, pages.of_pool(p)));
    sources.push_back(pools[p].source(direction).all());
    bytes += static_cast<std::int64_t>(pages.of_pool(p).size() * pools[p].layout.stored().size() *
                                       pools[p].shape().page_bytes);
  }

  PlanOutcome outcome;
  CopyPlan plan;
  planner.plan(pages, plan);
  std::vector<Copy> batch;
  std::int64_t moved = 0;
  for (std::size_t g = 0; g < planner.groups().size(); ++g) {
    Pool& pool = pools[static_cast<std::size_t>(planner.groups()[g].pool)];
    auto& batches = outcome.batches.emplace_back();
    const BatchSink sink = [&](std::span<const Copy> copies) {
      batches.emplace_back(copies.begin(), copies.end());
      if (copies.empty() || copies.size() > planner.limits().copies_per_call) {
        outcome.fault = text("a batch of ", copies.size(), " copies");
      }
      const bool chunked = direction == Direction::backup && options.chunk_pages > 0;
      if (chunked && std::ssize(pages_of(batches.back(), pool, direction)) > options.chunk_pages) {
        outcome.fault = text("a batch of more than ", options.chunk_pages, " pages");
      }
      for (const Copy& copy : copies) {
        if (const std::string fault = fault_of(copy, pool, direction, planner.limits());
            !fault.empty()) {
          outcome.fault = fault;
          continue;
        }
        moved += static_cast<std::int64_t>(copy.bytes());
        move_bytes(copy);
      }
    };
    planner.emit(plan, g, batch, sink, plan.count.registration_splits);
  }
  outcome.count = plan.count;
  if (!outcome.fault.empty()) return outcome;

  for (std::size_t p = 0; p < pools.size(); ++p) {
    if (pools[p].destination(direction).all() != expected[p]) {
      outcome.fault = text("pool ", p, ": bytes differ from the naive copy");
    }
    if (pools[p].source(direction).all() != sources[p]) {
      outcome.fault = text("pool ", p, ": the source was written");
    }
  }
  if (moved != bytes || plan.count.bytes != bytes) {
    outcome.fault = text(moved, " bytes moved and ", plan.count.bytes, " counted of ", bytes);
  }
  if (outcome.copies() != plan.count.copies + plan.count.registration_splits) {
    outcome.fault = text(outcome.copies(), " copies made, ", plan.count.copies, " counted and ",
                         plan.count.registration_splits, " registration splits");
  }
  return outcome;
}

}  // namespace kvburst::testing
