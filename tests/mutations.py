"""Breaks one safeguard at a time and checks that the test which is there for it fails.

`python tests/mutations.py` copies the tree, builds it, and for every mutation changes one place in
the source, builds again and runs the tests that must notice. Prints a line each; the exit status is
1 if one went unnoticed. Needs what the build needs, and pytest; a mutation takes as long as
compiling one file. `--only PART` takes those whose name has PART in it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parent.parent

STAND_IN = "stand-in 13.0 latest"
CUDA_TESTS = "test_cuda_device.py"


@dataclass(frozen=True)
class Mutation:
    """`before` occurs once in `file`; with `after` in its place each of `tests` must fail, for one
    of its parameters."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "start-event wait",
        "csrc/core/issue_body.cpp",
        "    device_->wait(stream_.handle(), burst.ready.handle());\n",
        "",
        ("test_fence.py::test_load_waits_for_the_current_stream_as_well_as_for_the_fence",),
    ),
    Mutation(
        "fence wait",
        "csrc/core/issue_body.cpp",
        "if (burst.fenced) device_->wait(",
        "if (false) device_->wait(",
        ("test_fence.py::test_load_waits_for_the_forward_that_still_writes_its_pages",),
    ),
    Mutation(
        "layer event record",
        "csrc/core/layer_gate.cpp",
        "  device_->record(slot_of(burst.id).layers[static_cast<std::size_t>(layer)]->handle(),"
        " stream);\n",
        "  static_cast<void>(stream);\n",
        ("test_burst_round_trip.py::test_forward_that_waits_sees_the_bytes_of_its_own_burst",),
    ),
    Mutation(
        "index wait",
        "csrc/core/page_reader.cpp",
        "  device_->wait(stream_.handle(), ready);\n",
        "  static_cast<void>(ready);\n",
        ("test_thread_mode.py::test_indices_that_the_stream_still_writes_are_read_behind_it",),
    ),
    Mutation(
        "range split",
        "csrc/core/copy_plan.cpp",
        "if (registrations_.size() > 1) {",
        "if (registrations_.size() > 1000) {",
        ("test_cuda_device.py::test_pages_on_both_sides_of_every_chunk_border_come_back",),
    ),
    Mutation(
        "pitch check in the plan",
        "csrc/core/layer_groups.cpp",
        "*gap.device > limits.max_pitch || *gap.host > limits.max_pitch",
        "false",
        ("test_copy_plan.py::test_layers_that_the_device_cannot_take_in_one_copy_move_one_by_one",),
    ),
    Mutation(
        "pitch check in the device",
        "csrc/core/device.cpp",
        "if (pitch < copy.width || pitch > max_pitch) {",
        "if (pitch < copy.width) {",
        ("test_cuda_device.py::test_pitch_above_the_gpus_is_refused_before_the_driver_is_asked",),
    ),
    Mutation(
        "pitch of the GPU",
        "csrc/cuda/cuda_device.cpp",
        "limits.max_pitch = std::min(limits.max_pitch, static_cast<std::size_t>(",
        "limits.max_pitch = std::max(limits.max_pitch, static_cast<std::size_t>(",
        ("test_cuda_device.py::test_largest_pitch_is_the_gpus_or_less",),
    ),
    Mutation(
        "batch cap in the plan",
        "csrc/core/copy_plan.cpp",
        "    if (batch_.size() == copies_per_call_) flush();\n",
        "    static_cast<void>(copies_per_call_);\n",
        ("test_cuda_device.py::test_burst_of_many_copies_is_split_at_the_cap",),
    ),
    Mutation(
        "batch cap in the device",
        "csrc/core/device.cpp",
        "if (copies.empty() || copies.size() > copies_per_call) {",
        "if (copies.empty()) {",
        ("test_cuda_device.py::test_more_copies_than_a_call_takes_are_refused_whole",),
    ),
    Mutation(
        "context set",
        "csrc/cuda/context.cpp",
        "const CUresult result = call.cuCtxSetCurrent(context_.handle());",
        "const CUresult result = CUDA_SUCCESS;",
        ("test_cuda_device.py::test_any_thread_may_submit_though_it_has_no_context",),
    ),
    Mutation(
        "context put back",
        "csrc/cuda/context.cpp",
        "  if (before_ != context_.handle()) context_.call().cuCtxSetCurrent(before_);\n",
        "",
        ("test_cuda_device.py::test_context_of_the_calling_thread_stays_as_it_was",),
    ),
    Mutation(
        "context released",
        "csrc/cuda/context.cpp",
        "  if (!forked()) call().cuDevicePrimaryCtxRelease(device_);\n",
        "",
        ("test_cuda_device.py::test_context_is_retained_once_and_released_with_the_last",),
    ),
    Mutation(
        "capture check",
        "csrc/cuda/cuda_device.cpp",
        "if (status != CU_STREAM_CAPTURE_STATUS_NONE) {",
        "if (false) {",
        ("test_cuda_device.py::test_capturing_stream_is_refused_before_anything_is_enqueued",),
    ),
    Mutation(
        "relaxed capture mode",
        "csrc/cuda/context.h",
        "CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;",
        "CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_GLOBAL;",
        ("test_cuda_device.py::test_bursts_go_on_while_another_thread_captures",),
    ),
    Mutation(
        "legacy stream handled",
        "csrc/cuda/cuda_device.cpp",
        "  if (is_legacy(handle)) {\n    detour_",
        "  if (is_legacy(handle) && handle == 7) {\n    detour_",
        ("test_cuda_device.py::test_copies_on_the_legacy_stream_keep_their_place_in_it",),
    ),
    Mutation(
        "legacy stream: behind what is on it",
        "csrc/cuda/legacy_detour.cpp",
        '  driver.check(call.cuStreamWaitEvent(stream_, before_, 0), "cuStreamWaitEvent");\n',
        "",
        ("test_cuda_device.py::test_copies_on_the_legacy_stream_keep_their_place_in_it",),
    ),
    Mutation(
        "legacy stream: ahead of what follows",
        "csrc/cuda/legacy_detour.cpp",
        '  driver.check(call.cuStreamWaitEvent(legacy, after_, 0), "cuStreamWaitEvent");\n',
        "",
        ("test_cuda_device.py::test_copies_on_the_legacy_stream_keep_their_place_in_it",),
    ),
    Mutation(
        "own streams do not block",
        "csrc/cuda/cuda_device.cpp",
        "cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING)",
        "cuStreamCreate(&stream_, CU_STREAM_DEFAULT)",
        ("test_cuda_device.py::test_streams_of_the_device_do_not_wait_for_the_legacy_stream",),
    ),
    Mutation(
        "source order of plain copies",
        "csrc/cuda/driver.cpp",
        "attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;",
        "attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_ANY;",
        ("test_cuda_device.py::test_copies_on_the_legacy_stream_keep_their_place_in_it",),
    ),
    Mutation(
        "source order of tall copies",
        "csrc/cuda/copy_calls.cpp",
        "tall.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;",
        "tall.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_ANY;",
        ("test_fence.py::test_backup_reads_after_the_write_it_is_ordered_behind",),
    ),
    Mutation(
        "unpinned host pools refused",
        "csrc/cuda/cuda_device.cpp",
        "limits.pinned_only = true;",
        "limits.pinned_only = false;",
        ("test_cuda_device.py::test_host_pool_that_is_not_pinned_is_refused",),
    ),
    Mutation(
        "address that the GPU sees",
        "csrc/cuda/copy_calls.cpp",
        "if (host_addresses_) return host;",
        "if (host_addresses_ || host != 0) return host;",
        ("test_cuda_device.py::test_gpu_that_sees_host_memory_elsewhere_is_given_that_address",),
    ),
    Mutation(
        "registrations taken back",
        "csrc/cuda/memory.cpp",
        "  if (!current.gone()) unregister();\n",
        "  static_cast<void>(current);\n",
        ("test_cuda_device.py::test_every_registration_is_taken_back",),
    ),
    Mutation(
        "registration rolled back",
        "csrc/cuda/memory.cpp",
        "  } catch (...) {\n    unregister();\n",
        "  } catch (...) {\n",
        ("test_cuda_device.py::test_refused_registration_takes_back_those_before_it",),
    ),
    Mutation(
        "registration adopted",
        "csrc/cuda/memory.cpp",
        "if (result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) return adopt(chunk);",
        "",
        ("test_cuda_device.py::test_memory_that_is_registered_already_is_adopted_and_left_so",),
    ),
    Mutation(
        "driver that is gone",
        "csrc/cuda/context.cpp",
        "  gone_ = enter() != CUDA_SUCCESS;\n",
        '  context_.driver().check(enter(), "cuCtxSetCurrent");\n',
        ("test_cuda_device.py::test_driver_that_is_gone_is_no_error",),
    ),
    Mutation(
        "bytes behind a row's words",
        "csrc/core/row_moves.h",
        "dst + head + body, src + head + body, lane, bytes - head - body);",
        "dst + head + body, src + head + body, lane, 0);",
        ("test_staging.py::test_gathered_rows_are_those_of_the_ids",),
    ),
    Mutation(
        "pieces of a large row",
        "csrc/core/row_moves.h",
        "begin = (piece - row * part.pieces_per_row) * piece_bytes;",
        "begin = 0;",
        ("test_staging.py::test_scattered_rows_land_at_their_ids",),
    ),
)


