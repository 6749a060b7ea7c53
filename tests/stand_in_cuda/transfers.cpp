#include "transfers.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include "capture.h"

namespace stand_in {
namespace {

/// Where the rows are read from, and what keeps them there.
struct Rows {
  Transfer transfer;
  std::vector<std::byte> read_early;  // packed; empty: read when it runs
};

void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

void read_now(Rows& rows) {
  const Transfer& transfer = rows.transfer;
  rows.read_early.resize(transfer.width * transfer.height);
  for (std::size_t row = 0; row < transfer.height; ++row) {
    std::memcpy(rows.read_early.data() + row * transfer.width,
                at(transfer.src.address + row * transfer.src_pitch), transfer.width);
  }
}

void perform(const Rows& rows, bool backwards) {
  const Transfer& transfer = rows.transfer;
  for (std::size_t i = 0; i < transfer.height; ++i) {
    const std::size_t row = backwards ? transfer.height - 1 - i : i;
    const void* src = rows.read_early.empty() ? at(transfer.src.address + row * transfer.src_pitch)
                                              : rows.read_early.data() + row * transfer.width;
    std::memmove(at(transfer.dst.address + row * transfer.dst_pitch), src, transfer.width);
  }
}

/// In an order of its own.
void perform_all(const std::vector<Rows>& all, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::size_t> order(all.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), random);
  for (const std::size_t i : order) perform(all[i], random() % 2 == 0);
}

void access(Driver& driver, const Transfer& transfer, bool write, const VectorClock& start,
            const Stamp& over) {
  const std::uintptr_t first = write ? transfer.dst.address : transfer.src.address;
  const std::size_t pitch = write ? transfer.dst_pitch : transfer.src_pitch;
  if (transfer.height == 1 || pitch == transfer.width) {
    driver.checker.access({first, first + transfer.width * transfer.height}, write, start, over);
    return;
  }
  for (std::size_t row = 0; row < transfer.height; ++row) {
    const std::uintptr_t begin = first + row * pitch;
    driver.checker.access({begin, begin + transfer.width}, write, start, over);
  }
}

void check(Scope& scope, const Stream& stream, const Place& place,
           const std::vector<Transfer>& transfers) {
  Driver& driver = scope.driver;
  if (!driver.settings.checker) return;
  const Stamp over{stream.line, place.tick, scope.call};
  for (const Transfer& transfer : transfers) {
    switch (transfer.reads) {
      case ReadTime::in_order:
        access(driver, transfer, false, place.start, over);
        break;
      case ReadTime::early:
        access(driver, transfer, false, driver.host, over);
        break;
      case ReadTime::during_call: {
        const VectorClock start = driver.host;
        access(driver, transfer, false, start, driver.host_step(scope.call));
        break;
      }
    }
    access(driver, transfer, true, place.start, over);
  }
}

}  // namespace

std::optional<std::size_t> hull(std::size_t width, std::size_t height, std::size_t pitch) {
  std::size_t bytes = 0;
  if (height == 0 || __builtin_mul_overflow(height - 1, pitch, &bytes) ||
      __builtin_add_overflow(bytes, width, &bytes)) {
    return std::nullopt;
  }
  return bytes;
}

std::optional<Operand> device_operand(const Scope& scope, std::uintptr_t address,
                                      std::size_t bytes) {
  std::optional<Operand> operand = scope.driver.memory->operand(address, bytes);
  if (!operand || !operand->on_device()) return std::nullopt;
  return operand;
}

std::optional<Operand> host_operand(const Scope& scope, std::uintptr_t address, std::size_t bytes) {
  std::optional<Operand> operand = scope.driver.memory->operand(address, bytes);
  if (!operand || operand->on_device() || operand->by_alias) return std::nullopt;
  return operand;
}

std::optional<Operand> unified_operand(const Scope& scope, std::uintptr_t address,
                                       std::size_t bytes) {
  std::optional<Operand> operand = scope.driver.memory->operand(address, bytes);
  if (operand && operand->pinned() && operand->block->alias != 0 && !operand->by_alias) {
    return std::nullopt;
  }
  return operand;
}

void enqueue(Scope& scope, const std::shared_ptr<Stream>& stream, std::vector<Transfer> transfers) {
  Driver& driver = scope.driver;
  Place place = scope.place(stream);
  check(scope, *stream, place, transfers);
  std::vector<Rows> all;
  all.reserve(transfers.size());
  std::uint64_t bytes = 0;
  for (Transfer& transfer : transfers) {
    bytes += transfer.width * transfer.height;
    all.push_back({std::move(transfer), {}});
    if (all.back().transfer.reads != ReadTime::in_order) read_now(all.back());
  }
  driver.counts.copies += all.size();
  driver.counts.copied_bytes += bytes;
  scope.amend({.stream = stream->handle, .bytes = bytes, .copies = all.size()});
  auto body = [all = std::move(all), seed = driver.scheduler.random()] { perform_all(all, seed); };
  scope.push(stream, std::move(place), {.after = {}, .gate = {}, .body = std::move(body)});
}

CUresult single_copy(Scope& scope, CUstream stream, const std::optional<Operand>& dst,
                     const std::optional<Operand>& src, std::size_t width, std::size_t height,
                     std::size_t dst_pitch, std::size_t src_pitch) {
  const auto on = scope.driver.find_stream(number_of(stream));
  if (!on) return CUDA_ERROR_INVALID_HANDLE;
  if (!dst || !src || width == 0 || height == 0) return CUDA_ERROR_INVALID_VALUE;
  const Captured by = captured(scope, *on);
  if (by.refusal) return *by.refusal;
  if (by.swallowed) return CUDA_SUCCESS;
  const bool pageable_dst = !dst->block;
  const ReadTime reads = src->block ? ReadTime::in_order : ReadTime::early;
  enqueue(scope, on, {{*dst, *src, width, height, dst_pitch, src_pitch, reads}});
  if (pageable_dst) scope.synchronize(on);
  return CUDA_SUCCESS;
}

}  // namespace stand_in
