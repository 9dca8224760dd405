"""Checks of disks, shared memory, limits and the clock, of ports, interfaces and the hub, and of variables."""

from __future__ import annotations

import errno
import math
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.core import hub
from lockstep.core.errors import ConfigError
from lockstep.core.formatting import size
from lockstep.core.interfaces import address_of
from lockstep.core.ranks import RankEnvironment, names_a_rank
from lockstep.doctor.findings import Finding, MachineView, not_here, ok, warning, wrong
from lockstep.doctor.links import SKEW_BREAKS, SKEW_WARNS

_GIB = 1 << 30
_LITTLE_SHARED = 64 << 20  # what a container gets by default
_FEW_FILES, _FEW_INODES = 4096, 1000
_TORCH_PORT = 29500
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_disk(machine: MachineView) -> Iterator[Finding]:
    """Check the file system that runs are written to."""
    yield _disk(machine, machine.folder, "runs", "Free space, or give run.folder a place on another disk.")


def cache_disk(machine: MachineView) -> Iterator[Finding]:
    """Check the file system of models and datasets."""
    cache = Path(machine.environ.get("HF_HOME") or machine.cache)
    yield _disk(machine, cache, "the cache", "Free space (hf cache prune), or set HF_HOME to another disk.")


def _disk(machine: MachineView, path: Path, what: str, remedy: str) -> Finding:
    place = machine.existing(path)
    try:
        status = machine.statvfs(place)
    except OSError as error:
        return wrong(f"{place}, for {what}: {error.strerror}", "Mount the file system again, or choose another folder.")
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    seen = f"{size(free)} of {size(total)} free in {place}, for {what}"
    if not os.access(place, os.W_OK):
        return wrong(f"{place}, for {what}, can't be written", f"Run chmod u+w {place}, or choose another folder.")
    if free < _GIB:
        return wrong(seen, remedy)
    if status.f_files and status.f_favail < _FEW_INODES:
        return wrong(f"{status.f_favail:,} inodes left in {place}, for {what}", f"Delete small files. {remedy}")
    return warning(seen, remedy) if free < min(20 * _GIB, 0.05 * total) else ok(seen)


def shared_memory(machine: MachineView) -> Iterator[Finding]:
    """Check /dev/shm, where data workers and NCCL pass tensors."""
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
    if free < _LITTLE_SHARED:
        yield wrong(seen, remedy)
    else:
        yield warning(seen, remedy) if total <= _LITTLE_SHARED or free < _GIB else ok(seen)


def open_files(machine: MachineView) -> Iterator[Finding]:
    """Check the limit of open files; a rank raises its own to the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= _FEW_FILES:
        yield ok("unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,} open files")
    else:
        remedy = "Raise it: ulimit -Hn 65536 (limits.conf, LimitNOFILE)."
        yield wrong(f"{hard:,} open files: many ranks and data workers need more", remedy)


def clock(machine: MachineView) -> Iterator[Finding]:
    """Compare the clock with the file system's, which hosts may share."""
    place = machine.existing(machine.folder)
    began = time.time()
    try:
        file_time = machine.file_time(place)
    except OSError as error:
        yield warning(f"no file can be written in {place}: {error.strerror}", "Choose a folder that can be written.")
        return
    seconds = max(began - file_time, file_time - time.time(), 0.0)
    differs = f"the clock differs by {seconds:.1f} s from the file system of {place}"
    remedy = "Set the clocks of all hosts by NTP: systemctl enable --now chrony (or timedatectl set-ntp true)."
    if seconds >= SKEW_BREAKS:
        yield wrong(f"{differs}: rendezvous takes hosts for dead", remedy)
    else:
        yield warning(differs, remedy) if seconds >= SKEW_WARNS else ok(f"agrees with the file system of {place}")


