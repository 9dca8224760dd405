"""The check that no two ranks compute on one accelerator.

    torchrun          each rank sees all GPUs of its machine        rank 3 takes number 3
    Slurm's           each sees its own (--gpus-per-task,           rank 3 takes number 0, which is its own
      srun, others    CUDA_VISIBLE_DEVICES of each rank)

A rank's environment is the same in both cases: four ranks that each see one GPU may have four, or share one. Only
the devices' identities do.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import torch

from lockstep.core.errors import ConfigError, Problem
from lockstep.distributed.rounds import RoundTimeout, poll

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SETTLE = 5.0  # seconds for all ranks to read a refusal


def refuse_shared_devices(store: Store, rank: int, size: int, device: torch.device, limit: float) -> None:
    """Raise ConfigError if two ranks have the same accelerator. All ranks together.

    Args:
        store: Keys of this round of ranks.
        limit: Seconds to wait for other ranks.

    Raises:
        RoundTimeout: Ranks have not come within the limit.
    """
    if size == 1:
        return
    store.set(f"device/{rank}", "" if device.type == "cpu" else device_identity(device))
    if rank == 0:
        keys = [f"device/{other}" for other in range(size)]
        if not poll(lambda: store.check(keys), time.monotonic() + limit):
            raise RoundTimeout("not all other ranks have a device")
        store.set("devices", shared_device([value.decode() for value in store.multi_get(keys)]))
    elif not poll(lambda: store.check(["devices"]), time.monotonic() + limit):
        raise RoundTimeout("rank 0 did not answer")
    if refusal := store.get("devices").decode():
        store.set(f"refused/{rank}", "")
        if rank == 0:  # the store may end with it
            poll(lambda: store.check([f"refused/{other}" for other in range(size)]), time.monotonic() + _SETTLE)
        raise ConfigError(Problem("", "launch.ranks", refusal))


def shared_device(identities: list[str]) -> str:
    """Return which ranks have the same device, as a refusal; empty: none. A rank on the CPU has no identity."""
    owners: dict[str, int] = {}
    for rank, identity in enumerate(identities):
        if identity and (owner := owners.setdefault(identity, rank)) != rank:
            devices = len(set(identities) - {""})
            return (
                f"ranks {owner} and {rank} have the same GPU, and {len(identities)} ranks have {devices} of them; "
                "start one rank for each GPU, or let each see its own (CUDA_VISIBLE_DEVICES, Slurm's --gpus-per-task)"
            )
    return ""


def device_identity(device: torch.device) -> str:
    """Return a name of the device that no other device has, on this machine and others."""
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return str(getattr(properties, "uuid", None) or f"{socket.gethostname()}/{device.type}:{index}")
