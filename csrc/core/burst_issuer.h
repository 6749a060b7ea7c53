#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/burst.h"
#include "core/burst_pages.h"
#include "core/copy_plan.h"
#include "core/device.h"
#include "core/layer_gate.h"

/// Issues bursts in one direction, in order, on a stream of its own.
///
/// What it does for a burst is short and the same however it is called: order the transfer stream
/// behind the submitter's, make the plan, hand the copies over group by group, record each layer's
/// event behind the last copy of that layer, record the finish. It copies, and only copies: which
/// pages, when, and what an ack means are decided above it. Here it runs on the caller's thread.
namespace kvburst {

/// One thread submits; the bursts it returns may be read from any.
class BurstIssuer {
 public:
  /// `gate` serves the loads' waiters; null for backups, which nobody waits for layer by layer.
  /// Throws LayoutError on no layouts, on options out of their bounds, and on a gate for other
  /// layers than the layouts'.
  BurstIssuer(std::shared_ptr<Device> device, std::vector<PoolLayout> layouts, Direction direction,
              std::shared_ptr<LayerGate> gate, const PlanOptions& options);
  /// Waits for the copies it has issued.
  ~BurstIssuer();

  /// Takes the collected pages (`pages` is empty afterwards) and issues them behind all work that
  /// is on `producer` now. Null, and no gate slot taken, if there are no pages. Waits for a gate
  /// slot, if the burst that has it is still copying. A device that fails does not throw: the burst
  /// is failed, its waiters throw, and the next burst is served.
  std::shared_ptr<Burst> submit(BurstPages& pages, std::span<const std::int64_t> node_ids,
                                StreamHandle producer);
  /// Blocks until every copy issued so far is done.
  void drain();

  StreamHandle stream() const { return stream_.handle(); }
  const CopyPlanner& planner() const { return planner_; }

 private:
  void issue(Burst& burst);
  void issue_group(Burst& burst, std::size_t group);
  void wait_for_stream();
  void fail(Burst& burst, const std::string& where, const std::string& what);

  std::shared_ptr<Device> device_;
  CopyPlanner planner_;
  std::shared_ptr<LayerGate> gate_;
  BurstPool bursts_;
  Stream stream_;
  std::vector<Copy> batch_;
  std::int64_t next_id_ = 0;
};

}  // namespace kvburst
