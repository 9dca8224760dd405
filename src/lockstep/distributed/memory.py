"""The memory that a rank may use, and its peak.

GPU    what torch may allocate there (`set_per_process_memory_fraction`); the peak that torch has allocated
CPU    an equal share of the machine's or the control groups' memory; the peak resident memory
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from lockstep.core.control_groups import SHARED_MEMORY, MemoryLimit, host_memory, tightest_limit

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis


def rank_memory(device: torch.device, axis: Axis, machine_ranks: int | None = None) -> int:
    """Return the least bytes that any rank may use; a collective. `machine_ranks` None: they are counted."""
    if machine_ranks is None:
        here = socket.gethostname()
        machine_ranks = axis.gather(here).count(here)
    own = host_memory() // machine_ranks if device.type == "cpu" else _accelerator_memory(device)
    return min(cast("list[int]", axis.gather(own)))


def memory_if_started(device_type: str, devices: int, cores: int, ranks: int) -> int | None:
    """Return `rank_memory` for N ranks here, if there are enough devices (0: the CPU) or cores."""
    if devices:
        return _accelerator_memory(torch.device(device_type, 0)) if ranks <= devices else None
    return host_memory() // ranks if ranks <= cores else None


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes of this rank so far."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_gauges(device: torch.device) -> Callable[[], dict[str, float]]:
    """Return a function that reads this rank's memory in bytes: of its process, and of the accelerator."""

    def host() -> dict[str, float]:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize()
        return {"memory_resident": resident, "memory_resident_peak": peak_memory(torch.device("cpu"))}

    if device.type == "cpu":
        return host
    module = torch.get_device_module(device)

    def accelerator() -> dict[str, float]:
        return {
            **host(),
            "memory_allocated": module.memory_allocated(device),
            "memory_reserved": module.memory_reserved(device),
            "memory_allocated_peak": module.max_memory_allocated(device),
        }

    return accelerator


def memory_limit_of(device: torch.device) -> MemoryLimit:
    """Return how much memory a rank on `device` has, and how much of it is free."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        free, total = module.mem_get_info(device)
        if (fraction := _allowed_fraction(device)) < 1:
            own = int(total * fraction)
            free = min(free, max(0, own - module.memory_reserved(device)))
            return MemoryLimit(own, free, "set_per_process_memory_fraction's")
        return MemoryLimit(total, free, f"{device}'s")
    return tightest_limit()


def shared_memory() -> MemoryLimit | None:
    """Return the size and the free bytes of /dev/shm; None: there is none."""
    try:
        disk = os.statvfs("/dev/shm")
    except OSError:
        return None
    return MemoryLimit(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize, SHARED_MEMORY)


def _accelerator_memory(device: torch.device) -> int:
    total = torch.get_device_module(device).get_device_properties(device).total_memory
    return int(total * _allowed_fraction(device))


def _allowed_fraction(device: torch.device) -> float:
    fraction: Any = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)
    return 1.0 if fraction is None else float(min(1.0, fraction(device)))


_MOST_MEMORY_EVENTS = 200_000


def record_memory_history(device: torch.device) -> None:
    """Start recording the allocations of a CUDA GPU, with Python stacks."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=_MOST_MEMORY_EVENTS, stacks="python")


def end_memory_history(device: torch.device) -> dict[str, Any] | None:
    """Stop recording; return the snapshot for pytorch.org/memory_viz, None without CUDA."""
    if device.type != "cuda":
        return None
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    return cast("dict[str, Any]", snapshot)
