#include "core/burst_issuer.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

std::string group_name(const CopyPlanner& planner, std::size_t index) {
  const LayerGroup& group = planner.groups()[index];
  const PoolLayout& pool = planner.pools()[static_cast<std::size_t>(group.pool)];
  const auto stored = pool.stored().subspan(static_cast<std::size_t>(group.first),
                                            static_cast<std::size_t>(group.layers));
  return text("group ", index + 1, " of ", planner.groups().size(), " (pool '", pool.name(),
              "', layers ", stored.front().layer, " to ", stored.back().layer, ")");
}

std::string list(std::span<const std::int64_t> values) {
  std::string out = "[";
  for (const std::int64_t value : values) out += text(out.size() > 1 ? ", " : "", value);
  return out + "]";
}

/// A gate for other layers would let a forward run on stale bytes, or hold it up for ever.
void check_gate(const LayerGate& gate, const CopyPlanner& planner) {
  std::set<int> issued;
  for (const LayerGroup& group : planner.groups()) {
    issued.insert(group.completes.begin(), group.completes.end());
  }
  const int layers = issued.empty() ? 0 : *issued.rbegin() + 1;
  for (int layer = 0; layer < std::max(layers, gate.num_layers()); ++layer) {
    const bool waited_for = layer < gate.num_layers() && gate.has_data(layer);
    if (waited_for == issued.contains(layer)) continue;
    throw LayoutError(text("gate: it is for pools that ", waited_for ? "store" : "do not store",
                           " layer ", layer, ", this issuer's ", waited_for ? "do not" : "do"));
  }
}

}  // namespace

BurstIssuer::BurstIssuer(std::shared_ptr<Device> device, std::vector<PoolLayout> layouts,
                         Direction direction, std::shared_ptr<LayerGate> gate,
                         const PlanOptions& options)
    : device_(std::move(device)),
      planner_(std::move(layouts), direction, device_->limits(), options),
      gate_(std::move(gate)),
      bursts_(device_, gate_ ? gate_->num_layers() : 0),
      stream_(device_) {
  if (gate_) check_gate(*gate_, planner_);
}

BurstIssuer::~BurstIssuer() {
  try {
    drain();
  } catch (const Error&) {
    // The device is going away; the stream's own destruction comes next.
  }
}

std::shared_ptr<Burst> BurstIssuer::submit(BurstPages& pages,
                                           std::span<const std::int64_t> node_ids,
                                           StreamHandle producer) {
  const auto begin = std::chrono::steady_clock::now();
  if (pages.direction() != planner_.direction()) {
    throw PageError(text("pages: collected for a ", name_of(pages.direction()),
                         ", this issuer's direction is ", name_of(planner_.direction())));
  }
  if (pages.num_pools() != planner_.pools().size()) {
    throw PageError(text("pages: collected for ", pages.num_pools(), " pools, this issuer has ",
                         planner_.pools().size()));
  }
  if (pages.num_pages() == 0) return nullptr;

  std::shared_ptr<Burst> burst = bursts_.take(next_id_, planner_.direction());
  device_->record(burst->ready.handle(), producer);
  if (gate_) gate_->acquire(burst);
  ++next_id_;
  burst->node_ids.assign(node_ids.begin(), node_ids.end());
  burst->num_pages = pages.num_pages();
  burst->pages = pages.take(std::move(burst->pages));
  issue(*burst);
  burst->caller_us =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  return burst;
}

void BurstIssuer::issue(Burst& burst) {
  const std::size_t groups = planner_.groups().size();
  std::optional<std::size_t> group;
  try {
    planner_.plan(burst.pages, burst.plan);
    device_->wait(stream_.handle(), burst.ready.handle());
    device_->record(burst.start.handle(), stream_.handle());
    for (group = 0; *group < groups; ++*group) issue_group(burst, *group);
    device_->record(burst.finish.handle(), stream_.handle());
    burst.state.store(BurstState::issued, std::memory_order_release);
  } catch (const std::exception& error) {
    const std::string where = !group            ? "its start"
                              : *group < groups ? group_name(planner_, *group)
                                                : "its finish";
    fail(burst, where, error.what());
  }
  if (gate_) gate_->burst_settled();
}

void BurstIssuer::issue_group(Burst& burst, std::size_t group) {
  const BatchSink sink = [&](std::span<const Copy> copies) {
    device_->copy(stream_.handle(), burst.direction, copies);
    burst.copies_issued += static_cast<std::int64_t>(copies.size());
    for (const Copy& copy : copies) burst.bytes_issued += static_cast<std::int64_t>(copy.bytes());
  };
  planner_.emit(burst.plan, group, batch_, sink, burst.plan.count.registration_splits);
  if (!gate_) return;
  for (const int layer : planner_.groups()[group].completes) {
    gate_->layer_issued(burst, layer, stream_.handle());
  }
}

void BurstIssuer::fail(Burst& burst, const std::string& where, const std::string& what) {
  burst.error =
      text(burst.title(), " failed in ", where, ", node_ids ", list(burst.node_ids), ": ", what);
  try {
    // What was issued still runs: `finish` says when its pages are no longer written.
    device_->record(burst.finish.handle(), stream_.handle());
  } catch (const std::exception& error) {
    burst.error += text("; and the finish event: ", error.what());
    wait_for_stream();
  }
  burst.state.store(BurstState::failed, std::memory_order_release);
}

/// Without its event, a burst that failed says that it is done as soon as it has failed. So let it
/// be so.
void BurstIssuer::wait_for_stream() {
  try {
    device_->synchronize_stream(stream_.handle());
  } catch (const std::exception&) {
    // Nothing works any more, and the burst's error says so.
  }
}

void BurstIssuer::drain() { device_->synchronize_stream(stream_.handle()); }

}  // namespace kvburst