class Copy:
    """A copy of the tree with a build of its own."""

    def __init__(self, directory: Path) -> None:
        self.tree = directory / "tree"
        self._build = directory / "build"
        self._site = directory / "site"
        shutil.rmtree(self.tree, ignore_errors=True)
        ignore = shutil.ignore_patterns("__pycache__", ".*")
        for part in ("csrc", "python", "tests"):
            # New files to the build: a run that was broken off leaves what a mutation has made.
            shutil.copytree(ROOT / part, self.tree / part, ignore=ignore, copy_function=shutil.copy)
        for part in ("CMakeLists.txt", "pyproject.toml", "setup.cfg"):
            shutil.copy(ROOT / part, self.tree / part)
        run(
            "cmake",
            f"-S{self.tree}",
            f"-B{self._build}",
            "-DKVBURST_CUDA=OFF",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        )

    def build(self) -> None:
        run("cmake", "--build", str(self._build), "--parallel")
        package = self._site / "kvburst"
        shutil.rmtree(package, ignore_errors=True)
        shutil.copytree(self.tree / "python" / "kvburst", package)
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        shutil.copy(self._build / f"_core{suffix}", package)

    def check_all_pass(self, tests: Collection[str]) -> None:
        """Ends the program if one of them fails without a mutation."""
        for file in sorted({test.partition("::")[0] for test in tests}):
            names = [test.partition("::")[2] for test in tests if test.startswith(file)]
            result = self._run(file, " or ".join(names))
            if result.returncode != 0:
                raise SystemExit(f"{file}: fails without any mutation\n{result.stdout}")

    def notices(self, test: str) -> bool:
        """Whether the test fails for one of its parameters."""
        file, _, name = test.partition("::")
        result = self._run(file, name)
        # 1: a test failed; below 0: it took the process with it.
        if result.returncode > 1:
            raise SystemExit(f"{test}: pytest ended with {result.returncode}\n{result.stdout}")
        return result.returncode != 0

    def _run(self, file: str, words: str) -> "subprocess.CompletedProcess[str]":
        # Elsewhere than in its own file the device is a parameter: the most hostile one.
        if file != CUDA_TESTS:
            words = f"({words}) and {' and '.join(STAND_IN.split())}"
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", f"tests/{file}", "-k", words],
            cwd=self.tree,
            env={**os.environ, "PYTHONPATH": str(self._site)},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )


def run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stdout}\n{result.stderr}")


def mutate(tree: Path, mutation: Mutation) -> str:
    """The file's text as it was."""
    path = tree / mutation.file
    text = path.read_text()
    if text.count(mutation.before) != 1:
        raise SystemExit(
            f"{mutation.name}: {text.count(mutation.before)} places in {mutation.file} are"
            f" {mutation.before!r}, there must be 1"
        )
    path.write_text(text.replace(mutation.before, mutation.after))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="mutations whose name has this in it")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "mutations")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    if not chosen:
        raise SystemExit(f"--only: no mutation's name has {options.only!r} in it")

    copy = Copy(options.directory)
    copy.build()
    copy.check_all_pass({test for mutation in chosen for test in mutation.tests})
    unnoticed = 0
    for mutation in chosen:
        text = mutate(copy.tree, mutation)
        copy.build()
        noticed = all(copy.notices(test) for test in mutation.tests)
        (copy.tree / mutation.file).write_text(text)
        unnoticed += not noticed
        verdict = "noticed by" if noticed else "NOT NOTICED by"
        print(f"{mutation.name}: {verdict} {', '.join(mutation.tests)}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} mutations were noticed")
    sys.exit(1 if unnoticed else 0)


if __name__ == "__main__":
    main()
