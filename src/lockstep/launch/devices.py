"""Counts the GPUs and cores of this machine.

A process that has created a CUDA context can't be forked, and counting GPUs with the CUDA runtime creates one. So they
are counted with the driver's management library (NVML), as nvidia-smi does.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

from lockstep.config.schema import Launch
from lockstep.core.errors import ConfigError, Problem


def choose_ranks(launch: Launch) -> int:
    """Return the number of ranks to start on this machine: as configured, or one per GPU, or one without GPUs."""
    if launch.ranks != "auto":
        return launch.ranks
    return 1 if launch.device == "cpu" else max(1, count_gpus())


def check_ranks(ranks: int, launch: Launch) -> str | None:
    """Return a warning about `ranks` ranks on this machine, if there is one.

    Raises:
        ConfigError: There are fewer GPUs than ranks under nccl, where two ranks can't share one.
    """
    if ranks < 1:
        raise ConfigError(Problem("", "launch.ranks", f"{ranks} ranks can't run; the least is 1"))
    if launch.backend == "nccl" and ranks > (gpus := count_gpus()):
        remedy = f"start {gpus} rank{'s' * (gpus > 1)}, or use gloo" if gpus else "use gloo"
        number = f"there {'is' if gpus == 1 else 'are'} {gpus}"
        message = f"nccl needs a GPU for each of the {ranks} ranks, and {number}; {remedy}"
        raise ConfigError(Problem("", "launch.backend", message))
    cores = count_cores()
    if ranks > cores:
        return f"{ranks} ranks share {cores} core{'s' * (cores > 1)}: they take turns, and each is slower"
    return None


def count_gpus(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of NVIDIA GPUs that a rank started from here could use; 0 if torch is built without CUDA."""
    import torch

    if torch.version.cuda is None:
        return 0
    return visible_gpus(os.environ if environ is None else environ, _nvml_count())


def visible_gpus(environ: Mapping[str, str], present: int) -> int:
    """Return how many of `present` GPUs CUDA_VISIBLE_DEVICES selects: indices or UUIDs up to the first invalid one."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return present
    seen: list[str] = []
    for name in (part.strip() for part in listed.split(",")):
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdigit() and int(name) < present):
            break
        if name in seen:  # CUDA then shows no GPU at all
            return 0
        seen.append(name)
    if any(name.startswith("MIG-") for name in seen):  # a process can use one slice only
        return 1
    return min(len(seen), present)


def count_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Return an even share of the cores, at least 1."""
    return max(1, count_cores() // ranks)


def _nvml_count() -> int:
    """Return the number of GPUs that the driver knows of; 0 without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint(0)
    failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return 0 if failed else count.value
