"""A piece of a model, the same on all replicas: gradients are summed over these, once, when all are there.

    pipeline rank 0 of replica 0    a gradient --.
    pipeline rank 0 of replica 1    a gradient --+-- sum --> optimizer     the same update in both

What torch's DDP does while a backward goes on can't be done here: a stage's backwards are many, and only their sum
counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from lockstep.sharding.held import NO_WINDOW, HeldInParts, OptimizerOf, SquaredNorm

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import Axis
    from lockstep.sharding.buffers import SharedBuffers
    from lockstep.sharding.pieces import Pieces

_BUCKET = 25 * 2**20  # bytes that are sent at a time


class Replicas(HeldInParts):
    """Args:
    model: this rank's piece.
    axis: the ranks that hold the same one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_of: OptimizerOf,
        squared_norm: SquaredNorm,
        axis: Axis,
        pieces: Pieces,
        buffers: SharedBuffers,
    ) -> None:
        super().__init__(model, optimizer_of, squared_norm, buffers, pieces)
        self._axis = axis
        self._reduced = True

    @property
    def _alike(self) -> int:
        return self._axis.size

    def window(self, last: bool) -> AbstractContextManager[object]:
        self._buffers.before_forward(last)
        self._reduced = False
        return NO_WINDOW

    def _reduce(self) -> None:
        if self._reduced:
            return
        self._reduced = True
        grads = {part.name: part.gradient for part in self._reached}
        self._pieces.add_shared(grads)
        if self._axis.size > 1:
            for bucket in _buckets(grads.values()):
                flat = torch.cat([grad.reshape(-1) for grad in bucket])
                self._axis.sum(flat)
                parts = torch.split(flat, [grad.numel() for grad in bucket])
                torch._foreach_copy_(bucket, [part.view_as(grad) for part, grad in zip(parts, bucket, strict=True)])


def _buckets(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Of one dtype each, in an order that is the same on all ranks."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for same in by_dtype.values():
        bucket: list[Tensor] = []
        for grad in same:
            if bucket and sum(one.nbytes for one in bucket) + grad.nbytes > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(grad)
        yield bucket
