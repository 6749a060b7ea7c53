#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

#include "agreement/step_board.h"
#include "boards.h"
#include "refusals.h"
#include "threads.h"

using namespace kvburst;
using namespace kvburst::testing;
using namespace std::chrono_literals;

namespace {

using Values = std::vector<std::int64_t>;

/// Looks up often, so that what is found by looking up is found soon.
constexpr BoardPatience kShort{.timeout = 200ms, .look_up = 5ms};
constexpr BoardPatience kLong{.timeout = 1min, .look_up = 5ms};

}  // namespace

TEST_CASE("every rank reads the element-wise minimum over all ranks") {
  Ranks ranks({.ranks = 3, .values = 4});
  ranks[0].publish(Values{1, -5, INT64_MAX, 0});
  ranks[1].publish(Values{2, -6, INT64_MIN, 0});
  ranks[2].publish(Values{0, -4, 17, 0});
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(ranks.read(rank) == Values{0, -6, INT64_MIN, 0});
    CHECK(ranks[rank].rounds() == 1);
  }
}

TEST_CASE("a rank reads its round although the others have published the next") {
  Ranks ranks({.ranks = 2, .values = 1});
  ranks[0].publish(Values{5});
  ranks[1].publish(Values{3});
  CHECK(ranks.read(1) == Values{3});
  ranks[1].publish(Values{100});
  CHECK(ranks.read(0) == Values{3});
  ranks[0].publish(Values{200});
  CHECK(ranks.read(0) == Values{100});
  CHECK(ranks.read(1) == Values{100});
}

TEST_CASE("a board of one rank agrees with itself") {
  Ranks ranks({.ranks = 1, .values = 31});
  Values values(31);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::int64_t>(i) - 15;
  ranks[0].publish(values);
  CHECK(ranks.read(0) == values);
}

TEST_CASE("a ring holds two rounds for each of lag, at least four, a power of two") {
  for (int lag = 1; lag <= BoardShape::kMaxLag; ++lag) {
    const int ring = BoardShape{.ranks = 2, .values = 1, .lag = lag}.ring();
    CHECK(ring >= std::max(4, 2 * lag));
    CHECK((ring & (ring - 1)) == 0);
  }
  CHECK(BoardShape{.ranks = 2, .values = 1, .lag = 1}.ring() == 4);
}

TEST_CASE("rounds go on where their numbers wrap, of 32 bits and of 64") {
  for (const std::uint64_t wrap : {std::uint64_t{1} << 32, std::uint64_t{0}}) {
    for (const int lag : {1, 3}) {
      const std::uint64_t first = wrap - 20;
      Ranks ranks({.ranks = 2, .values = 2, .lag = lag}, {}, first);
      for (std::uint64_t step = 0; step < 40; ++step) {
        for (int rank = 0; rank < 2; ++rank) {
          if (step >= static_cast<std::uint64_t>(lag)) {
            const std::uint64_t round = first + step - static_cast<std::uint64_t>(lag);
            CHECK(ranks.read(rank) == Values{minimum_of(round, 2, 0), minimum_of(round, 2, 1)});
          }
          const std::uint64_t round = first + step;
          ranks[rank].publish(Values{value_of(round, rank, 0), value_of(round, rank, 1)});
        }
      }
      CHECK(ranks[0].rounds() == 40);
    }
  }
}

// --- waiting ---------------------------------------------------------------------------------

TEST_CASE("a read blocks until the last rank has published, and is woken by it") {
  // No look-up comes to the rescue of a wake-up that is lost.
  Ranks ranks({.ranks = 3, .values = 1}, {.timeout = 1h, .look_up = 1h});
  ranks[0].publish(Values{7});
  ranks[2].publish(Values{9});
  Values seen;
  Blocking reader([&] { seen = ranks.read(0); });
  CHECK(reader.blocks());
  ranks[1].publish(Values{8});
  reader.join();
  CHECK(seen == Values{7});
  CHECK(ranks[0].stats().spins == 1);
  CHECK(ranks[0].stats().sleeps == 1);
  CHECK(ranks[0].stats().look_ups == 0);
  CHECK(ranks[1].stats().wakes == 1);
  CHECK(ranks[2].stats().wakes == 0);
}

