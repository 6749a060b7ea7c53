#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/driver_types.h"

namespace stand_in {

/// What a call was about, as far as it has such a thing; 0 where it has not.
struct CallSubject {
  std::uintptr_t stream = 0;
  std::uintptr_t event = 0;
  std::uintptr_t address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t copies = 0;
};

struct RecordedCall {
  const char* function = "";  ///< as cuda.h names it, without _v2; static
  std::uint32_t thread = 0;   ///< threads count from 1 in the order of their first call
  kvburst::cuda::CUresult result = kvburst::cuda::CUDA_SUCCESS;
  CallSubject subject;
};

/// Every call in the order in which they came, blocking ones at their begin. Only the first
/// million is kept in full; the counts go on.
class Record {
 public:
  std::uint64_t begin(const char* function, std::uint32_t thread, const CallSubject& subject);
  void amend(std::uint64_t index, const CallSubject& subject);
  void end(std::uint64_t index, kvburst::cuda::CUresult result);

  /// How often the function was called; every call if the name is empty.
  std::uint64_t count(std::string_view function) const;
  const std::vector<RecordedCall>& calls() const { return calls_; }
  /// "cuMemcpyHtoDAsync (call 12, thread 1, stream 0x5700000010)".
  std::string describe(std::uint64_t index) const;

 private:
  std::vector<RecordedCall> calls_;
  std::map<std::string, std::uint64_t, std::less<>> counts_;
  std::uint64_t all_ = 0;
};

}  // namespace stand_in
