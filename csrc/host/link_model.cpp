#include "host/link_model.h"

#include "core/error.h"
#include "core/format.h"

namespace kvburst {
namespace {

/// Written so that what is not a number is refused too.
void check_range(const char* field, double value, double lowest, double highest) {
  if (value >= lowest && value <= highest) return;
  throw LayoutError(text(field, ": ", value, " must be from ", lowest, " to ", highest));
}

}  // namespace

void LinkModel::check() const {
  check_range("gigabytes_per_second", gigabytes_per_second, 1e-6, 1e6);
  check_range("issue_us", issue_us, 0, 1e6);
  check_range("tall_issue_us", tall_issue_us, 0, 1e6);
  check_range("queue_depth", queue_depth, 0, 1e9);
  check_range("byte_scale", byte_scale, 1e-3, 1e6);
}

}  // namespace kvburst
