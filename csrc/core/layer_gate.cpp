#include "core/layer_gate.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {

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
    for (int layer = 0; layer < layers; ++layer) slot.layers.emplace_back(device_);
  }
}

void LayerGate::wait_for_slot(std::int64_t id) {
  std::shared_ptr<Burst> earlier;
  {
    std::unique_lock lock(mutex_);
    earlier = slot_of(id).burst;
    if (!earlier) return;
    issued_.wait(lock, [&] { return earlier->state.load() != BurstState::queued; });
  }
  earlier->synchronize();
}

void LayerGate::acquire(std::shared_ptr<Burst> burst) {
  while (!try_acquire(burst)) wait_for_slot(burst->id);
}

bool LayerGate::try_acquire(std::shared_ptr<Burst> burst) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slot_of(burst->id);
  if (slot.burst && !slot.burst->done()) return false;
  newest_ = std::max(newest_, burst->id);
  slot.burst = std::move(burst);
  return true;
}

void LayerGate::layer_issued(Burst& burst, int layer, StreamHandle stream) {
  device_->record(slot_of(burst.id).layers[static_cast<std::size_t>(layer)].handle(), stream);
  {
    // The flag is set under the lock so that a waiter cannot miss the notification.
    const std::lock_guard lock(mutex_);
    burst.issued[static_cast<std::size_t>(layer)].store(true, std::memory_order_release);
  }
  issued_.notify_all();
}

void LayerGate::burst_settled() {
  {
    const std::lock_guard lock(mutex_);
  }
  issued_.notify_all();
}

void LayerGate::check_layer(int layer) const {
  if (layer < 0 || layer >= num_layers()) {
    throw LayoutError(
        text("layer: ", layer, " is out of range, the gate has ", num_layers(), " layers"));
  }
}

/// The burst's record, or null if its slot has moved on. Needs the lock.
std::shared_ptr<Burst> LayerGate::current(std::int64_t burst) {
  if (burst < 0 || burst > newest_) {
    throw BurstError(text("burst: ", burst, " was never submitted, the newest is ", newest_));
  }
  const std::shared_ptr<Burst>& holder = slot_of(burst).burst;
  return holder->id == burst ? holder : nullptr;
}

bool LayerGate::ready(const Burst& burst, int layer) const {
  return !stored_[static_cast<std::size_t>(layer)] ||
         burst.issued[static_cast<std::size_t>(layer)].load(std::memory_order_acquire) ||
         burst.state.load(std::memory_order_acquire) == BurstState::failed;
}

bool LayerGate::is_issued(std::int64_t burst, int layer) {
  check_layer(layer);
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Burst> record = current(burst);
  return !record || ready(*record, layer);
}

void LayerGate::wait(std::int64_t burst, int layer, std::optional<StreamHandle> stream) {
  check_layer(layer);
  EventHandle event = 0;
  {
    std::unique_lock lock(mutex_);
    const std::shared_ptr<Burst> record = current(burst);
    if (!record) return;
    issued_.wait(lock, [&] { return ready(*record, layer); });
    if (record->state.load(std::memory_order_acquire) == BurstState::failed) {
      throw BurstError(record->error);
    }
    if (!stored_[static_cast<std::size_t>(layer)]) return;
    event = slot_of(burst).layers[static_cast<std::size_t>(layer)].handle();
    if (stream) {
      // Under the lock: once it is let go, the slot may be handed to a newer burst.
      device_->wait(*stream, event);
      return;
    }
  }
  device_->synchronize(event);
}

bool LayerGate::is_done(std::int64_t burst) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Burst> record = current(burst);
  if (!record) return true;
  if (record->state.load(std::memory_order_acquire) == BurstState::failed) {
    throw BurstError(record->error);
  }
  return record->done();
}

std::shared_ptr<Burst> LayerGate::find(std::int64_t burst) {
  const std::lock_guard lock(mutex_);
  return current(burst);
}

}  // namespace kvburst
