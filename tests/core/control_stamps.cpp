#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>

#include "agreement/round_ring.h"
#include "boards.h"

/// The negative control of `stress_board`: whether a race detector would say so if the orders of
/// the stamps were too weak. Only a ring and its stamps, so that nothing else orders the threads.
/// `control_stamps relaxed` must be reported as a race, `control_stamps ordered` must not.

using namespace kvburst;
using namespace kvburst::testing;

namespace {

struct RelaxedOrders {
  static constexpr std::memory_order write = std::memory_order_relaxed;
  static constexpr std::memory_order read = std::memory_order_relaxed;
};

constexpr int kRanks = 2;
constexpr int kValues = 4;
constexpr int kRounds = 4;
constexpr std::uint64_t kSteps = 1000;

/// Returns how many values were wrong.
template <class Orders>
int run() {
  SharedMemory memory(RoundRing<Orders>::bytes(kRanks, kRounds));
  std::atomic<int> wrong = 0;
  const auto rank_of = [&](int rank) {
    RoundRing<Orders> ring(memory.start(), kRanks, kValues, kRounds);
    std::array<std::int64_t, kValues> values{};
    for (std::uint64_t round = 1; round <= kSteps; ++round) {
      for (int place = 0; place < kValues; ++place) {
        values[static_cast<std::size_t>(place)] = value_of(round, rank, place);
      }
      ring.write(round, rank, values);
      for (int other = 0; other < kRanks; ++other) {
        while (!ring.has(round, other)) std::this_thread::yield();
      }
      ring.minimum(round, values);
      for (int place = 0; place < kValues; ++place) {
        if (values[static_cast<std::size_t>(place)] != minimum_of(round, kRanks, place)) ++wrong;
      }
    }
  };
  std::thread other([&] { rank_of(1); });
  rank_of(0);
  other.join();
  return wrong.load();
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 2 && std::strcmp(arguments[1], "ordered") == 0) return run<StampOrders>() != 0;
  if (count == 2 && std::strcmp(arguments[1], "relaxed") == 0) return run<RelaxedOrders>() != 0;
  std::fprintf(stderr, "usage: control_stamps ordered|relaxed\n");
  return 2;
}
