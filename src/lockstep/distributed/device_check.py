"""The check that ranks compute on devices of one type, and no two on one accelerator.

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
    """Raise ConfigError if two ranks have the same accelerator, or some have none. All ranks together.

    Args:
        store: Keys of this round of ranks.
        limit: Seconds to wait for other ranks.

    Raises:
        RoundTimeout: Ranks have not come within the limit.
    """
    if size == 1:
        return
    store.set(f"device/{rank}", device_identity(device))
    if rank == 0:
        keys = [f"device/{other}" for other in range(size)]
        if not poll(lambda: store.check(keys), time.monotonic() + limit):
            raise RoundTimeout("not all other ranks have a device")
        store.set("devices", device_refusal([value.decode() for value in store.multi_get(keys)]))
    elif not poll(lambda: store.check(["devices"]), time.monotonic() + limit):
        raise RoundTimeout("rank 0 did not answer")
    if refusal := store.get("devices").decode():
        store.set(f"refused/{rank}", "")
        if rank == 0:  # the store may end with it
            poll(lambda: store.check([f"refused/{other}" for other in range(size)]), time.monotonic() + _SETTLE)
        raise ConfigError(Problem("", "launch.ranks", refusal))


def device_refusal(identities: list[str]) -> str:
    """Return which ranks can't compute together on devices of these identities, and why; empty: all can."""
    types = [identity.partition(" ")[0] for identity in identities]
    if other := next((rank for rank, name in enumerate(types) if name != types[0]), None):
        return (
            f"rank 0 computes on {types[0]} and rank {other} on {types[other]}; let every rank see an accelerator "
            "(CUDA_VISIBLE_DEVICES, drivers of all nodes), or write launch.device: cpu"
        )
    owners: dict[str, int] = {}
    for rank, identity in enumerate(identities):
        if (owner := owners.setdefault(identity, rank)) != rank and types[0] != "cpu":
            number = len(set(identities))
            return (
                f"ranks {owner} and {rank} have the same device, and {len(identities)} ranks have {number} of "
                f"{types[0]}; start one rank for each, or let each see its own (CUDA_VISIBLE_DEVICES, Slurm's "
                "--gpus-per-task)"
            )
    return ""


def device_identity(device: torch.device) -> str:
    """Return the device's type and, after a space, a name that no other accelerator has, on this machine and others."""
    if device.type == "cpu":
        return device.type
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    name = getattr(properties, "uuid", None) or f"{socket.gethostname()}/{device.index}"
    return f"{device.type} {name}"
