#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/device.h"
#include "core/pool_layout.h"

namespace kvburst {

/// How a burst is cut into copies. The defaults are the product's; the rest is for comparison.
struct PlanOptions {
  /// Most layers in one group of a load.
  int max_group = 16;
  /// Groups grow 1, 2, 4, ... up to `max_group`; false gives one layer a group.
  bool ramp = true;
  /// Pages that are neighbours on both tiers move together.
  bool merge_neighbours = true;
  /// Most pages a backup hands to the device in one call; 0 is no bound but the device's own.
  std::int64_t chunk_pages = 0;

  /// Throws LayoutError, naming the option, its value and its bound.
  void check() const;
};

/// Why two neighbouring layers of a group cannot share a copy.
enum class SpanBreak : std::uint8_t {
  separate_allocations,
  uneven_device_layers,
  uneven_host_rows,
  pitch_above_maximum,
  tall_copies_off,
};
constexpr std::size_t kSpanBreaks = 5;

/// In words, for tables and messages.
std::string_view name_of(SpanBreak reason);

/// Consecutive stored layers of a pool that one copy can cover: evenly spaced on both tiers, in one
/// device allocation, within the device's pitch.
struct LayerSpan {
  /// Index into `PoolLayout::stored()`.
  int first;
  int layers;
  /// Bytes from one layer to the next; 0 in a span of one layer.
  std::size_t device_pitch;
  std::size_t host_pitch;
  /// Why the next span of the group is not part of this one; of no meaning in the last.
  SpanBreak ends;
};

/// Layers of one pool whose copies are issued together.
struct LayerGroup {
  int pool;
  /// Indices into `PoolLayout::stored()`.
  int first;
  int layers;
  std::vector<LayerSpan> spans;
  /// Model layers of which, once this group is issued, every pool's part is.
  std::vector<int> completes;
};

/// The groups of every burst between these pools, in the order of issue. A backup is one group a
/// pool. In a load each pool ramps over its own stored layers, and groups are issued by the first
/// model layer they contain, so that a layer which one pool lacks holds nothing back.
///
/// Depends on the layouts alone, so it is made once and not once a burst.
std::vector<LayerGroup> layer_groups(std::span<const PoolLayout> pools, Direction direction,
                                     const PlanOptions& options, const CopyLimits& limits);

}  // namespace kvburst
