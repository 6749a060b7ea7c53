#include "core/burst_issuer.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

using Clock = std::chrono::steady_clock;

/// How long a destructor waits for its thread, and again for its copies. A controller has two
/// issuers, and a process is to be gone within ten seconds.
constexpr std::chrono::seconds kFarewell{2};

void check_cpus(const std::vector<int>& cpus) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  for (const int cpu : cpus) {
    if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &allowed)) {
      throw LayoutError(text("cpus: processor ", cpu, " is none of the ", CPU_COUNT(&allowed),
                             " that this process may run on"));
    }
  }
}

/// Of the layers that one group completes, a forward can only be held up at the first.
std::vector<int> first_layers_of_groups(const CopyPlanner& planner) {
  std::vector<int> layers;
  for (const LayerGroup& group : planner.groups()) {
    if (!group.completes.empty()) layers.push_back(group.completes.front());
  }
  return layers;
}

}  // namespace

struct BurstIssuer::Queue {
  std::mutex mutex;
  std::condition_variable work;
  /// Notified when the thread has nothing to do, and when it ends.
  std::condition_variable idle;
  std::deque<std::shared_ptr<Burst>> bursts;
  /// Being issued.
  std::shared_ptr<Burst> current;
  bool stopping = false;
  bool ended = false;
  /// A stop timed out: why nothing is issued any more.
  std::string dead;
};

BurstIssuer::BurstIssuer(std::shared_ptr<Device> device, std::vector<PoolLayout> layouts,
                         Direction direction, std::shared_ptr<LayerGate> gate,
                         const PlanOptions& options, IssuerOptions issuer)
    : body_(std::make_shared<IssueBody>(device, std::move(layouts), direction, std::move(gate),
                                        options, std::move(issuer.memory))),
      bursts_(std::move(device), body_->gate() ? body_->gate()->num_layers() : 0),
      process_(getpid()) {
  check_cpus(issuer.cpus);
  if (!issuer.threaded) return;
  if (body_->gate()) body_->gate()->measure_stalls_at(first_layers_of_groups(planner()));
  start(issuer.cpus);
}

BurstIssuer::~BurstIssuer() {
  if (process_ != getpid()) {
    // Threads are the parent's. There is nothing to wait for, nor even to detach: their stacks may
    // be those of other threads by now.
    new std::thread(std::move(thread_));
    leave_body_behind();
    return;
  }
  try {
    if (stop(kFarewell) && drained_within(kFarewell)) return;
  } catch (const std::exception&) {
    return;  // A device that cannot say when it is done: the stream's own destruction waits for it.
  }
  leave_body_behind();
}

/// Of what is stuck in the driver, whatever would be freed may still be used: the body, and through
/// it the stream, the device and the memory, stay until the process is gone.
void BurstIssuer::leave_body_behind() { new std::shared_ptr<IssueBody>(std::move(body_)); }

bool BurstIssuer::drained_within(std::chrono::milliseconds timeout) {
  const Event done(body_->device_pointer());
  body_->device().record(done.handle(), body_->stream());
  const auto deadline = Clock::now() + timeout;
  while (!body_->device().query(done.handle())) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

void BurstIssuer::start(const std::vector<int>& cpus) {
  queue_ = std::make_shared<Queue>();
  thread_ = std::thread(run, queue_, body_);
  pthread_setname_np(thread_.native_handle(),
                     planner().direction() == Direction::load ? "kvburst-load" : "kvburst-backup");
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread_.native_handle(), sizeof set, &set);
}

void BurstIssuer::run(const std::shared_ptr<Queue>& queue, const std::shared_ptr<IssueBody>& body) {
  std::unique_lock lock(queue->mutex);
  for (;;) {
    queue->work.wait(lock, [&] { return queue->stopping || !queue->bursts.empty(); });
    if (queue->bursts.empty()) break;
    queue->current = std::move(queue->bursts.front());
    queue->bursts.pop_front();
    lock.unlock();
    body->issue(*queue->current);
    lock.lock();
    queue->current.reset();
    if (queue->bursts.empty()) queue->idle.notify_all();
  }
  queue->ended = true;
  queue->idle.notify_all();
}

