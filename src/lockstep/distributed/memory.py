"""The memory that a rank may use, and its peak.

       may use                                            has used
GPU    all of its memory                                  what torch has allocated there
CPU    the machine's, or what its control groups (of a     its resident memory
       container, a Slurm job, a service) leave of it,
       shared out among the ranks there
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import sys
from typing import TYPE_CHECKING, cast

import torch

from lockstep.core.control_groups import MemoryLimit, host_memory, tightest_limit

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis
    from lockstep.distributed.process_group import World


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_... of malloc.h
_KEPT = 1 << 30  # bytes free at the heap's end, from which they are given back
_LARGEST = 32 << 20  # the largest block that the heap holds; mallopt(3) takes no more
_MALLOC_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


def rank_memory(world: World) -> int:
    """Return the least bytes that any rank may use; a collective."""
    return _least(world.device, world.axis, world.machine_ranks)


def least_memory(device: torch.device, axis: Axis) -> int:
    """Return the same as `rank_memory`, for ranks without a `World`."""
    here = socket.gethostname()
    return _least(device, axis, axis.gather(here).count(here))


def memory_if_started(gpus: int, cores: int, ranks: int) -> int | None:
    """Return what `rank_memory` would be for N ranks on this machine; None if it has too few GPUs or cores for them.

    Args:
        gpus: that ranks may use here; 0: they compute on the CPU.
        cores: that they may use then.
    """
    if gpus:
        return _of_device(torch.device("cuda", 0)) if ranks <= gpus else None
    return host_memory() // ranks if ranks <= cores else None


def _least(device: torch.device, axis: Axis, machine_ranks: int) -> int:
    mine = _of_device(device) if device.type == "cuda" else host_memory() // machine_ranks
    return min(cast("list[int]", axis.gather(mine)))


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes of this rank so far."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_limit_of(device: torch.device) -> MemoryLimit:
    """Return how much memory a rank on `device` has, and how much of it is free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MemoryLimit(total, free, f"{device}'s")
    return tightest_limit()


def _of_device(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees; return whether it does. The user's malloc settings have priority.

    Each forward allocates what the last backward freed. The C library gives large blocks back to the system in between,
    and gets them again page by page: some 4,000 page faults an update of the default recipe, a tenth of its time.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _MALLOC_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    return mallopt is not None and all(
        mallopt(option, value) == 1 for option, value in ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _KEPT))
    )
