#include <chrono>
#include <functional>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/compute_device.h"
#include "host/host_device.h"
#include "host/null_device.h"

namespace kvburst::bindings {
namespace {

using CopyTuple =
    std::tuple<std::uintptr_t, std::uintptr_t, std::size_t, std::size_t, std::size_t, std::size_t>;

/// Holds a stream until it is released, at the latest when nobody refers to it any more: a stalled
/// stream that nobody can release would never end.
class Stall {
 public:
  explicit Stall(std::function<void()> let_go) : let_go_(std::move(let_go)) {}
  Stall(Stall&& other) noexcept : let_go_(std::exchange(other.let_go_, nullptr)) {}
  Stall& operator=(Stall&&) = delete;
  ~Stall() { release(); }

  void release() {
    if (const auto let_go = std::exchange(let_go_, nullptr)) let_go();
  }

 private:
  std::function<void()> let_go_;
};

/// Where streams wait for another to come, whichever is enqueued first.
class MeetingPoint {
 public:
  MeetingPoint() = default;
  MeetingPoint(const MeetingPoint&) = delete;
  MeetingPoint& operator=(const MeetingPoint&) = delete;
  ~MeetingPoint() {
    if (!promised_) mark_->reach(now());
  }

  void reach(HostDevice& device, StreamHandle stream) {
    if (promised_) throw DeviceError("meeting point: it was reached before, it serves once");
    device.release(stream, mark_);
    promised_ = true;
  }
  void wait(HostDevice& device, StreamHandle stream) const { device.hold(stream, mark_); }

