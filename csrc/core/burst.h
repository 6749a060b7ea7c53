#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/burst_pages.h"
#include "core/copy_plan.h"
#include "core/device.h"

namespace kvburst {

enum class BurstState : std::uint8_t {
  queued,     ///< handed over; its events do not stand for it yet
  issued,     ///< every copy is on the stream and `finish` is recorded behind them
  failed,     ///< `error` says why; what had been issued is ahead of `finish`
  abandoned,  ///< failed while the issuer is stuck in it: nothing says when its pages are done with
};

/// What issuing a burst took.
struct IssueTally {
  CopyCount planned;
  /// Handed to the device.
  std::int64_t copies = 0;
  std::int64_t bytes = 0;
  /// Microseconds from submission until the issuer took the burst up, and from there until its last
  /// copy was issued.
  double queue_us = 0;
  /// Microseconds from submission until the first copy was handed to the device.
  double first_copy_us = 0;
  double issue_us = 0;
};

/// The one record of a transfer that planner, issuer, gate and ack act on.
///
/// Written by the thread that submits it until it is handed over, then by the issuer alone. Readers
/// on other threads go through `state` and `issued`, which are stored with release order after what
/// they announce: what a burst came to may be read once it has settled, and not before.
class Burst {
 public:
  /// `layers`: model layers of the gate; 0 for a burst nobody waits for layer by layer.
  Burst(const std::shared_ptr<Device>& device, int layers);

  std::int64_t id = -1;
  Direction direction = Direction::load;
  std::vector<std::int64_t> node_ids;
  std::int64_t num_pages = 0;
  PageLists pages;
  CopyPlan plan;

  /// Recorded on the submitter's stream; the copies are ordered behind it.
  Event ready;
  /// Recorded on the fence stream, if there is one; the copies are ordered behind that too.
  Event fence;
  bool fenced = false;
  /// Around the copies, on the transfer stream.
  Event start;
  Event finish;

  /// By model layer: its event in the gate slot is recorded.
  std::vector<std::atomic<bool>> issued;
  /// By model layer: the event in the gate slot that says when its first waiter came is recorded.
  std::vector<std::atomic<bool>> awaited;
  std::atomic<BurstState> state = BurstState::queued;

  std::chrono::steady_clock::time_point submitted;
  /// Microseconds that the submitting thread spent in `submit`.
  double caller_us = 0;

  // What it came to; to be read once it has settled.

  /// Of a failed burst: operation, group, node ids.
  std::string error;
  IssueTally tally;

  /// "load 17", for messages.
  std::string title() const;
  /// True once the burst is issued and its copies are done, or it has failed and those that had
  /// been issued are done. Never true for a burst that still waits to be issued.
  bool done() const;
  bool settled() const { return state.load(std::memory_order_acquire) != BurstState::queued; }
  bool failed() const { return state.load(std::memory_order_acquire) >= BurstState::failed; }
  /// Blocks the calling thread until `done`.
  void synchronize() const;
  /// Says what the burst came to and wakes whoever waits for that. The first to settle a burst
  /// wins; false for all others, whose outcome is dropped. Any thread.
  bool settle(BurstState outcome, std::string why, const IssueTally& counted);
  Device& device() const { return *device_; }

  /// Makes the record ready for another transfer; its memory and events are kept.
  void renew(std::int64_t new_id, Direction new_direction);

 private:
  std::shared_ptr<Device> device_;
  std::atomic<bool> settling_ = false;
};

/// Hands out bursts and takes their records back when the last reader lets go, so that steady state
/// creates no events and allocates no page lists. Thread-safe; readers may outlive it.
class BurstPool {
 public:
  BurstPool(std::shared_ptr<Device> device, int layers);

  std::shared_ptr<Burst> take(std::int64_t id, Direction direction);

 private:
  struct Shelf {
    std::mutex mutex;
    std::vector<std::unique_ptr<Burst>> spare;
  };

  std::shared_ptr<Device> device_;
  int layers_;
  std::shared_ptr<Shelf> shelf_ = std::make_shared<Shelf>();
};

}  // namespace kvburst
