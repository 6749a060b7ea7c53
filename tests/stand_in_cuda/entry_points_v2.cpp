#include "driver.h"
#include "entry_points.h"

/// The entry point since driver 12.0; the library of an older driver is linked without this file.

STAND_IN_EXPORT kvburst::cuda::CUresult cuGetProcAddress_v2(
    const char* symbol, void** entry, int version, std::uint64_t flags,
    kvburst::cuda::CUdriverProcAddressQueryResult* status) {
  return stand_in::get_proc_address(symbol, entry, version, flags, status);
}
