#include "cuda/legacy_detour.h"

#include <new>
#include <utility>

namespace kvburst::cuda {

LegacyDetour::LegacyDetour(std::shared_ptr<const Context> context) : context_(std::move(context)) {
  const Current current(*context_);
  const DriverFunctions& call = context_->call();
  const Driver& driver = context_->driver();
  driver.check(call.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  driver.check(call.cuEventCreate(&before_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  driver.check(call.cuEventCreate(&after_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
}

LegacyDetour::~LegacyDetour() {
  if (context_->forked()) return;
  const Current current(*context_, std::nothrow);
  if (current.gone()) return;
  const DriverFunctions& call = context_->call();
  call.cuStreamSynchronize(stream_);
  call.cuStreamDestroy(stream_);
  call.cuEventDestroy(before_);
  call.cuEventDestroy(after_);
}

void LegacyDetour::leave(CUstream legacy) const {
  const DriverFunctions& call = context_->call();
  const Driver& driver = context_->driver();
  driver.check(call.cuEventRecord(before_, legacy), "cuEventRecord");
  driver.check(call.cuStreamWaitEvent(stream_, before_, 0), "cuStreamWaitEvent");
}

void LegacyDetour::come_back(CUstream legacy) const {
  const DriverFunctions& call = context_->call();
  const Driver& driver = context_->driver();
  driver.check(call.cuEventRecord(after_, stream_), "cuEventRecord");
  driver.check(call.cuStreamWaitEvent(legacy, after_, 0), "cuStreamWaitEvent");
}

}  // namespace kvburst::cuda
