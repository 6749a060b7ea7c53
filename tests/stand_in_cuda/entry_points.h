#pragma once

#include <cstdint>

#include "cuda/driver_types.h"

namespace stand_in {

/// Finds the form of a function that the version asks for, as both forms of cuGetProcAddress do.
kvburst::cuda::CUresult get_proc_address(const char* symbol, void** entry, int version,
                                         std::uint64_t flags,
                                         kvburst::cuda::CUdriverProcAddressQueryResult* status);

}  // namespace stand_in
