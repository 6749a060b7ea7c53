#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "core/burst_pages.h"
#include "core/copy_plan.h"
#include "core/device.h"
#include "core/error.h"
#include "core/format.h"

/// What the files of the module share. They translate, and decide nothing.
namespace kvburst::bindings {

namespace py = pybind11;

/// Runs `call`, which may block, without the GIL. A thread that comes back to an interpreter that
/// is gone meanwhile ends there and then, by unwinding: which a destructor does not survive, so
/// this is not `gil_scoped_release`.
template <class Call>
auto without_gil(Call&& call) -> decltype(call()) {
  using Result = decltype(call());
  std::conditional_t<std::is_void_v<Result>, std::monostate, std::optional<Result>> result;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    if constexpr (std::is_void_v<Result>) {
      call();
    } else {
      result = call();
    }
  } catch (...) {
    PyEval_RestoreThread(state);
    throw;
  }
  PyEval_RestoreThread(state);
  if constexpr (!std::is_void_v<Result>) return *std::move(result);
}

/// A shared object whose destruction may wait for a device, which must not happen under the GIL:
/// what it waits for may itself need a Python thread to go on. One such object may own another, so
/// the GIL may be let go already.
template <class T, class... Args>
std::shared_ptr<T> make_waiting(Args&&... args) {
  return {new T(std::forward<Args>(args)...), [](T* object) {
            std::optional<py::gil_scoped_release> unlocked;
            if (PyGILState_Check()) unlocked.emplace();
            delete object;
          }};
}

inline Direction direction_of(const std::string& name) {
  if (name == "load") return Direction::load;
  if (name == "backup") return Direction::backup;
  throw LayoutError(text("direction: '", name, "' must be 'load' or 'backup'"));
}

/// A stream of the device's, or one wrapped; the first kind is destroyed with its last reference.
struct BoundStream {
  std::shared_ptr<Device> device;
  StreamHandle handle;
  std::shared_ptr<Stream> owner;
  /// Current streams to return to, innermost `with` last.
  std::vector<StreamHandle> outer;
};

struct BoundEvent {
  std::shared_ptr<Device> device;
  std::shared_ptr<Event> event;

  EventHandle handle() const { return event->handle(); }
};

inline StreamHandle handle_or_current(const BoundStream* stream, Device& device) {
  return stream ? stream->handle : device.current_stream();
}

/// Pages together with the names of the pools they are collected for.
struct BoundPages {
  BurstPages pages;
  std::vector<std::string> pool_names;
};

/// The reasons that occurred, in words, and the copies they cost.
std::map<std::string, std::int64_t> fallbacks(const CopyCount& count);

void bind_devices(py::module_& module);
void bind_plans(py::module_& module);
void bind_bursts(py::module_& module);

}  // namespace kvburst::bindings
