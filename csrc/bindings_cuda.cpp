#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "bindings.h"
#include "cuda/cuda_device.h"
#include "cuda/memory.h"

namespace kvburst::bindings {
namespace {

using cuda::Context;
using cuda::CudaDevice;
using cuda::CudaOptions;
using cuda::DeviceMemory;
using cuda::Driver;
using cuda::PinnedMemory;

/// The current streams of a framework that only Python can ask.
class PythonStreams final : public CurrentStreams {
 public:
  PythonStreams(py::object current, py::object push, py::object pop)
      : current_(kept(std::move(current))),
        push_(kept(std::move(push))),
        pop_(kept(std::move(pop))) {}

  StreamHandle current() override {
    const py::gil_scoped_acquire locked;
    return py::handle(current_.get())().cast<StreamHandle>();
  }
  void push(StreamHandle stream) override {
    const py::gil_scoped_acquire locked;
    py::handle(push_.get())(stream);
  }
  void pop() override {
    const py::gil_scoped_acquire locked;
    py::handle(pop_.get())();
  }

 private:
  std::shared_ptr<PyObject> current_;
  std::shared_ptr<PyObject> push_;
  std::shared_ptr<PyObject> pop_;
};

/// Registered memory and whoever owns it: the registration goes first.
struct BoundPinned {
  py::object owner;
  std::shared_ptr<PinnedMemory> memory;
};

void bind_driver(py::module_& module) {
  py::class_<Driver, std::shared_ptr<Driver>>(module, "CudaDriver",
                                              R"(A CUDA driver, loaded at run time.

``library`` is a path or a name; without one it is what ``KVBURST_LIBCUDA`` in the environment says,
or else ``libcuda.so.1``. Raises DeviceError if it cannot be loaded or is older than 11.3.)")
      .def(py::init([](std::optional<std::string> library) {
             return std::make_shared<Driver>(library.value_or(std::string()));
           }),
           py::arg("library") = py::none())
      .def_property_readonly("library", &Driver::library)
      .def_property_readonly("version", &Driver::version, "12080 for CUDA 12.8.")
      .def_property_readonly("stand_in", &Driver::stand_in,
                             "No GPU is behind it: the memory of its devices is host memory.")
      .def_property_readonly("batch_version", &Driver::batch_version,
                             "The form of the batch calls it has: 12080 or 13000; 0 for none.")
      .def_property_readonly(
          "why_no_kernels",
          [](const Driver& self) -> std::optional<std::string> {
            const std::string why = cuda::why_not_loadable(self, cuda::built_in_kernels());
            return why.empty() ? std::nullopt : std::optional(why);
          },
          "Why no device of it can load the kernels of this build; None if it can try.")
      .def(
          "gpu_names",
          [](const Driver& self) { return without_gil([&] { return cuda::gpu_names(self); }); },
          R"(Of the GPUs it has, by index. Starts the driver.

Raises DeviceError, saying why, if it does not start, for one where there is no GPU.)");
}

void bind_memory(py::module_& module) {
  py::class_<DeviceMemory, std::shared_ptr<DeviceMemory>>(
      module, "DeviceMemory", "Memory of a device; freed with the last reference to it.")
      .def_property_readonly("address", &DeviceMemory::address)
      .def_property_readonly("nbytes", &DeviceMemory::bytes);

  py::class_<BoundPinned>(module, "PinnedMemory",
                          R"(Host memory that a device has registered.

Unregistered with the last reference to it, but for what was registered before.)")
      .def_property_readonly(
          "ranges",
          [](const BoundPinned& self) {
            std::vector<std::pair<std::uintptr_t, std::size_t>> ranges;
            for (const MemoryRange& range : self.memory->ranges()) {
              ranges.emplace_back(range.address, range.size);
            }
            return ranges;
          },
          "(address, bytes) of each registration; no copy may reach from one into the next.");
}

}  // namespace

void bind_cuda(py::module_& module) {
  bind_driver(module);
  bind_memory(module);

  py::class_<CudaDevice, ComputeDevice, std::shared_ptr<CudaDevice>>(module, "CudaDevice",
                                                                     R"(A GPU, through the driver.

``streams``: how to ask for, set and put back the current stream of a thread, where a framework
keeps it: three functions; without them threads have the streams that they enter. ``kernels``: a
fat binary of this version's csrc/cuda/staging.cu, to be loaded instead of the one in this build.)")
      .def(py::init([](int index, std::shared_ptr<Driver> driver, std::optional<CopyLimits> limits,
                       bool single_copies, std::optional<py::bytes> kernels,
                       std::optional<std::tuple<py::object, py::object, py::object>> streams) {
             CudaOptions options;
             options.limits = limits.value_or(CopyLimits{});
             options.single_copies = single_copies;
             if (kernels) {
               const std::string_view image(*kernels);
               options.kernels = {std::as_bytes(std::span(image)), "those given by the caller"};
             }
             if (streams) {
               auto& [current, push, pop] = *streams;
               options.current_streams = std::make_shared<PythonStreams>(
                   std::move(current), std::move(push), std::move(pop));
             }
             return make_waiting<CudaDevice>(std::move(driver), index, std::move(options));
           }),
           py::arg("index"), py::kw_only(), py::arg("driver"), py::arg("limits") = py::none(),
           py::arg("single_copies") = false, py::arg("kernels") = py::none(),
           py::arg("streams") = py::none())
      .def_property_readonly("index",
                             [](const CudaDevice& self) { return self.context()->index(); })
      .def_property_readonly("gpu_name",
                             [](const CudaDevice& self) { return self.context()->gpu_name(); })
      .def_property_readonly("copy_calls", &CudaDevice::copy_calls,
                             "Which calls of the driver copies are made with, and why those.")
      .def_property_readonly("kernels", &CudaDevice::kernels,
                             R"(Which kernels gather and scatter rows, or "none: " and why.)")
      .def(
          "wrap_stream",
          [](const std::shared_ptr<CudaDevice>& self, StreamHandle handle) {
            return BoundStream{self, handle, nullptr};
          },
          py::arg("handle"),
          R"(Somebody else's stream, such as torch's ``cuda_stream``; 0 is the legacy default stream.

Must not be used once its owner has destroyed it.)")
      .def(
          "wrap_event",
          [](const std::shared_ptr<CudaDevice>& self, EventHandle handle) {
            return BoundEvent{self, handle, nullptr};
          },
          py::arg("handle"),
          R"(Somebody else's event, such as torch's ``cuda_event``, which is 0 before its first record.

Must not be used once its owner has destroyed it.)")
      .def(
          "allocate",
          [](const CudaDevice& self, std::int64_t nbytes) {
            const auto bytes = whole_number<std::size_t>("nbytes", nbytes, 1);
            return without_gil([&] { return make_waiting<DeviceMemory>(self.context(), bytes); });
          },
          py::arg("nbytes"), "New memory of the device, straight from the driver.")
      .def(
          "pin_memory",
          [](const CudaDevice& self, std::uintptr_t address, std::int64_t nbytes, std::int64_t unit,
             std::int64_t largest_chunk, py::object owner) {
            const MemoryRange buffer{address, whole_number<std::size_t>("nbytes", nbytes, 1)};
            const auto unit_bytes = whole_number<std::size_t>("unit", unit, 1);
            const auto chunk = whole_number<std::size_t>("largest_chunk", largest_chunk, 1);
            auto memory = without_gil([&] {
              return make_waiting<PinnedMemory>(self.context(), buffer, unit_bytes, chunk);
            });
            return BoundPinned{std::move(owner), std::move(memory)};
          },
          py::arg("address"), py::arg("nbytes"), py::kw_only(), py::arg("unit"),
          py::arg("largest_chunk") = cuda::kLargestChunk, py::arg("owner"),
          R"(Registers host memory with the device, in chunks of whole units of ``unit`` bytes.

``owner`` is kept for as long as it is registered.)");
}

}  // namespace kvburst::bindings
