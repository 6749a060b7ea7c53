"""How much host memory may be taken, agreeing on it, and taking it."""

import ctypes
import errno
import multiprocessing
import os
import platform
import tempfile
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from kvburst import host_memory
from kvburst._core import KVBurstError, LayoutError
from kvburst.host_memory import (
    GIB,
    HostMemoryError,
    MemoryBudget,
    agree_on_minimum,
    allocate_host,
    memory_budget,
    online_numa_nodes,
)

V2_MOUNT = "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
V1_UNLIMITED = "9223372036854771712"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def fake_machine(root: Path, *, available: int, cgroup: str = "", mounts: str = "") -> Path:
    """A tree with the files of /proc that the budget reads."""
    kilobytes = available // 1024
    write(root / "proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable:   {kilobytes} kB\n")
    write(root / "proc/self/cgroup", cgroup)
    write(root / "proc/self/mountinfo", "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)
    (root / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
    return root


def v2_group(root: Path, path: str, limit: str, usage: int, inactive_file: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / path
    write(folder / "memory.max", limit + "\n")
    write(folder / "memory.current", f"{usage}\n")
    write(folder / "memory.stat", f"anon 1\ninactive_file {inactive_file}\n")


def v1_group(root: Path, path: str, limit: str, usage: int) -> None:
    folder = root / "sys/fs/cgroup/memory" / path
    write(folder / "memory.limit_in_bytes", limit + "\n")
    write(folder / "memory.usage_in_bytes", f"{usage}\n")
    write(folder / "memory.stat", "inactive_file 7\ntotal_inactive_file 0\n")


# --- the budget ----------------------------------------------------------------------------


# sgl-project/sglang#40135, vllm-project/vllm#45086
def test_parent_group_with_the_smaller_limit_decides_the_budget(tmp_path: Path) -> None:
    root = fake_machine(tmp_path, available=64 * GIB, cgroup="0::/pod/app\n", mounts=V2_MOUNT)
    v2_group(root, "pod/app", str(8 * GIB), GIB)
    v2_group(root, "pod", str(6 * GIB), 2 * GIB)

    budget = memory_budget(reserve_bytes=GIB, root=root)

    assert budget.nbytes == 3 * GIB
    assert budget.decided_by is not None
    assert budget.decided_by.source == "/sys/fs/cgroup/pod/memory.max"
    assert [limit.free_bytes for limit in budget.limits] == [64 * GIB, 7 * GIB, 4 * GIB]
    assert budget.problems == ()


# sgl-project/sglang#40135, vllm-project/vllm#45086
def test_group_without_a_limit_leaves_the_machine_to_decide(tmp_path: Path) -> None:
    root = fake_machine(tmp_path, available=5 * GIB, cgroup="0::/app\n", mounts=V2_MOUNT)
    v2_group(root, "app", "max", GIB)

    budget = memory_budget(reserve_bytes=GIB, root=root)

    assert budget.nbytes == 4 * GIB
    assert "MemAvailable" in str(budget)


# vllm-project/vllm#45086
def test_v1_sentinel_is_no_limit_and_a_v1_number_is_one(tmp_path: Path) -> None:
    cgroup = "9:name=systemd:/\n4:cpu,memory:/pod/app\n0::/\n"
    mounts = V1_MOUNT.replace("rw,memory", "rw,cpu,memory")
    root = fake_machine(tmp_path, available=64 * GIB, cgroup=cgroup, mounts=mounts)
    v1_group(root, "pod/app", V1_UNLIMITED, GIB)
    v1_group(root, "pod", str(10 * GIB), 4 * GIB)
    v1_group(root, "", V1_UNLIMITED, 5 * GIB)

    budget = memory_budget(reserve_bytes=0, root=root)

    assert budget.nbytes == 6 * GIB
    assert budget.decided_by is not None
    assert budget.decided_by.source == "/sys/fs/cgroup/memory/pod/memory.limit_in_bytes"
    assert [limit.free_bytes for limit in budget.limits] == [64 * GIB, 6 * GIB]
    assert budget.problems == ()


def test_mount_that_shows_only_the_containers_own_group_is_followed(tmp_path: Path) -> None:
    mounts = V1_MOUNT.replace("0:32 /", "0:32 /docker/abc")
    root = fake_machine(
        tmp_path, available=64 * GIB, cgroup="4:memory:/docker/abc\n", mounts=mounts
    )
    v1_group(root, "", str(3 * GIB), GIB)
    assert memory_budget(reserve_bytes=0, root=root).nbytes == 2 * GIB


@pytest.mark.parametrize(("mounted", "group"), [("/", "/../other"), ("/docker/abc", "/system")])
def test_group_outside_the_mount_is_reported_and_the_mounts_own_limit_holds(
    tmp_path: Path, mounted: str, group: str
) -> None:
    mounts = V2_MOUNT.replace("0:26 /", f"0:26 {mounted}")
    root = fake_machine(tmp_path, available=64 * GIB, cgroup=f"0::{group}\n", mounts=mounts)
    v2_group(root, "", str(3 * GIB), GIB)

    budget = memory_budget(reserve_bytes=0, root=root)

    assert budget.nbytes == 2 * GIB
    assert budget.problems[0].startswith(f"{group}: lies outside")


# sgl-project/sglang#40135, vllm-project/vllm#45086
@pytest.mark.parametrize("broken", ["unreadable", "malformed", "empty", "binary"])
def test_limit_that_cannot_be_read_limits_nothing_and_is_reported(
    tmp_path: Path, broken: str
) -> None:
    root = fake_machine(tmp_path, available=5 * GIB, cgroup="0::/app\n", mounts=V2_MOUNT)
    v2_group(root, "app", str(2 * GIB), GIB)
    limit = root / "sys/fs/cgroup/app/memory.max"
    limit.unlink()
    if broken == "unreadable":
        limit.mkdir()  # unreadable for the superuser too
    else:
        limit.write_bytes({"malformed": b"-12 GiB", "empty": b"", "binary": b"\xff\xfe"}[broken])

    budget = memory_budget(reserve_bytes=0, root=root)

    assert budget.nbytes == 5 * GIB
    (problem,) = budget.problems
    assert "/sys/fs/cgroup/app/memory.max" in problem


def test_limit_whose_usage_cannot_be_read_still_bounds_the_budget(tmp_path: Path) -> None:
    root = fake_machine(tmp_path, available=5 * GIB, cgroup="0::/app\n", mounts=V2_MOUNT)
    v2_group(root, "app", str(2 * GIB), GIB)
    (root / "sys/fs/cgroup/app/memory.current").write_text("lots")

    budget = memory_budget(reserve_bytes=0, root=root)

    assert budget.nbytes == 2 * GIB
    assert "memory.current" in budget.problems[0]


def test_machine_that_tells_nothing_has_no_limit_and_says_what_was_missing(tmp_path: Path) -> None:
    budget = memory_budget(reserve_bytes=GIB, root=tmp_path)
    assert budget.nbytes == 2**63 - 1
    assert budget.decided_by is None
    assert [problem.split(":")[0] for problem in budget.problems] == [
        "/proc/meminfo",
        "/proc/self/cgroup",
        "/proc/self/mountinfo",
    ]


def test_malformed_lines_of_proc_are_reported_and_skipped(tmp_path: Path) -> None:
    root = fake_machine(
        tmp_path, available=64 * GIB, cgroup="nonsense\n0::/app\n", mounts="1 2\n" + V2_MOUNT
    )
    v2_group(root, "app", str(2 * GIB), GIB)
    (root / "proc/meminfo").write_text("MemTotal: 9 kB\n")

    budget = memory_budget(reserve_bytes=0, root=root)

    assert budget.nbytes == GIB
    assert len(budget.problems) == 3


def test_file_pages_that_go_when_needed_do_not_count_as_used(tmp_path: Path) -> None:
    root = fake_machine(tmp_path, available=64 * GIB, cgroup="0::/app\n", mounts=V2_MOUNT)
    v2_group(root, "app", str(70 * GIB), 70 * GIB, inactive_file=50 * GIB)
    assert memory_budget(reserve_bytes=0, root=root).nbytes == 50 * GIB


def test_reserve_larger_than_what_is_free_leaves_nothing(tmp_path: Path) -> None:
    root = fake_machine(tmp_path, available=GIB)
    assert memory_budget(reserve_bytes=2 * GIB, root=root).nbytes == 0
    with pytest.raises(LayoutError, match="reserve_bytes: -1"):
        memory_budget(reserve_bytes=-1, root=root)


GROUP = st.tuples(st.none() | st.integers(0, 2**45), st.integers(0, 2**45))


@settings(max_examples=40, deadline=None)
@given(
    available=st.integers(0, 2**35),
    groups=st.lists(GROUP, max_size=4),
    reserve=st.integers(0, 2**40),
)
def test_budget_is_the_smallest_headroom_less_the_reserve(
    available: int, groups: list[tuple[int | None, int]], reserve: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = [f"g{depth}" for depth in range(len(groups))]
        root = fake_machine(
            Path(folder),
            available=available * 1024,
            cgroup="0::/" + "/".join(names) + "\n",
            mounts=V2_MOUNT,
        )
        for depth, (limit, usage) in enumerate(groups):
            path = "/".join(names[: depth + 1])
            v2_group(root, path, "max" if limit is None else str(limit), usage)

        budget = memory_budget(reserve_bytes=reserve, root=root)

    free = [max(0, limit - usage) for limit, usage in groups if limit is not None]
    assert budget.nbytes == max(0, min([available * 1024, *free]) - reserve)
    assert budget.problems == ()


def test_this_machines_budget_is_positive_and_at_most_its_memory() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory_budget(reserve_bytes=0).nbytes <= total


# --- agreement -----------------------------------------------------------------------------


def agree(rank: int, ranks: int, rendezvous: str, root: str, answers: "Queue[int]") -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    answers.put(agree_on_minimum(memory_budget(reserve_bytes=0, root=Path(root)).nbytes))
    dist.destroy_process_group()


# sgl-project/sglang#40135
@pytest.mark.slow
def test_ranks_with_different_readings_agree_on_the_smallest(tmp_path: Path) -> None:
    readings = [9 * GIB, 5 * GIB, 2**42, 7 * GIB]
    context = multiprocessing.get_context("spawn")
    answers: Queue[int] = context.Queue()
    ranks = [
        context.Process(
            target=agree,
            args=(
                rank,
                len(readings),
                str(tmp_path / "rendezvous"),
                str(fake_machine(tmp_path / str(rank), available=reading)),
                answers,
            ),
        )
        for rank, reading in enumerate(readings)
    ]
    for process in ranks:
        process.start()
    try:
        agreed = [answers.get(timeout=90) for _ in ranks]
        for process in ranks:
            process.join(timeout=30)
        assert [process.exitcode for process in ranks] == [0] * len(ranks)
    finally:
        for process in ranks:
            process.kill()

    assert agreed == [5 * GIB] * len(readings)


def test_one_process_alone_agrees_with_itself() -> None:
    assert agree_on_minimum(3 * GIB) == 3 * GIB


# --- taking it -----------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 4096, 1_000_003])
def test_host_memory_is_exactly_the_bytes_asked_for_and_zeroed(nbytes: int) -> None:
    memory = allocate_host(nbytes)
    assert memory.dtype == torch.uint8
    assert memory.shape == (nbytes,)
    assert not memory.any()


def test_more_than_the_budget_is_refused_naming_both_numbers(tmp_path: Path) -> None:
    root = fake_machine(tmp_path, available=GIB, cgroup="0::/app\n", mounts=V2_MOUNT)
    v2_group(root, "app", "8192", 4096)
    budget = memory_budget(reserve_bytes=1024, root=root)

    assert allocate_host(3072, budget=budget).shape == (3072,)
    with pytest.raises(HostMemoryError) as refused:
        allocate_host(3073, budget=budget)

    for named in ("nbytes: 3073", "3072", "/sys/fs/cgroup/app/memory.max", "reserve of 1024"):
        assert named in str(refused.value)
    assert isinstance(refused.value, KVBurstError)
    assert isinstance(refused.value, MemoryError)


def test_more_than_this_machine_has_is_refused_before_it_is_taken() -> None:
    with pytest.raises(HostMemoryError, match=f"nbytes: {2**60}"):
        allocate_host(2**60)


def test_no_bytes_are_refused() -> None:
    with pytest.raises(LayoutError, match="nbytes: 0"):
        allocate_host(0)


SYS_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
MPOL_DEFAULT = 0
MPOL_F_ADDR = 2


def policy_of(memory: torch.Tensor) -> tuple[int, list[int]]:
    """The placement policy of a tensor's first byte and its nodes, as the kernel has them."""
    mode = ctypes.c_int(-1)
    mask = (ctypes.c_ulong * 16)()
    word = 8 * ctypes.sizeof(ctypes.c_ulong)
    failed = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(SYS_GET_MEMPOLICY[platform.machine()]),
        ctypes.byref(mode),
        mask,
        ctypes.c_ulong(len(mask) * word),
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_ulong(MPOL_F_ADDR),
    )
    assert not failed, os.strerror(ctypes.get_errno())
    nodes = [node for node in range(len(mask) * word) if mask[node // word] >> node % word & 1]
    return mode.value, nodes


def test_interleaved_memory_lies_on_every_online_node_in_turn() -> None:
    nbytes = 1_000_003
    try:
        memory = allocate_host(nbytes, numa_interleave=True)
    except HostMemoryError as refused:
        # Containers often forbid the call; any other refusal would be a fault of ours.
        forbidden = (os.strerror(errno.EPERM), os.strerror(errno.ENOSYS))
        if not any(reason in str(refused) for reason in forbidden):
            raise
        pytest.skip(f"this kernel refuses it: {refused}")

    mode, nodes = policy_of(memory)

    assert mode == host_memory.MPOL_INTERLEAVE
    assert nodes == [node for node in online_numa_nodes() if node in nodes]
    assert nodes
    assert memory.shape == (nbytes,)
    assert not memory.any()
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * nbytes


def test_plain_memory_has_no_placement_policy() -> None:
    # The negative control of the test above: the policy does not come from elsewhere.
    try:
        mode, _ = policy_of(allocate_host(1_000_003))
    except AssertionError as refused:
        pytest.skip(f"this kernel does not say: {refused}")
    assert mode == MPOL_DEFAULT


def test_interleaving_that_the_kernel_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    no_such_call = 100_000
    monkeypatch.setitem(host_memory.SYS_MBIND, platform.machine(), no_such_call)
    with pytest.raises(HostMemoryError, match=r"numa_interleave: mbind over nodes \["):
        allocate_host(4096, numa_interleave=True)


def test_interleaving_on_an_unknown_machine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    with pytest.raises(HostMemoryError, match="'pdp11', only on x86_64, aarch64"):
        allocate_host(4096, numa_interleave=True)


@pytest.mark.parametrize(
    ("text", "nodes"), [("0\n", (0,)), ("0-3\n", (0, 1, 2, 3)), ("0,2-3,8\n", (0, 2, 3, 8))]
)
def test_online_nodes_are_read_as_ranges(tmp_path: Path, text: str, nodes: tuple[int, ...]) -> None:
    write(tmp_path / "sys/devices/system/node/online", text)
    assert online_numa_nodes(tmp_path) == nodes


def test_nodes_that_the_kernel_does_not_tell_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(HostMemoryError, match="node/online"):
        online_numa_nodes(tmp_path)
    write(tmp_path / "sys/devices/system/node/online", "all of them")
    with pytest.raises(HostMemoryError, match="node/online"):
        online_numa_nodes(tmp_path)


def test_budget_without_a_limit_says_so() -> None:
    assert "no limit" in str(MemoryBudget(2**63 - 1, 0, None, (), ()))
