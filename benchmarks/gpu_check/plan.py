"""The steps, in the order in which their answers are worth most should time run out."""

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"
TESTS = ROOT / "tests"

DeviceName = Literal["cuda", "stand-in"]
DEVICES: tuple[DeviceName, ...] = ("cuda", "stand-in")

# What a step ends with whose subject is not on this machine; its last line says what that is.
LEFT_OUT = 77

# Tests of the device that fit into the time, which the whole suite does not.
TEST_FILES = (
    "test_cuda_device.py",
    "test_fence.py",
    "test_failures.py",
    "test_thread_mode.py",
    "test_lifecycle.py",
    "test_controller.py",
    "test_burst_round_trip.py",
)
# On the stand-in driver CI runs all of them anyway, for every driver.
FEW_TESTS = ("test_cuda_device.py", "-k", "driver")


@dataclass(frozen=True)
class Step:
    """One process.

    ``asks`` is what it answers, in a line; after ``seconds`` it is killed. ``result``: where it
    writes JSON with any of ``machine``, ``rows`` and ``answers`` as soon as it has some; None if
    what it writes is not for the common file. It is not run unless all of ``needs`` are done.
    """

    name: str
    asks: str
    seconds: float
    command: tuple[str, ...]
    result: Path | None = None
    needs: tuple[str, ...] = ()
    probe: bool = False


@dataclass(frozen=True)
class Options:
    """``installed``: measure the kvburst that this Python has; build nothing. ``work``: where it is
    built and steps write, kept for the next run."""

    device: DeviceName
    out: Path
    work: Path
    quick: bool = False
    installed: bool = False

    @property
    def site(self) -> Path:
        return self.work / "site"

    def result(self, step: str) -> Path:
        return self.work / "results" / f"{step}.json"


def default_work() -> Path:
    return Path(tempfile.gettempdir()) / f"kvburst-gpu-check-{os.getuid()}"


def steps(options: Options) -> list[Step]:
    build = () if options.installed else ("build",)
    found = [] if options.installed else [_build(options)]
    found += [_own(options, "device", 120, "Which GPU, driver, copy calls and kernels?", build)]
    found += [_tests(options)]
    found += [_probe(options, name, seconds, asks) for name, seconds, asks in PROBES]
    found += [
        _own(options, name, seconds, asks, ("device",)) for name, seconds, asks in MEASUREMENTS
    ]
    return [*found, _sanitizer(options), _issue_latency(options)]


# Name, seconds, question; ``probes_*`` answer each in a word.
PROBES: tuple[tuple[str, float, str], ...] = (
    ("attributes", 15, "What does the GPU say of pitches, engines and host pointers?"),
    ("tall-across-allocations", 15, "A copy whose rows lie in two device allocations?"),
    ("tall-across-registrations", 15, "A copy whose rows lie in two host registrations?"),
    ("tall-across-vmm-handles", 15, "A copy across two handles mapped side by side?"),
    ("host-pitch-above-maximum", 30, "A host pitch above the device's maximum?"),
    ("device-pitch-above-maximum", 30, "A device pitch above the device's maximum?"),
    ("range-attributes", 15, "Do range attributes of host memory name its registration?"),
    ("batch-under-capture", 15, "A batch of plain copies on a capturing stream?"),
    ("tall-batch-under-capture", 15, "A batch of tall copies on a capturing stream?"),
    ("queue-depth", 30, "After how many operations behind a host function does a call block?"),
    ("queue-depth-wait-value", 30, "The same behind cuStreamWaitValue32?"),
    ("host-functions", 15, "Does a host function that blocks delay those of other streams?"),
    ("image-too-new", 30, "What error is a kernel image that the driver cannot load?"),
    ("large-batches", 30, "Plain copies in a call, up to 65,536?"),
    ("large-tall-batches", 30, "Tall copies in a call, up to 65,536?"),
)

