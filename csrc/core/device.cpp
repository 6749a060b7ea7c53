#include "core/device.h"

#include "core/error.h"

namespace kvburst {

void CopyLimits::check() const {
  if (max_pitch == 0) throw LayoutError("max_pitch: 0 bytes is below the minimum of 1");
  if (copies_per_call == 0) throw LayoutError("copies_per_call: 0 is below the minimum of 1");
}

}  // namespace kvburst
