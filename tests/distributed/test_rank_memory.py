"""The memory that a rank may use, within the limits of its control groups, and what it does with freed memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.core.control_groups import Kills, host_memory, kernel_kills
from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.memory import memory_if_started, peak_memory, rank_memory
from lockstep.distributed.process_group import World

MIB = 1 << 20
V1, V2 = "memory.limit_in_bytes", "memory.max"
NO_LIMIT = "9223372036854771712"


def _meminfo() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemTotal"].split()[0]) * 1024


def _plant(root: Path, groups: str, limits: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **limits}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def test_without_control_groups_the_limit_is_the_machine_s_memory(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == _meminfo()


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        pytest.param("0::/", {f"sys/fs/cgroup/{V2}": str(64 * MIB)}, 64 * MIB, id="container"),
        pytest.param("0::/", {f"sys/fs/cgroup/{V2}": "max"}, None, id="container without a limit"),
        pytest.param(
            "0::/job.slice/step",
            {f"sys/fs/cgroup/job.slice/{V2}": str(48 * MIB), f"sys/fs/cgroup/job.slice/step/{V2}": "max"},
            48 * MIB,
            id="a limit of the parent group",
        ),
        pytest.param(
            "0::/a/b",
            {f"sys/fs/cgroup/a/{V2}": str(48 * MIB), f"sys/fs/cgroup/a/b/{V2}": str(32 * MIB)},
            32 * MIB,
            id="the lower of two limits",
        ),
        pytest.param("0::/job", {f"sys/fs/cgroup/another/{V2}": str(32 * MIB)}, None, id="a limit of another group"),
        pytest.param(
            "4:cpu,memory:/slurm/job_7\n1:cpuset:/x\n0::/",
            {f"sys/fs/cgroup/memory/slurm/job_7/{V1}": str(48 * MIB), f"sys/fs/cgroup/memory/{V1}": NO_LIMIT},
            48 * MIB,
            id="version 1",
        ),
        pytest.param(
            "4:memory:/docker/0123",
            {f"sys/fs/cgroup/memory/{V1}": str(48 * MIB)},
            48 * MIB,
            id="version 1, a container that has its name on the host",
        ),
        pytest.param("4:memory:/", {f"sys/fs/cgroup/memory/{V1}": NO_LIMIT}, None, id="version 1 without a limit"),
    ],
)
def test_the_lowest_limit_of_the_control_groups_counts(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int | None
) -> None:
    assert host_memory(_plant(tmp_path, groups, limits)) == (_meminfo() if expected is None else expected)


def test_ranks_that_have_a_core_each_share_the_memory_equally() -> None:
    whole = host_memory()
    assert 0 < whole <= _meminfo()
    assert memory_if_started("cpu", 0, cores=4, ranks=1) == whole
    assert memory_if_started("cpu", 0, cores=4, ranks=3) == whole // 3
    assert memory_if_started("cpu", 0, cores=4, ranks=5) is None


def test_more_ranks_than_gpus_can_not_start_here() -> None:
    assert memory_if_started("cuda", 2, cores=64, ranks=3) is None


def test_a_started_rank_has_the_memory_that_was_planned() -> None:
    world = World(LocalGroup(), 0, 1, 0, 2, torch.device("cpu"), "none")
    assert rank_memory(world.device, world.axis, world.machine_ranks) == memory_if_started("cpu", 0, cores=2, ranks=2)


def test_the_peak_includes_what_was_written() -> None:
    held = torch.ones(64 * MIB // 4)
    assert held.numel() * 4 < peak_memory(torch.device("cpu")) < _meminfo()


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("0::/job/step", "sys/fs/cgroup/job/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 1"),
        ("4:memory:/slurm/job_7", "sys/fs/cgroup/memory/slurm/job_7/memory.oom_control", "under_oom 0\noom_kill 2"),
    ],
    ids=["version 2, the parent group", "version 1"],
)
def test_the_kernel_s_kills_are_counted(tmp_path: Path, groups: str, file: str, text: str) -> None:
    planted = _plant(tmp_path, groups, {file: text, "proc/vmstat": "nr_free_pages 7\noom_kill 5"})
    assert kernel_kills(planted) == Kills(in_group=2, on_machine=5)
    assert kernel_kills(tmp_path / "no linux") == Kills(None, None)


# --- freed memory ---------------------------------------------------------------------------------------------------

_PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}
_SCRIPT = """
import resource, sys, torch
from lockstep.core.process_settings import keep_freed_memory
torch.set_num_threads(1)
print(keep_freed_memory() if sys.argv[1] == "keep" else None)

def work():
    blocks = [torch.ones(1 << 20) for _ in range(8)]  # 4 MiB each

for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


glibc = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")


def _faults(how: str, **environment: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, how], capture_output=True, text=True, check=True, env={**_PATH, **environment}
    )
    keeps, faults = done.stdout.split()
    return keeps, int(faults)


@glibc
def test_kept_memory_is_allocated_again_without_page_faults() -> None:
    keeps, kept = _faults("keep")
    assert keeps == "True"
    left = _faults("leave")[1]
    if left == 0:  # the kernel may use huge pages
        pytest.skip("this system returns memory without page faults")
    assert 4 * kept < left


@glibc
def test_malloc_settings_of_the_environment_have_priority() -> None:
    assert _faults("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