TEST_CASE("a round that is complete is read without spinning or sleeping") {
  Ranks ranks({.ranks = 2, .values = 1});
  for (int step = 0; step < 10; ++step) {
    for (int rank = 0; rank < 2; ++rank) ranks[rank].publish(Values{step});
    for (int rank = 0; rank < 2; ++rank) CHECK(ranks.read(rank) == Values{step});
  }
  CHECK(ranks[0].stats().spins == 0);
  CHECK(ranks[0].stats().sleeps == 0);
  CHECK(ranks[0].stats().wakes == 0);
}

TEST_CASE("a rank later than the timeout is named, with its process and its last round") {
  Ranks ranks({.ranks = 3, .values = 1}, kShort);
  for (int rank = 0; rank < 3; ++rank) ranks[rank].publish(Values{1});
  for (const int rank : {0, 2}) {
    ranks.read(rank);
    ranks[rank].publish(Values{2});
  }
  check_refused<BoardError>(
      [&] { ranks.read(0); },
      {"round 2", "rank 1 (pid 101)", "did not publish it within 0.2 s", "its last one is 1"});
}

TEST_CASE("all ranks that are later than the timeout are named") {
  Ranks ranks({.ranks = 4, .values = 1}, kShort);
  ranks[0].publish(Values{1});
  ranks[2].publish(Values{1});
  std::vector<int> named;
  try {
    ranks.read(0);
  } catch (const BoardError& error) {
    named = error.ranks();
  }
  CHECK(named == std::vector{1, 3});
}

TEST_CASE("a rank whose process has ended is named long before the timeout") {
  Ranks ranks({.ranks = 3, .values = 1}, kLong);
  ranks[0].publish(Values{1});
  Blocking reader([&] {
    // The first late rank, which sleep is on, is not the one that has ended.
    check_refused<BoardError>([&] { ranks.read(0); },
                              {"rank 2 (pid 102)", "ended", "it has published none"});
  });
  ranks.peers->end(2);
  reader.join();
  CHECK(ranks[0].stats().look_ups >= 1);
}

TEST_CASE("what a rank published before its process ended is read") {
  Ranks ranks({.ranks = 2, .values = 1}, kLong);
  ranks[0].publish(Values{2});
  ranks[1].publish(Values{1});
  ranks.peers->end(1);
  CHECK(ranks.read(0) == Values{1});
  ranks[0].publish(Values{3});
  check_refused<BoardError>([&] { ranks.read(0); }, {"round 2", "rank 1", "its last one is 1"});
}

TEST_CASE("a rank that closed its board is named at once, and its rounds are read") {
  Ranks ranks({.ranks = 2, .values = 1}, {.timeout = 1h, .look_up = 1h});
  ranks[0].publish(Values{2});
  ranks[1].publish(Values{1});
  CHECK(ranks.read(0) == Values{1});
  ranks[0].publish(Values{2});
  Blocking reader([&] {
    check_refused<BoardError>([&] { ranks.read(0); }, {"round 2", "rank 1", "closed its board"});
  });
  CHECK(reader.blocks());
  ranks[1].close();
  reader.join();
}

TEST_CASE("a rank that gave up is named to those who wait for it") {
  Ranks ranks({.ranks = 3, .values = 1}, kShort);
  ranks[0].publish(Values{1});
  ranks[1].publish(Values{1});
  check_refused<BoardError>([&] { ranks.read(0); }, {"rank 2", "did not publish it"});
  ranks[2].publish(Values{1});
  CHECK(ranks.read(2) == Values{1});
  ranks[2].publish(Values{1});
  CHECK(ranks.read(1) == Values{1});
  ranks[1].publish(Values{1});
  check_refused<BoardError>([&] { ranks.read(2); },
                            {"round 2", "rank 0", "gave up on another rank"});
}

TEST_CASE("a board that has failed says so again, whatever is called") {
  Ranks ranks({.ranks = 2, .values = 1}, kShort);
  ranks[0].publish(Values{1});
  check_refused<BoardError>([&] { ranks.read(0); }, {"rank 1"});
  ranks[1].publish(Values{1});
  check_refused<BoardError>([&] { ranks.read(0); }, {"round 1", "rank 1"});
  check_refused<BoardError>([&] { ranks[0].publish(Values{1}); }, {"round 1", "rank 1"});
}

// --- refusals --------------------------------------------------------------------------------

