#include "stress_program.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <stdexcept>

namespace stand_in::stress {
namespace {

constexpr std::int64_t kDevicePages = 40;
constexpr std::int64_t kHostPages = 60;
constexpr std::size_t kScratch = std::size_t{1} << 20;
constexpr int kSteps = 60;

template <class Function>
Function find(void* library, const char* name) {
  void* const found = dlsym(library, name);
  if (found == nullptr) throw std::runtime_error(std::string("the library has no ") + name);
  return reinterpret_cast<Function>(found);
}

void* open(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  return library;
}

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

Control::Control(const std::string& path) {
  void* const library = open(path);
  configure = find<decltype(configure)>(library, "stand_in_configure");
  error = find<decltype(error)>(library, "stand_in_error");
  fail = find<decltype(fail)>(library, "stand_in_fail");
  call_count = find<decltype(call_count)>(library, "stand_in_call_count");
  finding_count = find<decltype(finding_count)>(library, "stand_in_finding_count");
  finding = find<decltype(finding)>(library, "stand_in_finding");
  counts = find<decltype(counts)>(library, "stand_in_counts");
  adopt = find<decltype(adopt)>(library, "stand_in_adopt");
  disown = find<decltype(disown)>(library, "stand_in_disown");
  host_write = find<decltype(host_write)>(library, "stand_in_host_write");
  reset = find<decltype(reset)>(library, "stand_in_reset");
}

Program::Program(const Control& control, const std::string& library, std::uint64_t seed,
                 bool ordered, Tally& tally)
    : control_(control),
      ordered_(ordered),
      tally_(tally),
      random_(seed),
      device_users_(kDevicePages, 0),
      host_users_(kHostPages, 0) {
  cuda::CudaOptions options;
  options.limits.copies_per_call = 1 + below(40);
  options.limits.tall_copies = below(4) != 0;
  options.single_copies = below(4) == 0;
  const auto driver = std::make_shared<const cuda::Driver>(library);
  device_ = std::make_shared<cuda::CudaDevice>(driver, 0, std::move(options));
  make_pools();
  pin_and_adopt();
  gate_ = std::make_shared<LayerGate>(device_, layouts_, 1 + static_cast<int>(below(4)));
  if (below(5) == 0) {
    ++tally_.legacy_runs;
  } else {
    own_forward_.emplace(device_);
    forward_ = own_forward_->handle();
  }
  elsewhere_.emplace(device_);
  for (const Direction direction : {Direction::load, Direction::backup}) {
    PlanOptions options;
    options.max_group = 1 + static_cast<int>(below(6));
    options.ramp = below(2) == 0;
    options.chunk_pages = direction == Direction::backup ? static_cast<std::int64_t>(below(4)) : 0;
    lanes_.push_back({direction,
                      BurstPages(layouts_, direction, 1, IndexCheck::slots),
                      std::make_unique<BurstIssuer>(device_, layouts_, direction,
                                                    direction == Direction::load ? gate_ : nullptr,
                                                    options, IssuerOptions{below(4) != 0, {}, {}}),
                      {}});
  }
}

Program::~Program() = default;

void Program::make_pools() {
  const std::size_t count = 1 + below(3);
  for (std::size_t i = 0; i < count; ++i) {
    const std::vector<int> ids = testing::layers(1 + static_cast<int>(below(7)));
    const std::size_t page_bytes = 1 + below(48);
    const std::string name = "pool " + std::to_string(i);
    const bool page_first = below(3) != 0;
    auto shape = page_first ? testing::page_first(name, ids, page_bytes, kDevicePages, kHostPages)
                            : testing::layer_first(name, ids, page_bytes, kDevicePages, kHostPages);
    if (below(3) == 0) shape.separate_allocations();
    shape.registered_by(shape.page_stride * (1 + below(kHostPages)));
    pools_.push_back(std::make_unique<Pool>(std::move(shape), static_cast<unsigned>(random_())));
    layouts_.push_back(pools_.back()->layout);
    on_device_.emplace_back(pools_.back()->device);
    on_host_.emplace_back(pools_.back()->host);
  }
}

void Program::pin_and_adopt() {
  const auto adopt = [&](std::uintptr_t address, std::size_t bytes) {
    if (control_.adopt(pointer(address), bytes, 0) != 0) throw std::runtime_error("not adopted");
    adopted_.push_back(pointer(address));
  };
  for (const auto& pool : pools_) {
    const auto& shape = pool->shape();
    for (const MemoryRange& range : shape.allocations) {
      adopt(pool->device.address() + range.address, range.size);
    }
    const MemoryRange host{pool->host.address(), shape.host_bytes()};
    pinned_.push_back(std::make_unique<cuda::PinnedMemory>(
        device_->context(), host, shape.page_stride, shape.registrations.front().size));
    if (pinned_.back()->ranges().size() != shape.registrations.size()) ++tally_.wrong;
  }
  scratch_.emplace(kScratch);
  adopt(scratch_->address(), kScratch);
}

void Program::run() {
  for (int step = 0; step < kSteps; ++step) {
    switch (below(8)) {
      case 0:
      case 1:
        submit(lanes_[0]);
        break;
      case 2:
      case 3:
        submit(lanes_[1]);
        break;
      case 4:
      case 5:
        forward();
        break;
      case 6:
        fill_some();
        break;
      default:
        for (Lane& lane : lanes_) poll(lane);
    }
  }
  finish();
}

/// A page more than once is fine as a source on the host, and nowhere else.
void Program::submit(Lane& lane) {
  const bool load = lane.direction == Direction::load;
  std::vector<std::int64_t> device;
  std::vector<std::int64_t> host;
  for (std::int64_t page = 0; page < kDevicePages; ++page) {
    if (device_users_[static_cast<std::size_t>(page)] == 0) device.push_back(page);
  }
  for (std::int64_t page = 0; page < kHostPages; ++page) {
    if (host_users_[static_cast<std::size_t>(page)] == 0) host.push_back(page);
  }
  if (below(4) != 0) {
    std::shuffle(device.begin(), device.end(), random_);
    std::shuffle(host.begin(), host.end(), random_);
  }
  const std::size_t count = std::min({device.size(), host.size(), 1 + below(12)});
  if (count == 0) return;
  device.resize(count);
  host.resize(count);

  InFlight submitted;
  for (std::size_t i = 0; i < count; ++i) submitted.pages.push_back({device[i], host[i]});
  if (below(4) == 0) {
    add_late(lane, device, host, submitted);
  } else {
    lane.pages.append(testing::view_of("device_indices", device),
                      testing::view_of("host_indices", host));
  }
  if (below(12) == 0) {
    constexpr std::array kMayFail{"cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync", "cuMemcpyHtoDAsync",
                                  "cuMemcpyDtoHAsync", "cuMemcpy2DAsync"};
    control_.fail(kMayFail[below(kMayFail.size())], 1 + below(6), cuda::CUDA_ERROR_UNKNOWN);
  }
  const StreamHandle producer = ordered_ ? forward_ : elsewhere_->handle();
  const std::optional<StreamHandle> fence =
      ordered_ && below(2) == 0 ? std::optional(forward_) : std::nullopt;
  submitted.burst =
      lane.issuer->submit(lane.pages, std::array<std::int64_t, 1>{7}, producer, fence);
  ++tally_.bursts;
  reserve(lane.direction, submitted.pages, 1);
  write_model(lane.direction, submitted.pages, true);
  if (load) newest_load_ = submitted;
  lane.in_flight.push_back(std::move(submitted));
}

/// Indices that the forward's stream is still to write.
void Program::add_late(Lane& lane, const std::vector<std::int64_t>& device,
                       const std::vector<std::int64_t>& host, InFlight& burst) {
  const std::size_t bytes = device.size() * sizeof(std::int64_t);
  const std::shared_ptr<std::byte[]> written = device_->landing(bytes);
  const auto slots = std::make_shared<cuda::DeviceMemory>(device_->context(), bytes);
  std::memcpy(written.get(), device.data(), bytes);
  control_.host_write(written.get(), bytes);
  control_.fail("*", 1, 0);  // what is left of those would hit the copy below
  {
    const cuda::Current current(*device_->context());
    const StreamHandle on = ordered_ ? forward_ : elsewhere_->handle();
    device_->context()->driver().check(
        device_->context()->call().cuMemcpyHtoDAsync(slots->address(), written.get(), bytes,
                                                     reinterpret_cast<cuda::CUstream>(on)),
        "cuMemcpyHtoDAsync");
  }
  const IndexView view{"device_indices", pointer(slots->address()),
                       static_cast<std::int64_t>(device.size()), 1, sizeof(std::int64_t)};
  lane.pages.append_deferred(view, testing::view_of("host_indices", host));
  burst.keeps = {written, slots};
  ++tally_.late_indices;
}

/// Waits for the newest load, layer by layer, and reads what it brought.
void Program::forward() {
  if (!newest_load_) return;
  const InFlight load = *std::exchange(newest_load_, std::nullopt);
  ++tally_.forwards;
  try {
    for (int layer = 0; layer < gate_->num_layers(); ++layer) {
      gate_->wait(load.burst->id, layer, forward_);
      ++tally_.layer_waits;
      read_layer(layer, load.pages);
    }
  } catch (const BurstError&) {
    // Found failed here; counted when it is retired.
  }
}

void Program::read_layer(int layer, std::span<const PagePair> pages) {
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    Pool& pool = *pools_[i];
    const auto row = static_cast<std::size_t>(layer);
    if (row >= pool.shape().rows.size()) continue;
    const std::size_t bytes = pool.shape().page_bytes;
    for (const PagePair& pair : pages) {
      if (scratch_used_ + bytes > kScratch) return;
      const std::uintptr_t page = pool.device_page(row, pair.device);
      device_->copy_on_device(forward_,
                              {scratch_->address() + scratch_used_, page, bytes, 1, 0, 0});
      const auto at = static_cast<std::ptrdiff_t>(pool.device.position(page));
      const auto size = static_cast<std::ptrdiff_t>(bytes);
      const Modelled& model = on_device_[i];
      reads_.push_back({scratch_used_,
                        {model.bytes.begin() + at, model.bytes.begin() + at + size},
                        {model.known.begin() + at, model.known.begin() + at + size}});
      scratch_used_ += bytes;
    }
  }
}

/// The forward writes pages that no burst uses.
void Program::fill_some() {
  for (std::int64_t page = 0; page < kDevicePages; ++page) {
    if (device_users_[static_cast<std::size_t>(page)] > 0 || below(4) != 0) continue;
    for (std::size_t i = 0; i < pools_.size(); ++i) {
      Pool& pool = *pools_[i];
      const std::size_t layer = below(pool.shape().rows.size());
      const auto value = static_cast<std::uint8_t>(random_());
      const std::size_t bytes = pool.shape().page_bytes;
      const std::uintptr_t address = pool.device_page(layer, page);
      device_->fill(forward_, address, value, bytes);
      const std::size_t at = pool.device.position(address);
      for (std::size_t byte = at; byte < at + bytes; ++byte) {
        on_device_[i].bytes[byte] = value;
        on_device_[i].known[byte] = true;
      }
    }
  }
}

void Program::poll(Lane& lane) {
  while (!lane.in_flight.empty() && lane.in_flight.front().burst->done()) retire(lane);
}

void Program::retire(Lane& lane) {
  const InFlight done = std::move(lane.in_flight.front());
  lane.in_flight.pop_front();
  reserve(lane.direction, done.pages, -1);
  if (done.burst->failed()) {
    ++tally_.failed_bursts;
    // That it is done says nothing of the program's own copy of its late indices.
    for (const StreamHandle stream : {forward_, elsewhere_->handle()}) {
      device_->synchronize_stream(stream);
    }
    write_model(lane.direction, done.pages, false);
    if (newest_load_ && newest_load_->burst == done.burst) newest_load_.reset();
  }
}

/// In a load the host's pages may be read by others too, if they are read only.
void Program::reserve(Direction, std::span<const PagePair> pages, int by) {
  for (const PagePair& pair : pages) {
    device_users_[static_cast<std::size_t>(pair.device)] += by;
    host_users_[static_cast<std::size_t>(pair.host)] += by;
  }
}

void Program::write_model(Direction direction, std::span<const PagePair> pages, bool known) {
  const bool load = direction == Direction::load;
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    Pool& pool = *pools_[i];
    Modelled& to = load ? on_device_[i] : on_host_[i];
    const Modelled& from = load ? on_host_[i] : on_device_[i];
    for (std::size_t layer = 0; layer < pool.shape().rows.size(); ++layer) {
      for (const PagePair& pair : pages) {
        const std::size_t on_device = pool.device.position(pool.device_page(layer, pair.device));
        const std::size_t on_host = pool.host.position(pool.host_page(layer, pair.host));
        const std::size_t dst = load ? on_device : on_host;
        const std::size_t src = load ? on_host : on_device;
        for (std::size_t byte = 0; byte < pool.shape().page_bytes; ++byte) {
          to.bytes[dst + byte] = from.bytes[src + byte];
          to.known[dst + byte] = known && from.known[src + byte];
        }
      }
    }
  }
}

