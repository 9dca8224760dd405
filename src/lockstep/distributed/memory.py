"""How much memory a rank may use for itself, and has used at most.

       may use                                            has used
GPU    all of its memory                                  what torch has allocated there
CPU    the machine's, or what the container may use of    its resident memory
       it, shared out among the ranks there
"""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis
    from lockstep.distributed.process_group import World

_CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_of_a_rank(world: World) -> int:
    """Bytes; the least that any rank has, the same on all ranks, which call it together."""
    return _least(world.device, world.axis, world.machine_ranks)


def memory_of_ranks(device: torch.device, axis: Axis) -> int:
    """As `memory_of_a_rank`, for ranks of which nothing else is known."""
    here = socket.gethostname()
    return _least(device, axis, axis.gather(here).count(here))


def memory_here(gpus: int, ranks: int) -> int | None:
    """What `memory_of_a_rank` would be, were so many ranks started on this machine; None: it is no machine for them.

    Args:
        gpus: that ranks may use here; 0: they compute on the CPU.
    """
    if gpus:
        return _of_device(torch.device("cuda", 0)) if ranks <= gpus else None
    return _of_host() // ranks if ranks <= len(os.sched_getaffinity(0)) else None


def _least(device: torch.device, axis: Axis, machine_ranks: int) -> int:
    mine = _of_device(device) if device.type == "cuda" else _of_host() // machine_ranks
    return min(cast("list[int]", axis.gather(mine)))


def peak_of_a_rank(device: torch.device) -> int:
    """Bytes that this rank has used at once so far, at most."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _of_device(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def _of_host() -> int:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([whole, *(limit for place in _CONTAINER if (limit := _limit(Path(place))) is not None)])


def _limit(file: Path) -> int | None:
    """None: there is none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not a container, or `max`
        return None