MEASUREMENTS: tuple[tuple[str, float, str], ...] = (
    ("copy_cost", 60, "What does issuing a copy cost, by call, width and height?"),
    ("bandwidth", 60, "How near does a burst come to one large copy?"),
    ("staging", 40, "Gather and scatter against a copy on the device?"),
    ("caller", 50, "What do load and start_loading cost their caller?"),
    ("overlap", 60, "How much of a load hides behind a forward of 78 layers?"),
)


def _build(options: Options) -> Step:
    """With pip, into a directory of its own; the second time only what has changed."""
    pip = (sys.executable, "-m", "pip", "install", "--no-index", "--no-build-isolation")
    target = ("--no-deps", "--no-cache-dir", "--upgrade", "--target", str(options.site))
    kept = ("-C", f"build-dir={options.work / 'build'}")
    return Step("build", "Does it build here?", 200, (*pip, *target, *kept, str(ROOT)))


def _own(options: Options, name: str, seconds: float, asks: str, needs: tuple[str, ...]) -> Step:
    result = options.result(name)
    command = [sys.executable, "-m", "gpu_check.step", name, "--device", options.device]
    command += ["--json", str(result)]
    if options.quick:
        command.append("--quick")
    return Step(name, asks, seconds, tuple(command), result, needs)


def _probe(options: Options, name: str, seconds: float, asks: str) -> Step:
    """Whether or not kvburst could be built; but not where there is no driver at all."""
    result = options.result(name)
    command = (sys.executable, "-m", "gpu_check.ask", name, "--device", options.device)
    needs = () if name == PROBES[0][0] else (PROBES[0][0],)
    return Step(name, asks, seconds, (*command, "--json", str(result)), result, needs, probe=True)


def _pytest(options: Options, step: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Takes whatever version of pytest is there, and writes after each test how they went so far.
    On a GPU it leaves nothing in the tree, whose cache has the stand-in driver."""
    ini = ["minversion=7.0", "addopts=-ra"]
    if options.device == "cuda":
        ini.append(f"cache_dir={options.work / 'pytest'}")
    settings = [word for each in (*ini, "faulthandler_timeout=60") for word in ("-o", each)]
    tally = ("-p", "gpu_check.tally", "--tally", str(options.result(step)))
    first, *rest = arguments
    return (sys.executable, "-m", "pytest", "-q", *settings, *tally, str(TESTS / first), *rest)


def _tests(options: Options) -> Step:
    result = options.result("tests")
    if options.device == "cuda":
        files = [str(TESTS / name) for name in TEST_FILES[1:]]
        few = ("-m", "gpu", "-k", "not half_minute")  # which is what that one takes
        command = _pytest(options, "tests", (TEST_FILES[0], *files, *few))
    else:
        command = _pytest(options, "tests", FEW_TESTS)
    return Step("tests", "Do the tests of the device pass?", 120, command, result, ("device",))


def _sanitizer(options: Options) -> Step:
    """One round trip under NVIDIA's checker of accesses."""
    result = options.result("sanitizer")
    test = ("test_cuda_device.py", "-m", "gpu", "-k", "on_the_gpu_of_this_machine")
    command = (sys.executable, "-m", "gpu_check.sanitizer", "--device", options.device, "--")
    return Step(
        "sanitizer",
        "Does compute-sanitizer find a bad access?",
        80,
        (*command, *_pytest(options, "sanitizer", test)),
        result,
        ("device",),
    )


def _issue_latency(options: Options) -> Step:
    """Its many rows have a file of their own."""
    command = [sys.executable, str(BENCHMARKS / "issue_latency.py"), "--quick"]
    command += ["--device", options.device, "--json", str(options.out / "issue_latency.json")]
    command += ["--geometry", "mla-dsa-78-full"]
    if options.quick:
        command += ["--pages", "16", "--chunk-pages", "0"]
    return Step(
        "issue_latency",
        "What does issuing a burst cost? (issue_latency.json)",
        150,
        tuple(command),
        None,
        ("device",),
    )
