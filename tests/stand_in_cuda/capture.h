#pragma once

#include <optional>

#include "driver.h"

/// What a capture forbids. Where the documentation leaves a choice, the strict one is taken: any
/// capture of a context makes its legacy stream unusable, be the captured stream blocking or not.
namespace stand_in {

/// Before a call that is "potentially unsafe" during captures: allocating, pinning, asking for or
/// waiting on progress. The thread's mode and the captures' modes decide; those that forbid it are
/// invalidated.
std::optional<CUresult> unsafe_call(Scope& scope);

/// Before anything is enqueued on the stream or asked of it. The legacy stream during any capture
/// of its context: 906, and the captures are invalidated.
std::optional<CUresult> implicit_use(Scope& scope, const Stream& stream);

/// Before an operation that a capture takes as a node: `swallowed` if it was taken, and is not to
/// run.
struct Captured {
  std::optional<CUresult> refusal;
  bool swallowed = false;
};
Captured captured(Scope& scope, Stream& stream);

/// Before a call that is invalid on a capturing stream: synchronizing with it and querying it.
std::optional<CUresult> invalid_while_capturing(Scope& scope, const Stream& stream);

}  // namespace stand_in