void BurstIssuer::check_alive() const {
  if (process_ != getpid()) {
    throw BurstError(text("issuer: belongs to process ", process_,
                          ", a forked child needs a device and a controller of its own"));
  }
  if (!queue_) return;
  const std::lock_guard lock(queue_->mutex);
  if (!queue_->dead.empty()) throw BurstError(queue_->dead);
}

/// Whether the thread takes bursts. One that is to stop does until it has ended: nobody else may
/// use the body before.
bool BurstIssuer::threaded() const {
  if (!queue_) return false;
  const std::lock_guard lock(queue_->mutex);
  return !queue_->ended;
}

/// False if there is no thread to take it.
bool BurstIssuer::hand_over(const std::shared_ptr<Burst>& burst) {
  if (!queue_) return false;
  std::unique_lock lock(queue_->mutex);
  if (!queue_->dead.empty()) {
    // Stopped while this burst waited for its gate slot.
    lock.unlock();
    body_->give_up(*burst, queue_->dead);
    return true;
  }
  if (queue_->ended) return false;
  queue_->bursts.push_back(burst);
  lock.unlock();
  queue_->work.notify_one();
  return true;
}

bool BurstIssuer::only_hands_over() const {
  check_alive();
  return threaded() && (!body_->gate() || body_->gate()->has_slot(next_id_));
}

std::shared_ptr<Burst> BurstIssuer::submit(BurstPages& pages,
                                           std::span<const std::int64_t> node_ids,
                                           StreamHandle producer,
                                           std::optional<StreamHandle> fence) {
  const auto begin = Clock::now();
  if (pages.direction() != planner().direction()) {
    throw PageError(text("pages: collected for a ", name_of(pages.direction()),
                         ", this issuer's direction is ", name_of(planner().direction())));
  }
  if (pages.num_pools() != planner().pools().size()) {
    throw PageError(text("pages: collected for ", pages.num_pools(), " pools, this issuer has ",
                         planner().pools().size()));
  }
  check_alive();
  if (pages.num_pages() == 0) return nullptr;

  std::shared_ptr<Burst> burst = bursts_.take(next_id_, planner().direction());
  Device& device = body_->device();
  device.record(burst->ready.handle(), producer);
  if (fence) {
    device.record(burst->fence.handle(), *fence);
    burst->fenced = true;
  }
  burst->node_ids.assign(node_ids.begin(), node_ids.end());
  burst->num_pages = pages.num_pages();
  if (body_->gate()) body_->gate()->acquire(burst);
  ++next_id_;
  burst->pages = pages.take(std::move(burst->pages));
  burst->submitted = begin;
  if (!hand_over(burst)) body_->issue(*burst);
  burst->caller_us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  return burst;
}

void BurstIssuer::drain() {
  check_alive();
  if (threaded()) {
    std::unique_lock lock(queue_->mutex);
    queue_->idle.wait(lock, [&] {
      return !queue_->dead.empty() || (queue_->bursts.empty() && !queue_->current);
    });
    if (!queue_->dead.empty()) throw BurstError(queue_->dead);
  }
  body_->device().synchronize_stream(body_->stream());
}

bool BurstIssuer::stop(std::chrono::milliseconds timeout) {
  if (!queue_ || process_ != getpid()) return true;
  std::unique_lock lock(queue_->mutex);
  queue_->stopping = true;
  queue_->work.notify_one();
  queue_->idle.wait_for(lock, timeout, [&] { return queue_->ended || !queue_->dead.empty(); });
  if (!queue_->dead.empty()) return false;
  if (queue_->ended) {
    lock.unlock();
    const std::lock_guard joining(joining_);
    if (thread_.joinable()) thread_.join();
    return true;
  }
  const std::string stuck = queue_->current ? queue_->current->title() : "a burst";
  queue_->dead = text("issuer: stuck in ", stuck, " when it was stopped after ", timeout.count(),
                      " ms, nothing more is issued");
  const std::shared_ptr<Burst> under_way = queue_->current;
  std::deque<std::shared_ptr<Burst>> left;
  left.swap(queue_->bursts);
  queue_->idle.notify_all();
  lock.unlock();
  if (under_way) body_->abandon(*under_way, queue_->dead);
  for (const std::shared_ptr<Burst>& burst : left) body_->give_up(*burst, queue_->dead);
  const std::lock_guard joining(joining_);
  if (thread_.joinable()) thread_.detach();
  return false;
}

}  // namespace kvburst
