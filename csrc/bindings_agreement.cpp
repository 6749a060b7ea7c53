#include <array>
#include <chrono>
#include <span>

#include "agreement/board_segment.h"
#include "agreement/step_board.h"
#include "bindings.h"

namespace kvburst::bindings {
namespace {

/// A rank's board and the segment that it lies in; the segment goes last.
struct BoundBoard {
  std::shared_ptr<BoardSegment> segment;
  std::unique_ptr<StepBoard> board;

  BoundBoard(std::shared_ptr<BoardSegment> in, const BoardShape& shape, int rank,
             const BoardPatience& patience)
      : segment(std::move(in)),
        board(std::make_unique<StepBoard>(segment->memory(), shape, rank, segment, patience)) {}

  void close() {
    board->close();
    segment->leave();
  }
};

template <class To>
To number(const char* name, std::int64_t value) {
  return whole_number<To, BoardUseError>(name, value, 0);
}

BoardShape shape_of(std::int64_t ranks, std::int64_t values, std::int64_t lag) {
  return {number<int>("ranks", ranks), number<int>("values", values), number<int>("lag", lag)};
}

constexpr double kLongestTimeout = 1e9;

BoardPatience patience_of(double timeout) {
  if (!(timeout > 0 && timeout <= kLongestTimeout)) {
    throw BoardUseError(
        text("timeout: ", timeout, " s must be above 0 and at most ", kLongestTimeout));
  }
  BoardPatience patience;
  patience.timeout =
      std::chrono::ceil<std::chrono::nanoseconds>(std::chrono::duration<double>(timeout));
  return patience;
}

/// Python's integers are not bounded: one beyond 64 bits is refused by its place.
std::vector<std::int64_t> values_of(const py::sequence& sequence) {
  std::vector<std::int64_t> values;
  values.reserve(sequence.size());
  for (const py::handle item : sequence) {
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(item.ptr()));
    if (!index) {
      PyErr_Clear();
      throw BoardUseError(text("values: number ", values.size(), " is ",
                               py::repr(item).cast<std::string>(), ", and not an integer"));
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow != 0) {
      throw BoardUseError(text("values: number ", values.size(), " is ",
                               py::str(index).cast<std::string>(), ", which 64 bits do not hold"));
    }
    values.push_back(value);
  }
  return values;
}

/// Lets go of the GIL only to sleep, and looks up now and then for signals.
py::list read(BoundBoard& self) {
  StepBoard& board = *self.board;
  if (!board.ready()) {
    while (!without_gil([&] { return board.wait(); })) {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }
  std::array<std::int64_t, RoundRing<>::kMaxValues> values;
  const std::span out(values.data(), static_cast<std::size_t>(board.shape().values));
  board.read(out);
  py::list agreed(out.size());
  for (std::size_t i = 0; i < out.size(); ++i) agreed[i] = py::int_(out[i]);
  return agreed;
}

/// The translator tried first is the one registered last, so this one is asked before the base's.
void bind_board_errors(py::module_& module) {
  const py::object base = module.attr("KVBurstError");
  const py::exception<BoardError> error(module, "BoardError", base);
  error.attr("__doc__") = R"(A board cannot be had or cannot go on.

Its segment is refused, or a rank is missing from a round.)";
  error.attr("ranks") =
      py::module_::import("builtins")
          .attr("property")(
              py::cpp_function([](const py::object& self) {
                const py::dict state = self.attr("__dict__");
                return state.contains("_ranks") ? py::object(state["_ranks"])
                                                : py::object(py::tuple());
              }),
              py::none(), py::none(),
              "The ranks that are missing, ascending; none where it is about the segment.");
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const BoardError& caught) {
      const py::object type = py::module_::import("kvburst._core").attr("BoardError");
      const py::object raised = type(caught.what());
      raised.attr("_ranks") = py::tuple(py::cast(caught.ranks()));
      PyErr_SetObject(type.ptr(), raised.ptr());
    }
  });
  const py::tuple value_error = py::make_tuple(base, py::handle(PyExc_ValueError));
  py::register_exception<BoardUseError>(module, "BoardUseError", value_error).doc() =
      "A board is called in a way that cannot be served; nothing was published or read.";
}

}  // namespace

