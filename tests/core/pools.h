#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/burst_pages.h"
#include "core/device.h"
#include "core/pool_layout.h"

/// Pools in real memory, and the naive copy that every plan is compared with.
namespace kvburst::testing {

/// Random bytes between two canaries. Comparing `all` with an image taken earlier also compares the
/// canaries.
class Buffer {
 public:
  explicit Buffer(std::size_t size, unsigned seed = 1) : all_(size + 2 * kCanary, 0xC5) {
    std::mt19937 random(seed);
    std::generate_n(all_.begin() + kCanary, size,
                    [&] { return static_cast<std::uint8_t>(random()); });
  }

  std::size_t size() const { return all_.size() - 2 * kCanary; }
  std::uint8_t* data() { return all_.data() + kCanary; }
  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(all_.data()) + kCanary; }
  const std::vector<std::uint8_t>& all() const { return all_; }
  /// Where `address` lies in `all`.
  std::size_t position(std::uintptr_t address) const {
    return address - reinterpret_cast<std::uintptr_t>(all_.data());
  }
  std::span<std::uint8_t> at(std::uintptr_t address, std::size_t size) {
    return std::span(all_).subspan(position(address), size);
  }

 private:
  static constexpr std::size_t kCanary = 64;
  std::vector<std::uint8_t> all_;
};

/// A pool as it is described before it has memory: addresses are offsets into its two buffers.
struct PoolShape {
  std::string name;
  std::vector<int> layer_ids;
  std::size_t page_bytes = 0;
  std::int64_t device_pages = 0;
  std::int64_t host_pages = 0;
  std::vector<std::size_t> layer_offsets;
  std::vector<MemoryRange> allocations;
  std::vector<std::optional<std::int64_t>> rows;
  std::size_t page_stride = 0;
  std::size_t layer_stride = 0;
  std::vector<MemoryRange> registrations;

  std::size_t layer_bytes() const { return static_cast<std::size_t>(device_pages) * page_bytes; }
  std::size_t device_bytes() const {
    std::size_t bytes = 0;
    for (const MemoryRange& range : allocations) bytes = std::max(bytes, range.end());
    return bytes;
  }
  std::size_t host_bytes() const {
    std::int64_t last_row = 0;
    for (const auto& row : rows) last_row = std::max(last_row, row.value_or(0));
    return static_cast<std::size_t>(host_pages - 1) * page_stride +
           static_cast<std::size_t>(last_row) * layer_stride + page_bytes;
  }

  /// Every layer in an allocation of its own.
  PoolShape& separate_allocations() {
    allocations.clear();
    for (const std::size_t offset : layer_offsets) allocations.push_back({offset, layer_bytes()});
    return *this;
  }
  /// Registrations of `bytes` each, the last one as long as it needs to be.
  PoolShape& registered_by(std::size_t bytes) {
    registrations.clear();
    for (std::size_t at = 0; at < host_bytes(); at += bytes) {
      registrations.push_back({at, std::min(bytes, host_bytes() - at)});
    }
    return *this;
  }
};

/// Layers one after the other in one device allocation; a row of the host for each.
inline PoolShape page_first(std::string name, std::vector<int> layer_ids, std::size_t page_bytes,
                            std::int64_t device_pages, std::int64_t host_pages) {
  PoolShape shape;
  shape.name = std::move(name);
  shape.layer_ids = std::move(layer_ids);
  shape.page_bytes = page_bytes;
  shape.device_pages = device_pages;
  shape.host_pages = host_pages;
  for (std::size_t i = 0; i < shape.layer_ids.size(); ++i) {
    shape.layer_offsets.push_back(i * shape.layer_bytes());
    shape.rows.push_back(static_cast<std::int64_t>(i));
  }
  shape.allocations = {{0, shape.layer_ids.size() * shape.layer_bytes()}};
  shape.layer_stride = page_bytes;
  shape.page_stride = page_bytes * shape.layer_ids.size();
  return shape;
}

inline PoolShape layer_first(std::string name, std::vector<int> layer_ids, std::size_t page_bytes,
                             std::int64_t device_pages, std::int64_t host_pages) {
  PoolShape shape =
      page_first(std::move(name), std::move(layer_ids), page_bytes, device_pages, host_pages);
  shape.page_stride = page_bytes;
  shape.layer_stride = page_bytes * static_cast<std::size_t>(host_pages);
  return shape;
}

