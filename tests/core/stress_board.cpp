#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "agreement/step_board.h"
#include "boards.h"

/// Ranks as threads over one mapping, since a race detector sees no other process. The values are
/// plain memory: a hole in the protocol is a race, and a round written over is a wrong minimum.

using namespace kvburst;
using namespace kvburst::testing;
using namespace std::chrono_literals;

namespace {

struct Run {
  BoardShape shape;
  std::uint64_t first_round = 1;
  int steps = 4000;
};

/// Every rank: read the round of `lag` steps ago, dawdle at random, publish the next.
void run(const Run& of) {
  CAPTURE(of.shape.ranks);
  CAPTURE(of.shape.lag);
  CAPTURE(of.first_round);
  // A look-up would hide a wake-up that was lost, so none comes in time.
  Ranks ranks(of.shape, {.timeout = 1h, .look_up = 100s}, of.first_round);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < of.shape.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::mt19937 random(static_cast<unsigned>(rank));
      std::vector<std::int64_t> values(static_cast<std::size_t>(of.shape.values));
      for (int step = 0; step < of.steps; ++step) {
        const std::uint64_t round = of.first_round + static_cast<std::uint64_t>(step);
        if (step >= of.shape.lag) {
          ranks[rank].read(values);
          for (int place = 0; place < of.shape.values; ++place) {
            const auto at = static_cast<std::size_t>(place);
            const std::uint64_t read = round - static_cast<std::uint64_t>(of.shape.lag);
            if (values[at] != minimum_of(read, of.shape.ranks, place)) ++wrong;
          }
        }
        const unsigned dice = static_cast<unsigned>(random()) % 32;
        if (dice == 0) std::this_thread::yield();
        if (dice == 1) std::this_thread::sleep_for(std::chrono::microseconds(random() % 100));
        for (int place = 0; place < of.shape.values; ++place) {
          values[static_cast<std::size_t>(place)] = value_of(round, rank, place);
        }
        ranks[rank].publish(values);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong.load() == 0);
  for (int rank = 0; rank < of.shape.ranks; ++rank) {
    CHECK(ranks[rank].rounds() == of.steps);
    CHECK(ranks[rank].stats().look_ups == 0);
  }
}

}  // namespace

TEST_CASE("ranks on threads of their own read the same minima, whatever their timing") {
  for (const int ranks : {2, 3, 8}) run({.shape = {.ranks = ranks, .values = 8}});
}

TEST_CASE("they do so when rounds take all of an entry, and with more rounds in flight") {
  run({.shape = {.ranks = 3, .values = RoundRing<>::kMaxValues}});
  for (const int lag : {2, 3, 16}) run({.shape = {.ranks = 3, .values = 2, .lag = lag}});
}

TEST_CASE("they do so where the numbers of rounds wrap") {
  for (const std::uint64_t wrap : {std::uint64_t{1} << 32, std::uint64_t{0}}) {
    run({.shape = {.ranks = 4, .values = 2}, .first_round = wrap - 1000, .steps = 2000});
  }
}
