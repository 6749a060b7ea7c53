#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "core/row_moves.h"
#include "cuda/staging.h"

using namespace kvburst;

namespace {

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

/// Bytes with a margin on either side, the first of them `apart` bytes behind a whole line.
class Bytes {
 public:
  static constexpr std::size_t kMargin = 64;

  Bytes(std::size_t size, std::size_t apart, std::uint8_t seed) : memory_(size + 4 * kMargin) {
    first_ = kMargin + (kMargin - address(memory_.data()) % kMargin) % kMargin + apart;
    std::uint8_t value = seed;
    for (std::uint8_t& byte : memory_) byte = value = static_cast<std::uint8_t>(value * 7 + 13);
  }

  std::uintptr_t begin() const { return address(memory_.data()) + first_; }
  std::uint8_t& operator[](std::size_t at) { return memory_[first_ + at]; }
  std::vector<std::uint8_t> all() const { return memory_; }
  /// As `all`, with the bytes from `at` on replaced.
  std::vector<std::uint8_t> with(std::size_t at, std::vector<std::uint8_t> bytes) const {
    std::vector<std::uint8_t> changed = memory_;
    std::copy(bytes.begin(), bytes.end(), changed.begin() + static_cast<long>(first_ + at));
    return changed;
  }
  std::vector<std::uint8_t> part(std::size_t at, std::size_t size) const {
    const auto from = memory_.begin() + static_cast<long>(first_ + at);
    return {from, from + static_cast<long>(size)};
  }

 private:
  std::vector<std::uint8_t> memory_;
  std::size_t first_;
};

/// Counts how often each byte of the destination is written, and looks where it comes from.
struct Counting {
  std::uintptr_t dst;
  std::uintptr_t src;
  std::vector<int>* times;

  void operator()(std::uintptr_t to, std::uintptr_t from, std::uint64_t bytes) const {
    REQUIRE(to - dst == from - src);
    for (std::uint64_t i = 0; i < bytes; ++i) ++times->at(to - dst + i);
  }
};

struct Piece {
  std::uintptr_t dst;
  std::uintptr_t src;
  std::uint64_t bytes;
  friend auto operator<=>(const Piece&, const Piece&) = default;
};

/// The pieces of a launch in the order of their destinations, whoever of `workers` moves them.
std::vector<Piece> pieces_of(const std::vector<RowMove>& moves, RowDirection direction,
                             std::uint64_t piece_bytes, std::uint64_t workers) {
  std::vector<RowPart> parts(moves.size());
  const std::uint64_t pieces = cut(moves, piece_bytes, parts.data());
  std::vector<Piece> found;
  const auto note = [&](std::uintptr_t dst, std::uintptr_t src, std::uint64_t bytes) {
    found.push_back({dst, src, bytes});
  };
  for (std::uint64_t worker = 0; worker < workers; ++worker) {
    move_rows(parts.data(), pieces, piece_bytes, direction, worker, workers, note);
  }
  CHECK(found.size() == pieces);
  std::sort(found.begin(), found.end());
  return found;
}

constexpr std::uint64_t kWhole = std::numeric_limits<std::uint64_t>::max();

}  // namespace

TEST_CASE("all lanes together copy every byte and no other, however the two sides are aligned") {
  const std::vector<std::size_t> sizes{0,  1,  3,   7,   8,   15,  16,  17,  31,  33,
                                       63, 64, 132, 300, 528, 576, 656, 700, 1152};
  for (std::size_t dst_apart = 0; dst_apart < 17; ++dst_apart) {
    for (std::size_t src_apart = 0; src_apart < 17; ++src_apart) {
      for (const std::size_t size : sizes) {
        for (const unsigned lanes : {1u, 2u, 5u, 32u}) {
          Bytes dst(size, dst_apart, 1);
          const Bytes src(size, src_apart, 2);
          const std::vector<std::uint8_t> wanted = dst.with(0, src.part(0, size));
          for (unsigned lane = 0; lane < lanes; ++lane) {
            LaneCopy{lane, lanes}(dst.begin(), src.begin(), size);
          }
          const bool exact = dst.all() == wanted;
          REQUIRE_MESSAGE(exact, size, " bytes, ", dst_apart, " and ", src_apart, " apart, ", lanes,
                          " lanes");
        }
      }
    }
  }
}

TEST_CASE("one lane alone leaves the others' bytes as they are") {
  Bytes dst(528, 0, 1);
  const Bytes src(528, 0, 2);
  const std::vector<std::uint8_t> wanted = dst.with(3 * 16, src.part(3 * 16, 16));
  LaneCopy{3, 32}(dst.begin(), src.begin(), 528);  // of 33 words
  CHECK(dst.all() == wanted);
}

TEST_CASE("rows are cut into pieces that meet and do not overlap") {
  const std::vector<std::int64_t> ids{2};
  for (const std::uint64_t row_bytes : {1u, 15u, 16u, 4095u, 4096u, 4097u, 8192u, 40960u, 41000u}) {
    std::vector<int> times(row_bytes, 0);
    const RowMove move{1 << 20, 1 << 24, address(ids.data()), 1, row_bytes};
    std::array<RowPart, 1> parts;
    const std::uint64_t pieces = cut({&move, 1}, 4096, parts.data());
    CHECK(pieces == (row_bytes + 4095) / 4096);
    const Counting count{move.packed, move.rows + 2 * row_bytes, &times};
    for (std::uint64_t worker = 0; worker < 3; ++worker) {
      move_rows(parts.data(), pieces, 4096, RowDirection::gather, worker, 3, count);
    }
    CHECK(std::all_of(times.begin(), times.end(), [](int n) { return n == 1; }));
  }
}

