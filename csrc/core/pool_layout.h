#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvburst {

/// `size` bytes from `address` on.
struct MemoryRange {
  std::uintptr_t address;
  std::size_t size;

  std::uintptr_t end() const { return address + size; }
  bool contains(std::uintptr_t first, std::size_t bytes) const {
    return first >= address && bytes <= size && first - address <= size - bytes;
  }
};

/// Highest model layer id: far above any model's, and low enough for an event a layer.
constexpr int kMaxLayerId = 65'535;

/// The device side of a pool: one contiguous array of pages a layer.
struct DeviceTier {
  /// Address of page 0, one a layer.
  std::vector<std::uintptr_t> layers;
  std::int64_t pages = 0;
  /// Bytes of one page of one layer; pages follow each other without a gap.
  std::size_t page_bytes = 0;
  /// The allocations the layers lie in, *as the caller declares them*. A copy that spans layers
  /// stays inside one: what a driver does with rows that cross allocations is not documented.
  std::vector<MemoryRange> allocations;
};

/// The host side of a pool: page `p` of row `r` lies at
/// `address + p * page_stride + r * layer_stride`. Page-first and layer-first differ only in which
/// stride is the larger.
struct HostTier {
  std::uintptr_t address = 0;
  /// Bytes of the whole buffer.
  std::size_t size = 0;
  std::int64_t pages = 0;
  /// Bytes the buffer has for one page of one layer.
  std::size_t page_bytes = 0;
  std::size_t page_stride = 0;
  std::size_t layer_stride = 0;
  /// The row of each layer of the device tier; none where the host does not store that layer.
  std::vector<std::optional<std::int64_t>> rows;
  /// The pinned ranges. Empty: the buffer is not pinned.
  std::vector<MemoryRange> registrations;
};

/// A layer that exists on both tiers.
struct StoredLayer {
  /// The model's layer id.
  int layer;
  std::uintptr_t device;
  /// Index of the allocation it lies in.
  int allocation;
  std::int64_t row;
};

/// Where a (layer, page) of one pool lives on each tier. A value, checked at construction and
/// immutable after it; it describes memory and does not own any.
///
/// One class covers page_first_direct and layer_first hosts, MHA (two pools), MLA, index-K in some
/// of the layers, packed draft layers and pools that hold only a rank's own layers: what differs is
/// which layer has which row. All arithmetic is 64-bit.
class PoolLayout {
 public:
  /// `layer_ids`: the model layer of each entry of `device.layers`, strictly increasing.
  /// Throws LayoutError, naming both values, on: differing counts, pages narrower on the host than
  /// on the device, strides that make pages overlap, tiers larger than their buffers, layers that
  /// overlap or lie in no allocation, rows used twice, registrations that overlap or leave a part
  /// of the buffer out, a page larger than the largest registration.
  PoolLayout(std::string name, std::span<const int> layer_ids, DeviceTier device, HostTier host);

  const std::string& name() const { return name_; }
  /// Bytes of one page of one layer.
  std::size_t page_bytes() const { return page_bytes_; }
  std::int64_t device_pages() const { return device_pages_; }
  std::int64_t host_pages() const { return host_pages_; }
  std::size_t host_page_stride() const { return host_page_stride_; }
  std::size_t host_layer_stride() const { return host_layer_stride_; }
  /// The layers that move, by model layer id.
  std::span<const StoredLayer> stored() const { return stored_; }
  /// Highest model layer id of the pool, stored or not, plus one.
  int num_layers() const { return num_layers_; }
  /// Sorted by address. Empty: not pinned.
  std::span<const MemoryRange> registrations() const { return registrations_; }

  std::uintptr_t device_address(const StoredLayer& layer, std::int64_t page) const {
    return layer.device + static_cast<std::uintptr_t>(page) * page_bytes_;
  }
  std::uintptr_t host_address(const StoredLayer& layer, std::int64_t page) const {
    return host_ + static_cast<std::uintptr_t>(page) * host_page_stride_ +
           static_cast<std::uintptr_t>(layer.row) * host_layer_stride_;
  }

 private:
  std::string name_;
  std::size_t page_bytes_;
  std::int64_t device_pages_;
  std::int64_t host_pages_;
  std::uintptr_t host_;
  std::size_t host_page_stride_;
  std::size_t host_layer_stride_;
  int num_layers_ = 0;
  std::vector<StoredLayer> stored_;
  std::vector<MemoryRange> registrations_;
};

}  // namespace kvburst
