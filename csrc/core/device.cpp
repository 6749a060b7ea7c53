#include "core/device.h"

#include "core/error.h"
#include "core/format.h"

namespace kvburst {

void CopyLimits::check() const {
  if (max_pitch == 0) throw LayoutError("max_pitch: 0 bytes is below the minimum of 1");
  if (copies_per_call == 0) throw LayoutError("copies_per_call: 0 is below the minimum of 1");
}

void CopyLimits::check(const Copy& copy) const {
  if (copy.width == 0 || copy.height == 0) {
    throw DeviceError(
        text("copy: ", copy.width, " bytes x ", copy.height, " rows, both must be at least 1"));
  }
  if (copy.height == 1) return;
  if (!tall_copies) {
    throw DeviceError(text("copy: ", copy.height, " rows, tall copies are switched off"));
  }
  for (const std::size_t pitch : {copy.dst_pitch, copy.src_pitch}) {
    if (pitch < copy.width || pitch > max_pitch) {
      throw DeviceError(text("copy: pitch ", pitch, " must be from the width ", copy.width,
                             " to the maximum pitch ", max_pitch));
    }
  }
}

void CopyLimits::check(std::span<const Copy> copies) const {
  if (copies.empty() || copies.size() > copies_per_call) {
    throw DeviceError(
        text("copy: ", copies.size(), " copies in a call, must be from 1 to ", copies_per_call));
  }
  for (const Copy& copy : copies) check(copy);
}

}  // namespace kvburst
