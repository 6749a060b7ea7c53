#include "core/layer_gate.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

/// A forward that comes later than so many failures has long been told by its ack.
constexpr std::size_t kFailuresRemembered = 1024;

}  // namespace

LayerGate::LayerGate(std::shared_ptr<Device> device, std::span<const PoolLayout> layouts, int slots)
    : device_(std::move(device)) {
  if (layouts.empty()) throw LayoutError("layouts: 0 pools, at least 1 is needed");
  if (slots < 1) throw LayoutError(text("slots: ", slots, " is below the minimum of 1"));
  int layers = 0;
  for (const PoolLayout& layout : layouts) layers = std::max(layers, layout.num_layers());
  stored_.resize(static_cast<std::size_t>(layers));
  for (const PoolLayout& layout : layouts) {
    for (const StoredLayer& stored : layout.stored()) {
      stored_[static_cast<std::size_t>(stored.layer)] = true;
    }
  }
  slots_.resize(static_cast<std::size_t>(slots));
  for (Slot& slot : slots_) {
    slot.layers.resize(stored_.size());
    for (std::size_t layer = 0; layer < stored_.size(); ++layer) {
      if (stored_[layer]) slot.layers[layer].emplace(device_);
    }
  }
}

bool LayerGate::has_slot(std::int64_t id) {
  const std::lock_guard lock(rotation_);
  const std::shared_ptr<Burst>& earlier = slot_of(id).burst;
  return !earlier || earlier->done();
}

void LayerGate::wait_for_slot(std::int64_t id) {
  std::shared_ptr<Burst> earlier;
  {
    const std::lock_guard lock(rotation_);
    earlier = slot_of(id).burst;
  }
  if (earlier) earlier->synchronize();
}

void LayerGate::acquire(std::shared_ptr<Burst> burst) {
  while (!try_acquire(burst)) wait_for_slot(burst->id);
}

bool LayerGate::try_acquire(std::shared_ptr<Burst> burst) {
  const std::lock_guard lock(rotation_);
  Slot& slot = slot_of(burst->id);
  if (slot.burst && !slot.burst->done()) return false;
  if (slot.burst && slot.burst->failed()) {
    failures_.emplace(slot.burst->id, slot.burst->error);
    if (failures_.size() > kFailuresRemembered) failures_.erase(failures_.begin());
  }
  newest_ = std::max(newest_, burst->id);
  slot.burst = std::move(burst);
  return true;
}

void LayerGate::layer_issued(Burst& burst, int layer, StreamHandle stream) {
  device_->record(slot_of(burst.id).layers[static_cast<std::size_t>(layer)]->handle(), stream);
  {
    // Set under the lock, so that a waiter that has just looked cannot miss the notification.
    const std::lock_guard lock(waiters_);
    burst.issued[static_cast<std::size_t>(layer)].store(true, std::memory_order_release);
  }
  issued_.notify_all();
}

void LayerGate::burst_settled() {
  {
    const std::lock_guard lock(waiters_);
  }
  issued_.notify_all();
}

void LayerGate::check_layer(int layer) const {
  if (layer < 0 || layer >= num_layers()) {
    throw LayoutError(
        text("layer: ", layer, " is out of range, the gate has ", num_layers(), " layers"));
  }
}

/// The burst's record, or null if its slot has moved on. Needs the rotation's lock.
std::shared_ptr<Burst> LayerGate::current(std::int64_t burst) {
  if (burst < 0 || burst > newest_) {
    throw BurstError(text("burst: ", burst, " was never submitted, the newest is ", newest_));
  }
  const std::shared_ptr<Burst>& holder = slot_of(burst).burst;
  return holder->id == burst ? holder : nullptr;
}

std::shared_ptr<Burst> LayerGate::find(std::int64_t burst) {
  const std::lock_guard lock(rotation_);
  return current(burst);
}

bool LayerGate::ready(const Burst& burst, int layer) const {
  return !stored_[static_cast<std::size_t>(layer)] ||
         burst.issued[static_cast<std::size_t>(layer)].load(std::memory_order_acquire) ||
         burst.failed();
}

bool LayerGate::wait_issued(std::int64_t burst, int layer, std::chrono::milliseconds timeout) {
  check_layer(layer);
  const std::shared_ptr<Burst> record = find(burst);
  if (!record || ready(*record, layer)) return true;
  if (timeout.count() == 0) return false;
  std::unique_lock lock(waiters_);
  return issued_.wait_for(lock, timeout, [&] { return ready(*record, layer); });
}

void LayerGate::wait(std::int64_t burst, int layer, std::optional<StreamHandle> stream) {
  check_layer(layer);
  const std::shared_ptr<Burst> record = find(burst);
  if (!record) return throw_if_failed(burst);
  if (!ready(*record, layer)) {
    if (stream) arrive(burst, layer, *stream);
    std::unique_lock lock(waiters_);
    issued_.wait(lock, [&] { return ready(*record, layer); });
  }
  if (record->failed()) throw BurstError(record->error);
  if (!stored_[static_cast<std::size_t>(layer)]) return;
  EventHandle event = 0;
  {
    // Under the lock, so that the slot cannot be handed to a newer burst meanwhile.
    std::unique_lock lock(rotation_);
    if (!current(burst)) {
      lock.unlock();
      return throw_if_failed(burst);
    }
    event = slot_of(burst).layers[static_cast<std::size_t>(layer)]->handle();
    if (stream) {
      note_arrival(*record, layer, *stream);
      device_->wait(*stream, event);
      return;
    }
  }
  device_->synchronize(event);
}

void LayerGate::throw_if_failed(std::int64_t gone) {
  const std::lock_guard lock(rotation_);
  const auto failure = failures_.find(gone);
  if (failure != failures_.end()) throw BurstError(failure->second);
}

void LayerGate::arrive(std::int64_t burst, int layer, StreamHandle stream) {
  const std::lock_guard lock(rotation_);
  if (const std::shared_ptr<Burst> record = current(burst)) note_arrival(*record, layer, stream);
}

void LayerGate::note_arrival(Burst& burst, int layer, StreamHandle stream) {
  Slot& slot = slot_of(burst.id);
  const auto arrival = slot.arrivals.find(layer);
  if (arrival == slot.arrivals.end()) return;
  if (burst.awaited[static_cast<std::size_t>(layer)].exchange(true)) return;
  device_->record(arrival->second.handle(), stream);
}

std::optional<double> LayerGate::stalls_ms(std::int64_t burst) {
  const std::lock_guard lock(rotation_);
  const std::shared_ptr<Burst> record = current(burst);
  if (!record) return std::nullopt;
  double stalls = 0;
  const Slot& slot = slot_of(burst);
  for (const auto& [layer, arrival] : slot.arrivals) {
    const auto at = static_cast<std::size_t>(layer);
    // A stream that has not come yet finds the layer in place.
    if (!record->awaited[at] || !device_->query(arrival.handle())) continue;
    stalls += std::max(0.0, device_->elapsed_ms(arrival.handle(), slot.layers[at]->handle()));
  }
  return stalls;
}

void LayerGate::measure_stalls_at(std::span<const int> layers) {
  for (Slot& slot : slots_) {
    for (const int layer : layers) slot.arrivals.try_emplace(layer, device_);
  }
}

bool LayerGate::is_done(std::int64_t burst) {
  const std::shared_ptr<Burst> record = find(burst);
  if (!record) {
    throw_if_failed(burst);
    return true;
  }
  if (record->failed()) throw BurstError(record->error);
  return record->done();
}

}  // namespace kvburst