TEST_CASE("moves of one launch follow each other, empty ones among them") {
  const std::vector<std::int64_t> a{5, 0};
  const std::vector<std::int64_t> b{7, 7, 1};
  const std::vector<RowMove> moves{{0x1000, 0x2000, 0, 0, 8},
                                   {0x3000, 0x4000, address(a.data()), 2, 16},
                                   {0x5000, 0x6000, 0, 0, 1},
                                   {0x7000, 0x8000, 0, 0, 4},
                                   {0x9000, 0xA000, address(b.data()), 3, 5},
                                   {0xB000, 0xC000, 0, 0, 4}};
  const std::vector<Piece> gathered{{0x3000, 0x4050, 16},
                                    {0x3010, 0x4000, 16},
                                    {0x9000, 0xA023, 5},
                                    {0x9005, 0xA023, 5},
                                    {0x900A, 0xA005, 5}};
  for (const std::uint64_t workers : {1u, 2u, 3u, 100u}) {
    CHECK(pieces_of(moves, RowDirection::gather, kWhole, workers) == gathered);
  }
  const std::vector<Piece> scattered{{0x4000, 0x3010, 16},
                                     {0x4050, 0x3000, 16},
                                     {0xA005, 0x900A, 5},
                                     {0xA023, 0x9000, 5},
                                     {0xA023, 0x9005, 5}};
  CHECK(pieces_of(moves, RowDirection::scatter, kWhole, 4) == scattered);
}

// sgl-project/sglang#34025, sgl-project/sglang#34027: an id times a stride in 32 bits
TEST_CASE("addresses are exact beyond 4 GiB") {
  for (const std::uint64_t row_bytes : {132u, 37440u, 149760u, 276480u}) {
    for (const std::uint64_t bound : {1ull << 31, 1ull << 32, (1ull << 33) + 1}) {
      const auto near = static_cast<std::int64_t>(bound / row_bytes);
      const std::vector<std::int64_t> ids{near - 1, near, near + 1, std::int64_t{1} << 40};
      const RowMove move{std::uintptr_t{1} << 60, 1 << 12, address(ids.data()), ids.size(),
                         row_bytes};
      std::vector<Piece> wanted;
      for (std::uint64_t i = 0; i < ids.size(); ++i) {
        wanted.push_back({move.packed + i * row_bytes,
                          move.rows + static_cast<std::uint64_t>(ids[i]) * row_bytes, row_bytes});
      }
      CHECK(pieces_of({move}, RowDirection::gather, kWhole, 3) == wanted);
    }
  }
  // As many rows that packed memory is that large itself.
  const std::vector<std::int64_t> ids(100, 1);
  const RowMove move{0, 0, address(ids.data()), ids.size(), std::uint64_t{1} << 27};
  const std::vector<Piece> pieces = pieces_of({move}, RowDirection::gather, 1 << 26, 7);
  CHECK(pieces.back() == Piece{(std::uint64_t{199} << 26), std::uint64_t{3} << 26, 1 << 26});
}

TEST_CASE("random launches, thread by thread as a GPU has them, move what they are to") {
  std::mt19937_64 random(11);
  const std::vector<std::uint64_t> widths{132, 528, 576, 656, 1152};
  for (int round = 0; round < 60; ++round) {
    const bool gather = round % 2 == 0;
    std::vector<Bytes> rows;
    std::vector<Bytes> packed;
    std::vector<std::vector<std::int64_t>> ids;
    std::vector<std::vector<std::uint8_t>> wanted;
    cuda::RowLaunch launch{};
    std::vector<RowMove> moves;
    const std::size_t pools = 1 + random() % 4;
    for (std::size_t pool = 0; pool < pools; ++pool) {
      const std::uint64_t width =
          random() % 2 == 0 ? widths[random() % widths.size()] : 1 + random() % 9000;
      const std::size_t total = 1 + random() % 9;
      std::vector<std::int64_t>& named = ids.emplace_back(total);
      std::iota(named.begin(), named.end(), 0);
      std::shuffle(named.begin(), named.end(), random);
      named.resize(random() % (total + 1));
      if (gather && !named.empty()) named.push_back(named.front());
      rows.emplace_back(total * width, random() % 32, 1);
      packed.emplace_back(named.size() * width, random() % 32, 2);
      const Bytes& from = gather ? rows.back() : packed.back();
      Bytes to = gather ? packed.back() : rows.back();
      for (std::size_t i = 0; i < named.size(); ++i) {
        const std::size_t place = static_cast<std::size_t>(named[i]) * width;
        const std::vector<std::uint8_t> row = from.part(gather ? place : i * width, width);
        for (std::size_t k = 0; k < width; ++k) to[(gather ? i * width : place) + k] = row[k];
      }
      wanted.push_back(to.all());
      moves.push_back(
          {packed.back().begin(), rows.back().begin(), address(named.data()), named.size(), width});
    }
    // Moving a vector of these does not move their bytes, so the addresses hold.
    launch.pieces = cut(moves, cuda::kPieceBytes, launch.parts);
    const std::uint64_t threads = cuda::kLanes * (1 + random() % 40);
    for (std::uint64_t thread = threads; thread-- > 0;) {
      cuda::move_rows_as(launch, gather ? RowDirection::gather : RowDirection::scatter, thread,
                         threads);
    }
    for (std::size_t pool = 0; pool < pools; ++pool) {
      const bool exact = (gather ? packed : rows)[pool].all() == wanted[pool];
      CHECK_MESSAGE(exact, "round ", round, ", pool ", pool);
    }
  }
}