TEST_CASE("shapes, ranks and timeouts out of bounds are refused by name") {
  const auto make = [](BoardShape shape, int rank, BoardPatience patience) {
    SharedMemory memory(1 << 16);
    const StepBoard board(memory.start(), shape, rank, std::make_shared<FakePeers>(), patience);
  };
  const auto refused = [&](BoardShape shape, int rank, std::initializer_list<std::string> words) {
    check_refused<BoardUseError>([&] { make(shape, rank, {}); }, words);
  };
  refused({0, 1, 1}, 0, {"ranks: 0", "1 to 1024"});
  refused({1025, 1, 1}, 0, {"ranks: 1025", "1 to 1024"});
  refused({2, 0, 1}, 0, {"values: 0", "1 to 31"});
  refused({2, 32, 1}, 0, {"values: 32", "1 to 31"});
  refused({2, 1, 0}, 0, {"lag: 0", "1 to 16"});
  refused({2, 1, 17}, 0, {"lag: 17", "1 to 16"});
  refused({2, 1, 1}, 2, {"rank: 2", "0 to 1"});
  refused({2, 1, 1}, -1, {"rank: -1", "0 to 1"});
  check_refused<BoardUseError>([&] { make({2, 1, 1}, 0, {.timeout = 0s}); }, {"timeout: 0"});
}

TEST_CASE("a round with another number of values is refused, and is not published") {
  Ranks ranks({.ranks = 2, .values = 2});
  check_refused<BoardUseError>([&] { ranks[0].publish(Values{1}); }, {"1 are given", "has 2"});
  check_refused<BoardUseError>([&] { ranks[0].publish(Values{1, 2, 3}); }, {"3 are", "has 2"});
  Values three(3);
  CHECK(ranks[0].rounds() == 0);
  ranks[0].publish(Values{1, 2});
  check_refused<BoardUseError>([&] { ranks[0].read(three); }, {"room for 3", "has 2"});
}

TEST_CASE("a round is refused while as many as lag are not read") {
  for (const int lag : {1, 2, 16}) {
    Ranks ranks({.ranks = 2, .values = 1, .lag = lag});
    for (int round = 0; round < lag; ++round) ranks[0].publish(Values{round});
    check_refused<BoardUseError>([&] { ranks[0].publish(Values{0}); },
                                 {"round 1 is not read", "lag of " + std::to_string(lag)});
    CHECK(ranks[0].rounds() == lag);
    ranks[1].publish(Values{-1});
    CHECK(ranks.read(0) == Values{-1});
    ranks[0].publish(Values{0});
  }
}

TEST_CASE("reading is refused where nothing is published that has not been read") {
  Ranks ranks({.ranks = 2, .values = 1});
  check_refused<BoardUseError>([&] { ranks.read(0); }, {"publish round 1 first"});
  check_refused<BoardUseError>([&] { ranks[0].ready(); }, {"publish round 1 first"});
  check_refused<BoardUseError>([&] { ranks[0].wait(); }, {"publish round 1 first"});
  for (int rank = 0; rank < 2; ++rank) ranks[rank].publish(Values{1});
  ranks.read(0);
  check_refused<BoardUseError>([&] { ranks.read(0); }, {"publish round 2 first"});
}

TEST_CASE("a closed board is closed, however often, and refuses rounds") {
  Ranks ranks({.ranks = 1, .values = 1});
  ranks[0].publish(Values{1});
  ranks[0].close();
  ranks[0].close();
  check_refused<BoardUseError>([&] { ranks[0].publish(Values{1}); }, {"rank 0", "closed"});
  check_refused<BoardUseError>([&] { ranks.read(0); }, {"rank 0", "closed"});
}

TEST_CASE("a forked child is refused, and closes nothing for its parent") {
  Ranks ranks({.ranks = 2, .values = 1}, kShort);
  const pid_t child = fork();
  if (child == 0) {
    int refusals = 0;
    try {
      ranks[0].publish(Values{1});
    } catch (const BoardUseError&) {
      ++refusals;
    }
    ranks[0].close();
    _exit(refusals == 1 ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  ranks[1].publish(Values{2});
  // Still open: late, and not closed.
  check_refused<BoardError>([&] { ranks.read(1); }, {"rank 0", "did not publish it"});
  CHECK(ranks[0].rounds() == 0);
}
