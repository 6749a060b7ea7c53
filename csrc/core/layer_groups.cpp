#include "core/layer_groups.h"

#include <algorithm>
#include <map>
#include <optional>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

/// Bytes from `a` up to `b`; none where `b` does not lie above.
std::optional<std::size_t> step(std::uintptr_t a, std::uintptr_t b) {
  if (b <= a) return std::nullopt;
  return b - a;
}

struct Spacing {
  std::optional<std::size_t> device;
  std::optional<std::size_t> host;
};

Spacing spacing(const PoolLayout& pool, const StoredLayer& a, const StoredLayer& b) {
  return {step(a.device, b.device), step(pool.host_address(a, 0), pool.host_address(b, 0))};
}

std::vector<LayerSpan> layer_spans(const PoolLayout& pool, int first, int layers,
                                   const CopyLimits& limits) {
  const std::span<const StoredLayer> stored = pool.stored();
  std::vector<LayerSpan> spans{{first, 1, 0, 0, SpanBreak::tall_copies_off}};
  for (int i = first + 1; i < first + layers; ++i) {
    const StoredLayer& last = stored[static_cast<std::size_t>(i - 1)];
    const StoredLayer& next = stored[static_cast<std::size_t>(i)];
    const Spacing gap = spacing(pool, last, next);
    LayerSpan& span = spans.back();
    std::optional<SpanBreak> reason;
    if (!limits.tall_copies) {
      reason = SpanBreak::tall_copies_off;
    } else if (last.allocation != next.allocation) {
      reason = SpanBreak::separate_allocations;
    } else if (!gap.device || (span.layers > 1 && *gap.device != span.device_pitch)) {
      reason = SpanBreak::uneven_device_layers;
    } else if (!gap.host || (span.layers > 1 && *gap.host != span.host_pitch)) {
      reason = SpanBreak::uneven_host_rows;
    } else if (*gap.device > limits.max_pitch || *gap.host > limits.max_pitch) {
      reason = SpanBreak::pitch_above_maximum;
    }
    if (reason) {
      span.ends = *reason;
      spans.push_back({i, 1, 0, 0, *reason});
    } else {
      span.device_pitch = *gap.device;
      span.host_pitch = *gap.host;
      ++span.layers;
    }
  }
  return spans;
}

}  // namespace

void PlanOptions::check() const {
  if (max_group < 1) {
    throw LayoutError(text("max_group: ", max_group, " layers is below the minimum of 1"));
  }
  if (chunk_pages < 0) {
    throw LayoutError(text("chunk_pages: ", chunk_pages, " pages is below the minimum of 0"));
  }
}

std::string_view name_of(SpanBreak reason) {
  switch (reason) {
    case SpanBreak::separate_allocations:
      return "layers in separate allocations";
    case SpanBreak::uneven_device_layers:
      return "device layers not evenly spaced";
    case SpanBreak::uneven_host_rows:
      return "host rows not evenly spaced";
    case SpanBreak::pitch_above_maximum:
      return "pitch above the device's maximum";
    case SpanBreak::tall_copies_off:
      return "tall copies switched off";
  }
  return "unknown";
}

std::vector<LayerGroup> layer_groups(std::span<const PoolLayout> pools, Direction direction,
                                     const PlanOptions& options, const CopyLimits& limits) {
  options.check();
  limits.check();
  std::vector<LayerGroup> groups;
  for (std::size_t p = 0; p < pools.size(); ++p) {
    const int stored = static_cast<int>(pools[p].stored().size());
    const bool ramping = direction == Direction::load && options.ramp;
    int size = direction == Direction::backup ? stored : 1;
    for (int first = 0; first < stored;) {
      const int layers = std::min(size, stored - first);
      groups.push_back(
          {static_cast<int>(p), first, layers, layer_spans(pools[p], first, layers, limits), {}});
      first += layers;
      if (ramping) size = std::min(2 * size, options.max_group);
    }
  }
  const auto first_layer = [&](const LayerGroup& group) {
    return pools[static_cast<std::size_t>(group.pool)]
        .stored()[static_cast<std::size_t>(group.first)]
        .layer;
  };
  std::stable_sort(groups.begin(), groups.end(), [&](const LayerGroup& a, const LayerGroup& b) {
    return first_layer(a) < first_layer(b);
  });

  std::map<int, std::size_t> last_group_of_layer;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto stored = pools[static_cast<std::size_t>(groups[g].pool)].stored();
    for (int i = groups[g].first; i < groups[g].first + groups[g].layers; ++i) {
      last_group_of_layer[stored[static_cast<std::size_t>(i)].layer] = g;
    }
  }
  for (const auto& [layer, group] : last_group_of_layer) groups[group].completes.push_back(layer);
  return groups;
}

}  // namespace kvburst
