#include "cuda/cuda_device.h"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/format.h"
#include "cuda/host_work.h"
#include "cuda/memory.h"

namespace kvburst::cuda {
namespace {

CUstream to_stream(StreamHandle handle) { return reinterpret_cast<CUstream>(handle); }
CUevent to_event(EventHandle handle) { return reinterpret_cast<CUevent>(handle); }

bool is_legacy(StreamHandle handle) { return handle == 0 || handle == kStreamLegacy; }

CopyLimits limits_of(const Context& context, CopyLimits limits) {
  limits.check();
  const int pitch = context.attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
  limits.max_pitch = std::min(limits.max_pitch, static_cast<std::size_t>(std::max(pitch, 1)));
  limits.pinned_only = true;
  return limits;
}

}  // namespace

/// Destroyed with whoever uses it last: one thread may wait for all streams while another destroys
/// one of them.
class CudaDevice::OwnStream {
 public:
  explicit OwnStream(std::shared_ptr<const Context> context) : context_(std::move(context)) {
    const Current current(*context_);
    context_->driver().check(context_->call().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING),
                             "cuStreamCreate");
  }
  ~OwnStream() {
    if (context_->forked()) return;
    const Current current(*context_, std::nothrow);
    if (!current.gone()) context_->call().cuStreamDestroy(stream_);
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  CUstream get() const { return stream_; }

 private:
  std::shared_ptr<const Context> context_;
  CUstream stream_ = nullptr;
};

CudaDevice::CudaDevice(std::shared_ptr<const Driver> driver, int index, CudaOptions options)
    : context_(std::make_shared<Context>(std::move(driver), index)),
      limits_(limits_of(*context_, options.limits)),
      copies_(context_, options.single_copies),
      kernels_(context_, std::move(options.kernels)),
      current_streams_(std::move(options.current_streams)),
      detour_(context_) {
  if (current_streams_) return;
  thread_streams_ = std::make_shared<ThreadStreams>(create_stream());
  current_streams_ = thread_streams_;
}

StreamHandle CudaDevice::create_stream() {
  auto stream = std::make_shared<OwnStream>(context_);
  const auto handle = reinterpret_cast<StreamHandle>(stream->get());
  const std::lock_guard lock(mutex_);
  streams_.emplace(handle, std::move(stream));
  return handle;
}

void CudaDevice::destroy_stream(StreamHandle handle) {
  // Of a forked child, whose driver knows none of the handles.
  if (context_->forked()) return;
  if (thread_streams_) thread_streams_->forget(handle);
  std::shared_ptr<OwnStream> stream;
  {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(handle);
    if (found == streams_.end()) {
      throw DeviceError(text("stream: handle ", handle, " is not one that this device created"));
    }
    stream = std::move(found->second);
    streams_.erase(found);
  }
  const Current current(*context_, std::nothrow);
  if (current.gone()) return;
  driver().check_teardown(call().cuStreamSynchronize(stream->get()), "cuStreamSynchronize");
}

EventHandle CudaDevice::create_event() {
  const Current current(*context_);
  CUevent event = nullptr;
  // Threads that wait for it sleep: spinning would take the processor from those that issue.
  driver().check(call().cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC), "cuEventCreate");
  return reinterpret_cast<EventHandle>(event);
}

void CudaDevice::destroy_event(EventHandle event) {
  if (context_->forked()) return;
  const Current current(*context_, std::nothrow);
  if (current.gone()) return;
  driver().check_teardown(call().cuEventDestroy(to_event(event)), "cuEventDestroy");
}

/// The stream, unless a graph is being captured on it. The legacy stream cannot be captured, but
/// work on it invalidates the capture of any stream that it would wait for.
CUstream CudaDevice::not_capturing(StreamHandle handle) const {
  const CUstream stream = to_stream(handle);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = call().cuStreamIsCapturing(stream, &status);
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) {
    throw DeviceError(
        "stream: the legacy default stream cannot be used while a blocking stream is captured into "
        "a graph");
  }
  driver().check(result, "cuStreamIsCapturing");
  if (status != CU_STREAM_CAPTURE_STATUS_NONE) {
    throw DeviceError(text("stream: handle ", handle,
                           " is being captured into a graph, which bursts cannot be part of"));
  }
  return stream;
}

void CudaDevice::record(EventHandle event, StreamHandle stream) {
  const Current current(*context_);
  driver().check(call().cuEventRecord(to_event(event), not_capturing(stream)), "cuEventRecord");
}

