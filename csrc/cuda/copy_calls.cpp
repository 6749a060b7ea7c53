#include "cuda/copy_calls.h"

#include <limits>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace kvburst::cuda {
namespace {

constexpr std::size_t kNotSaid = std::numeric_limits<std::size_t>::max();

std::string describe(const Driver& driver, bool single) {
  if (!single) {
    return text("cuMemcpyBatchAsync and cuMemcpy3DBatchAsync, as of ",
                version_text(driver.batch_version()));
  }
  return text("one call a copy (cuMemcpyHtoDAsync, cuMemcpyDtoHAsync, cuMemcpy2DAsync): ",
              driver.batch_version() != 0 ? "so it was asked for"
                                          : text("the batch calls came with 12.8, the driver is ",
                                                 version_text(driver.version())));
}

std::string name_of(const Copy& copy) {
  return text(copy.width, " bytes x ", copy.height, " rows, from 0x", std::hex, copy.src, " to 0x",
              copy.dst, std::dec, ", pitches ", copy.src_pitch, " and ", copy.dst_pitch);
}

CUmemcpy3DOperand operand(CUdeviceptr address, std::size_t pitch, std::size_t height) {
  CUmemcpy3DOperand operand{};
  operand.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
  operand.op.ptr.ptr = address;
  operand.op.ptr.rowLength = pitch;
  operand.op.ptr.layerHeight = height;
  return operand;
}

/// Which of `count` copies were refused, for a message.
std::string refused(std::span<const Copy> copies, std::span<const std::size_t> index,
                    std::size_t failed) {
  if (failed < index.size()) {
    return text("copy ", index[failed], " of ", copies.size(), ", ",
                name_of(copies[index[failed]]));
  }
  return text(index.size(), " of ", copies.size(), " copies, the first of them ",
              name_of(copies[index.front()]));
}

}  // namespace

CopyCalls::CopyCalls(std::shared_ptr<const Context> context, bool single)
    : context_(std::move(context)),
      single_(single || context_->driver().batch_version() == 0),
      host_addresses_(
          context_->attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) != 0),
      description_(describe(context_->driver(), single_)) {}

void CopyCalls::issue(CUstream stream, Direction direction, std::span<const Copy> copies) {
  if (!single_) return issue_batches(stream, direction, copies);
  for (const Copy& copy : copies) issue_single(stream, direction, copy);
}

void CopyCalls::issue_batches(CUstream stream, Direction direction, std::span<const Copy> copies) {
  std::unique_ptr<Batch> batch = take();
  fill(*batch, direction, copies);
  const Driver& driver = context_->driver();
  if (!batch->sizes.empty()) {
    std::size_t failed = kNotSaid;
    const CUresult result =
        driver.copy_batch(batch->dsts, batch->srcs, batch->sizes, stream, failed);
    if (result != CUDA_SUCCESS) {
      driver.check(result, text("cuMemcpyBatchAsync, ", kvburst::name_of(direction), ": ",
                                refused(copies, batch->plain_index, failed)));
    }
  }
  if (!batch->tall.empty()) {
    std::size_t failed = kNotSaid;
    const CUresult result = driver.copy_batch(batch->tall, stream, failed);
    if (result != CUDA_SUCCESS) {
      driver.check(result, text("cuMemcpy3DBatchAsync, ", kvburst::name_of(direction), ": ",
                                refused(copies, batch->tall_index, failed)));
    }
  }
  put_back(std::move(batch));
}

void CopyCalls::fill(Batch& batch, Direction direction, std::span<const Copy> copies) const {
  batch.dsts.clear();
  batch.srcs.clear();
  batch.sizes.clear();
  batch.tall.clear();
  batch.plain_index.clear();
  batch.tall_index.clear();
  const bool load = direction == Direction::load;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const Copy& copy = copies[i];
    const CUdeviceptr src = load ? seen_by_device(copy.src) : copy.src;
    const CUdeviceptr dst = load ? copy.dst : seen_by_device(copy.dst);
    if (copy.height == 1) {
      batch.dsts.push_back(dst);
      batch.srcs.push_back(src);
      batch.sizes.push_back(copy.width);
      batch.plain_index.push_back(i);
    } else {
      CUDA_MEMCPY3D_BATCH_OP& tall = batch.tall.emplace_back();
      tall.src = operand(src, copy.src_pitch, copy.height);
      tall.dst = operand(dst, copy.dst_pitch, copy.height);
      tall.extent = {copy.width, copy.height, 1};
      tall.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
      batch.tall_index.push_back(i);
    }
  }
}

void CopyCalls::issue_single(CUstream stream, Direction direction, const Copy& copy) const {
  const DriverFunctions& call = context_->call();
  const bool load = direction == Direction::load;
  const char* name = load ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync";
  CUresult result;
  if (copy.height > 1) {
    name = "cuMemcpy2DAsync";
    result = issue_rows(stream, load ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST,
                        load ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE, copy);
  } else if (load) {
    result = call.cuMemcpyHtoDAsync(copy.dst, reinterpret_cast<const void*>(copy.src), copy.width,
                                    stream);
  } else {
    result =
        call.cuMemcpyDtoHAsync(reinterpret_cast<void*>(copy.dst), copy.src, copy.width, stream);
  }
  if (result != CUDA_SUCCESS) {
    context_->driver().check(result,
                             text(name, ", ", kvburst::name_of(direction), ": ", name_of(copy)));
  }
}

void CopyCalls::issue_on_device(CUstream stream, const Copy& copy) const {
  const CUresult result =
      copy.height > 1 ? issue_rows(stream, CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_DEVICE, copy)
                      : context_->call().cuMemcpyDtoDAsync(copy.dst, copy.src, copy.width, stream);
  if (result != CUDA_SUCCESS) {
    context_->driver().check(result, text("copy on the device: ", name_of(copy)));
  }
}

CUresult CopyCalls::issue_rows(CUstream stream, CUmemorytype dst, CUmemorytype src,
                               const Copy& copy) const {
  CUDA_MEMCPY2D rows{};
  rows.srcMemoryType = src;
  rows.srcHost = reinterpret_cast<const void*>(copy.src);
  rows.srcDevice = copy.src;
  rows.srcPitch = copy.src_pitch;
  rows.dstMemoryType = dst;
  rows.dstHost = reinterpret_cast<void*>(copy.dst);
  rows.dstDevice = copy.dst;
  rows.dstPitch = copy.dst_pitch;
  rows.WidthInBytes = copy.width;
  rows.Height = copy.height;
  return context_->call().cuMemcpy2DAsync(&rows, stream);
}

/// Needed by the batch calls alone: the others are told which side is the host's.
CUdeviceptr CopyCalls::seen_by_device(std::uintptr_t host) const {
  if (host_addresses_) return host;
  CUdeviceptr alias = 0;
  const CUresult result =
      context_->call().cuPointerGetAttribute(&alias, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, host);
  if (result != CUDA_SUCCESS) {
    context_->driver().check(result, text("host memory at 0x", std::hex, host,
                                          ": has no address on the device, it must be pinned"));
  }
  return alias;
}

std::unique_ptr<CopyCalls::Batch> CopyCalls::take() {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) return std::make_unique<Batch>();
  std::unique_ptr<Batch> batch = std::move(spare_.back());
  spare_.pop_back();
  return batch;
}

void CopyCalls::put_back(std::unique_ptr<Batch> batch) {
  const std::lock_guard lock(mutex_);
  spare_.push_back(std::move(batch));
}

}  // namespace kvburst::cuda
