#include "core/burst.h"

#include <utility>

#include "core/format.h"

namespace kvburst {

Burst::Burst(const std::shared_ptr<Device>& device, int layers)
    : ready(device),
      fence(device),
      start(device),
      finish(device),
      issued(static_cast<std::size_t>(layers)),
      awaited(static_cast<std::size_t>(layers)),
      device_(device) {}

std::string Burst::title() const { return text(name_of(direction), " ", id); }

bool Burst::done() const { return settled() && device_->query(finish.handle()); }

void Burst::synchronize() const {
  state.wait(BurstState::queued, std::memory_order_acquire);
  device_->synchronize(finish.handle());
}

bool Burst::settle(BurstState outcome, std::string why, const IssueTally& counted) {
  if (settling_.exchange(true)) return false;
  error = std::move(why);
  tally = counted;
  state.store(outcome, std::memory_order_release);
  state.notify_all();
  return true;
}

void Burst::renew(std::int64_t new_id, Direction new_direction) {
  id = new_id;
  direction = new_direction;
  node_ids.clear();
  num_pages = 0;
  for (std::atomic<bool>& layer : issued) layer.store(false, std::memory_order_relaxed);
  for (std::atomic<bool>& layer : awaited) layer.store(false, std::memory_order_relaxed);
  state.store(BurstState::queued, std::memory_order_relaxed);
  settling_.store(false, std::memory_order_relaxed);
  fenced = false;
  caller_us = 0;
  error.clear();
  tally = {};
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
