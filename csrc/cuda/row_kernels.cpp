#include "cuda/row_kernels.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "cuda/staging.h"

namespace kvburst::cuda {
namespace {

/// The image is for another GPU or for newer drivers, or is none: no other kernels would help, and
/// there is another way. The last two: it has code of this GPU's kind only to be compiled here, and
/// nothing here compiles it.
bool is_unsuitable(CUresult result) {
  return result == CUDA_ERROR_INVALID_IMAGE || result == CUDA_ERROR_NO_BINARY_FOR_GPU ||
         result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION ||
         result == CUDA_ERROR_JIT_COMPILER_NOT_FOUND ||
         result == CUDA_ERROR_JIT_COMPILATION_DISABLED;
}

unsigned blocks_of(const Context& context) {
  const int processors = context.attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  return static_cast<unsigned>(std::max(processors / kProcessorsPerBlock, 1));
}

}  // namespace

std::string why_not_loadable(const Driver& driver, const KernelImage& image) {
  if (image.bytes.empty()) return image.origin;
  if (driver.has_libraries()) return {};
  return text("cuLibraryLoadData came with 12.0, the driver is ", version_text(driver.version()));
}

RowKernels::RowKernels(std::shared_ptr<const Context> context, KernelImage image)
    : context_(std::move(context)), most_blocks_(blocks_of(*context_)) {
  if (const std::string why = load(image); !why.empty()) {
    gather_ = scatter_ = nullptr;
    description_ = text("none: ", why);
    return;
  }
  description_ = text(image.origin, ", on compute capability ",
                      context_->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR), ".",
                      context_->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR), " in ",
                      most_blocks_, " blocks of ", kThreadsPerBlock, " threads at most");
}

std::string RowKernels::load(const KernelImage& image) {
  const Driver& driver = context_->driver();
  if (std::string why = why_not_loadable(driver, image); !why.empty()) return why;
  const Current current(*context_);
  const LibraryFunctions& call = driver.libraries();
  CUlibrary library = nullptr;
  const auto refused = [&](CUresult result, const char* name) -> std::string {
    if (result == CUDA_SUCCESS) return {};
    if (!is_unsuitable(result)) driver.check(result, text(name, ", staging kernels"));
    return text(name, ": ", driver.describe(result), ", of ", image.origin, ", by driver ",
                version_text(driver.version()));
  };
  std::string why = refused(call.cuLibraryLoadData(&library, image.bytes.data(), nullptr, nullptr,
                                                   0, nullptr, nullptr, 0),
                            "cuLibraryLoadData");
  const auto find = [&](const char* name, CUfunction& function) {
    CUkernel kernel = nullptr;
    if (why.empty()) {
      why = refused(call.cuLibraryGetKernel(&kernel, library, name), "cuLibraryGetKernel");
    }
    if (why.empty())
      why = refused(call.cuKernelGetFunction(&function, kernel), "cuKernelGetFunction");
  };
  find(kGatherKernel, gather_);
  find(kScatterKernel, scatter_);
  return why;
}

void RowKernels::launch(CUstream stream, RowDirection direction,
                        std::span<const RowMove> moves) const {
  std::array<RowMove, kMovesPerLaunch> some;
  std::size_t count = 0;
  for (const RowMove& move : moves) {
    if (move.count == 0) continue;
    some[count++] = move;
    if (count == some.size())
      launch_once(stream, direction, {some.data(), std::exchange(count, 0)});
  }
  if (count > 0) launch_once(stream, direction, {some.data(), count});
}

void RowKernels::launch_once(CUstream stream, RowDirection direction,
                             std::span<const RowMove> moves) const {
  RowLaunch launch{};
  launch.pieces = cut(moves, kPieceBytes, launch.parts);
  constexpr unsigned kWarps = kThreadsPerBlock / kLanes;
  const auto blocks = static_cast<unsigned>(
      std::min<std::uint64_t>(most_blocks_, (launch.pieces + kWarps - 1) / kWarps));
  const bool gather = direction == RowDirection::gather;
  void* parameters[] = {&launch};
  context_->driver().check(
      context_->call().cuLaunchKernel(gather ? gather_ : scatter_, blocks, 1, 1, kThreadsPerBlock,
                                      1, 1, 0, stream, parameters, nullptr),
      text("cuLaunchKernel, ", gather ? kGatherKernel : kScatterKernel, " of ", moves.size(),
           " moves"));
}

}  // namespace kvburst::cuda
