"""How much memory a rank may use for itself, and has used at most.

       may use                                            has used
GPU    all of its memory                                  what torch has allocated there
CPU    the machine's, or what its control groups (of a     its resident memory
       container, a Slurm job, a service) leave of it,
       shared out among the ranks there
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis
    from lockstep.distributed.process_group import World

_VERSION_1 = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
_VERSION_2 = "sys/fs/cgroup", "memory.max"


def memory_of_a_rank(world: World) -> int:
    """Bytes; the least that any rank has, the same on all ranks, which call it together."""
    return _least(world.device, world.axis, world.machine_ranks)


def memory_of_ranks(device: torch.device, axis: Axis) -> int:
    """As `memory_of_a_rank`, for ranks of which nothing else is known."""
    here = socket.gethostname()
    return _least(device, axis, axis.gather(here).count(here))


def memory_here(gpus: int, cores: int, ranks: int) -> int | None:
    """What `memory_of_a_rank` would be, were so many ranks started on this machine; None: it is no machine for them.

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


def peak_of_a_rank(device: torch.device) -> int:
    """Bytes that this rank has used at once so far, at most."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _of_device(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def host_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may use, with all that share its control groups.

    Args:
        root: where `proc` and `sys` are.
    """
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([whole, *(limit for file in _limit_files(root) if (limit := _limit(file)) is not None)])


def _limit_files(root: Path) -> Iterator[Path]:
    """Of this process's groups and all above them: each has a limit of its own. A container may see the host's name of
    its group, which is not there, and its own limit where the host's would be: at the top."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        place, name = _VERSION_1 if controllers else _VERSION_2
        inside = PurePosixPath(group.lstrip("/"))
        for folder in (inside, *inside.parents):
            yield root / place / folder / name


def _lines(file: Path) -> list[str]:
    """None of a file that isn't there: this is not Linux."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _limit(file: Path) -> int | None:
    """None: there is none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such group, or `max`
        return None
