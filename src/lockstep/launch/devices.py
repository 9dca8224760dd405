"""Counts the accelerators and cores of this machine.

A process that has started an accelerator's driver can't be forked, and counting starts some drivers. So a copy of this
process counts.
"""

from __future__ import annotations

import os
import sys
from functools import partial

from lockstep.config.schema import Launch
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.processes import in_fork, may_fork


def choose_ranks(launch: Launch) -> int:
    """Return the number of ranks to start on this machine: as configured, or one per accelerator, or one without."""
    return max(1, count_accelerators(launch)[1]) if launch.ranks == "auto" else launch.ranks


def check_ranks(ranks: int, launch: Launch) -> str | None:
    """Return a warning about `ranks` ranks on this machine, if there is one.

    Raises:
        ConfigError: There are accelerators, but fewer than ranks: two ranks can't share one.
    """
    if ranks < 1:
        raise ConfigError(Problem("", "launch.ranks", f"{ranks} ranks can't run; the least is 1"))
    device_type, count = count_accelerators(launch) if ranks > 1 else ("cpu", 0)
    if 0 < count < ranks:
        devices = f"{count} {device_type} device{'s' * (count > 1)}"
        why = f"{ranks} ranks, and this process sees {devices}; set ranks to {count} at most, or launch.device to cpu"
        raise ConfigError(Problem("", "launch.ranks", why))
    cores = count_cores()
    if ranks > cores:
        return f"{ranks} ranks share {cores} core{'s' * (cores > 1)}: they take turns, and each is slower"
    return None


def count_accelerators(launch: Launch) -> tuple[str, int]:
    """Return the type of device of ranks that start from here, and how many of them they see; the CPU: 0."""
    if launch.device == "cpu":
        return "cpu", 0
    import torch

    from lockstep.distributed.accelerators import visible_devices

    if launch.device == "auto" and torch.accelerator.current_accelerator() is None:
        return "cpu", 0
    count = partial(visible_devices, launch.device)
    return in_fork(count) if may_fork() else count()


def count_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Return an even share of the cores, at least 1."""
    return max(1, count_cores() // ranks)
