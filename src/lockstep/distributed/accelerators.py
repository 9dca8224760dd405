"""The device and the backend of a rank, as torch sees this machine.

launch.device   auto            the accelerator that torch finds; without one, the CPU
                cuda, xpu, ...  that one, of torch or of a plugin
local rank 3    sees all 8      number 3
                sees its own    number 0 (CUDA_VISIBLE_DEVICES of each rank, Slurm's --gpus-per-task)
launch.backend  auto            the one registered for the device
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep.core.errors import ConfigError, Problem

_USED = ("Stream", "Event", "current_stream", "set_device", "default_generators", "get_device_properties")
"""Members of torch's module of a device that a run uses. Apple's (torch.mps) has almost none of them."""


def visible_devices(requested: str) -> tuple[str, int]:
    """Return the device type of `launch.device` here, and how many of them this process sees; the CPU: 0.

    It may start the device's driver; a process forked after that can't use it.
    """
    if requested != "auto":
        return requested, 0 if requested == "cpu" else _count(requested)
    current = torch.accelerator.current_accelerator()
    types = () if current is None else (current.type, "cuda")  # a plugin's device comes first, also if there is none
    return next(((name, count) for name in types if (count := _count(name))), ("cpu", 0))


def choose_device(requested: str, local_rank: int) -> torch.device:
    """Return the device of a rank, and make it the current one.

    Raises:
        ConfigError: There is no such device here, or torch lacks what a run needs on it.
    """
    device_type, count = visible_devices(requested)
    if device_type == "cpu":
        return torch.device("cpu")
    if not count:
        other, _ = visible_devices("auto")
        why = f"{requested} was asked for, and torch finds no such device on this machine; {other} works"
        raise ConfigError(Problem("", "launch.device", why))
    module: Any = torch.get_device_module(device_type)
    if missing := [name for name in _USED if getattr(module, name, None) is None]:
        why = f"a run needs what torch.{device_type} doesn't have ({', '.join(missing)}); write cpu"
        raise ConfigError(Problem("", "launch.device", why))
    device = torch.device(device_type, local_rank % count)
    module.set_device(device)
    return device


def choose_backend(requested: str, device: torch.device) -> str:
    """Return the backend of collectives on the device.

    Raises:
        ConfigError: This torch doesn't have it, or it takes no tensors of the device.
    """
    default = dist.Backend.default_device_backend_map.get(device.type)
    backend = default if requested == "auto" else requested
    works = "launch.device: cpu works" if default in (None, backend) else f"{default} works"
    why = ""
    if backend is None:
        why = f"torch has no backend for {device.type}; name its plugin's, or write launch.device: cpu"
    elif not dist.is_backend_available(backend):
        why = f"{backend} isn't part of this build of torch; {works}"
    elif device.type not in dist.Backend.backend_capability.get(backend, [device.type]):
        why = f"{backend} takes no tensors of {device.type}, where this rank computes; {works}"
    if why or backend is None:
        raise ConfigError(Problem("", "launch.backend", why))
    return backend


def _count(device_type: str) -> int:
    try:
        return int(torch.get_device_module(device_type).device_count())
    except (RuntimeError, AttributeError):  # a device of a plugin that isn't installed, or of another build of torch
        return 0
