"""Checks of disks, shared memory, limits of processes, and the clock."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.core.formatting import size
from lockstep.doctor.findings import Finding, MachineView, ok, warning, wrong
from lockstep.doctor.links import SKEW_BREAKS, SKEW_WARNS

_GIB = 1 << 30
_LITTLE_SHARED = 64 << 20  # what a container gets by default
_FEW_FILES, _FEW_PROCESSES, _FEW_INODES = 4096, 1024, 1000


def run_disk(machine: MachineView) -> Iterator[Finding]:
    """Check the file system that runs are written to."""
    yield _disk(machine, machine.folder, "runs", "Free space, or give run.folder a place on another disk.")


def cache_disk(machine: MachineView) -> Iterator[Finding]:
    """Check the file system of models and datasets."""
    cache = machine.environ.get("HF_HOME")
    yield _disk(
        machine,
        Path(cache) if cache else machine.cache,
        "the cache",
        "Free space (hf cache prune), or set HF_HOME to another disk.",
    )


def _disk(machine: MachineView, path: Path, what: str, remedy: str) -> Finding:
    place = machine.existing(path)
    try:
        status = machine.statvfs(place)
    except OSError as error:
        return wrong(f"{place}, for {what}: {error.strerror}", "Mount the file system again, or choose another folder.")
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    seen = f"{size(free)} of {size(total)} free in {place}, for {what}"
    if not os.access(place, os.W_OK):
        return wrong(
            f"{place}, for {what}, can't be written", f"Make it writable: chmod u+w {place}, or choose another."
        )
    if free < _GIB:
        return wrong(seen, remedy)
    if status.f_files and status.f_favail < _FEW_INODES:
        return wrong(f"{status.f_favail:,} inodes left in {place}, for {what}", f"Delete small files. {remedy}")
    return warning(seen, remedy) if free < min(20 * _GIB, 0.05 * total) else ok(seen)


def shared_memory(machine: MachineView) -> Iterator[Finding]:
    """Check /dev/shm, through which data workers, and NCCL's ranks of one machine, pass tensors."""
    place = machine.root / "dev/shm"
    remedy = (
        "In a container, start it with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir in memory at /dev/shm); "
        "elsewhere delete what is left in it: ls -l /dev/shm"
    )
    try:
        status = machine.statvfs(place)
    except OSError as error:
        yield wrong(f"{place}: {error.strerror}", "Mount it: mount -t tmpfs tmpfs /dev/shm")
        return
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    seen = f"{size(free)} of {size(total)} free in {place}"
    if not os.access(place, os.W_OK):
        yield wrong(f"{place} can't be written", "Run chmod 1777 /dev/shm as its owner.")
    elif free < _LITTLE_SHARED:
        yield wrong(seen, remedy)
    else:
        yield warning(seen, remedy) if total <= _LITTLE_SHARED or free < _GIB else ok(seen)


def open_files(machine: MachineView) -> Iterator[Finding]:
    """Check the limit of open files; a rank raises its own to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{_limit(hard)} open files ({_limit(soft)} until a rank raises it)"
    yield (
        ok(seen)
        if _at_least(hard, _FEW_FILES)
        else wrong(
            f"{seen}: many ranks and data workers need more", "Raise it: ulimit -Hn 65536 (limits.conf, LimitNOFILE)."
        )
    )


def processes(machine: MachineView) -> Iterator[Finding]:
    """Check how many processes and threads may be started."""
    limits = [resource.getrlimit(resource.RLIMIT_NPROC)[0]]
    text = machine.text("sys/fs/cgroup/pids.max")
    if text.isdecimal():
        limits.append(int(text))
    least = min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=resource.RLIM_INFINITY)
    seen = f"{_limit(least)} processes and threads"
    yield (
        ok(seen)
        if _at_least(least, _FEW_PROCESSES)
        else wrong(f"{seen}: a rank has about 50", "Raise it: ulimit -u 65536, or the container's --pids-limit.")
    )


def locked_memory(machine: MachineView) -> Iterator[Finding]:
    """Check the limit of locked memory, which InfiniBand needs."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    adapters = machine.names("sys/class/infiniband")
    locked = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    if adapters and soft != resource.RLIM_INFINITY:
        yield wrong(
            f"{locked} of locked memory, and {', '.join(adapters)} need more: NCCL fails to register buffers",
            "Set it without a limit: ulimit -l unlimited (limits.conf, LimitMEMLOCK=infinity, --ulimit memlock=-1).",
        )
    else:
        yield ok(f"{locked}; {'InfiniBand is here' if adapters else 'there is no InfiniBand, which needs it'}")


def clock(machine: MachineView) -> Iterator[Finding]:
    """Compare the clock with that of the file system that hosts may share, and check that it was set."""
    place = machine.existing(machine.folder)
    began = machine.now()
    try:
        file_time = machine.file_time(place)
    except OSError as error:
        yield warning(f"no file can be written in {place}: {error.strerror}", "Choose a folder that can be written.")
        return
    seconds = max(began - file_time, file_time - machine.now(), 0.0)
    where = f"the file system of {place}"
    remedy = "Set the clocks of all hosts by NTP: systemctl enable --now chrony (or timedatectl set-ntp true)."
    if file_time < 1.6e9:
        yield wrong(f"it is {time.strftime('%Y-%m-%d', time.gmtime(file_time))} here: certificates fail", remedy)
    elif seconds >= SKEW_BREAKS:
        yield wrong(f"the clock differs by {seconds:.0f} s from {where}: rendezvous takes hosts for dead", remedy)
    elif seconds >= SKEW_WARNS:
        yield warning(f"the clock differs by {seconds:.1f} s from {where}", remedy)
    else:
        yield ok(f"agrees with {where}")


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else f"{number:,}"


def _at_least(limit: int, least: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= least