void Program::compare(const Modelled& model, const std::vector<std::uint8_t>& all) {
  for (std::size_t byte = 0; byte < all.size(); ++byte) {
    if (model.known[byte] && model.bytes[byte] != all[byte]) ++tally_.wrong;
  }
}

void Program::finish() {
  control_.fail("*", 1, 0);
  for (Lane& lane : lanes_) {
    lane.issuer->drain();
    while (!lane.in_flight.empty()) {
      if (!lane.in_flight.front().burst->done()) ++tally_.wrong;
      retire(lane);
    }
    lane.issuer.reset();
  }
  newest_load_.reset();
  device_->synchronize_stream(forward_);
  device_->synchronize_stream(elsewhere_->handle());
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    compare(on_device_[i], pools_[i]->device.all());
    compare(on_host_[i], pools_[i]->host.all());
  }
  for (const Read& read : reads_) {
    const auto found = scratch_->at(scratch_->address() + read.offset, read.bytes.size());
    for (std::size_t byte = 0; byte < read.bytes.size(); ++byte) {
      if (read.known[byte] && read.bytes[byte] != found[byte]) ++tally_.wrong;
    }
  }
  tally_.pages_compared += static_cast<std::int64_t>(reads_.size());

  lanes_.clear();
  gate_.reset();
  own_forward_.reset();
  elsewhere_.reset();
  pinned_.clear();
  for (void* const address : adopted_) control_.disown(address);
  device_.reset();
  StandInCounts counts{};
  control_.counts(&counts);
  for (const std::uint64_t open : {counts.streams, counts.events, counts.allocations, counts.pinned,
                                   counts.registrations, counts.retained}) {
    if (open != 0) ++tally_.wrong;
  }
  if (counts.registered == 0 || counts.registered != counts.unregistered) ++tally_.wrong;
  tally_.copies += counts.copies;
  tally_.copied_bytes += counts.copied_bytes;
  tally_.calls += control_.call_count(nullptr);
  tally_.findings += control_.finding_count();
}

}  // namespace stand_in::stress