# --- network --------------------------------------------------------------------------------------------------------


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that is up."""
    import psutil

    names = sorted(name for name, state in psutil.net_if_stats().items() if state.isup)
    return {name: address for name in names if (address := address_of(name))}


def network_interfaces(machine: MachineView) -> Iterator[Finding]:
    """List the interfaces, and check those in variables: gloo takes names, NCCL prefixes and, after `=`, names."""
    usable = interfaces()
    known = ", ".join(name for name in usable if name != "lo") or "lo"
    problems = []
    for variable in _INTERFACE_VARIABLES:
        value = machine.environ.get(variable, "")
        exact, names = value.startswith("=") or not variable.startswith("NCCL"), value.removeprefix("=").split(",")
        is_here = any(here == name or (not exact and here.startswith(name)) for here in usable for name in names)
        if value and not value.startswith("^") and not is_here:
            seen = f"{variable}={value}: no such interface is up with an IPv4 address"
            problems.append(wrong(seen, f"Set it to one that is here: {known}."))
    yield from problems
    if not usable:
        yield wrong("no interface has an IPv4 address, not even loopback", "Set loopback up: ip link set lo up")
    elif not problems:
        yield ok(", ".join(f"{name} {address}" for name, address in usable.items()))


def port(machine: MachineView) -> Iterator[Finding]:
    """Check that the store's port is free: launch.port, MASTER_PORT, or torch's default."""
    master = machine.environ.get("MASTER_PORT", "")
    is_master_here = machine.environ.get("MASTER_ADDR", "localhost").startswith(("localhost", "127."))
    named = machine.port or (int(master) if master.isdecimal() and int(master) < 65536 and is_master_here else 0)
    number = named or _TORCH_PORT
    if not _is_taken(number):
        yield ok(f"{number} is free" + ("" if named else ", torchrun's default; Lockstep takes any"))
        return
    seen = f"port {number} is taken{_owner(machine, number)}"
    if named:
        key = "launch.port" if machine.port else "MASTER_PORT"
        yield wrong(seen, f"End that process, or set {key} to another port (0 for launch.port: any free one).")
    else:
        yield warning(f"{seen}: torchrun takes it by default", "Pass --master-port to torchrun; Lockstep takes any.")


def _is_taken(number: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store: a closed connection is no owner
        try:
            probe.bind(("", number))
            probe.listen(1)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _owner(machine: MachineView, number: int) -> str:
    import psutil

    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (number,)
            if listens and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f" by process {connection.pid} ({command[:60]})"
    return ""


def hugging_face_hub(machine: MachineView) -> Iterator[Finding]:
    """Ask the hub, unless HF_HUB_OFFLINE is set."""
    setting = machine.environ.get("HF_HUB_OFFLINE")
    endpoint = machine.environ.get("HF_ENDPOINT", hub.ENDPOINT)
    if setting is not None and hub.means_offline(setting):
        yield ok(f"not asked: HF_HUB_OFFLINE={setting}, and only the cache is used")
    elif hub.responds(endpoint):
        yield ok(f"{endpoint} answers")
    else:
        yield warning(
            f"{endpoint} doesn't answer: names of models and datasets are found only in the cache",
            "Set HTTPS_PROXY or HF_ENDPOINT; or run `lockstep data fetch RECIPE` with a network, and set "
            "HF_HUB_OFFLINE=1.",
        )


# --- variables ------------------------------------------------------------------------------------------------------


def rank_variables(machine: MachineView) -> Iterator[Finding]:
    """Check the variables that make a process a rank."""
    environ = machine.environ
    present = [name for name in _RANK_VARIABLES if name in environ]
    if not names_a_rank(environ):
        yield not_here("no launcher has made this process a rank")
        return
    try:
        rank = RankEnvironment.read(environ)
    except ConfigError as error:
        for problem in error.problems:
            fact, _, remedy = problem.message.partition("; ")
            advice = f"{remedy[:1].upper()}{remedy[1:]}." if remedy else "Correct or unset it."
            yield wrong(f"{problem.key} {fact}", advice)
        return
    if rank.world_size > 1:
        yield warning(
            f"this process is rank {rank.rank} of {rank.world_size} ({', '.join(present)})",
            f"If no launcher is meant, unset them, or commands wait for other ranks: unset {' '.join(present)}",
        )
    else:
        yield ok("rank 0 of 1")


def threads(machine: MachineView) -> Iterator[Finding]:
    """Check OMP_NUM_THREADS against the cores."""
    value = machine.environ.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    if value is None:
        yield ok(f"OMP_NUM_THREADS is not set; ranks share {cores} core{'s' * (cores > 1)} evenly")
        return
    first, ranks = value.split(",")[0], machine.environ.get("LOCAL_WORLD_SIZE", "1")
    total = math.prod(int(text) if text.isdecimal() else 1 for text in (first, ranks))
    if total > cores:
        seen = f"OMP_NUM_THREADS={value}: {total} threads on {cores} cores wait for each other"
        yield warning(seen, "Lower or unset it.")
    else:
        yield ok(f"OMP_NUM_THREADS={value}, {cores} cores")


_KEEP = "Unset it when the fault is clear."
SETTINGS = (
    ("NCCL_P2P_DISABLE", "1", "GPUs exchange by way of the host: slow", "Unset it."),
    ("NCCL_SHM_DISABLE", "1", "GPUs exchange by the network: slow", "Unset it."),
    ("NCCL_IB_DISABLE", "1", "NCCL uses sockets, also where InfiniBand is", "Unset it."),
    ("NCCL_DEBUG", "TRACE", "NCCL logs every call: slow", "Set it to WARN."),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "a rank waits without a limit after its peer has ended", "Unset it."),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "checks each collective: slow", _KEEP),
    ("CUDA_LAUNCH_BLOCKING", "1", "the host waits for each kernel: slow", _KEEP),
)
"""Variables: the value that makes training slow or fail, its effect, and the remedy."""


def contradictions(machine: MachineView) -> Iterator[Finding]:
    """Check variables of NCCL and torch for what fails or is slow."""
    environ = machine.environ
    broken = [
        warning(f"{name}={environ[name]}: {effect}", remedy)
        for name, value, effect, remedy in SETTINGS
        if environ.get(name, "").upper() == value
    ]
    yield from broken
    if not broken:
        present = sorted(name for name in environ if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_")))
        yield ok(", ".join(f"{name}={environ[name]}" for name in present) or "none of NCCL's or gloo's is set")
