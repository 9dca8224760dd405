"""Buffers that are state, such as running means: each rank's forwards change its own.

Forwards start from the first rank's, which are also evaluated and saved, as under DistributedDataParallel.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, cast

import torch

from lockstep.distributed.collectives import group_or_all

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn


_SMALL = 2**20  # bytes that are copied in 0.1 ms


class SyncedBuffers:
    """The saved buffers of a model; not tables that every rank computes alike.

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
        """Synchronize before the first micro-batch of an update.

        Args:
            last: Whether this is the update's last micro-batch.
        """
        if self._update_begins:
            self.synchronize()
        self._update_begins = last

    def synchronize(self) -> None:
        """Copy the first rank's to all ranks of the group."""
        if self._buffers:
            ranks = group_or_all(self._group)
            for buffer in self._buffers:
                ranks.copy_first(buffer)


class BufferSnapshot:
    """Saved buffers as they were before an update, whose forwards may change them.

    Buffers that are too large to be copied beside an update unnoticed are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        saved = set(model.state_dict())
        slots = {
            f"{prefix}.{name}".lstrip("."): module._buffers
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self._slots = {name: slot for name, slot in slots.items() if name in saved}
        allowed = max(_SMALL, sum(parameter.nbytes for parameter in model.parameters()) // 100)
        if sum(buffer.nbytes for buffer in self._now()) > allowed:
            self._slots = {}
        self._sources: list[Tensor] = []
        self._copies: list[Tensor] = []

    @property
    def names(self) -> frozenset[str]:
        """Names of the buffers that are copied."""
        return frozenset(self._slots)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the buffers as they are now."""
        if not self._slots:
            return
        now = self._now()
        if len(now) == len(self._sources) and all(map(operator.is_, now, self._sources)):
            torch._foreach_copy_(self._copies, now)
        else:
            self._sources, self._copies = now, [buffer.detach().clone() for buffer in now]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the model's buffers the values of the last `take`."""
        for buffer, copy in zip(self._now(), self._copies, strict=True):
            buffer.copy_(copy)

    def _now(self) -> list[Tensor]:
        return [cast("Tensor", slot[name.rpartition(".")[2]]) for name, slot in self._slots.items()]