 private:
  std::shared_ptr<Mark> mark_ = std::make_shared<Mark>();
  /// A stream will come.
  bool promised_ = false;
};

RowMove move_of(std::uintptr_t packed, std::uintptr_t rows, std::uintptr_t ids, std::int64_t count,
                std::int64_t row_bytes) {
  return {packed, rows, ids, whole_number<std::uint64_t, DeviceError>("count", count, 0),
          whole_number<std::uint64_t, DeviceError>("row_bytes", row_bytes, 1)};
}

HostDevice& host_of(const BoundStream& stream) {
  auto* const host = dynamic_cast<HostDevice*>(stream.device.get());
  if (!host) {
    throw DeviceError(
        text("stream: of the device '", stream.device->name(), "', must be of 'host'"));
  }
  return *host;
}

std::shared_ptr<ComputeDevice> compute_of(const BoundStream& stream) {
  auto device = std::dynamic_pointer_cast<ComputeDevice>(stream.device);
  if (!device) {
    throw DeviceError(
        text("stream: on the device '", stream.device->name(), "' nothing but bursts can run"));
  }
  return device;
}

void bind_limits(py::module_& module) {
  py::class_<CopyLimits>(module, "CopyLimits", R"(What a device accepts in one call.

The planner keeps to it and the device refuses the rest. ``max_pitch`` in bytes.
``tall_copies=False`` forbids copies of more than one row; ``pinned_only=True`` forbids host pools
that are not pinned, and is always so on a GPU.)")
      .def(py::init([](std::int64_t max_pitch, std::int64_t copies_per_call, bool tall_copies,
                       bool pinned_only) {
             return CopyLimits{whole_number<std::size_t>("max_pitch", max_pitch, 1),
                               whole_number<std::size_t>("copies_per_call", copies_per_call, 1),
                               tall_copies, pinned_only};
           }),
           py::kw_only(), py::arg("max_pitch") = CopyLimits{}.max_pitch,
           py::arg("copies_per_call") = CopyLimits{}.copies_per_call,
           py::arg("tall_copies") = CopyLimits{}.tall_copies,
           py::arg("pinned_only") = CopyLimits{}.pinned_only)
      .def_readonly("max_pitch", &CopyLimits::max_pitch)
      .def_readonly("copies_per_call", &CopyLimits::copies_per_call)
      .def_readonly("tall_copies", &CopyLimits::tall_copies)
      .def_readonly("pinned_only", &CopyLimits::pinned_only);

  py::class_<LinkModel>(module, "LinkModel", R"(A modelled link between host and device.

Bytes still move; modelled is how long the calling thread is held for each copy (``issue_us``, for
one of several rows ``tall_issue_us``) and when each is done (``gigabytes_per_second``, 10^9 bytes,
each direction on its own). ``queue_depth`` copies may be outstanding on a stream, 0 is no bound.
``byte_scale`` modelled bytes are charged for each that moves. What is measured with a link model is
simulated, and must say so.)")
      .def(py::init([](double gigabytes_per_second, double issue_us, double tall_issue_us,
                       std::int64_t queue_depth, double byte_scale) {
             const LinkModel model{gigabytes_per_second, issue_us, tall_issue_us,
                                   whole_number<int>("queue_depth", queue_depth, 0), byte_scale};
             model.check();
             return model;
           }),
           py::kw_only(), py::arg("gigabytes_per_second"), py::arg("issue_us") = 0.0,
           py::arg("tall_issue_us") = 0.0, py::arg("queue_depth") = 0, py::arg("byte_scale") = 1.0)
      .def_readonly("gigabytes_per_second", &LinkModel::gigabytes_per_second)
      .def_readonly("issue_us", &LinkModel::issue_us)
      .def_readonly("tall_issue_us", &LinkModel::tall_issue_us)
      .def_readonly("queue_depth", &LinkModel::queue_depth)
      .def_readonly("byte_scale", &LinkModel::byte_scale);

  py::class_<RowMove>(module, "RowMove",
                      R"(Rows of one array, and the packed memory they go to or come from.

What `ComputeDevice.gather` takes, by the same names.)")
      .def(py::init(&move_of), py::kw_only(), py::arg("packed"), py::arg("rows"), py::arg("ids"),
           py::arg("count"), py::arg("row_bytes"))
      .def_readonly("packed", &RowMove::packed)
      .def_readonly("rows", &RowMove::rows)
      .def_readonly("ids", &RowMove::ids)
      .def_readonly("count", &RowMove::count)
      .def_readonly("row_bytes", &RowMove::row_bytes);

  py::class_<CopyCounters>(module, "CopyCounters",
                           "Copies that a device was handed in one direction since it was made.")
      .def_readonly("calls", &CopyCounters::calls)
      .def_readonly("copies", &CopyCounters::copies)
      .def_readonly("bytes", &CopyCounters::bytes);
}

void bind_streams(py::module_& module, py::class_<BoundEvent>& event,
                  py::class_<BoundStream>& stream) {
  event.def_readonly("handle", &BoundEvent::handle)
      .def(
          "record",
          [](const BoundEvent& self, const BoundStream* stream) {
            self.device->record(self.handle, handle_or_current(stream, *self.device));
          },
          py::arg("stream") = nullptr,
          "Makes the event stand for this point of `stream` (default: the current one).")
      .def(
          "wait",
          [](const BoundEvent& self, const BoundStream* stream) {
            self.device->wait(handle_or_current(stream, *self.device), self.handle);
          },
          py::arg("stream") = nullptr,
          "Orders `stream` behind the event as recorded now; of no effect if it never was.")
      .def(
          "query", [](const BoundEvent& self) { return self.device->query(self.handle); },
          "True if the event has been reached, or was never recorded.")
      .def(
          "synchronize",
          [](const BoundEvent& self) {
            without_gil([&] { self.device->synchronize(self.handle); });
          },
          "Blocks this thread until it is reached.")
      .def(
          "elapsed_time",
          [](const BoundEvent& self, const BoundEvent& end) {
            return self.device->elapsed_ms(self.handle, handle_on(end, *self.device));
          },
          py::arg("end"),
          "Milliseconds from this event to `end`. Both must have been recorded and reached.");

  stream.def_readonly("handle", &BoundStream::handle)
      .def(
          "wait_event",
          [](const BoundStream& self, const BoundEvent& event) {
            self.device->wait(self.handle, handle_on(event, *self.device));
          },
          py::arg("event"), "Orders this stream behind the event as recorded now.")
      .def(
          "wait_stream",
          [](const BoundStream& self, const BoundStream& other) {
            const Event event(self.device);
            self.device->record(event.handle(), handle_on(other, *self.device));
            self.device->wait(self.handle, event.handle());
          },
          py::arg("stream"), "Orders this stream behind all that is on the other one now.")
      .def(
          "record_event",
          [](const BoundStream& self, std::optional<BoundEvent> event) {
            if (!event) event = new_event(self.device);
            self.device->record(handle_on(*event, *self.device), self.handle);
            return *event;
          },
          py::arg("event") = py::none(),
          "Makes `event` (default: a new one), which is returned, stand for this point.")
      .def(
          "query",
          [](const BoundStream& self) { return compute_of(self)->query_stream(self.handle); },
          "True if all work on the stream is done.")
      .def(
          "synchronize",
          [](const BoundStream& self) {
            without_gil([&] { self.device->synchronize_stream(self.handle); });
          },
          "Blocks this thread until all work on the stream is done.")
      .def(
          "__enter__",
          [](const py::object& self) {
            const auto& stream = self.cast<const BoundStream&>();
            compute_of(stream)->push_current_stream(stream.handle);
            return self;
          },
          "Makes it this thread's current stream.")
      .def("__exit__", [](const BoundStream& self, const py::args&) {
        compute_of(self)->pop_current_stream();
      });

  py::class_<Stall>(module, "Stall", "Holds a stream until it is released, or forgotten.")
      .def("release", &Stall::release);

  py::class_<MeetingPoint>(module, "MeetingPoint",
                           R"(An event that may be waited for before it is recorded, and once only.

Streams of any `HostDevice` may meet at it. Forgotten before that, it holds nobody.)")
      .def(py::init<>())
      .def(
          "reach",
          [](MeetingPoint& self, const BoundStream& stream) {
            self.reach(host_of(stream), stream.handle);
          },
          py::arg("stream"), "Makes it stand for this point of `stream`.")
      .def(
          "wait",
          [](const MeetingPoint& self, const BoundStream& stream) {
            self.wait(host_of(stream), stream.handle);
          },
          py::arg("stream"), "Orders `stream` behind it, though it may be reached by nobody yet.");
}

}  // namespace

void bind_devices(py::module_& module) {
  bind_limits(module);
  py::class_<BoundEvent> event(module, "Event",
                               R"(A point in a stream. Any thread may use it.

Recording it again does not move the waits already enqueued on it.)");
  py::class_<BoundStream> stream(
      module, "Stream",
      R"(Work in the order in which it was enqueued. Any thread may use it.

Destroyed, once its work is done, with the last reference to it.)");
  bind_streams(module, event, stream);

  py::class_<Device, std::shared_ptr<Device>>(module, "Device", R"(What bursts run on.

Any thread may use it.)")
      .def_property_readonly("name", &Device::name)
      .def_property_readonly("limits", &Device::limits)
      .def(
          "current_stream",
          [](const std::shared_ptr<Device>& self) {
            return BoundStream{self, self->current_stream(), nullptr};
          },
          R"(This thread's current stream: the innermost `with stream:`, else the default one.

Where torch computes on the device, torch's.)")
      .def("new_stream",
           [](const std::shared_ptr<Device>& self) {
             auto owner = make_waiting<Stream>(self);
             const StreamHandle handle = owner->handle();
             return BoundStream{self, handle, std::move(owner)};
           })
      .def("new_event", &new_event)
      .def(
          "transfer",
          [](Device& self, const BoundStream& stream, const std::string& direction,
             const std::vector<CopyTuple>& copies) {
            std::vector<Copy> call;
            for (const auto& [dst, src, width, height, dst_pitch, src_pitch] : copies) {
              call.push_back({dst, src, width, height, dst_pitch, src_pitch});
            }
            const Direction towards = direction_of(direction);
            return without_gil([&] {
              const auto begin = std::chrono::steady_clock::now();
              self.copy(handle_on(stream, self), towards, call);
              const std::chrono::duration<double, std::micro> took =
                  std::chrono::steady_clock::now() - begin;
              return took.count();
            });
          },
          py::arg("stream"), py::arg("direction"), py::arg("copies"),
          R"(Enqueues copies between the tiers, outside any burst, in one call.

Each is (dst, src, width, height, dst_pitch, src_pitch), addresses and bytes, as a plan has them.
The memory must stay until they are done. Returns the microseconds that the device held the calling
thread, without those of translating the arguments.)");

  py::class_<ComputeDevice, Device, std::shared_ptr<ComputeDevice>>(
      module, "ComputeDevice", "A device on which a forward can run, or what stands for one.")
      .def(
          "copy",
          [](ComputeDevice& self, const BoundStream& stream, std::uintptr_t dst, std::uintptr_t src,
             std::size_t width, std::size_t height, std::size_t dst_pitch, std::size_t src_pitch) {
            self.copy_on_device(handle_on(stream, self),
                                {dst, src, width, height, dst_pitch, src_pitch});
          },
          py::arg("stream"), py::arg("dst"), py::arg("src"), py::arg("width"), py::kw_only(),
          py::arg("height") = 1, py::arg("dst_pitch") = 0, py::arg("src_pitch") = 0,
          R"(Enqueues a copy within the device, between two addresses; all sizes in bytes.

Counted nowhere and slowed by no link. The memory must stay until it is done.)")
      .def_property_readonly("moves_rows", &ComputeDevice::moves_rows,
                             "Whether `gather` and `scatter` can be called; else they raise why.")
      .def(
          "gather",
          [](ComputeDevice& self, const BoundStream& stream, std::uintptr_t packed,
             std::uintptr_t rows, std::uintptr_t ids, std::int64_t count, std::int64_t row_bytes) {
            const RowMove move = move_of(packed, rows, ids, count, row_bytes);
            self.gather(handle_on(stream, self), {&move, 1});
          },
          py::arg("stream"), py::arg("packed"), py::arg("rows"), py::arg("ids"), py::arg("count"),
          py::arg("row_bytes"),
          R"(Enqueues copying `count` rows of the array at `rows` to `packed`, one after the other.

A row is `row_bytes` bytes: a page, say. All are addresses of the device's memory, which must stay
until it is done; at `ids` are `count` int64, the rows. On `host` they are read before the call
returns, and one below 0 is refused. On `cuda` they are read when the stream gets there, and
cannot be checked: an id without a row is an access outside the array. Raises DeviceError, and
enqueues nothing, where there are no kernels (`CudaDevice.kernels` says why), on a capturing stream,
and on numbers or addresses that cannot be.)")
      .def(
          "scatter",
          [](ComputeDevice& self, const BoundStream& stream, std::uintptr_t rows,
             std::uintptr_t packed, std::uintptr_t ids, std::int64_t count,
             std::int64_t row_bytes) {
            const RowMove move = move_of(packed, rows, ids, count, row_bytes);
            self.scatter(handle_on(stream, self), {&move, 1});
          },
          py::arg("stream"), py::arg("rows"), py::arg("packed"), py::arg("ids"), py::arg("count"),
          py::arg("row_bytes"),
          R"(The reverse of `gather`: the destination comes first here too.

An id that occurs twice leaves bytes of either packed row.)")
      .def(
          "gather_all",
          [](ComputeDevice& self, const BoundStream& stream, const std::vector<RowMove>& moves) {
            self.gather(handle_on(stream, self), moves);
          },
          py::arg("stream"), py::arg("moves"),
          R"(`gather` of several arrays at once, without an order among them.

On a GPU one launch for every 64 of them: the pools of a layer, say.)")
      .def(
          "scatter_all",
          [](ComputeDevice& self, const BoundStream& stream, const std::vector<RowMove>& moves) {
            self.scatter(handle_on(stream, self), moves);
          },
          py::arg("stream"), py::arg("moves"), "The reverse of `gather_all`.")
      .def(
          "fill",
          [](ComputeDevice& self, const BoundStream& stream, std::uintptr_t dst, std::uint8_t value,
             std::size_t size) { self.fill(handle_on(stream, self), dst, value, size); },
          py::arg("stream"), py::arg("dst"), py::arg("value"), py::arg("size"),
          "Enqueues setting `size` bytes of the device from address `dst` on to `value`.")
      .def(
          "busy",
          [](ComputeDevice& self, const BoundStream& stream, double microseconds) {
            self.busy(handle_on(stream, self), microseconds);
          },
          py::arg("stream"), py::arg("microseconds"), "Occupies the stream as a kernel would.")
      .def(
          "stall",
          [](ComputeDevice& self, const BoundStream& stream) {
            return Stall(self.hold(handle_on(stream, self)));
          },
          py::arg("stream"), py::keep_alive<0, 1>(), py::keep_alive<0, 2>(),
          R"(Holds the stream at this point until the returned stall is released, or forgotten.

On a GPU two minutes at most.)")
      .def(
          "synchronize", [](ComputeDevice& self) { without_gil([&] { self.synchronize(); }); },
          "Blocks this thread until all streams of the device are done, and the current one.")
      .def("fail_copy_call", &ComputeDevice::fail_copy_call, py::arg("nth"),
           "Makes the `nth` call that copies between the tiers, from now on, fail. For tests.")
      .def(
          "counters",
          [](const ComputeDevice& self, const std::string& direction) {
            return self.counters(direction_of(direction));
          },
          py::arg("direction"));

  py::class_<HostDevice, ComputeDevice, std::shared_ptr<HostDevice>>(
      module, "HostDevice", R"(Host memory plays both tiers; streams are threads.

A real asynchronous device with CUDA's ordering: whatever no stream and no event orders, races.
Torch's own CPU operations are not on its streams: they run at once, on the thread that calls them.)")
      .def(py::init([](std::optional<LinkModel> link, std::optional<CopyLimits> limits) {
             return make_waiting<HostDevice>(link, limits.value_or(CopyLimits{}));
           }),
           py::kw_only(), py::arg("link") = py::none(), py::arg("limits") = py::none())
      .def_property_readonly("link", &HostDevice::link);

  py::class_<NullDevice, Device, std::shared_ptr<NullDevice>>(
      module, "NullDevice", R"(Accepts every call and moves nothing.

What remains of a burst is the cost of planning and issuing it. For benchmarks.)")
      .def(py::init([](std::optional<CopyLimits> limits) {
             return std::make_shared<NullDevice>(limits.value_or(CopyLimits{}));
           }),
           py::kw_only(), py::arg("limits") = py::none());
}

}  // namespace kvburst::bindings
