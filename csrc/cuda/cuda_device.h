#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "core/compute_device.h"
#include "core/current_streams.h"
#include "cuda/context.h"
#include "cuda/copy_calls.h"
#include "cuda/legacy_detour.h"
#include "cuda/row_kernels.h"

namespace kvburst::cuda {

struct CudaOptions {
  CopyLimits limits;
  /// A driver call a copy, whatever the driver has: some misbehave.
  bool single_copies = false;
  /// What `gather` and `scatter` are loaded from.
  KernelImage kernels = built_in_kernels();
  /// Of the framework that computes on the GPU. Null: threads have the streams they push.
  std::shared_ptr<CurrentStreams> current_streams;
};

/// The device "cuda": a GPU, through the driver's own interface, which a framework shares: streams
/// and events of torch are handles of the same kind, and may be passed wherever ours may. Handle 0
/// is the legacy default stream, or an event that was never recorded, which torch creates late.
///
/// Its own streams do not wait for the legacy stream, nor it for them. A stream that is being
/// captured into a graph is refused before anything is enqueued: a copy on it would be in the graph
/// or, worse, silently nowhere. Copies on the legacy stream, which the batch calls refuse, are made
/// on a stream of the device's, ordered behind it and ahead of what follows on it; kernels run on
/// the legacy stream itself.
class CudaDevice final : public ComputeDevice {
 public:
  /// Throws DeviceError if the driver does not start, has no GPU of this index, or fails to load
  /// the kernels for another reason than that it or the GPU does not take them; LayoutError on
  /// limits out of their bounds.
  CudaDevice(std::shared_ptr<const Driver> driver, int index, CudaOptions options = {});

  std::string_view name() const override { return "cuda"; }
  CopyLimits limits() const override { return limits_; }
  const std::shared_ptr<const Context>& context() const { return context_; }
  const std::string& copy_calls() const { return copies_.description(); }
  /// Which kernels gather and scatter rows, or why there are none.
  const std::string& kernels() const { return kernels_.description(); }

  StreamHandle create_stream() override;
  void destroy_stream(StreamHandle stream) override;
  EventHandle create_event() override;
  void destroy_event(EventHandle event) override;

  StreamHandle current_stream() override { return current_streams_->current(); }
  void push_current_stream(StreamHandle stream) override { current_streams_->push(stream); }
  void pop_current_stream() override { current_streams_->pop(); }

  void record(EventHandle event, StreamHandle stream) override;
  void wait(StreamHandle stream, EventHandle event) override;
  bool query(EventHandle event) override;
  bool query_stream(StreamHandle stream) override;
  void synchronize(EventHandle event) override;
  void synchronize_stream(StreamHandle stream) override;
  void synchronize() override;
  double elapsed_ms(EventHandle start, EventHandle end) override;

  std::shared_ptr<std::byte[]> landing(std::size_t bytes) override;
  void read(StreamHandle stream, const Copy& copy) override;
  void copy(StreamHandle stream, Direction direction, std::span<const Copy> copies) override;
  CopyCounters counters(Direction direction) const override { return tally_.counters(direction); }
  void fail_copy_call(std::int64_t nth) override { tally_.fail_call(nth); }

  bool moves_rows() const override { return kernels_.usable(); }
  void copy_on_device(StreamHandle stream, const Copy& copy) override;
  void fill(StreamHandle stream, std::uintptr_t dst, std::uint8_t value, std::size_t size) override;
  void busy(StreamHandle stream, double microseconds) override;
  std::function<void()> hold(StreamHandle stream) override;

 private:
  class OwnStream;

  const Driver& driver() const { return context_->driver(); }
  const DriverFunctions& call() const { return context_->call(); }
  CUstream not_capturing(StreamHandle stream) const;
  void issue(StreamHandle stream, Direction direction, std::span<const Copy> copies);
  void move_rows(StreamHandle stream, RowDirection direction,
                 std::span<const RowMove> moves) override;

  std::shared_ptr<const Context> context_;
  CopyLimits limits_;
  CopyCalls copies_;
  RowKernels kernels_;
  CopyTally tally_;
  std::mutex mutex_;
  std::unordered_map<StreamHandle, std::shared_ptr<OwnStream>> streams_;
  std::shared_ptr<CurrentStreams> current_streams_;
  /// The same, where it is ours.
  std::shared_ptr<ThreadStreams> thread_streams_;
  LegacyDetour detour_;
};

}  // namespace kvburst::cuda
