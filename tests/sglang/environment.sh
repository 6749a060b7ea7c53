#!/usr/bin/env bash
# environment.sh FOLDER WHEEL: makes a virtual environment in FOLDER with the released SGLang, on
# whose hierarchical cache these tests run without a GPU, and kvburst from WHEEL beside it.
set -euo pipefail
readonly folder=$1 wheel=$2 here=$(cd "$(dirname "$0")" && pwd)

python3 -m venv "$folder"
"$folder/bin/pip" install -q -r "$here/requirements.txt"
"$folder/bin/pip" install -q --no-deps sglang==0.5.23
"$folder/bin/pip" install -q "$wheel"
# A torchvision from the registry is linked against one particular torch, and all that is needed of
# it are names.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$here/stand_ins/torchvision" "$site/"
"$folder/bin/python" - <<'PYTHON'
from importlib.metadata import entry_points, version

import sglang.srt.mem_cache.unified_radix_cache

plugins = [each.value for each in entry_points(group="sglang.srt.plugins")]
print(f"SGLang {version('sglang')} with the plugins {plugins}")
assert plugins == ["kvburst.sglang_plugin:register"]
PYTHON
