"""Reads memory limits and counts of out-of-memory kills, of the machine and of this process's control groups.

A container, a Slurm job or a service is a control group.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SHARED_MEMORY = "/dev/shm's"
"""The owner of the limit on memory that processes share."""
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Version:
    folder: str
    limit: str
    usage: str
    kills: str


_VERSION_1 = _Version("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
_VERSION_2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", "memory.events")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit on memory and how much of it is free, in bytes; `owner`: what sets the limit."""

    total: int
    free: int
    owner: str


def host_memory(root: Path = _ROOT) -> int:
    """Return the bytes that this process's control groups may use; `root`: the folder of `proc` and `sys`."""
    limits = (_number(group / version.limit) for version, group in _groups(root))
    return min([_machine(), *(limit for limit in limits if limit is not None)])


def tightest_limit(root: Path = _ROOT) -> MemoryLimit:
    """Return the limit on this process's memory that leaves the least free."""
    limits = [MemoryLimit(_machine(), _field(root / "proc/meminfo", "MemAvailable:", 1024) or 0, "the machine's")]
    for version, group in _groups(root):
        limit, usage = _number(group / version.limit), _number(group / version.usage)
        if limit is not None and usage is not None:
            limits.append(MemoryLimit(limit, max(0, limit - usage), "the control group's"))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _field(root / "proc/self/status", "VmSize:", 1024)
    if limit != resource.RLIM_INFINITY and used is not None:
        limits.append(MemoryLimit(limit, max(0, limit - used), "ulimit -v"))
    return min(limits, key=lambda item: item.free)


@dataclass(frozen=True, slots=True)
class Kills:
    """Numbers of processes that the kernel killed for lack of memory; None if it doesn't count them."""

    in_group: int | None
    on_machine: int | None


def kernel_kills(root: Path = _ROOT) -> Kills:
    """Return the current counts."""
    counts = (_field(group / version.kills, "oom_kill ") for version, group in _groups(root))
    in_group = next((count for count in counts if count is not None), None)
    return Kills(in_group, _field(root / "proc/vmstat", "oom_kill "))


@dataclass(frozen=True, slots=True)
class WhyKilled:
    """The likely cause of a SIGKILL, and whether it was the kernel, because memory ran out."""

    text: str
    by_kernel: bool = False


def why_killed(before: Kills, now: Kills, remedy: Callable[[], str]) -> WhyKilled:
    """Return the likely cause of a SIGKILL, from the counts before and after it; `remedy` is for out of memory."""
    if now.in_group is not None and before.in_group is not None and now.in_group > before.in_group:
        return WhyKilled(f"out of memory (the kernel's OOM killer, in this control group). {remedy()}".rstrip(), True)
    if now.on_machine is None or before.on_machine is None:
        return WhyKilled("out of memory, perhaps (the kernel's log, dmesg, would show it)")
    if now.on_machine > before.on_machine:
        text = f"out of memory (the kernel's OOM killer was at work on this machine meanwhile). {remedy()}"
        return WhyKilled(text.rstrip(), True)
    return WhyKilled("by a person or a scheduler; the kernel has counted no out-of-memory kill here")


def _machine() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(root: Path) -> Iterator[tuple[_Version, Path]]:
    """Yield the folders of this process's groups and all above; a container's own limit may be at the top."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _VERSION_1 if controllers else _VERSION_2
        inside = PurePosixPath(group.lstrip("/"))
        for path in (inside, *inside.parents):
            yield version, root / version.folder / path


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _field(file: Path, name: str, unit: int = 1) -> int | None:
    """Return the first number of the line that begins with `name`, times `unit`, if any."""
    line = next((line for line in _lines(file) if line.startswith(name)), None)
    return None if line is None else int(line.removeprefix(name).split()[0]) * unit
