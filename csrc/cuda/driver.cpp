#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace kvburst::cuda {
namespace {

constexpr const char* kSystemLibrary = "libcuda.so.1";
/// The first that finds its functions by version.
constexpr int kOldestVersion = 11030;

std::string library_or_default(std::string library) {
  if (!library.empty()) return library;
  const char* const named = std::getenv("KVBURST_LIBCUDA");
  return named && *named ? named : kSystemLibrary;
}

void* load(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw DeviceError(text("CUDA driver: cannot be loaded: ", dlerror()));
  return handle;
}

template <class Function>
Function exported(void* handle, const char* name) {
  return reinterpret_cast<Function>(dlsym(handle, name));
}

/// Asks a driver for its functions.
class Entries {
 public:
  Entries(void* handle, const std::string& library)
      : library_(library),
        v2_(exported<GetProcAddressV2>(handle, "cuGetProcAddress_v2")),
        v1_(exported<GetProcAddressV1>(handle, "cuGetProcAddress")) {
    if (!v2_ && !v1_) throw DeviceError(text(library, ": has no cuGetProcAddress"));
  }

  /// Null if the driver does not have it in this version. One that is too old says so with a null
  /// pointer and not with its status, one that is asked for a version newer than itself the other
  /// way round.
  template <class Function>
  Function find(const char* name, int version) const {
    void* entry = nullptr;
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SUCCESS;
    const CUresult result = v2_ ? v2_(name, &entry, version, kGetProcAddressLegacyStream, &found)
                                : v1_(name, &entry, version, kGetProcAddressLegacyStream);
    if (result != CUDA_SUCCESS || found != CU_GET_PROC_ADDRESS_SUCCESS) return nullptr;
    return reinterpret_cast<Function>(entry);
  }

  template <class Function>
  void require(Function& function, const char* name, int version) const {
    function = find<Function>(name, version);
    if (!function) throw DeviceError(text(library_, ": has no ", name));
  }

 private:
  const std::string& library_;
  GetProcAddressV2 v2_;
  GetProcAddressV1 v1_;
};

}  // namespace

Driver::Driver(std::string library) : library_(library_or_default(std::move(library))) {
  void* const handle = load(library_);
  stand_in_ = dlsym(handle, kStandInSymbol) != nullptr;
  const auto get_version = exported<CUresult (*)(int*)>(handle, "cuDriverGetVersion");
  if (!get_version) throw DeviceError(text(library_, ": has no cuDriverGetVersion"));
  if (const CUresult result = get_version(&version_); result != CUDA_SUCCESS) {
    throw DeviceError(text(library_, ": cuDriverGetVersion returned ", result));
  }
  if (version_ < kOldestVersion) {
    throw DeviceError(text(library_, ": CUDA ", version_text(version_), " is older than ",
                           version_text(kOldestVersion)));
  }
  const Entries entries(handle, library_);
#define KVBURST_REQUIRE(name, version, parameters) entries.require(functions_.name, #name, version);
  KVBURST_DRIVER_FUNCTIONS(KVBURST_REQUIRE)
#undef KVBURST_REQUIRE
  if (version_ >= 12000) {
#define KVBURST_REQUIRE(name, version, parameters) entries.require(libraries_.name, #name, version);
    KVBURST_LIBRARY_FUNCTIONS(KVBURST_REQUIRE)
#undef KVBURST_REQUIRE
  }

  // By the number of one form: the same name has another form since.
  if (version_ >= 13000) {
    const auto plain = entries.find<CopyBatchV13000>("cuMemcpyBatchAsync", 13000);
    const auto tall = entries.find<CopyBatch3DV13000>("cuMemcpy3DBatchAsync", 13000);
    if (plain && tall) batch_ = plain, batch_3d_ = tall;
  } else if (version_ >= 12080) {
    const auto plain = entries.find<CopyBatchV12080>("cuMemcpyBatchAsync", 12080);
    const auto tall = entries.find<CopyBatch3DV12080>("cuMemcpy3DBatchAsync", 12080);
    if (plain && tall) batch_ = plain, batch_3d_ = tall;
  }
}

int Driver::batch_version() const {
  constexpr int kVersions[] = {0, 12080, 13000};
  return kVersions[batch_.index()];
}

CUresult Driver::copy_batch(std::span<CUdeviceptr> dsts, std::span<CUdeviceptr> srcs,
                            std::span<std::size_t> sizes, CUstream stream,
                            std::size_t& failed) const {
  CUmemcpyAttributes attributes{};
  // In both directions: any other order may read a source before what the stream does to it.
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  std::size_t first = 0;
  if (const auto* const call = std::get_if<CopyBatchV12080>(&batch_)) {
    return (*call)(dsts.data(), srcs.data(), sizes.data(), sizes.size(), &attributes, &first, 1,
                   &failed, stream);
  }
  return std::get<CopyBatchV13000>(batch_)(dsts.data(), srcs.data(), sizes.data(), sizes.size(),
                                           &attributes, &first, 1, stream);
}

CUresult Driver::copy_batch(std::span<CUDA_MEMCPY3D_BATCH_OP> copies, CUstream stream,
                            std::size_t& failed) const {
  if (const auto* const call = std::get_if<CopyBatch3DV12080>(&batch_3d_)) {
    return (*call)(copies.size(), copies.data(), &failed, 0, stream);
  }
  return std::get<CopyBatch3DV13000>(batch_3d_)(copies.size(), copies.data(), 0, stream);
}

std::string Driver::describe(CUresult result) const {
  const char* name = nullptr;
  const char* words = nullptr;
  if (functions_.cuGetErrorName(result, &name) != CUDA_SUCCESS || !name) name = "unknown error";
  if (functions_.cuGetErrorString(result, &words) != CUDA_SUCCESS || !words) words = "no text";
  return text(name, " (", static_cast<unsigned int>(result), "): ", words);
}

void Driver::check(CUresult result, std::string_view call) const {
  if (result != CUDA_SUCCESS) throw DeviceError(text(call, ": ", describe(result)));
}

void Driver::check_teardown(CUresult result, std::string_view call) const {
  if (result == CUDA_ERROR_DEINITIALIZED || result == CUDA_ERROR_CONTEXT_IS_DESTROYED) return;
  check(result, call);
}

std::string version_text(int version) { return text(version / 1000, ".", version % 1000 / 10); }

}  // namespace kvburst::cuda
