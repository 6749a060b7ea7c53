#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "control.h"
#include "core/burst_issuer.h"
#include "core/error.h"
#include "core/pools.h"
#include "cuda/cuda_device.h"
#include "cuda/memory.h"

/// A program of random bursts on a CudaDevice over the stand-in driver, and a model of what every
/// byte has to be afterwards. It keeps the rules that a cache controller keeps: a page of a burst
/// is left alone until the burst is done. Then nothing may be unordered and nothing wrong.
namespace stand_in::stress {

using namespace kvburst;
using kvburst::testing::Buffer;
using kvburst::testing::Pool;

/// The control functions of one loaded library.
struct Control {
  explicit Control(const std::string& path);

  decltype(&stand_in_configure) configure;
  decltype(&stand_in_error) error;
  decltype(&stand_in_fail) fail;
  decltype(&stand_in_call_count) call_count;
  decltype(&stand_in_finding_count) finding_count;
  decltype(&stand_in_finding) finding;
  decltype(&stand_in_counts) counts;
  decltype(&stand_in_adopt) adopt;
  decltype(&stand_in_disown) disown;
  decltype(&stand_in_host_write) host_write;
  decltype(&stand_in_reset) reset;
};

struct Tally {
  std::int64_t runs = 0;
  std::int64_t bursts = 0;
  std::int64_t failed_bursts = 0;
  std::int64_t late_indices = 0;
  std::int64_t forwards = 0;
  std::int64_t legacy_runs = 0;  ///< whose forwards run on the legacy stream
  std::int64_t layer_waits = 0;
  std::int64_t pages_compared = 0;
  std::uint64_t copies = 0;
  std::uint64_t copied_bytes = 0;
  std::uint64_t calls = 0;
  std::uint64_t findings = 0;
  std::int64_t reported = 0;  ///< runs with findings
  std::int64_t wrong = 0;  ///< bytes, open handles, or registrations that are not as they must be
};

/// A buffer and what the model says of it. A byte that a failed burst may have written is unknown
/// until it is written again.
struct Modelled {
  explicit Modelled(const Buffer& buffer) : bytes(buffer.all()), known(bytes.size(), true) {}

  std::vector<std::uint8_t> bytes;
  std::vector<bool> known;
};

class Program {
 public:
  /// `ordered`: false leaves out the order between the forward and the bursts.
  Program(const Control& control, const std::string& library, std::uint64_t seed, bool ordered,
          Tally& tally);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  /// Everything, and in the end the comparison.
  void run();

 private:
  struct InFlight {
    std::shared_ptr<Burst> burst;
    std::vector<PagePair> pages;
    std::vector<std::shared_ptr<const void>> keeps;
  };
  /// A page that a forward read, and what it must have been.
  struct Read {
    std::size_t offset;
    std::vector<std::uint8_t> bytes;
    std::vector<bool> known;
  };
  struct Lane {
    Direction direction;
    BurstPages pages;
    std::unique_ptr<BurstIssuer> issuer;
    std::deque<InFlight> in_flight;
  };

  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }
  void make_pools();
  void pin_and_adopt();
  void submit(Lane& lane);
  void add_late(Lane& lane, const std::vector<std::int64_t>& device,
                const std::vector<std::int64_t>& host, InFlight& burst);
  void forward();
  void read_layer(int layer, std::span<const PagePair> pages);
  void fill_some();
  void poll(Lane& lane);
  void retire(Lane& lane);
  void reserve(Direction direction, std::span<const PagePair> pages, int by);
  void write_model(Direction direction, std::span<const PagePair> pages, bool known);
  void finish();
  void compare(const Modelled& model, const std::vector<std::uint8_t>& all);

  const Control& control_;
  const bool ordered_;
  Tally& tally_;
  std::mt19937_64 random_;
  std::shared_ptr<cuda::CudaDevice> device_;
  std::vector<std::unique_ptr<Pool>> pools_;
  std::vector<PoolLayout> layouts_;
  std::vector<Modelled> on_device_;
  std::vector<Modelled> on_host_;
  std::vector<std::unique_ptr<cuda::PinnedMemory>> pinned_;
  std::vector<void*> adopted_;
  std::shared_ptr<LayerGate> gate_;
  std::optional<Stream> own_forward_;
  StreamHandle forward_ = cuda::kStreamLegacy;  // that, or a stream of its own
  std::optional<Stream> elsewhere_;
  std::vector<Lane> lanes_;
  std::optional<Buffer> scratch_;  // what forwards read, one page after the other
  std::size_t scratch_used_ = 0;
  std::vector<Read> reads_;
  std::optional<InFlight> newest_load_;
  std::vector<int> device_users_;  // by page: bursts in flight
  std::vector<int> host_users_;
};

}  // namespace stand_in::stress
