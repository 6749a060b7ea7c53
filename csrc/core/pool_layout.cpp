#include "core/pool_layout.h"

#include <algorithm>
#include <limits>
#include <set>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

/// `a * b + c`, refused rather than wrapped.
std::size_t bytes_of(const std::string& what, std::size_t a, std::size_t b, std::size_t c) {
  std::size_t product = 0;
  std::size_t sum = 0;
  if (__builtin_mul_overflow(a, b, &product) || __builtin_add_overflow(product, c, &sum)) {
    throw LayoutError(text(what, ": ", a, " x ", b, " + ", c, " bytes does not fit in 64 bits"));
  }
  return sum;
}

void check_positive(const std::string& what, std::int64_t value) {
  if (value < 1) throw LayoutError(text(what, ": ", value, " is below the minimum of 1"));
}

void check_range(const std::string& what, const MemoryRange& range) {
  if (range.size == 0) throw LayoutError(text(what, ": size 0 is below the minimum of 1"));
  if (range.size > std::numeric_limits<std::uintptr_t>::max() - range.address) {
    throw LayoutError(
        text(what, ": ", range.size, " bytes from ", range.address, " on pass the last address"));
  }
}

std::vector<MemoryRange> sorted(std::vector<MemoryRange> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const MemoryRange& a, const MemoryRange& b) { return a.address < b.address; });
  return ranges;
}

void check_device(const std::string& pool, const DeviceTier& device, std::size_t layer_bytes) {
  for (const MemoryRange& range : device.allocations) check_range(pool + ": allocations", range);
  std::vector<MemoryRange> layers;
  for (std::uintptr_t layer : device.layers) layers.push_back({layer, layer_bytes});
  layers = sorted(std::move(layers));
  for (std::size_t i = 1; i < layers.size(); ++i) {
    if (layers[i].address < layers[i - 1].end()) {
      throw LayoutError(text(pool, ": device layers of ", layer_bytes, " bytes at addresses ",
                             layers[i - 1].address, " and ", layers[i].address, " overlap"));
    }
  }
}

int allocation_of(const std::string& pool, const DeviceTier& device, int layer,
                  const MemoryRange& bytes) {
  for (std::size_t i = 0; i < device.allocations.size(); ++i) {
    if (device.allocations[i].contains(bytes.address, bytes.size)) return static_cast<int>(i);
  }
  throw LayoutError(text(pool, ": device layer ", layer, " needs ", bytes.size,
                         " bytes (pages x page_bytes) from address ", bytes.address,
                         " on, which lie in none of the ", device.allocations.size(),
                         " declared allocations"));
}

/// Pages and layers are two nested strides; whichever is larger must clear the extent of the other.
void check_strides(const std::string& pool, const HostTier& host, std::int64_t rows) {
  const auto pages = static_cast<std::size_t>(host.pages);
  const auto layers = static_cast<std::size_t>(rows);
  const std::string what = pool + ": host tier";
  const std::size_t page_extent = bytes_of(what, layers - 1, host.layer_stride, host.page_bytes);
  const std::size_t layer_extent = bytes_of(what, pages - 1, host.page_stride, host.page_bytes);
  const bool page_major = (pages == 1 || host.page_stride >= page_extent) &&
                          (layers == 1 || host.layer_stride >= host.page_bytes);
  const bool layer_major = (layers == 1 || host.layer_stride >= layer_extent) &&
                           (pages == 1 || host.page_stride >= host.page_bytes);
  if (!page_major && !layer_major) {
    throw LayoutError(text(pool, ": host strides overlap: page_stride ", host.page_stride,
                           " and layer_stride ", host.layer_stride, " for ", pages, " pages of ",
                           layers, " rows of ", host.page_bytes, " bytes"));
  }
  const std::size_t needed =
      bytes_of(what, pages - 1, host.page_stride,
               bytes_of(what, layers - 1, host.layer_stride, host.page_bytes));
  if (needed > host.size) {
    throw LayoutError(text(pool, ": the host tier needs ", needed, " bytes for ", pages,
                           " pages of ", layers, " rows, its buffer has ", host.size));
  }
}