void CudaDevice::wait(StreamHandle stream, EventHandle event) {
  if (event == 0) return;
  const Current current(*context_);
  driver().check(call().cuStreamWaitEvent(not_capturing(stream), to_event(event), 0),
                 "cuStreamWaitEvent");
}

bool CudaDevice::query(EventHandle event) {
  if (event == 0) return true;
  const Current current(*context_);
  const CUresult result = call().cuEventQuery(to_event(event));
  if (result == CUDA_ERROR_NOT_READY) return false;
  driver().check(result, "cuEventQuery");
  return true;
}

bool CudaDevice::query_stream(StreamHandle stream) {
  const Current current(*context_);
  const CUresult result = call().cuStreamQuery(not_capturing(stream));
  if (result == CUDA_ERROR_NOT_READY) return false;
  driver().check(result, "cuStreamQuery");
  return true;
}

void CudaDevice::synchronize(EventHandle event) {
  if (event == 0) return;
  const Current current(*context_);
  driver().check(call().cuEventSynchronize(to_event(event)), "cuEventSynchronize");
}

void CudaDevice::synchronize_stream(StreamHandle stream) {
  const Current current(*context_);
  driver().check(call().cuStreamSynchronize(not_capturing(stream)), "cuStreamSynchronize");
}

/// One by one: a context cannot be waited for while anybody captures on it.
void CudaDevice::synchronize() {
  std::vector<std::shared_ptr<OwnStream>> streams;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [handle, stream] : streams_) streams.push_back(stream);
  }
  for (const auto& stream : streams) {
    synchronize_stream(reinterpret_cast<StreamHandle>(stream->get()));
  }
  synchronize_stream(current_stream());
}

double CudaDevice::elapsed_ms(EventHandle start, EventHandle end) {
  if (start == 0 || end == 0) throw DeviceError("elapsed time: an event that was never recorded");
  const Current current(*context_);
  float milliseconds = 0;
  const CUresult result = call().cuEventElapsedTime(&milliseconds, to_event(start), to_event(end));
  if (result == CUDA_ERROR_NOT_READY) {
    throw DeviceError("elapsed time: an event that is not reached yet");
  }
  if (result == CUDA_ERROR_INVALID_HANDLE) {
    throw DeviceError("elapsed time: an event that was never recorded, or that keeps no time");
  }
  driver().check(result, "cuEventElapsedTime");
  return milliseconds;
}

std::shared_ptr<std::byte[]> CudaDevice::landing(std::size_t bytes) {
  return allocate_pinned(context_, bytes);
}

void CudaDevice::read(StreamHandle stream, const Copy& copy) {
  // A switch for the copies of plans: page ids are of one stride, whatever it is.
  CopyLimits limits = limits_;
  limits.tall_copies = true;
  limits.check(copy);
  issue(stream, Direction::backup, {&copy, 1});
}

void CudaDevice::copy(StreamHandle stream, Direction direction, std::span<const Copy> copies) {
  limits_.check(copies);
  tally_.begin();
  issue(stream, direction, copies);
  tally_.count(direction, copies);
}

void CudaDevice::issue(StreamHandle handle, Direction direction, std::span<const Copy> copies) {
  const Current current(*context_);
  const CUstream stream = not_capturing(handle);
  if (is_legacy(handle)) {
    detour_.run(stream, [&](CUstream own) { copies_.issue(own, direction, copies); });
  } else {
    copies_.issue(stream, direction, copies);
  }
}

void CudaDevice::move_rows(StreamHandle stream, RowDirection direction,
                           std::span<const RowMove> moves) {
  for (const RowMove& move : moves) move.check();
  if (!moves_rows()) throw DeviceError(text("staging kernels: ", kernels()));
  const Current current(*context_);
  kernels_.launch(not_capturing(stream), direction, moves);
}

void CudaDevice::copy_on_device(StreamHandle stream, const Copy& copy) {
  limits_.check(copy);
  const Current current(*context_);
  copies_.issue_on_device(not_capturing(stream), copy);
}

void CudaDevice::fill(StreamHandle stream, std::uintptr_t dst, std::uint8_t value,
                      std::size_t size) {
  const Current current(*context_);
  driver().check(call().cuMemsetD8Async(dst, value, size, not_capturing(stream)),
                 text("cuMemsetD8Async of ", size, " bytes"));
}

void CudaDevice::busy(StreamHandle stream, double microseconds) {
  check_busy(microseconds);
  const Current current(*context_);
  enqueue_busy(driver(), not_capturing(stream), microseconds);
}

std::function<void()> CudaDevice::hold(StreamHandle stream) {
  const Current current(*context_);
  return enqueue_hold(driver(), not_capturing(stream));
}

}  // namespace kvburst::cuda
