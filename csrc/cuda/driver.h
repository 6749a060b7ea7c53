#pragma once

#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "cuda/driver_types.h"

namespace kvburst::cuda {

/// Every function of the list, by its name.
struct DriverFunctions {
#define KVBURST_POINTER_TO(name, version, parameters) CUresult(*name) parameters = nullptr;
  KVBURST_DRIVER_FUNCTIONS(KVBURST_POINTER_TO)
#undef KVBURST_POINTER_TO
};

/// Those that load kernels. All null in a driver before 12.0.
struct LibraryFunctions {
#define KVBURST_POINTER_TO(name, version, parameters) CUresult(*name) parameters = nullptr;
  KVBURST_LIBRARY_FUNCTIONS(KVBURST_POINTER_TO)
#undef KVBURST_POINTER_TO
};

/// A CUDA driver, loaded at run time: so one build serves machines with any driver, and those with
/// none. What is asked of the driver is asked by version, since a name alone may stand for several
/// forms of a call.
///
/// Loading asks for nothing but the version; the first `init` starts the driver. Immutable; any
/// thread. The library is never unloaded: a driver does not survive that.
class Driver {
 public:
  /// `library`: a path or a name for the dynamic loader; empty: what the environment's
  /// KVBURST_LIBCUDA says, or else libcuda.so.1. Throws DeviceError if it cannot be loaded, is
  /// older than 11.3 or lacks a function.
  explicit Driver(std::string library = {});

  const std::string& library() const { return library_; }
  /// 12080 for CUDA 12.8.
  int version() const { return version_; }
  /// No GPU is behind it: device memory is host memory.
  bool stand_in() const { return stand_in_; }
  const DriverFunctions& call() const { return functions_; }
  bool has_libraries() const { return libraries_.cuLibraryLoadData != nullptr; }
  const LibraryFunctions& libraries() const { return libraries_; }
  /// Starts the driver; may be called again. Throws DeviceError, for one where there is no GPU.
  void init() const { check(call().cuInit(0), "cuInit"); }

  /// Which form of the batch calls it has: 12080 or 13000; 0 for none.
  int batch_version() const;
  /// Enqueues plain copies that have no order among themselves; sources are read in stream order.
  /// `failed` becomes the index of a copy that was refused, where the driver says so.
  CUresult copy_batch(std::span<CUdeviceptr> dsts, std::span<CUdeviceptr> srcs,
                      std::span<std::size_t> sizes, CUstream stream, std::size_t& failed) const;
  /// The same for copies of several rows.
  CUresult copy_batch(std::span<CUDA_MEMCPY3D_BATCH_OP> copies, CUstream stream,
                      std::size_t& failed) const;

  /// "CUDA_ERROR_INVALID_VALUE (1): invalid argument".
  std::string describe(CUresult result) const;
  /// Throws DeviceError, naming the call, unless it succeeded.
  void check(CUresult result, std::string_view call) const;
  /// The same for what gives something back: of a driver that is shutting down, or a context that
  /// is gone, there is nothing left to give back.
  void check_teardown(CUresult result, std::string_view call) const;

 private:
  std::string library_;
  int version_ = 0;
  bool stand_in_ = false;
  DriverFunctions functions_;
  LibraryFunctions libraries_;
  std::variant<std::monostate, CopyBatchV12080, CopyBatchV13000> batch_;
  std::variant<std::monostate, CopyBatch3DV12080, CopyBatch3DV13000> batch_3d_;
};

/// "12.8" for 12080.
std::string version_text(int version);

}  // namespace kvburst::cuda
