#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace stand_in {

/// When a stream runs what is enqueued on it.
enum class Order : std::uint8_t {
  eager,   ///< as soon as what it waits for has happened
  latest,  ///< not before somebody synchronizes with it, asks for it, or needs room in the queue
  random,  ///< each operation by the toss of a coin: `eager` or `latest`
};

struct Settings {
  int version = 13000;  ///< what cuDriverGetVersion says: 1000 x major + 10 x minor
  Order order = Order::eager;
  std::uint64_t seed = 1;          ///< of `random`, and of the order of copies in a batch
  std::size_t queue_depth = 1000;  ///< operations outstanding on a stream before calls block
  std::size_t batch_cap = 50'000;  ///< copies in a batch; drivers have crashed near it
  std::size_t max_pitch = 2'147'483'647;
  int devices = 1;
  bool host_pointers = true;  ///< CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
  bool checker = true;        ///< whether accesses are checked for order
  bool report = false;        ///< to stderr, when the process ends
  bool strict = false;        ///< the process ends with status 86 if there are findings
  std::size_t memory = std::size_t{8} << 30;  ///< bytes of device memory, of all devices together
};

/// `base` changed by "key=value,key=value". std::invalid_argument names a key or a value that is
/// not one.
Settings changed(Settings base, std::string_view text);

}  // namespace stand_in
