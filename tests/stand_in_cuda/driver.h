#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/driver_types.h"
#include "happens_before.h"
#include "memory.h"
#include "record.h"
#include "settings.h"
#include "streams.h"

/// The state of the stand-in driver, and the frame in which every call runs.
///
/// One mutex guards all of it; only the bodies of operations run outside. The object is never
/// destroyed: like a driver's, its threads may run until the process ends.
namespace stand_in {

using namespace kvburst::cuda;

#define STAND_IN_EXPORT extern "C" __attribute__((visibility("default")))

struct Context {
  std::uintptr_t handle;
  CUdevice device;
  int retained = 0;
  std::shared_ptr<Stream> legacy;                              // null until used
  std::map<std::uint32_t, std::shared_ptr<Stream>> by_thread;  // the per-thread default streams
  std::vector<std::shared_ptr<Stream>> leaving;                // destroyed, with work left
};

/// Streams that are being captured together.
struct Capture {
  CUstreamCaptureMode mode;
  std::uint32_t thread;   ///< that began it
  std::uintptr_t stream;  ///< that it began on
  std::uintptr_t context;
  bool active = true;  ///< until it ends
  bool invalidated = false;
};

struct Event {
  std::uintptr_t handle;
  std::uintptr_t context;
  bool timed;
  std::optional<Point> point;          ///< nothing: never recorded, or recorded in a capture
  VectorClock clock;                   ///< of the stream, at the point
  std::shared_ptr<double> reached_ms;  ///< set when the point is reached
  std::shared_ptr<Capture> capture;    ///< that it was last recorded in; null: none
  VectorClock captured;                ///< of the capture's stream, at the point
};

struct Failure {
  std::string function;  ///< "*": every call
  std::uint64_t calls_left;
  CUresult code;
};

struct Counts {
  std::uint64_t registered = 0;
  std::uint64_t unregistered = 0;
  std::uint64_t copies = 0;
  std::uint64_t copied_bytes = 0;
};

/// A host function stands in its stream, like a kernel: the rest of the host learns nothing from
/// it.
struct HostFunction {
  VectorClock start;
  Stamp over;
};

/// What a thread has of its own.
struct Thread {
  std::uint32_t number = 0;  ///< 0: has not called yet
  std::uintptr_t context = 0;
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  /// Of the host function that it runs; null: none.
  const HostFunction* host_function = nullptr;
};

Thread& this_thread();

class Driver {
 public:
  Driver();

  std::mutex mutex;
  const pid_t process;
  Settings settings;
  bool initialized = false;
  Record record;
  HappensBefore checker;
  VectorClock host;  ///< what the host knows to have happened
  Scheduler scheduler{mutex};
  std::unique_ptr<Memory> memory = std::make_unique<Memory>();
  std::map<std::uintptr_t, Context> contexts;
  std::map<std::uintptr_t, std::shared_ptr<Stream>> streams;
  std::map<std::uintptr_t, std::shared_ptr<Event>> events;
  std::vector<std::shared_ptr<Capture>> captures;  ///< the active ones
  std::map<std::uintptr_t, std::shared_ptr<Capture>> graphs;
  std::map<std::uintptr_t, std::string> libraries;  ///< their images
  std::map<std::uintptr_t, std::string> kernels;    ///< their names
  std::map<std::uintptr_t, std::string> functions;
  std::map<std::uintptr_t, std::shared_ptr<Gate>> gates;  ///< of stalled streams
  std::vector<Failure> failures;
  Counts counts;
  std::uint32_t threads = 0;

  /// Never the same twice, of whatever kind.
  std::uintptr_t new_handle();
  std::shared_ptr<Stream> new_stream(std::uintptr_t context);
  /// The stream's line of events may go to another once the host knows of all that was on it.
  void retire_line(const Stream& stream);
  Context& primary_context(CUdevice device);
  /// With the default streams by their special handles; null if there is no such stream.
  std::shared_ptr<Stream> find_stream(std::uintptr_t handle);
  std::shared_ptr<Event> find_event(std::uintptr_t handle) const;
  /// Of the context; all if it is 0. With the default streams.
  std::vector<std::shared_ptr<Stream>> streams_of(std::uintptr_t context) const;
  /// Those that the context's legacy stream waits for, with those that are destroyed.
  std::vector<std::shared_ptr<Stream>> blocking_streams_of(std::uintptr_t context);
  /// Frees everything that the context has, once its streams have done their work.
  void tear_down(std::unique_lock<std::mutex>& lock, Context& context);
  /// Lets all work be done, then begins anew; handles go on, so that old ones stay unknown.
  /// False, and nothing has changed, if the work does not end within `limit`.
  bool reset(std::unique_lock<std::mutex>& lock, std::chrono::duration<double> limit);
  /// The next tick of the host's line.
  Stamp host_step(std::uint64_t call);
  /// By the calling thread, which may be in a host function.
  void host_access(Range range, bool write, std::uint64_t call);
  std::string describe(const Finding& finding) const;
  std::string report() const;

 private:
  std::uintptr_t last_handle_ = 0x57'0000'0000;
  std::vector<std::pair<std::size_t, std::uint64_t>> free_lines_;  // with their last ticks
  std::size_t lines_ = 1;
};

Driver& driver();
/// Whether the process is a forked child of the driver's: the lock may be another thread's, and no
/// stream's thread is here.
bool forked(const Driver& driver);

/// What the next operation of a stream has behind it.
struct Place {
  VectorClock start;         ///< has happened before it starts
  std::vector<Point> after;  ///< has to be reached before it starts, in other streams
  std::uint64_t tick;
};

/// A call while it runs: its lock, and where it is in the record.
struct Scope {
  Driver& driver;
  std::unique_lock<std::mutex>& lock;
  Thread& thread;
  std::uint64_t call;

  void amend(const CallSubject& subject) { driver.record.amend(call, subject); }
  /// Where the next operation of the stream stands. Blocks while its queue is full.
  Place place(const std::shared_ptr<Stream>& stream);
  /// Enqueues it there.
  void push(const std::shared_ptr<Stream>& stream, Place place, Operation operation);
  /// Blocks until all that is on the stream is done; the host then knows it.
  void synchronize(const std::shared_ptr<Stream>& stream);
};

enum class Needs : std::uint8_t {
  nothing,
  driver,   ///< cuInit
  context,  ///< cuInit, and a context current on the calling thread
};

/// Enters a call: what every call checks first. Nothing: it may go on.
std::optional<CUresult> refused(Driver& driver, Thread& thread, const char* function, Needs needs);

/// Runs `body(scope)`, with the lock held, as one recorded call.
template <class Body>
CUresult call(const char* function, Needs needs, const CallSubject& subject, Body body) {
  Driver& state = driver();
  if (forked(state)) return CUDA_ERROR_NOT_INITIALIZED;
  Thread& thread = this_thread();
  std::unique_lock lock(state.mutex);
  if (thread.number == 0) thread.number = ++state.threads;
  Scope scope{state, lock, thread, state.record.begin(function, thread.number, subject)};
  const std::optional<CUresult> refusal = refused(state, thread, function, needs);
  const CUresult result = refusal ? *refusal : body(scope);
  state.record.end(scope.call, result);
  return result;
}

template <class Handle>
std::uintptr_t number_of(Handle handle) {
  return reinterpret_cast<std::uintptr_t>(handle);
}

}  // namespace stand_in
