"""What nvcc makes of the staging kernels, and whether CMake finds out that it can."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from devices import KERNEL_NAMES

ROOT = Path(__file__).resolve().parent.parent
STAGING = ROOT / "csrc" / "cuda" / "staging.cu"
NVCC = shutil.which("nvcc")
ARCHITECTURES = (80, 90, 100, 120)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What ptxas says of the kernels for each architecture that nvcc knows, and the PTX."""
    if NVCC is None:
        pytest.skip("nvcc is not on PATH")
    known = subprocess.run([NVCC, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    found = [arch for arch in ARCHITECTURES if f"compute_{arch}\n" in known.stdout]
    assert found
    common = [NVCC, "-std=c++20", f"-I{ROOT / 'csrc'}", "--Werror", "all-warnings"]
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in found]
    folder = tmp_path_factory.mktemp("kernels")
    image = folder / "staging.fatbin"
    said = subprocess.run(
        [*common, "-O3", "-Xptxas", "-v", *targets, "-fatbin", "-o", str(image), str(STAGING)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert said.returncode == 0, said.stderr
    ptx = folder / "staging.ptx"
    target = f"-arch=compute_{found[0]}"
    subprocess.run([*common, target, "-ptx", "-o", str(ptx), str(STAGING)], check=True, timeout=300)
    report = said.stdout + said.stderr
    assert len(re.findall("Compiling entry function", report)) == len(found) * len(KERNEL_NAMES)
    return report, ptx.read_text()


def test_kernels_spill_no_register_on_any_architecture(compiled: tuple[str, str]) -> None:
    report, _ = compiled
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    assert len(frames) >= len(KERNEL_NAMES)
    assert set(frames) == {("0", "0", "0")}


def test_kernels_read_and_write_16_bytes_at_a_time_several_of_them_in_flight(
    compiled: tuple[str, str],
) -> None:
    _, ptx = compiled
    for name in KERNEL_NAMES:
        begin = ptx.index(f".entry {name}")
        body = ptx[begin : ptx.find(".entry", begin + 1)]
        wide = re.findall(r"\b(ld|st)\.global\.cg\.v4\.u32", body)
        assert "ldldldldstststst" in "".join(wide)
        assert ".local" not in body


OLD_NVCC = """\
#!/bin/sh
case "$*" in
  --version) echo 'Cuda compilation tools, release 12.4, V12.4.131' ;;
  --list-gpu-arch) printf 'compute_52\\ncompute_80\\ncompute_90\\n' ;;
  --help) echo '--no-compress' ;;
  *-gencode*) ;;
  *) echo '__grid_constant__ is only allowed for compute_70 or later'; exit 1 ;;
esac
"""


@pytest.mark.slow
def test_toolkit_that_compiles_for_a_gpu_without_grid_constants_by_itself_still_builds_kernels(
    tmp_path: Path,
) -> None:
    """As those of 12.x do, and know nothing of the newest GPUs."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(OLD_NVCC)
    nvcc.chmod(0o755)
    options = ("-DKVBURST_PYTHON=OFF", "-DKVBURST_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}")
    done = subprocess.run(
        ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "CUDA kernels: ON (KVBURST_CUDA=ON): nvcc 12.4.131" in done.stdout
    assert "for compute capabilities 80, 90, the first as PTX too" in done.stdout
