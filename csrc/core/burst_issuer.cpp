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
  /// The process whose thread it is.
  const pid_t process = getpid();
};

BurstIssuer::BurstIssuer(std::shared_ptr<Device> device, std::vector<PoolLayout> layouts,
                         Direction direction, std::shared_ptr<LayerGate> gate,
                         const PlanOptions& options, IssuerOptions issuer)
    : body_(std::make_shared<IssueBody>(device, std::move(layouts), direction, std::move(gate),
                                        options)),
      bursts_(std::move(device), body_->gate() ? body_->gate()->num_layers() : 0) {
  check_cpus(issuer.cpus);
  if (!issuer.threaded) return;
  if (body_->gate()) body_->gate()->measure_stalls_at(first_layers_of_groups(planner()));
  start(issuer.cpus);
}

BurstIssuer::~BurstIssuer() {
  if (queue_ && queue_->process != getpid()) {
    // The thread is the parent's. Nothing of it is here, so there is nothing to end.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  try {
    if (stop(kFarewell) && drained_within(kFarewell)) return;
  } catch (const Error&) {
    return;  // The device is going away, and with it what was on the stream.
  }
  // Stuck in the driver. Whatever is freed now may still be read: the body, and through it the
  // stream and the device, stay until the process is gone.
  new std::shared_ptr<IssueBody>(std::move(body_));
}

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

/// Whether the thread takes bursts.
bool BurstIssuer::threaded() const {
  if (!queue_) return false;
  if (queue_->process != getpid()) {
    throw BurstError(text("issuer: its thread belongs to process ", queue_->process,
                          ", a forked child needs a controller of its own"));
  }
  const std::lock_guard lock(queue_->mutex);
  if (!queue_->dead.empty()) throw BurstError(queue_->dead);
  return !queue_->stopping;
}

bool BurstIssuer::only_hands_over() const {
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
  const bool hand_over = threaded();
  if (pages.num_pages() == 0) return nullptr;

  std::shared_ptr<Burst> burst = bursts_.take(next_id_, planner().direction());
  Device& device = body_->device();
  device.record(burst->ready.handle(), producer);
  if (fence) {
    device.record(burst->fence.handle(), *fence);
    burst->fenced = true;
  }
  if (body_->gate()) body_->gate()->acquire(burst);
  ++next_id_;
  burst->node_ids.assign(node_ids.begin(), node_ids.end());
  burst->num_pages = pages.num_pages();
  burst->pages = pages.take(std::move(burst->pages));
  burst->submitted = begin;
  const auto spent = [&] {
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  };
  if (hand_over) {
    {
      const std::lock_guard lock(queue_->mutex);
      queue_->bursts.push_back(burst);
    }
    queue_->work.notify_one();
  } else {
    body_->issue(*burst);
  }
  burst->caller_us = spent();
  return burst;
}

void BurstIssuer::drain() {
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
  if (!queue_) return true;
  std::unique_lock lock(queue_->mutex);
  if (!queue_->dead.empty()) return false;
  queue_->stopping = true;
  queue_->work.notify_one();
  if (queue_->idle.wait_for(lock, timeout, [&] { return queue_->ended; })) {
    lock.unlock();
    if (thread_.joinable()) thread_.join();
    return true;
  }
  const std::string stuck = queue_->current ? queue_->current->title() : "a burst";
  queue_->dead = text("issuer: stuck in ", stuck, " when it was stopped after ", timeout.count(),
                      " ms, nothing more is issued");
  std::deque<std::shared_ptr<Burst>> left;
  left.swap(queue_->bursts);
  if (queue_->current) left.push_front(queue_->current);
  queue_->idle.notify_all();
  lock.unlock();
  for (const std::shared_ptr<Burst>& burst : left) body_->give_up(*burst, queue_->dead);
  if (thread_.joinable()) thread_.detach();
  return false;
}

}  // namespace kvburst
