#pragma once

#include <sstream>
#include <string>

namespace kvburst {

/// Joins its arguments into one string; std::format is not in every supported standard library.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

}  // namespace kvburst
