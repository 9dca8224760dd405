"""Buffers that are state, such as running means: each rank's forwards change its own.

What a forward starts from, what is judged and what is saved are the first rank's, as under DistributedDataParallel.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, cast

import torch

from lockstep.distributed.collectives import copy_first

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn


_SMALL = 2**20  # bytes that are copied in 0.1 ms


class SharedBuffers:
    """Buffers that belong to the model's state, not tables that every rank computes alike."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """`group`: of the ranks that have the same model; None: all."""
        self._group = group
        saved = set(model.state_dict())
        self._buffers = [buffer for name, buffer in model.named_buffers() if name in saved]
        self._update_begins = True

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def before_forward(self, last: bool) -> None:
        """Of a micro-batch; the first of an update starts from the first rank's.

        Args:
            last: it is the update's last.
        """
        if self._update_begins:
            self.synchronize()
        self._update_begins = last

    def synchronize(self) -> None:
        """The first rank's, to all."""
        for buffer in self._buffers:
            copy_first(buffer, self._group)


class BufferCopies:
    """Saved buffers as they were before an update, whose forwards may change them.

    Those of a model that has more of them than can be copied beside an update, unnoticed, are not kept.
    """

    def __init__(self, model: nn.Module) -> None:
        saved = set(model.state_dict())
        self._places = {
            f"{prefix}.{name}" if prefix else name: module._buffers
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self._places = {name: place for name, place in self._places.items() if name in saved}
        if sum(map(_bytes, self._now())) > max(_SMALL, sum(map(_bytes, model.parameters())) // 100):
            self._places = {}
        self._sources: list[Tensor] = []
        self._copies: list[Tensor] = []

    @property
    def names(self) -> frozenset[str]:
        """Of the buffers that are kept."""
        return frozenset(self._places)

    @torch.no_grad()
    def take(self) -> None:
        """Copies them as they are now."""
        if not self._places:
            return
        now = self._now()
        if len(now) == len(self._sources) and all(map(operator.is_, now, self._sources)):
            torch._foreach_copy_(self._copies, now)
        else:
            self._sources, self._copies = now, [one.detach().clone() for one in now]

    @torch.no_grad()
    def put_back(self) -> None:
        """Gives the model's buffers the values of the last `take`."""
        for one, copy in zip(self._now(), self._copies, strict=True):
            one.copy_(copy)

    def _now(self) -> list[Tensor]:
        return [cast("Tensor", place[name.rpartition(".")[2]]) for name, place in self._places.items()]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
