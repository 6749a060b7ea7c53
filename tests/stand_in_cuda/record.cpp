#include "record.h"

#include <cstdio>

namespace stand_in {
namespace {

constexpr std::size_t kKept = 1'000'000;

}  // namespace

std::uint64_t Record::begin(const char* function, std::uint32_t thread,
                            const CallSubject& subject) {
  const auto [entry, added] = counts_.try_emplace(function, 0);
  ++entry->second;
  if (calls_.size() < kKept) {
    calls_.push_back({function, thread, kvburst::cuda::CUDA_SUCCESS, subject});
  }
  return all_++;
}

void Record::amend(std::uint64_t index, const CallSubject& subject) {
  if (index < calls_.size()) calls_[index].subject = subject;
}

void Record::end(std::uint64_t index, kvburst::cuda::CUresult result) {
  if (index < calls_.size()) calls_[index].result = result;
}

std::uint64_t Record::count(std::string_view function) const {
  if (function.empty()) return all_;
  const auto found = counts_.find(function);
  return found == counts_.end() ? 0 : found->second;
}

std::string Record::describe(std::uint64_t index) const {
  char text[160];
  if (index >= calls_.size()) {
    std::snprintf(text, sizeof text, "call %llu", static_cast<unsigned long long>(index));
    return text;
  }
  const RecordedCall& call = calls_[index];
  const int length = std::snprintf(text, sizeof text, "%s (call %llu, thread %u", call.function,
                                   static_cast<unsigned long long>(index), call.thread);
  std::string result(text, static_cast<std::size_t>(length));
  if (call.subject.stream != 0) {
    std::snprintf(text, sizeof text, ", stream %#llx",
                  static_cast<unsigned long long>(call.subject.stream));
    result += text;
  }
  return result + ")";
}

}  // namespace stand_in
