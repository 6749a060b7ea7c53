#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "capture.h"
#include "driver.h"
#include "kernels.h"

/// Kernels: an image is looked at as far as a driver must, to find that it is a fat binary and what
/// kernels are in it; those of staging.cu then run as the host compiled them.
///
/// Which rows a launch touches is in its ids, in the device's memory. They are read twice: at the
/// call, so that accesses are judged in the order in which they are enqueued, and when the launch
/// runs. Ids that are then others, since the stream still had to bring them, are judged there.

using namespace stand_in;

namespace {

/// The frame of a fat binary.
struct FatHeader {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t header_bytes;
  std::uint64_t bytes;  ///< behind the header
};
constexpr std::uint32_t kFatMagic = 0xBA55ED50;

/// As the launch bounds of staging.cu have it.
constexpr std::uint64_t kMostThreads = kThreadsPerBlock;
constexpr unsigned kMostSharedBytes = 48 << 10;

std::optional<kvburst::RowDirection> direction_of(std::string_view kernel) {
  if (kernel == kGatherKernel) return kvburst::RowDirection::gather;
  if (kernel == kScatterKernel) return kvburst::RowDirection::scatter;
  return std::nullopt;
}

/// The context is of no use after an access to memory that is not there.
void fault(Driver& driver) { driver.failures.push_back({"*", 1, CUDA_ERROR_ILLEGAL_ADDRESS}); }

void judge(Driver& driver, const Touched& touched, const VectorClock& start, const Stamp& over,
           bool late) {
  if (!driver.settings.checker) return;
  for (const auto& [range, write] : touched.ranges) {
    if (late) {
      driver.checker.access_late(range, write, start, over);
    } else {
      driver.checker.access(range, write, start, over);
    }
  }
}

/// What the launch does when its stream comes to it.
struct Launched {
  RowKernel kernel;
  std::uint64_t threads;
  std::uint64_t seed;
  VectorClock start;
  Stamp over;
  std::optional<std::vector<std::int64_t>> judged;  ///< nothing: the rows are not
  std::vector<std::shared_ptr<Block>> blocks;

  void operator()() {
    if (reach()) kernel.run(threads, seed);
  }

  /// False if it would touch memory that is not there.
  bool reach() {
    Driver& state = driver();
    const std::lock_guard lock(state.mutex);
    const auto ids = kernel.ids(*state.memory);
    const auto known = kernel.known(*state.memory);
    const auto rows = ids ? kernel.rows(*state.memory, *ids) : std::nullopt;
    if (!known || !rows) {
      fault(state);
      return false;
    }
    if (judged != ids) judge(state, *rows, start, over, true);
    for (const Touched* touched : {&*known, &*rows}) {
      blocks.insert(blocks.end(), touched->blocks.begin(), touched->blocks.end());
    }
    return true;
  }
};

}  // namespace

STAND_IN_EXPORT CUresult cuLibraryLoadData(CUlibrary* library, const void* image, void*, void**,
                                           unsigned int jit_count, void*, void**,
                                           unsigned int count) {
  return call("cuLibraryLoadData", Needs::driver, {}, [&](Scope& scope) {
    if (library == nullptr || image == nullptr || jit_count != 0 || count != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    FatHeader header;
    std::memcpy(&header, image, sizeof header);
    if (header.magic != kFatMagic || header.version != 1 || header.header_bytes != sizeof header) {
      return CUDA_ERROR_INVALID_IMAGE;
    }
    const std::uintptr_t handle = scope.driver.new_handle();
    scope.driver.libraries.emplace(
        handle, std::string(static_cast<const char*>(image) + sizeof header, header.bytes));
    *library = reinterpret_cast<CUlibrary>(handle);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  return call("cuLibraryGetKernel", Needs::driver, {}, [&](Scope& scope) {
    if (kernel == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto found = scope.driver.libraries.find(number_of(library));
    if (found == scope.driver.libraries.end()) return CUDA_ERROR_INVALID_HANDLE;
    // With the zero, so that a name is not found in a longer one.
    const std::string_view whole(name, std::strlen(name) + 1);
    if (found->second.find(whole) == std::string::npos) return CUDA_ERROR_NOT_FOUND;
    const std::uintptr_t handle = scope.driver.new_handle();
    scope.driver.kernels.emplace(handle, name);
    *kernel = reinterpret_cast<CUkernel>(handle);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  return call("cuKernelGetFunction", Needs::context, {}, [&](Scope& scope) {
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto found = scope.driver.kernels.find(number_of(kernel));
    if (found == scope.driver.kernels.end()) return CUDA_ERROR_INVALID_HANDLE;
    const std::uintptr_t handle = scope.driver.new_handle();
    scope.driver.functions.emplace(handle, found->second);
    *function = reinterpret_cast<CUfunction>(handle);
    return CUDA_SUCCESS;
  });
}

STAND_IN_EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x,
                                        unsigned int grid_y, unsigned int grid_z,
                                        unsigned int block_x, unsigned int block_y,
                                        unsigned int block_z, unsigned int shared_bytes,
                                        CUstream stream, void** parameters, void** extra) {
  const CallSubject subject{.stream = number_of(stream)};
  return call("cuLaunchKernel", Needs::context, subject, [&](Scope& scope) {
    Driver& state = scope.driver;
    const auto on = state.find_stream(number_of(stream));
    const auto found = state.functions.find(number_of(function));
    if (!on || found == state.functions.end()) return CUDA_ERROR_INVALID_HANDLE;
    const std::uint64_t blocks = std::uint64_t{grid_x} * grid_y * grid_z;
    const std::uint64_t block = std::uint64_t{block_x} * block_y * block_z;
    if (blocks == 0 || block == 0 || extra != nullptr || shared_bytes > kMostSharedBytes) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (parameters == nullptr || parameters[0] == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (block > kMostThreads) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    const auto direction = direction_of(found->second);
    if (!direction) return CUDA_ERROR_NOT_SUPPORTED;  // a kernel that the host has no body of
    const Captured by = captured(scope, *on);
    if (by.refusal) return *by.refusal;
    if (by.swallowed) return CUDA_SUCCESS;

    const RowKernel kernel(*direction, *static_cast<const RowLaunch*>(parameters[0]));
    scope.amend({.stream = on->handle, .bytes = kernel.bytes(), .copies = blocks});
    Place place = scope.place(on);
    Launched launched{kernel,
                      blocks * block,
                      state.scheduler.random(),
                      place.start,
                      {on->line, place.tick, scope.call},
                      {},
                      {}};
    const auto keep = [&](const std::optional<Touched>& touched) {
      if (!touched) return false;
      judge(state, *touched, launched.start, launched.over, false);
      launched.blocks.insert(launched.blocks.end(), touched->blocks.begin(), touched->blocks.end());
      return true;
    };
    const auto ids = kernel.ids(*state.memory);
    keep(kernel.known(*state.memory));
    if (ids && keep(kernel.rows(*state.memory, *ids))) launched.judged = ids;
    scope.push(on, std::move(place), {.after = {}, .gate = {}, .body = std::move(launched)});
    return CUDA_SUCCESS;
  });
}