inline std::vector<int> layers(int count) {
  std::vector<int> ids;
  for (int layer = 0; layer < count; ++layer) ids.push_back(layer);
  return ids;
}

inline PoolLayout layout_of(const PoolShape& shape, std::uintptr_t device, std::uintptr_t host) {
  DeviceTier device_tier{{}, shape.device_pages, shape.page_bytes, shape.allocations};
  for (const std::size_t offset : shape.layer_offsets)
    device_tier.layers.push_back(device + offset);
  for (MemoryRange& range : device_tier.allocations) range.address += device;
  HostTier host_tier{host,
                     shape.host_bytes(),
                     shape.host_pages,
                     shape.page_bytes,
                     shape.page_stride,
                     shape.layer_stride,
                     shape.rows,
                     shape.registrations};
  for (MemoryRange& range : host_tier.registrations) range.address += host;
  return {shape.name, shape.layer_ids, std::move(device_tier), std::move(host_tier)};
}

/// A shape with memory. Movable; its addresses stay.
class Pool {
 public:
  explicit Pool(PoolShape shape, unsigned seed = 1)
      : device(shape.device_bytes(), 2 * seed),
        host(shape.host_bytes(), 2 * seed + 1),
        layout(layout_of(shape, device.address(), host.address())),
        shape_(std::move(shape)) {}

  Buffer device;
  Buffer host;
  PoolLayout layout;

  const PoolShape& shape() const { return shape_; }
  Buffer& destination(Direction direction) { return direction == Direction::load ? device : host; }
  Buffer& source(Direction direction) { return direction == Direction::load ? host : device; }

  /// The address of a page of the `layer`-th entry of `layer_ids`, worked out from the shape alone.
  std::uintptr_t device_page(std::size_t layer, std::int64_t page) const {
    return device.address() + shape_.layer_offsets[layer] +
           static_cast<std::size_t>(page) * shape_.page_bytes;
  }
  std::uintptr_t host_page(std::size_t layer, std::int64_t page) const {
    return host.address() + static_cast<std::size_t>(*shape_.rows[layer]) * shape_.layer_stride +
           static_cast<std::size_t>(page) * shape_.page_stride;
  }

  /// What `destination(direction).all()` must be after these pages have moved.
  std::vector<std::uint8_t> after(Direction direction, std::span<const PagePair> pages) {
    Buffer& to = destination(direction);
    std::vector<std::uint8_t> image = to.all();
    for (const PagePair& pair : pages) {
      for (std::size_t layer = 0; layer < shape_.rows.size(); ++layer) {
        if (!shape_.rows[layer]) continue;
        const std::uintptr_t on_device = device_page(layer, pair.device);
        const std::uintptr_t on_host = host_page(layer, pair.host);
        const bool load = direction == Direction::load;
        std::memcpy(image.data() + to.position(load ? on_device : on_host),
                    source(direction).at(load ? on_host : on_device, shape_.page_bytes).data(),
                    shape_.page_bytes);
      }
    }
    return image;
  }

 private:
  PoolShape shape_;
};

inline std::vector<PoolLayout> layouts_of(std::span<const Pool> pools) {
  std::vector<PoolLayout> layouts;
  for (const Pool& pool : pools) layouts.push_back(pool.layout);
  return layouts;
}

/// The slots of whole pages, as an index tensor holds them.
template <class Integer = std::int64_t>
std::vector<Integer> slots_of(std::span<const std::int64_t> pages, std::int64_t page_size) {
  std::vector<Integer> slots;
  for (const std::int64_t page : pages) {
    for (std::int64_t i = 0; i < page_size; ++i) {
      slots.push_back(static_cast<Integer>(page * page_size + i));
    }
  }
  return slots;
}

template <class Integer>
IndexView view_of(std::string_view name, const std::vector<Integer>& slots) {
  return {name, slots.data(), static_cast<std::int64_t>(slots.size()), 1, sizeof(Integer)};
}

}  // namespace kvburst::testing
