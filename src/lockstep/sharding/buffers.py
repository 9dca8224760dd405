"""Buffers that are state, such as running means: each rank's forwards change its own.

As under DistributedDataParallel, forwards start from the first rank's buffers, which are also evaluated and saved.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lockstep.distributed.collectives import group_or_all

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn


_SMALL = 2**20  # bytes that are copied in 0.1 ms


class SyncedBuffers:
    """The saved buffers of a model, without tables that every rank computes alike.

    Args:
        group: The ranks that hold the same model; None: all.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        saved = set(model.state_dict())
        self._buffers = [buffer for name, buffer in model.named_buffers() if name in saved]
        self._update_begins = True

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def before_forward(self, last: bool) -> None:
        """Synchronize before the first micro-batch of an update; `last`: the micro-batch is the update's last."""
        if self._update_begins:
            self.synchronize()
        self._update_begins = last

    def synchronize(self) -> None:
        """Copy the first rank's buffers to all ranks of the group."""
        if self._buffers:
            ranks = group_or_all(self._group)
            for buffer in self._buffers:
                ranks.copy_first(buffer)


def buffer_owners(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the `_buffers` that hold each saved buffer, by its name: forwards may replace it."""
    saved = set(model.state_dict())
    owners: dict[str, dict[str, Any]] = {
        f"{prefix}.{key}".lstrip("."): module._buffers
        for prefix, module in model.named_modules()
        for key in module._buffers
    }
    return {name: owner for name, owner in owners.items() if name in saved}


def current_buffers(owners: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Return the buffers that the modules hold now, None where one was removed."""
    return [owner[name.rpartition(".")[2]] for name, owner in owners.items()]


class BufferSnapshot:
    """Saved buffers as they were before an update, whose forwards may change them.

    Buffers are left out if they are too large to be copied in every update at no cost.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = buffer_owners(model)
        allowed = max(_SMALL, sum(parameter.nbytes for parameter in model.parameters()) // 100)
        if sum(buffer.nbytes for buffer in current_buffers(self._owners)) > allowed:
            self._owners = {}
        self._sources: list[Tensor] = []
        self._copies: list[Tensor] = []

    @property
    def names(self) -> frozenset[str]:
        """Names of the buffers that are copied."""
        return frozenset(self._owners)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the buffers as they are now."""
        if not self._owners:
            return
        now = current_buffers(self._owners)
        if len(now) == len(self._sources) and all(map(operator.is_, now, self._sources)):
            torch._foreach_copy_(self._copies, now)
        else:
            self._sources, self._copies = now, [buffer.detach().clone() for buffer in now]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the model's buffers to the values of the last `take`."""
        for buffer, copy in zip(current_buffers(self._owners), self._copies, strict=True):
            buffer.copy_(copy)