void check_registrations(const std::string& pool, const HostTier& host) {
  if (host.registrations.empty()) return;
  for (const MemoryRange& range : host.registrations) check_range(pool + ": registrations", range);
  std::size_t largest = 0;
  std::uintptr_t covered = host.address;
  const std::uintptr_t end = host.address + host.size;
  for (std::size_t i = 1; i < host.registrations.size(); ++i) {
    if (host.registrations[i].address < host.registrations[i - 1].end()) {
      throw LayoutError(text(pool, ": registrations at addresses ",
                             host.registrations[i - 1].address, " and ",
                             host.registrations[i].address, " overlap"));
    }
  }
  for (const MemoryRange& range : host.registrations) {
    largest = std::max(largest, range.size);
    if (range.address > covered) break;
    covered = std::max(covered, range.end());
  }
  if (host.page_bytes > largest) {
    throw LayoutError(text(pool, ": a host page of ", host.page_bytes,
                           " bytes is larger than the largest registration of ", largest,
                           " bytes"));
  }
  if (covered < end) {
    throw LayoutError(text(pool, ": registrations: ", end - covered, " of the host buffer's ",
                           host.size, " bytes, from address ", covered,
                           " on, lie in no registration"));
  }
}

}  // namespace

PoolLayout::PoolLayout(std::string name, std::span<const int> layer_ids, DeviceTier device,
                       HostTier host)
    : name_(std::move(name)),
      page_bytes_(device.page_bytes),
      device_pages_(device.pages),
      host_pages_(host.pages),
      host_(host.address),
      host_page_stride_(host.page_stride),
      host_layer_stride_(host.layer_stride) {
  const std::string pool = text("pool '", name_, "'");
  if (layer_ids.size() != device.layers.size() || layer_ids.size() != host.rows.size()) {
    throw LayoutError(text(pool, ": ", layer_ids.size(), " layer_ids, ", device.layers.size(),
                           " device layers and ", host.rows.size(),
                           " host rows: the three must be equal"));
  }
  if (layer_ids.empty()) throw LayoutError(pool + ": layer_ids: 0 layers, at least 1 is needed");
  for (std::size_t i = 0; i < layer_ids.size(); ++i) {
    if (layer_ids[i] < 0 || (i > 0 && layer_ids[i] <= layer_ids[i - 1])) {
      throw LayoutError(text(pool, ": layer_ids: ", layer_ids[i], " at position ", i,
                             " must be at least ", i > 0 ? layer_ids[i - 1] + 1 : 0,
                             " (strictly increasing from 0)"));
    }
    if (layer_ids[i] > kMaxLayerId) {
      throw LayoutError(
          text(pool, ": layer_ids: ", layer_ids[i], " must be at most ", kMaxLayerId));
    }
  }
  num_layers_ = layer_ids.back() + 1;
  check_positive(pool + ": device pages", device.pages);
  check_positive(pool + ": host pages", host.pages);
  if (device.page_bytes == 0) {
    throw LayoutError(pool + ": device page_bytes: 0 is below the minimum of 1");
  }
  if (host.page_bytes < device.page_bytes) {
    throw LayoutError(text(pool, ": the host page of ", host.page_bytes,
                           " bytes is narrower than the device page of ", device.page_bytes,
                           " bytes"));
  }
  if (host.size > std::numeric_limits<std::uintptr_t>::max() - host.address) {
    throw LayoutError(text(pool, ": host buffer of ", host.size, " bytes at ", host.address,
                           " passes the last address"));
  }

  const std::size_t layer_bytes = bytes_of(
      pool + ": device tier", static_cast<std::size_t>(device.pages), device.page_bytes, 0);
  check_device(pool, device, layer_bytes);

  std::set<std::int64_t> rows;
  for (std::size_t i = 0; i < layer_ids.size(); ++i) {
    const int allocation =
        allocation_of(pool, device, layer_ids[i], {device.layers[i], layer_bytes});
    if (!host.rows[i]) continue;
    const std::int64_t row = *host.rows[i];
    if (row < 0)
      throw LayoutError(
          text(pool, ": host row ", row, " of layer ", layer_ids[i], " is below the minimum of 0"));
    if (!rows.insert(row).second) {
      throw LayoutError(text(pool, ": host row ", row, " is used by layer ", layer_ids[i],
                             " and by an earlier layer"));
    }
    stored_.push_back({layer_ids[i], device.layers[i], allocation, row});
  }
  if (!rows.empty()) {
    if (*rows.rbegin() == std::numeric_limits<std::int64_t>::max()) {
      throw LayoutError(text(pool, ": host row ", *rows.rbegin(), " is too large"));
    }
    check_strides(pool, host, *rows.rbegin() + 1);
    host.registrations = sorted(std::move(host.registrations));
    check_registrations(pool, host);
  }
  registrations_ = std::move(host.registrations);
}

}  // namespace kvburst
