#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "core/burst.h"
#include "core/burst_pages.h"
#include "core/copy_plan.h"
#include "core/device.h"
#include "core/issue_body.h"
#include "core/layer_gate.h"

/// A FIFO that issues bursts in one direction: on the caller's thread, or on one of its own.
///
/// Issuing is what costs, some microseconds a copy that the thread which calls the driver cannot
/// escape. So in mode `thread` the caller only hands over: it records two events, swaps the page
/// lists it has collected against empty ones, and wakes the thread, and what that costs grows with
/// neither layers nor pools nor copies. The thread is native and never takes Python's lock, so a
/// busy interpreter does not hold copies up, nor they it. One thread, one stream, one queue: bursts
/// complete in the order of submission.
namespace kvburst {

struct IssuerOptions {
  /// On a thread of its own; false: on the caller's.
  bool threaded = false;
  /// Processors that the thread may run on; empty: any.
  std::vector<int> cpus;
  /// Whatever owns the memory that the layouts describe, if it is to live as long as a copy may use
  /// it.
  std::shared_ptr<const void> memory;
};

/// One thread submits; the bursts it returns may be read from any.
class BurstIssuer {
 public:
  /// `gate` serves the loads' waiters; null for backups, which nobody waits for layer by layer.
  /// Throws LayoutError on no layouts, options out of their bounds, or processors that are not
  /// there.
  BurstIssuer(std::shared_ptr<Device> device, std::vector<PoolLayout> layouts, Direction direction,
              std::shared_ptr<LayerGate> gate, const PlanOptions& options,
              IssuerOptions issuer = {});
  /// Waits for what was submitted, some seconds at most: what is stuck in the driver by then is
  /// left behind, together with what it may still use.
  ~BurstIssuer();

  /// Takes the collected pages (`pages` is empty afterwards) and issues them behind all work that
  /// is now on `producer` and, if given, on `fence`. Null, and no gate slot taken, if there are no
  /// pages. Waits for a gate slot, if the burst that has it is still copying. A device that fails
  /// does not throw: the burst is failed, its waiters throw, and the next burst is served. Throws
  /// BurstError after a stop that timed out, and in a forked child, which has no such thread.
  std::shared_ptr<Burst> submit(BurstPages& pages, std::span<const std::int64_t> node_ids,
                                StreamHandle producer, std::optional<StreamHandle> fence = {});
  /// Whether `submit` returns without waiting for a gate slot or issuing anything itself.
  bool only_hands_over() const;

  /// Blocks until every burst submitted so far is issued and its copies are done. Throws BurstError
  /// after a stop that timed out.
  void drain();
  /// Ends the thread once its queue is empty; later bursts are issued on the caller. If that takes
  /// longer than `timeout`, bursts that are not issued fail, later submissions throw, and the
  /// result is false. May be called again, and from any thread. A forked child has no thread to
  /// end.
  bool stop(std::chrono::milliseconds timeout);

  const CopyPlanner& planner() const { return body_->planner(); }
  const Device& device() const { return body_->device(); }
  /// The transfer stream.
  StreamHandle stream() const { return body_->stream(); }

 private:
  /// What the thread shares with its issuer; outlives the issuer if the thread is stuck.
  struct Queue;

  static void run(const std::shared_ptr<Queue>& queue, const std::shared_ptr<IssueBody>& body);
  void start(const std::vector<int>& cpus);
  void check_alive() const;
  bool threaded() const;
  bool hand_over(const std::shared_ptr<Burst>& burst);
  bool drained_within(std::chrono::milliseconds timeout);
  void leave_body_behind();

  std::shared_ptr<IssueBody> body_;
  BurstPool bursts_;
  std::shared_ptr<Queue> queue_;
  std::thread thread_;
  /// Of `thread_`, which whoever stops the issuer joins.
  std::mutex joining_;
  std::int64_t next_id_ = 0;
  /// The one whose thread and whose streams these are.
  const pid_t process_;
};

}  // namespace kvburst
