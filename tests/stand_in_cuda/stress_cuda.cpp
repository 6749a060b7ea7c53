#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "stress_program.h"

/// `stress_cuda [--without-order] SEED|FIRST-LAST ...` runs one program for each seed, on a driver
/// whose version, order and bounds the seed decides, and prints a tally. Status 0: nothing wrong
/// and nothing unordered. With --without-order the bursts are not ordered behind the forward, and
/// status 0 means that most such programs were reported: not all of them need the order.

using namespace stand_in::stress;

namespace {

struct Library {
  std::string path;
  Control control{path};
};

std::string settings_of(std::mt19937_64& random, int version) {
  constexpr std::array kOrders{"eager", "latest", "random", "random"};
  return "version=" + std::to_string(version) + ",order=" + kOrders[random() % kOrders.size()] +
         ",seed=" + std::to_string(random()) +
         ",queue_depth=" + std::to_string(random() % 2 == 0 ? 1000 : 2 + random() % 20) +
         ",batch_cap=40,max_pitch=" + std::to_string(random() % 2 == 0 ? 2'147'483'647 : 1500) +
         ",host_pointers=" + std::to_string(random() % 4 != 0);
}

void run(const Library& library, int version, std::uint64_t seed, bool ordered, Tally& tally) {
  std::mt19937_64 random(seed);
  const std::string settings = settings_of(random, version);
  if (library.control.configure(settings.c_str()) != 0) {
    throw std::runtime_error(library.control.error());
  }
  const Tally before = tally;
  Program(library.control, library.path, seed, ordered, tally).run();
  ++tally.runs;
  if (ordered && (tally.wrong != before.wrong || tally.findings != before.findings)) {
    std::printf("seed %llu, %s: %lld wrong, %llu findings\n", static_cast<unsigned long long>(seed),
                settings.c_str(), static_cast<long long>(tally.wrong - before.wrong),
                static_cast<unsigned long long>(tally.findings - before.findings));
    std::array<char, 1000> text{};
    if (library.control.finding(0, text.data(), text.size()) > 0) std::puts(text.data());
  }
  if (tally.findings != before.findings) ++tally.reported;
  if (library.control.reset(30) != 0) throw std::runtime_error("a host function does not return");
}

/// "7" or "1-300".
std::optional<std::pair<std::uint64_t, std::uint64_t>> seeds_of(std::string_view text) {
  const auto number = [](std::string_view digits) -> std::optional<std::uint64_t> {
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc{} || end != digits.data() + digits.size()) return std::nullopt;
    return value;
  };
  const std::size_t dash = text.find('-');
  const auto first = number(text.substr(0, dash));
  const auto last = dash == std::string_view::npos ? first : number(text.substr(dash + 1));
  if (!first || !last || *last < *first) return std::nullopt;
  return std::pair{*first, *last};
}

}  // namespace

int main(int argc, char** argv) try {
  bool ordered = true;
  Tally tally;
  const Library current{KVBURST_STAND_IN};
  const Library before_12{KVBURST_STAND_IN_11};
  constexpr std::array kVersions{13000, 12080, 12040, 11080};
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--without-order") {
      ordered = false;
      continue;
    }
    const auto seeds = seeds_of(argv[i]);
    if (!seeds) {
      std::fprintf(stderr, "%s: is neither a seed nor FIRST-LAST\n", argv[i]);
      return 2;
    }
    for (std::uint64_t seed = seeds->first; seed <= seeds->second; ++seed) {
      const int version = kVersions[seed % kVersions.size()];
      run(version < 12000 ? before_12 : current, version, seed, ordered, tally);
    }
  }
  std::printf(
      "%lld runs (%lld on the legacy stream), %lld bursts (%lld failed, %lld with late indices), "
      "%lld forwards, %lld layer "
      "waits, %lld pages read by forwards, %llu copies, %llu bytes, %llu driver calls, %llu "
      "findings in %lld runs, %lld wrong\n",
      static_cast<long long>(tally.runs), static_cast<long long>(tally.legacy_runs),
      static_cast<long long>(tally.bursts), static_cast<long long>(tally.failed_bursts),
      static_cast<long long>(tally.late_indices), static_cast<long long>(tally.forwards),
      static_cast<long long>(tally.layer_waits), static_cast<long long>(tally.pages_compared),
      static_cast<unsigned long long>(tally.copies),
      static_cast<unsigned long long>(tally.copied_bytes),
      static_cast<unsigned long long>(tally.calls), static_cast<unsigned long long>(tally.findings),
      static_cast<long long>(tally.reported), static_cast<long long>(tally.wrong));
  if (tally.runs == 0) std::fprintf(stderr, "no seeds were given\n");
  const bool as_meant =
      ordered ? tally.findings == 0 && tally.wrong == 0 : tally.reported > tally.runs / 2;
  return tally.runs > 0 && as_meant ? EXIT_SUCCESS : EXIT_FAILURE;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return EXIT_FAILURE;
}
