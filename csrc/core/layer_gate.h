#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/burst.h"
#include "core/device.h"
#include "core/pool_layout.h"

/// Where a forward waits for "layer l of burst b is in place".
///
/// A device event alone cannot say so. One that was never recorded, or was last recorded for an
/// earlier burst, counts as reached and a wait on it is a no-op: a forward that arrives before the
/// issuer would run on stale bytes, silently. So every wait has two halves. On the host the layer's
/// *issued* flag, kept in the burst's own record, says that the event now stands for this burst; on
/// the device the event says that the bytes are there.
///
/// Events are few and bursts are many, so they rotate: burst `id` has slot `id % slots`. Callers
/// hold burst ids and never a slot. A slot is handed on only when its burst is done, so an id whose
/// slot has moved on names a burst that is complete, and needs no wait at all; those that failed
/// are remembered, for a forward that comes late to be told.
namespace kvburst {

/// Thread-safe: one thread acquires, one issues, any number wait.
class LayerGate {
 public:
  /// One gate layer a model layer, up to the highest that any pool has. A layer that no pool stores
  /// never holds anybody up. Throws LayoutError on no layouts or fewer than 1 slot.
  LayerGate(std::shared_ptr<Device> device, std::span<const PoolLayout> layouts, int slots);

  int num_layers() const { return static_cast<int>(stored_.size()); }
  /// Whether any of its pools stores the layer.
  bool has_data(int layer) const { return stored_[static_cast<std::size_t>(layer)]; }
  const Device& device() const { return *device_; }
  int num_slots() const { return static_cast<int>(slots_.size()); }

  /// Makes the first wait for each of these layers record one event more, for `stalls_ms`. Before
  /// the first burst.
  void measure_stalls_at(std::span<const int> layers);

  // The issuer's side.

  /// Whether the slot that burst `id` will have is free.
  bool has_slot(std::int64_t id);
  /// Blocks until the slot that burst `id` will have is free: until the burst that has it is done.
  void wait_for_slot(std::int64_t id);
  /// Gives `burst` its slot, waiting for it.
  void acquire(std::shared_ptr<Burst> burst);
  /// The same, but false at once where `acquire` would wait.
  bool try_acquire(std::shared_ptr<Burst> burst);
  /// Records the layer's event on `stream`, behind the layer's copies, and lets its waiters go on.
  void layer_issued(Burst& burst, int layer, StreamHandle stream);
  /// Wakes the waiters of a burst that has settled.
  void burst_settled();

  // The forward's side. A burst that failed is thrown as BurstError; an id that was never
  // submitted, or a layer out of range, is refused.

  /// Blocks the thread until `wait` would not block it on the issuer, for `timeout` at most, and
  /// returns whether that is so.
  bool wait_issued(std::int64_t burst, int layer, std::chrono::milliseconds timeout);
  /// Says that `stream` has come to the layer, for `stalls_ms`, where the thread that launches on
  /// it is about to block in `wait_issued`: the stream stands from now on. `wait` says it itself.
  void arrive(std::int64_t burst, int layer, StreamHandle stream);
  /// Orders `stream` behind the layer, every pool's part of it; without a stream blocks the thread
  /// until the bytes are there (and, if the slot moves on meanwhile, perhaps a little longer).
  /// Blocks first for as long as the layer has not been issued.
  void wait(std::int64_t burst, int layer, std::optional<StreamHandle> stream);
  /// Milliseconds that streams have stood at the gate for this burst, so far: for each measured
  /// layer, from its first waiter's arrival until the layer was in place. None once the slot has
  /// moved on. Of a burst that is done.
  std::optional<double> stalls_ms(std::int64_t burst);
  /// Whether all of the burst is in place.
  bool is_done(std::int64_t burst);
  /// The burst's record; null once its slot has moved on, and the burst is complete.
  std::shared_ptr<Burst> find(std::int64_t burst);

 private:
  struct Slot {
    std::shared_ptr<Burst> burst;
    /// By model layer; none where no pool stores it.
    std::vector<std::optional<Event>> layers;
    /// By model layer; only where stalls are measured.
    std::map<int, Event> arrivals;
  };

  Slot& slot_of(std::int64_t burst) {
    return slots_[static_cast<std::size_t>(burst) % slots_.size()];
  }
  std::shared_ptr<Burst> current(std::int64_t burst);
  bool ready(const Burst& burst, int layer) const;
  void check_layer(int layer) const;
  void note_arrival(Burst& burst, int layer, StreamHandle stream);
  void throw_if_failed(std::int64_t gone);

  std::shared_ptr<Device> device_;
  /// By model layer: whether any pool stores it.
  std::vector<bool> stored_;
  std::vector<Slot> slots_;
  std::int64_t newest_ = -1;
  /// Errors of bursts whose slot has moved on; the newest of them.
  std::map<std::int64_t, std::string> failures_;
  /// Of the slots, `newest_` and `failures_`: which burst has which slot, and which had one.
  std::mutex rotation_;
  /// Of the waiters for *issued* flags. The issuer takes this one alone, and calls no driver under
  /// it.
  std::mutex waiters_;
  std::condition_variable issued_;
};

}  // namespace kvburst
