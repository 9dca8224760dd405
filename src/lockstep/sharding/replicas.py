"""Replicas of a partitioned or tensor-parallel model: gradients are summed over them once an update, in buckets.

A stage has many backwards, and only their sum counts: sums begin in the last one, and overlap with what is left of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.protocols import NO_CONTEXT, GradientStep
from lockstep.sharding.buckets import BucketSums, buckets, sum_in_buckets
from lockstep.sharding.buffers import SyncedBuffers
from lockstep.sharding.context import Sharding, ShardingContext
from lockstep.sharding.model_state import ModelState
from lockstep.sharding.parameter_shards import LocalGradients, ParameterShard, parameter_shards
from lockstep.sharding.single import named_gradients, run_backward, unused_parameters

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis, Optimizer


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
        self._gradients = LocalGradients(shards)
        self._optimizer = optimizer
        self._reduced = True
        self._device = context.world.device
        last = [shard for shard in reversed(shards) if not context.partition.sums(shard.name)]
        self._early = EarlySums(last, self._replicas, self._device) if self._replicas.size > 1 else None

    def sync_context(self, last: bool) -> AbstractContextManager[object]:
        self._buffers.before_forward(last)
        self._gradients.clear()
        self._reduced = False
        if self._early is not None:
            self._early.begin(last)
        return NO_CONTEXT

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        run_backward(loss, seed)

    def squared_norm(self) -> Tensor:
        self._reduce()
        counted = self._partition.counted(self._gradients.read())
        return self._world.sum(self._squared_norm(counted).double() / self._replicas.size)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        self._reduce()
        return named_gradients(self.module)

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        self._gradients.move()
        self._optimizer.update(rate, divisor, keep)

    def _reduce(self) -> None:
        """Sum gradients over replicas when the sum is first needed, at the same point on every rank."""
        if self._reduced:
            return
        self._reduced = True
        if self._replicas.size > 1 and (unused := self.parameters_without_gradient()):
            where = f"on rank {dist.get_rank()}, and others may wait for it"
            raise unused_parameters(unused, where=where, remedy=self._unused_remedy)
        gradients = self._gradients.read()
        self._partition.reduce_shared(gradients)
        if self._early is not None:
            summed = self._early.finish()
            rest = (gradient for name, gradient in gradients.items() if name not in summed)
            sum_in_buckets(rest, self._replicas, self._device)


def build(context: ShardingContext) -> Sharding:
    """Return the sharding of a partitioned or tensor-parallel model's replicas."""
    model = context.model
    shards = parameter_shards(model)
    optimizer = context.optimizer((shard.name, shard.local) for shard in shards)
    buffers = SyncedBuffers(model, context.position.data_parallel_group)
    by_name = {shard.name: shard for shard in shards}
    state = ModelState(model, optimizer, buffers=buffers, partition=context.partition, shards=by_name)
    return Sharding(ReplicaStep(context, shards, optimizer, buffers), state)


class EarlySums:
    """The sums over one axis that begin in a backward.

        last backward    head   block 3   block 2   block 1   block 0   embedding
        sent                     [head, block 3 ----->    [block 2, 1 ---->     [block 0, embedding ->

    A bucket is sent when its gradients are there and all buckets before it have been sent. What a rank's last backward
    doesn't reach is summed after it. `shards` are in the order of a backward.
    """

    def __init__(self, shards: Sequence[ParameterShard], axis: Axis, device: torch.device) -> None:
        self._axis = axis
        self._device = device
        self._sums = BucketSums(axis, device)
        by_memory = {id(shard.local): shard for shard in shards}
        self._buckets = [[by_memory[id(local)] for local in bucket] for bucket in buckets(s.local for s in shards)]
        self._missing: list[int] = []
        self._next = len(self._buckets)
        self._sent = 0
        for number, bucket in enumerate(self._buckets):
            for shard in bucket:
                shard.whole.register_post_accumulate_grad_hook(partial(self._arrived, number))  # type: ignore[no-untyped-call]

    def begin(self, last: bool) -> None:
        """Begin a backward; sums begin in the last one of an update."""
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sums = BucketSums(self._axis, self._device)  # without what an interrupted backward has begun
        self._sent = 0
        self._next = 0 if last else len(self._buckets)

    def finish(self) -> frozenset[str]:
        """Wait for the sums, which replace the gradients; return the names of the parameters with a begun sum."""
        self._sums.finish()
        sent = self._buckets[: self._sent]
        self._sent, self._next = 0, len(self._buckets)
        return frozenset(shard.name for bucket in sent for shard in bucket)

    @torch.no_grad()
    def _arrived(self, number: int, parameter: Tensor) -> None:
        if self._next == len(self._buckets):
            return
        self._missing[number] -= 1
        while self._next < len(self._buckets) and not self._missing[self._next]:
            gradients = [shard.gradient for shard in self._buckets[self._next]]
            present = [gradient for gradient in gradients if gradient is not None]
            self._sums.start(present)
            self._next += 1
            self._sent += 1
