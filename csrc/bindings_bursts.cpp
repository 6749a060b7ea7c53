#include <algorithm>
#include <chrono>
#include <optional>

#include "bindings.h"
#include "core/burst_issuer.h"
#include "core/layer_gate.h"

namespace kvburst::bindings {
namespace {

/// The start or the finish of a burst, as an event.
struct BurstEvent {
  std::shared_ptr<Burst> burst;
  bool is_finish;

  EventHandle handle() const { return (is_finish ? burst->finish : burst->start).handle(); }
};

/// What a burst came to, or nothing yet: another thread may be writing it.
IssueTally outcome(const Burst& burst) { return burst.settled() ? burst.tally : IssueTally{}; }

/// Blocks while the layer is not issued, without the GIL, but looks up now and then: for signals,
/// and to say after every half minute that it still waits.
void wait_issued(LayerGate& gate, std::int64_t burst, int layer) {
  constexpr std::chrono::seconds kLookUp{1};
  constexpr int kLookUpsALine = 30;
  for (int seconds = 1;; ++seconds) {
    if (without_gil([&] { return gate.wait_issued(burst, layer, kLookUp); })) return;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (seconds % kLookUpsALine == 0) {
      py::module_::import("logging").attr("getLogger")("kvburst").attr("warning")(
          "load %d: layer %d is still not issued after %d s", burst, layer, seconds);
    }
  }
}

void bind_burst(py::module_& module) {
  py::class_<BurstEvent>(module, "BurstEvent", R"(The start or the finish of a burst's copies.

Stands for its own burst for as long as it is kept.)")
      .def(
          "query",
          [](const BurstEvent& self) {
            return self.is_finish
                       ? self.burst->done()
                       : self.burst->settled() && self.burst->device().query(self.handle());
          },
          R"(The start: true once the first copy may run. The finish: true once the burst has been issued
and its copies are done, or it has failed and those that had been issued are done.)")
      .def(
          "synchronize",
          [](const BurstEvent& self) {
            without_gil([&] {
              self.burst->state.wait(BurstState::queued);
              self.burst->device().synchronize(self.handle());
            });
          },
          "Blocks this thread until it is reached.")
      .def(
          "wait",
          [](const BurstEvent& self, const BoundStream* stream) {
            if (!self.burst->settled()) {
              without_gil([&] { self.burst->state.wait(BurstState::queued); });
            }
            Device& device = self.burst->device();
            device.wait(handle_or_current(stream, device), self.handle());
          },
          py::arg("stream") = nullptr,
          "Orders `stream` (default: the current one) behind it; blocks while it is not issued.")
      .def(
          "elapsed_time",
          [](const BurstEvent& self, const BurstEvent& end) {
            Device& device = self.burst->device();
            if (&end.burst->device() != &device) {
              throw DeviceError(text("elapsed time: ", end.burst->title(),
                                     " is of another device, '", end.burst->device().name(), "'"));
            }
            return device.elapsed_ms(self.handle(), end.handle());
          },
          py::arg("end"), "Milliseconds from this event to `end`; both must be reached.")
      .def(
          "elapsed_since",
          [](const BurstEvent& self, const BoundEvent& start) {
            Device& device = self.burst->device();
            return device.elapsed_ms(handle_on(start, device), self.handle());
          },
          py::arg("event"),
          R"(Milliseconds from `event`, recorded on a stream of this device, to this one; below 0 if it came
after. Both must be reached.)")
      .def(
          "elapsed_time",
          [](const BurstEvent& self, const BoundEvent& end) {
            Device& device = self.burst->device();
            return device.elapsed_ms(self.handle(), handle_on(end, device));
          },
          py::arg("end"));

  py::class_<Burst, std::shared_ptr<Burst>>(module, "Burst", R"(The record of one transfer.

May be read from any thread.)")
      .def_readonly("id", &Burst::id)
      .def_property_readonly("direction", [](const Burst& self) { return name_of(self.direction); })
      .def_readonly("node_ids", &Burst::node_ids)
      .def_readonly("num_pages", &Burst::num_pages, "Pages, counted once for all pools and layers.")
      .def_property_readonly(
          "settled", [](const Burst& self) { return self.settled(); },
          "Whether it is issued or has failed; what it came to is 0 and empty until then.")
      .def_property_readonly(
          "num_bytes", [](const Burst& self) { return outcome(self).bytes; },
          "Bytes handed to the device.")
      .def_property_readonly(
          "num_copies", [](const Burst& self) { return outcome(self).copies; },
          "Copies handed to the device.")
      .def_property_readonly(
          "one_per_page_and_layer",
          [](const Burst& self) { return outcome(self).planned.one_per_page_and_layer; },
          "Copies it would have taken with one for every page of every layer.")
      .def_property_readonly(
          "neighbours_merged",
          [](const Burst& self) { return outcome(self).planned.neighbours_merged; },
          "Copies it would have taken with neighbouring pages merged, but no layers.")
      .def_property_readonly(
          "fallbacks", [](const Burst& self) { return fallbacks(outcome(self).planned); },
          "Copies more than whole groups would take, by what makes them necessary.")
      .def_property_readonly(
          "host_digest", [](const Burst& self) { return host_digest(self.pages); },
          R"(62 bits from the host pages of every pool, in order.

Equal on ranks whose bursts move the same pages of a host tier that is the same on all.)")
      .def(
          "copy_page_ids",
          [](const Burst& self, std::size_t pool, const std::string& tier, std::uintptr_t out) {
            if (pool >= self.pages.list_of_pool.size()) {
              throw PageError(text("pool: ", pool, " is out of range, the burst has ",
                                   self.pages.list_of_pool.size(), " pools"));
            }
            const bool device = tier_of(tier) == Tier::device;
            auto* ids = reinterpret_cast<std::int64_t*>(out);
            for (const PagePair& pair : self.pages.of_pool(pool)) {
              *ids++ = device ? pair.device : pair.host;
            }
          },
          py::arg("pool"), py::kw_only(), py::arg("tier"), py::arg("out"),
          R"(Writes the `num_pages` page ids of one pool as int64 to address `out`.

In the order in which they were submitted; -1 for one that lies in device memory.)")
      .def_property_readonly(
          "error",
          [](const Burst& self) -> std::optional<std::string> {
            if (!self.failed()) return std::nullopt;
            return self.error;
          },
          "Operation, group and node ids of a burst that failed.")
      .def_property_readonly(
          "abandoned", [](const Burst& self) { return self.state == BurstState::abandoned; },
          "Whether it failed while the issuer was stuck in it: its pages may be used for ever.")
      .def_readonly("caller_us", &Burst::caller_us,
                    "Microseconds that the submitting thread spent in submit.")
      .def_property_readonly(
          "queue_us", [](const Burst& self) { return outcome(self).queue_us; },
          "Microseconds from submission until the issuer took it up.")
      .def_property_readonly(
          "first_copy_us", [](const Burst& self) { return outcome(self).first_copy_us; },
          "Microseconds from submission until its first copy was handed to the device.")
      .def_property_readonly(
          "issue_us", [](const Burst& self) { return outcome(self).issue_us; },
          "Microseconds from there until its last copy was issued.")
      .def_property_readonly(
          "start_event", [](const std::shared_ptr<Burst>& self) { return BurstEvent{self, false}; },
          "Before the first copy; of a burst that failed before it, of no meaning.")
      .def_property_readonly(
          "finish_event", [](const std::shared_ptr<Burst>& self) { return BurstEvent{self, true}; },
          "Behind the last copy.");
}

}  // namespace

void bind_bursts(py::module_& module) {
  bind_burst(module);

  py::class_<LayerGate, std::shared_ptr<LayerGate>>(
      module, "LayerGate", R"(Where a forward waits for "layer l of burst b is in place".

``slots`` bursts may be under way at a time. Any thread may wait.)")
      .def(
          py::init([](const std::shared_ptr<Device>& device, const std::vector<PoolLayout>& layouts,
                      int slots) { return std::make_shared<LayerGate>(device, layouts, slots); }),
          py::arg("device"), py::arg("layouts"), py::kw_only(), py::arg("slots") = 3)
      .def_property_readonly("num_layers", &LayerGate::num_layers)
      .def_property_readonly("num_slots", &LayerGate::num_slots)
      .def(
          "wait",
          [](LayerGate& self, std::int64_t burst, int layer, const BoundStream* stream) {
            std::optional<StreamHandle> handle;
            if (stream) handle = handle_on(*stream, self.device());
            if (!self.wait_issued(burst, layer, {})) {
              if (handle) self.arrive(burst, layer, *handle);
              wait_issued(self, burst, layer);
            }
            if (handle) {
              self.wait(burst, layer, handle);
            } else {
              without_gil([&] { self.wait(burst, layer, std::nullopt); });
            }
          },
          py::arg("burst"), py::arg("layer"), py::arg("stream") = nullptr,
          R"(Orders `stream` behind the layer, every pool's part of it.

Without a stream blocks this thread until the bytes are there. Raises BurstError if the burst failed
or was never submitted.)")
      .def(
          "wait_for_slot",
          [](LayerGate& self, std::int64_t burst) {
            without_gil([&] { self.wait_for_slot(burst); });
          },
          py::arg("burst"),
          "Blocks this thread until the gate slot that `burst` will have is free.")
      .def("find", &LayerGate::find, py::arg("burst"),
           "The burst's record; None once its slot has moved on, and the burst is complete.")
      .def("stalls_ms", &LayerGate::stalls_ms, py::arg("burst"),
           R"(Milliseconds that streams have stood at the gate for a burst that is done.

Of the first layer of each group; None once its slot has moved on. Measured where loads are issued
on a thread.)")
      .def("is_done", &LayerGate::is_done, py::arg("burst"),
           "Whether all of the burst is in place.");

  py::class_<BurstIssuer, std::shared_ptr<BurstIssuer>>(
      module, "BurstIssuer",
      R"(Issues bursts in one direction, in order, on a stream of its own.

``mode="inline"``: on the thread that submits; ``"thread"``: on a native thread of its own, which
may run on the processors ``cpus`` (none named: on any). ``memory``: whatever owns the memory that
the layouts describe; kept alive until the issuer, which waits for its copies, is gone, and for ever
if they are stuck.)")
      .def(py::init([](const std::shared_ptr<Device>& device, std::vector<PoolLayout> layouts,
                       const std::string& direction, std::shared_ptr<LayerGate> gate,
                       const PlanOptions& options, const std::string& mode, std::vector<int> cpus,
                       const py::object& memory) {
             if (mode != "inline" && mode != "thread") {
               throw LayoutError(text("mode: '", mode, "' must be 'inline' or 'thread'"));
             }
             return make_waiting<BurstIssuer>(
                 device, std::move(layouts), direction_of(direction), std::move(gate), options,
                 IssuerOptions{mode == "thread", std::move(cpus), kept(memory)});
           }),
           py::arg("device"), py::arg("layouts"), py::kw_only(), py::arg("direction"),
           py::arg("gate") = nullptr, py::arg("options") = PlanOptions{},
           py::arg("mode") = "inline", py::arg("cpus") = std::vector<int>{},
           py::arg("memory") = py::none())
      .def(
          "submit",
          [](BurstIssuer& self, BoundPages& pages, const std::vector<std::int64_t>& node_ids,
             const BoundStream& stream, const BoundStream* fence) {
            const StreamHandle producer = handle_on(stream, self.device());
            std::optional<StreamHandle> fence_handle;
            if (fence) fence_handle = handle_on(*fence, self.device());
            const auto submit = [&] {
              return self.submit(pages.pages, node_ids, producer, fence_handle);
            };
            // A hand-over is too short to let go of the GIL for: another thread would take it, and
            // keep it for its whole turn.
            return self.only_hands_over() ? submit() : without_gil(submit);
          },
          py::arg("pages"), py::arg("node_ids"), py::kw_only(), py::arg("stream"),
          py::arg("fence") = nullptr,
          R"(Submits the collected pages behind all that is now on `stream` and on `fence`.

None if there are no pages; `pages` is empty afterwards. Blocks while the gate slot it needs is
still copying. A device that fails does not raise: the burst carries the error, and its waiters
raise. Raises BurstError after a stop that timed out, and in a forked child.)")
      .def(
          "drain", [](BurstIssuer& self) { without_gil([&] { self.drain(); }); },
          "Blocks until everything submitted so far is issued and copied.")
      .def(
          "stop",
          [](BurstIssuer& self, double timeout) {
            // What is longer than a day, infinity included, is a day.
            const std::chrono::duration<double> seconds(std::clamp(timeout, 0.0, 86'400.0));
            return without_gil([&] {
              return self.stop(std::chrono::duration_cast<std::chrono::milliseconds>(seconds));
            });
          },
          py::arg("timeout"),
          R"(Ends the thread once its queue is empty; later bursts are issued on the caller.

False after `timeout` seconds: bursts that are not issued have failed, and later submissions
raise.)");
}

}  // namespace kvburst::bindings
