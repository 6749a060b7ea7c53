#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
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
#include "core/page_allocator.h"

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
            PyThreadState* const state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
            delete object;
            if (state) PyEval_RestoreThread(state);
          }};
}

inline Direction direction_of(const std::string& name) {
  if (name == "load") return Direction::load;
  if (name == "backup") return Direction::backup;
  throw LayoutError(text("direction: '", name, "' must be 'load' or 'backup'"));
}

inline Tier tier_of(const std::string& name) {
  if (name == "device") return Tier::device;
  if (name == "host") return Tier::host;
  throw LayoutError(text("tier: '", name, "' must be 'device' or 'host'"));
}

/// A count that C++ keeps in `To`. Python's are not bounded, so its bounds are checked here, by
/// name.
template <class To, class Refusal = LayoutError>
To whole_number(const char* name, std::int64_t value, std::int64_t lowest) {
  constexpr auto highest = static_cast<std::int64_t>(std::min<std::uint64_t>(
      std::numeric_limits<To>::max(), std::numeric_limits<std::int64_t>::max()));
  if (value < lowest || value > highest) {
    throw Refusal(text(name, ": ", value, " must be from ", lowest, " to ", highest));
  }
  return static_cast<To>(value);
}

/// A stream of the device's, or one wrapped; the first kind is destroyed with its last reference.
struct BoundStream {
  std::shared_ptr<Device> device;
  StreamHandle handle;
  std::shared_ptr<Stream> owner;
};

/// The same of an event.
struct BoundEvent {
  std::shared_ptr<Device> device;
  EventHandle handle;
  std::shared_ptr<Event> owner;
};

inline BoundEvent new_event(const std::shared_ptr<Device>& device) {
  auto owner = std::make_shared<Event>(device);
  const EventHandle handle = owner->handle();
  return {device, handle, std::move(owner)};
}

/// A handle is a number that another device may have given out too.
inline StreamHandle handle_on(const BoundStream& stream, const Device& device) {
  if (stream.device.get() != &device) {
    throw DeviceError(text("stream: handle ", stream.handle, " is of another device, '",
                           stream.device->name(), "'"));
  }
  return stream.handle;
}

inline EventHandle handle_on(const BoundEvent& event, const Device& device) {
  if (event.device.get() != &device) {
    throw DeviceError(text("event: handle ", event.handle, " is of another device, '",
                           event.device->name(), "'"));
  }
  return event.handle;
}

inline StreamHandle handle_or_current(const BoundStream* stream, Device& device) {
  return stream ? handle_on(*stream, device) : device.current_stream();
}

/// Pages together with the names of the pools they are collected for.
struct BoundPages {
  BurstPages pages;
  std::vector<std::string> pool_names;
};

/// A Python object that native code keeps, and may let go of without the GIL.
inline std::shared_ptr<PyObject> kept(py::object object) {
  return {object.release().ptr(), [](PyObject* pointer) {
            const py::gil_scoped_acquire locked;
            Py_DECREF(pointer);
          }};
}

/// The reasons that occurred, in words, and the copies they cost.
std::map<std::string, std::int64_t> fallbacks(const CopyCount& count);

void bind_devices(py::module_& module);
/// After `bind_devices`.
void bind_cuda(py::module_& module);
void bind_plans(py::module_& module);
void bind_bursts(py::module_& module);
void bind_agreement(py::module_& module);

}  // namespace kvburst::bindings
