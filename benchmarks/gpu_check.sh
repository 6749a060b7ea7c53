#!/usr/bin/env bash
# Builds kvburst, runs its tests on a GPU, and measures and probes what no document says, in one
# command of at most eight minutes: `benchmarks/gpu_check.sh --help`. All of it is in gpu_check/.
set -u

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 2
python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null; then
  printf 'error: %s is not there; name a Python 3.10 or later in PYTHON\n' "$python" >&2
  exit 2
fi
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "$python" -m gpu_check "$@"
