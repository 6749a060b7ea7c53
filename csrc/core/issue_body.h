#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/burst.h"
#include "core/copy_plan.h"
#include "core/device.h"
#include "core/layer_gate.h"
#include "core/page_reader.h"

namespace kvburst {

/// What is done for a burst, whichever thread does it: order the transfer stream behind the
/// submitter's and the fence, read the page ids that lie on the device, make the plan, hand the
/// copies over group by group, record each layer's event behind the last copy of that layer, record
/// the finish.
///
/// It copies, and only copies: which pages, when, and what an ack means are decided above it. One
/// thread at a time.
class IssueBody {
 public:
  /// `gate` serves the loads' waiters; null for backups, which nobody waits for layer by layer.
  /// `memory` owns what the layouts describe and is kept; null if others see to that.
  /// Throws LayoutError on no layouts, options out of their bounds, or a gate for other
  /// layers than the layouts'.
  IssueBody(std::shared_ptr<Device> device, std::vector<PoolLayout> layouts, Direction direction,
            std::shared_ptr<LayerGate> gate, const PlanOptions& options,
            std::shared_ptr<const void> memory = nullptr);

  /// Issues the burst and settles it. Never throws: a device that fails fails the burst.
  void issue(Burst& burst);
  /// Settles a burst that is not going to be issued. Any thread; of no effect on one that settled.
  void give_up(Burst& burst, const std::string& why);
  /// The same for one whose issuing is stuck: its copies may still come.
  void abandon(Burst& burst, const std::string& why);

  const CopyPlanner& planner() const { return planner_; }
  Device& device() const { return *device_; }
  const std::shared_ptr<Device>& device_pointer() const { return device_; }
  const std::shared_ptr<LayerGate>& gate() const { return gate_; }
  StreamHandle stream() const { return stream_.handle(); }

 private:
  void wait_for_stream();
  void issue_group(Burst& burst, std::size_t group, IssueTally& tally);
  void settle(Burst& burst, BurstState outcome, std::string why, const IssueTally& tally);

  /// First, so that it goes last: the stream's destruction waits for copies that use it.
  std::shared_ptr<const void> memory_;
  std::shared_ptr<Device> device_;
  CopyPlanner planner_;
  std::shared_ptr<LayerGate> gate_;
  Stream stream_;
  PageReader reader_;
  /// What the burst's pages turn out to be, in the order of the plan.
  PageLists pages_;
  std::vector<Copy> batch_;
};

}  // namespace kvburst
