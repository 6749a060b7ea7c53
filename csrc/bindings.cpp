#include "bindings.h"

#include <optional>

/// kvburst._core: the native core for Python. Tensors come in as addresses, shapes and strides,
/// streams and events as integers or as the device's own; nothing here links torch or CUDA.
namespace kvburst::bindings {
namespace {

struct BuildInfo {
  std::string version = KVBURST_VERSION;
  std::string compiler =
#if defined(__clang__)
      "clang " __clang_version__;
#else
      "gcc " __VERSION__;
#endif
#ifdef KVBURST_CUDA_TOOLKIT
  std::optional<std::string> cuda_toolkit = KVBURST_CUDA_TOOLKIT;
#else
  std::optional<std::string> cuda_toolkit;
#endif
  std::string cuda_reason = KVBURST_CUDA_REASON;
};

/// One Python exception a kind. The translator tried first is the one registered last, so the base
/// comes first.
void bind_errors(py::module_& module) {
  auto& base = py::register_exception<Error>(module, "KVBurstError", PyExc_RuntimeError);
  base.doc() = "Base of everything kvburst raises.";
  const py::tuple value_error = py::make_tuple(base, py::handle(PyExc_ValueError));
  py::register_exception<LayoutError>(module, "LayoutError", value_error).doc() =
      "A pool, plan or device was described in a way that cannot be served.";
  py::register_exception<PageError>(module, "PageError", value_error).doc() =
      "Page or slot indices that are refused before anything moves.";
  py::register_exception<DeviceError>(module, "DeviceError", base).doc() =
      "A device operation failed, or a handle is not one of the device's.";
  py::register_exception<BurstError>(module, "BurstError", base).doc() =
      "A burst failed; raised at everyone who waits for it.";
}

}  // namespace
}  // namespace kvburst::bindings

PYBIND11_MODULE(_core, module) {
  using namespace kvburst::bindings;
  module.doc() = "The native core of kvburst.";
  module.attr("__version__") = KVBURST_VERSION;
  bind_errors(module);
  py::class_<BuildInfo>(module, "BuildInfo", "How this module was built.")
      .def_readonly("version", &BuildInfo::version)
      .def_readonly("compiler", &BuildInfo::compiler)
      .def_readonly("cuda_toolkit", &BuildInfo::cuda_toolkit,
                    "Version of the CUDA toolkit it was built with; None if without.")
      .def_readonly("cuda_reason", &BuildInfo::cuda_reason, "Why with, or why without.");
  module.def("build_info", [] { return BuildInfo(); }, "How this module was built.");
  bind_devices(module);
  bind_cuda(module);
  bind_plans(module);
  bind_bursts(module);
  bind_agreement(module);
}
