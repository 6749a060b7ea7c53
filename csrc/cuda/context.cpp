#include "cuda/context.h"

#include <unistd.h>

#include <array>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace kvburst::cuda {

namespace {

std::string name_of_gpu(const Driver& driver, CUdevice device) {
  std::array<char, 256> name{};
  driver.check(driver.call().cuDeviceGetName(name.data(), name.size() - 1, device),
               "cuDeviceGetName");
  return name.data();
}

int count_gpus(const Driver& driver) {
  int count = 0;
  driver.check(driver.call().cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

}  // namespace

std::vector<std::string> gpu_names(const Driver& driver) {
  driver.init();
  std::vector<std::string> names;
  for (int index = 0; index < count_gpus(driver); ++index) {
    CUdevice device = 0;
    driver.check(driver.call().cuDeviceGet(&device, index), "cuDeviceGet");
    names.push_back(name_of_gpu(driver, device));
  }
  return names;
}

Context::Context(std::shared_ptr<const Driver> driver, int index)
    : driver_(std::move(driver)), index_(index), process_(getpid()) {
  driver_->init();
  const int count = count_gpus(*driver_);
  if (index < 0 || index >= count) {
    throw DeviceError(
        text("index: ", index, " is not one of the ", count, " GPUs of ", driver_->library()));
  }
  driver_->check(call().cuDeviceGet(&device_, index), "cuDeviceGet");
  driver_->check(call().cuDevicePrimaryCtxRetain(&handle_, device_), "cuDevicePrimaryCtxRetain");
}

Context::~Context() {
  if (!forked()) call().cuDevicePrimaryCtxRelease(device_);
}

bool Context::forked() const { return process_ != getpid(); }

std::string Context::gpu_name() const { return name_of_gpu(*driver_, device_); }

int Context::attribute(CUdevice_attribute which) const {
  int value = 0;
  driver_->check(call().cuDeviceGetAttribute(&value, which, device_),
                 text("cuDeviceGetAttribute(", static_cast<unsigned int>(which), ")"));
  return value;
}

Current::Current(const Context& context) : context_(context) {
  context_.driver().check(enter(), "cuCtxSetCurrent");
}

Current::Current(const Context& context, std::nothrow_t) : context_(context) {
  gone_ = enter() != CUDA_SUCCESS;
}

CUresult Current::enter() {
  const DriverFunctions& call = context_.call();
  if (const CUresult result = call.cuCtxGetCurrent(&before_); result != CUDA_SUCCESS) {
    return result;
  }
  if (before_ != context_.handle()) {
    const CUresult result = call.cuCtxSetCurrent(context_.handle());
    if (result != CUDA_SUCCESS) return result;
  }
  entered_ = true;
  const CUresult result = call.cuThreadExchangeStreamCaptureMode(&mode_);
  relaxed_ = result == CUDA_SUCCESS;
  // A constructor that throws has no destructor to do so.
  if (!relaxed_) leave();
  return result;
}

void Current::leave() {
  if (!entered_) return;
  entered_ = false;
  if (relaxed_) context_.call().cuThreadExchangeStreamCaptureMode(&mode_);
  if (before_ != context_.handle()) context_.call().cuCtxSetCurrent(before_);
}

Current::~Current() { leave(); }

}  // namespace kvburst::cuda
