"""How much memory a rank may use for itself.

GPU    all of its memory
CPU    the machine's, or what the container may use of it, shared out among the ranks there
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from lockstep.distributed.process_group import World

_CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_of_a_rank(world: World) -> int:
    """Bytes; the least that any rank has, the same on all ranks, which call it together."""
    mine = _of_device(world.device) if world.device.type == "cuda" else _of_host() // world.machine_ranks
    return min(cast("list[int]", world.axis.gather(mine)))


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
