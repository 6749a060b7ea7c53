#include "core/burst.h"

#include <utility>

#include "core/format.h"

namespace kvburst {

Burst::Burst(const std::shared_ptr<Device>& device, int layers)
    : ready(device),
      start(device),
      finish(device),
      issued(static_cast<std::size_t>(layers)),
      device_(device) {}

std::string Burst::title() const { return text(name_of(direction), " ", id); }

bool Burst::done() const {
  if (state.load(std::memory_order_acquire) == BurstState::queued) return false;
  return device_->query(finish.handle());
}

void Burst::synchronize() const { device_->synchronize(finish.handle()); }

void Burst::renew(std::int64_t new_id, Direction new_direction) {
  id = new_id;
  direction = new_direction;
  node_ids.clear();
  num_pages = 0;
  for (std::atomic<bool>& layer : issued) layer.store(false, std::memory_order_relaxed);
  state.store(BurstState::queued, std::memory_order_relaxed);
  error.clear();
  copies_issued = 0;
  bytes_issued = 0;
  caller_us = 0;
}

BurstPool::BurstPool(std::shared_ptr<Device> device, int layers)
    : device_(std::move(device)), layers_(layers) {}

std::shared_ptr<Burst> BurstPool::take(std::int64_t id, Direction direction) {
  std::unique_ptr<Burst> burst;
  {
    const std::lock_guard lock(shelf_->mutex);
    if (!shelf_->spare.empty()) {
      burst = std::move(shelf_->spare.back());
      shelf_->spare.pop_back();
    }
  }
  if (!burst) burst = std::make_unique<Burst>(device_, layers_);
  burst->renew(id, direction);
  return {burst.release(), [shelf = shelf_](Burst* spent) {
            const std::lock_guard lock(shelf->mutex);
            shelf->spare.emplace_back(spent);
          }};
}

}  // namespace kvburst
