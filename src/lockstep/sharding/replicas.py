"""A piece of a model, the same on all replicas: gradients are summed over these, once, when all are there.

    pipeline rank 0 of replica 0    a gradient --.
    pipeline rank 0 of replica 1    a gradient --+-- sum --> optimizer     the same update in both

What torch's DDP does while a backward goes on can't be done here: a stage's backwards are many, and only their sum
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.sharding.local_parts import Part, trained_parts
from lockstep.sharding.single import NO_WINDOW, SquaredNorm
from lockstep.sharding.state import (
    live_state,
    restore_state,
    unused_parameters,
    whole_gradients,
    whole_weights,
    without_gradient,
)

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis, Optimizer
    from lockstep.core.records import TrainingState
    from lockstep.sharding.buffers import SharedBuffers
    from lockstep.sharding.pieces import Pieces

OptimizerOf = Callable[[Iterable[tuple[str, nn.Parameter]]], "Optimizer"]
_BUCKET = 25 * 2**20  # bytes that are sent at a time


class Replicas:
    """Args:
    model: this rank's piece.
    optimizer_of: makes the optimizer of named parameters: plain ones, this rank's parts.
    axis: the ranks that hold the same one.
    before_unused: as `sharding.state.unused_parameters` has it.
    """

    averages_over = 1
    norm_is_whole = False

    def __init__(
        self,
        model: nn.Module,
        optimizer_of: OptimizerOf,
        squared_norm: SquaredNorm,
        axis: Axis,
        pieces: Pieces,
        buffers: SharedBuffers,
        before_unused: str,
    ) -> None:
        self.bare = self.module = model
        self._squared_norm = squared_norm
        self._axis = axis
        self._pieces = pieces
        self._buffers = buffers
        self._before_unused = before_unused
        self._parts = trained_parts(model)
        self._by_name = {part.name: part for part in self._parts}
        self._optimizer = optimizer_of((part.name, part.local) for part in self._parts)
        self._reduced = True

    def window(self, last: bool) -> AbstractContextManager[object]:
        self._buffers.before_forward(last)
        self._reduced = False
        return NO_WINDOW

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        loss.backward(seed)  # type: ignore[no-untyped-call]

    def unreached(self) -> list[str]:
        return without_gradient(self.bare)

    def squared_norm(self) -> Tensor:
        self._reduce()
        counted = [part.gradient for part in self._reached if self._pieces.counts(part.name)]
        return self._squared_norm(counted) / self._axis.size

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        for part in self._parts:
            part.hand_over()
        self._optimizer.update(rate, divisor, keep)

    def synchronize(self) -> None:
        self._buffers.synchronize()

    def weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        return self._pieces.whole(whole_weights(self.bare, wanted or self._pieces.several), wanted)

    def gradients(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        self._reduce()
        return self._pieces.whole(whole_gradients(self.bare, wanted or self._pieces.several), wanted)

    def close(self) -> None:
        pass

    def state(self) -> TrainingState:
        return self._pieces.state(live_state(self.bare, self._optimizer, self._shown))

    def restore(self, state: TrainingState) -> None:
        restore_state(self.bare, self._optimizer, self._pieces.own(state), self._fit)

    @property
    def _reached(self) -> list[Part]:
        """Those that a gradient has reached."""
        return [part for part in self._parts if part.whole.grad is not None]

    def _shown(self, name: str, value: Tensor) -> Tensor:
        return self._by_name[name].shown(value)

    def _fit(self, name: str, value: Tensor) -> Tensor:
        return self._by_name[name].fit(value)

    def _reduce(self) -> None:
        """Once an update, when somebody first asks for the whole gradient; at the same point on every rank."""
        if self._reduced:
            return
        self._reduced = True
        if self._axis.size > 1 and (lacking := self.unreached()):
            where = f"on rank {dist.get_rank()}, and others may wait for it"
            raise unused_parameters(lacking, where=where, before=self._before_unused)
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
