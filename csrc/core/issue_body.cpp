#include "core/issue_body.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

double microseconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

std::string list(std::span<const std::int64_t> values) {
  std::string out = "[";
  for (const std::int64_t value : values) out += text(out.size() > 1 ? ", " : "", value);
  return out + "]";
}

std::string group_name(const CopyPlanner& planner, std::size_t index) {
  const LayerGroup& group = planner.groups()[index];
  const PoolLayout& pool = planner.pools()[static_cast<std::size_t>(group.pool)];
  const auto stored = pool.stored().subspan(static_cast<std::size_t>(group.first),
                                            static_cast<std::size_t>(group.layers));
  return text("group ", index + 1, " of ", planner.groups().size(), " (pool '", pool.name(),
              "', layers ", stored.front().layer, " to ", stored.back().layer, ")");
}

std::string failure(const Burst& burst, const std::string& where, const std::string& what) {
  return text(burst.title(), " failed in ", where, ", node_ids ", list(burst.node_ids), ": ", what);
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

IssueBody::IssueBody(std::shared_ptr<Device> device, std::vector<PoolLayout> layouts,
                     Direction direction, std::shared_ptr<LayerGate> gate,
                     const PlanOptions& options, std::shared_ptr<const void> memory)
    : memory_(std::move(memory)),
      device_(std::move(device)),
      planner_(std::move(layouts), direction, device_->limits(), options),
      gate_(std::move(gate)),
      stream_(device_),
      reader_(device_) {
  if (gate_) check_gate(*gate_, planner_);
}

void IssueBody::issue(Burst& burst) {
  const auto begin = std::chrono::steady_clock::now();
  const std::size_t groups = planner_.groups().size();
  std::optional<std::size_t> group;
  IssueTally tally;
  tally.queue_us = microseconds(begin - burst.submitted);
  try {
    pages_ = burst.pages;
    reader_.read(pages_, burst.ready.handle(), burst.direction);
    planner_.plan(pages_, burst.plan);
    tally.planned = burst.plan.count;
    if (burst.fenced) device_->wait(stream_.handle(), burst.fence.handle());
    device_->wait(stream_.handle(), burst.ready.handle());
    device_->record(burst.start.handle(), stream_.handle());
    for (group = 0; *group < groups && !burst.settled(); ++*group) {
      issue_group(burst, *group, tally);
    }
    device_->record(burst.finish.handle(), stream_.handle());
    tally.issue_us = microseconds(std::chrono::steady_clock::now() - begin);
    settle(burst, BurstState::issued, {}, tally);
  } catch (const std::exception& error) {
    const std::string where = !group            ? "its start"
                              : *group < groups ? group_name(planner_, *group)
                                                : "its finish";
    std::string what = failure(burst, where, error.what());
    try {
      // What was issued still runs: `finish` says when its pages are no longer written.
      device_->record(burst.finish.handle(), stream_.handle());
    } catch (const std::exception& also) {
      what += text("; and the finish event: ", also.what());
      wait_for_stream();
    }
    settle(burst, BurstState::failed, std::move(what), tally);
  }
}

void IssueBody::issue_group(Burst& burst, std::size_t group, IssueTally& tally) {
  const auto sink = [&](std::span<const Copy> copies) {
    if (tally.copies == 0) {
      tally.first_copy_us = microseconds(std::chrono::steady_clock::now() - burst.submitted);
    }
    device_->copy(stream_.handle(), burst.direction, copies);
    tally.copies += static_cast<std::int64_t>(copies.size());
    for (const Copy& copy : copies) tally.bytes += static_cast<std::int64_t>(copy.bytes());
  };
  // By reference, which std::function holds without allocating.
  planner_.emit(burst.plan, group, batch_, std::ref(sink), tally.planned.registration_splits);
  if (!gate_) return;
  for (const int layer : planner_.groups()[group].completes) {
    gate_->layer_issued(burst, layer, stream_.handle());
  }
}

void IssueBody::give_up(Burst& burst, const std::string& why) {
  settle(burst, BurstState::failed, failure(burst, "the queue", why), {});
}

void IssueBody::abandon(Burst& burst, const std::string& why) {
  settle(burst, BurstState::abandoned, failure(burst, "the driver", why), {});
}

/// Without its event, a burst that failed says that it is done as soon as it has failed. So let it
/// be so.
void IssueBody::wait_for_stream() {
  try {
    device_->synchronize_stream(stream_.handle());
  } catch (const std::exception&) {
    // Nothing works any more, and the burst's error says so.
  }
}

void IssueBody::settle(Burst& burst, BurstState outcome, std::string why, const IssueTally& tally) {
  if (burst.settle(outcome, std::move(why), tally) && gate_) gate_->burst_settled();
}

}  // namespace kvburst