void bind_agreement(py::module_& module) {
  bind_board_errors(module);
  py::class_<BoardStats>(module, "BoardStats", "How the rounds of a board went at this rank.")
      .def_readonly("spins", &BoardStats::spins,
                    "Rounds that were not complete when they were to be read.")
      .def_readonly("sleeps", &BoardStats::sleeps, "Times that this rank slept.")
      .def_readonly("wakes", &BoardStats::wakes, "Rounds for which it woke others.")
      .def_readonly("look_ups", &BoardStats::look_ups,
                    "Times that nothing had come for 50 ms, and it looked whether the others that"
                    " it waits for are still there.");
  py::class_<BoundBoard>(module, "StepBoard", R"(One rank's side of a board in shared memory.

Each round every rank publishes as many integers as were agreed at the start, and, a step later,
reads the element-wise minimum over all ranks. All ranks of a board are on one node and give the
same `ranks`, `values` and `lag`. A step reads first, then publishes.

Rank 0 creates the board and hands `name` and `nonce` to the others, which attach; once all have,
anybody unlinks it. `kvburst.agreement.connect_board` does all that over a process group.

`lag`: rounds that a rank may publish before it reads the oldest of them, 1 to 16. `values`: 1 to
31. `timeout`: seconds that a read waits for a late rank.

An object belongs to one thread at a time, and not to a forked child. `BoardUseError` refuses a
call, and nothing is changed; `BoardError` names ranks that are missing.)")
      .def_static(
          "create",
          [](std::int64_t ranks, std::int64_t values, double timeout, std::int64_t lag) {
            const BoardShape shape = shape_of(ranks, values, lag);
            const BoardPatience patience = patience_of(timeout);
            return BoundBoard(BoardSegment::create(shape), shape, 0, patience);
          },
          py::kw_only(), py::arg("ranks"), py::arg("values"), py::arg("timeout"),
          py::arg("lag") = 1,
          R"(A new board, as its rank 0.

Raises BoardError, saying why, where there is no shared memory to be had.)")
      .def_static(
          "attach",
          [](const std::string& name, std::int64_t nonce, std::int64_t rank, std::int64_t ranks,
             std::int64_t values, double timeout, std::int64_t lag) {
            const BoardShape shape = shape_of(ranks, values, lag);
            const BoardPatience patience = patience_of(timeout);
            const int own = number<int>("rank", rank);
            auto segment =
                BoardSegment::attach(name, number<std::uint64_t>("nonce", nonce), shape, own);
            return BoundBoard(std::move(segment), shape, own, patience);
          },
          py::arg("name"), py::arg("nonce"), py::kw_only(), py::arg("rank"), py::arg("ranks"),
          py::arg("values"), py::arg("timeout"), py::arg("lag") = 1,
          R"(The board of that name, as one of its other ranks.

Raises BoardError, saying why, where the segment is not there, belongs to another user, may be
opened by others, is another one than was meant, or already has that rank.)")
      .def_static(
          "sweep", &BoardSegment::sweep,
          R"(Removes segments of this user whose ranks have all ended before they were unlinked.

Returns how many. Any process may call it at any time.)")
      .def(
          "unlink", [](BoundBoard& self) { self.segment->unlink(); },
          "Removes the name, once all ranks have attached; the board goes on. Idempotent.")
      .def(
          "publish",
          [](BoundBoard& self, const py::sequence& values) {
            self.board->publish(values_of(values));
          },
          py::arg("values"),
          R"(Publishes this rank's integers, 64-bit signed, `values` of them, as its next round.

Never blocks. Refused where `lag` rounds are published and not read.)")
      .def("read", &read,
           R"(The minimum, place by place, over all ranks, of the oldest round not read yet.

Blocks until every rank has published it: spins some microseconds, then sleeps without the GIL, and
looks up for signals. Raises BoardError, from then on always, when a rank that is waited for has
ended or closed its board, within 0.1 s, or has not published it within `timeout`.)")
      .def(
          "close", [](BoundBoard& self) { self.close(); },
          R"(Leaves: ranks that wait for a later round of this one raise, and name it. Idempotent.

What it has published stays readable for the others.)")
      .def_property_readonly("name", [](const BoundBoard& self) { return self.segment->name(); })
      .def_property_readonly("nonce", [](const BoundBoard& self) { return self.segment->nonce(); })
      .def_property_readonly("rank", [](const BoundBoard& self) { return self.board->rank(); })
      .def_property_readonly("ranks",
                             [](const BoundBoard& self) { return self.board->shape().ranks; })
      .def_property_readonly("values",
                             [](const BoundBoard& self) { return self.board->shape().values; })
      .def_property_readonly("lag", [](const BoundBoard& self) { return self.board->shape().lag; })
      .def_property_readonly(
          "rounds", [](const BoundBoard& self) { return self.board->rounds(); },
          "Rounds published by this rank.")
      .def_property_readonly("stats", [](const BoundBoard& self) { return self.board->stats(); });
}

}  // namespace kvburst::bindings
