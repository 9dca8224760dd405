"""Replicas of a partitioned or tensor-parallel model: gradients are summed over them once, after all backwards.

    pipeline rank 0 of replica 0    a gradient --.
    pipeline rank 0 of replica 1    a gradient --+-- sum --> optimizer     the same update in both

DDP's overlap with the backward is impossible here: a stage has many backwards, and only their sum counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.protocols import GradientStep
from lockstep.sharding.buffers import SyncedBuffers
from lockstep.sharding.context import Sharding, ShardingContext
from lockstep.sharding.model_state import ModelState
from lockstep.sharding.parameter_shards import ParameterShard, parameter_shards
from lockstep.sharding.single import NO_SYNC, named_gradients, unused_parameters, without_gradient

if TYPE_CHECKING:
    from lockstep.core.protocols import Optimizer

_BUCKET = 25 * 2**20  # bytes that are sent at a time


class ReplicaStep(GradientStep):
    """The step of ranks that each hold a replica of one part of the model."""

    def __init__(
        self, context: ShardingContext, shards: Sequence[ParameterShard], optimizer: Optimizer, buffers: SyncedBuffers
    ) -> None:
        self.module = context.model
        self._squared_norm = context.squared_norm
        self._world = context.world.axis
        self._replicas = context.position.data
        self._partition = context.partition
        self._buffers = buffers
        self._unused_remedy = context.unused_remedy
        self._shards = shards
        self._optimizer = optimizer
        self._reduced = True

    def sync_context(self, last: bool) -> AbstractContextManager[object]:
        self._buffers.before_forward(last)
        self._reduced = False
        return NO_SYNC

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        loss.backward(seed)  # type: ignore[no-untyped-call]

    def parameters_without_gradient(self) -> list[str]:
        return without_gradient(self.module)

    def squared_norm(self) -> Tensor:
        self._reduce()
        counted = [shard.gradient for shard in self._with_gradient() if self._partition.counts(shard.name)]
        return self._world.sum(self._squared_norm(counted).double() / self._replicas.size)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        self._reduce()
        return named_gradients(self.module)

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        for shard in self._shards:
            shard.move_gradient()
        self._optimizer.update(rate, divisor, keep)

    def _with_gradient(self) -> list[ParameterShard]:
        return [shard for shard in self._shards if shard.whole.grad is not None]

    def _reduce(self) -> None:
        """Sum gradients over replicas when the sum is first needed, at the same point on every rank."""
        if self._reduced:
            return
        self._reduced = True
        if self._replicas.size > 1 and (unused := self.parameters_without_gradient()):
            where = f"on rank {dist.get_rank()}, and others may wait for it"
            raise unused_parameters(unused, where=where, remedy=self._unused_remedy)
        grads = {shard.name: shard.gradient for shard in self._with_gradient()}
        self._partition.reduce_shared(grads)
        if self._replicas.size > 1:
            for bucket in _buckets(grads.values()):
                flat = torch.cat([grad.reshape(-1) for grad in bucket])
                self._replicas.sum(flat)
                sums = torch.split(flat, [grad.numel() for grad in bucket])
                torch._foreach_copy_(bucket, [part.view_as(grad) for part, grad in zip(sums, bucket, strict=True)])


def build(context: ShardingContext) -> Sharding:
    """Return the sharding of a partitioned or tensor-parallel model's replicas."""
    model = context.model
    shards = parameter_shards(model)
    optimizer = context.optimizer((shard.name, shard.local) for shard in shards)
    buffers = SyncedBuffers(model, context.position.data_parallel_group)
    by_name = {shard.name: shard for shard in shards}
    state = ModelState(model, optimizer, buffers=buffers, partition=context.partition, shards=by_name)
    return Sharding(ReplicaStep(context, shards, optimizer, buffers), state)


def _buckets(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield gradients of one dtype each, in an order that is the same on all ranks."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for same_dtype in by_dtype.values():
        bucket: list[Tensor] = []
        for grad in same_dtype:
            if bucket and sum(earlier.nbytes for earlier in bucket) + grad.nbytes > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(grad)
        yield bucket
