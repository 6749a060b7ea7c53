#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

namespace kvburst {

/// A board cannot be had or cannot go on: its segment is refused, or a rank is missing from a
/// round. `ranks` are those that are missing, ascending; none where it is about the segment.
class BoardError : public Error {
 public:
  explicit BoardError(const std::string& message, std::vector<int> ranks = {})
      : Error(message), ranks_(std::move(ranks)) {}

  const std::vector<int>& ranks() const { return ranks_; }

 private:
  std::vector<int> ranks_;
};

/// A board is called in a way that cannot be served. Nothing has been published or read.
class BoardUseError : public Error {
 public:
  using Error::Error;
};

}  // namespace kvburst
