#include "kernels.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

namespace stand_in {
namespace {

/// Adds bytes that all lie in one block; false if they do not.
bool add(Touched& touched, const Memory& memory, std::uintptr_t address, std::uint64_t bytes,
         bool write) {
  const std::optional<Operand> operand = memory.operand(address, bytes);
  if (!operand || !operand->block) return false;
  touched.ranges.push_back({{operand->address, operand->address + bytes}, write});
  if (touched.blocks.empty() || touched.blocks.back() != operand->block) {
    touched.blocks.push_back(operand->block);
  }
  return true;
}

}  // namespace

template <class Each>
void RowKernel::each_move(const Each& each) const {
  const kvburst::RowPart* part = launch_.parts;
  for (std::uint64_t before = 0; before < launch_.pieces; before = (part++)->end) each(part->move);
}

std::optional<std::vector<std::int64_t>> RowKernel::ids(const Memory& memory) const {
  std::vector<std::int64_t> all;
  bool reached = true;
  each_move([&](const kvburst::RowMove& move) {
    const std::size_t bytes = move.count * sizeof(std::int64_t);
    const std::optional<Operand> operand = memory.operand(move.ids, bytes);
    reached = reached && operand && operand->block;
    if (!reached) return;
    all.resize(all.size() + move.count);
    std::memcpy(all.data() + all.size() - move.count,
                reinterpret_cast<const void*>(operand->address), bytes);
  });
  if (!reached) return std::nullopt;
  return all;
}

std::optional<Touched> RowKernel::known(const Memory& memory) const {
  Touched touched;
  bool reached = true;
  each_move([&](const kvburst::RowMove& move) {
    const bool gather = direction_ == kvburst::RowDirection::gather;
    reached = reached && add(touched, memory, move.ids, move.count * sizeof(std::int64_t), false) &&
              add(touched, memory, move.packed, move.count * move.row_bytes, gather);
  });
  if (!reached) return std::nullopt;
  return touched;
}

std::optional<Touched> RowKernel::rows(const Memory& memory,
                                       const std::vector<std::int64_t>& ids) const {
  Touched touched;
  bool reached = true;
  const std::int64_t* id = ids.data();
  each_move([&](const kvburst::RowMove& move) {
    for (std::uint64_t i = 0; i < move.count; ++i, ++id) {
      std::uintptr_t offset = 0;
      std::uintptr_t row = 0;
      reached =
          reached &&
          !__builtin_mul_overflow(static_cast<std::uint64_t>(*id), move.row_bytes, &offset) &&
          !__builtin_add_overflow(move.rows, offset, &row) &&
          add(touched, memory, row, move.row_bytes, direction_ == kvburst::RowDirection::scatter);
    }
  });
  if (!reached) return std::nullopt;
  return touched;
}

void RowKernel::run(std::uint64_t threads, std::uint64_t seed) const {
  std::vector<std::uint64_t> order(threads);
  std::iota(order.begin(), order.end(), std::uint64_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  for (const std::uint64_t thread : order) {
    kvburst::cuda::move_rows_as(launch_, direction_, thread, threads);
  }
}

std::uint64_t RowKernel::bytes() const {
  std::uint64_t sum = 0;
  each_move([&](const kvburst::RowMove& move) { sum += move.count * move.row_bytes; });
  return sum;
}

}  // namespace stand_in
