"""Sums of gradients over replicas that begin while the last backward still runs.

    last backward    head   block 3   block 2   block 1   block 0   embedding
    sent                     [head, block 3 ----->    [block 2, 1 ---->     [block 0, embedding ->

A bucket is sent when all of its gradients are there and all buckets before it have been sent, as under
DistributedDataParallel. What a rank's last backward doesn't reach, such as stages whose backwards have ended before, is
summed after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.sharding.buckets import BucketSums, buckets

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis
    from lockstep.sharding.parameter_shards import ParameterShard


class EarlySums:
    """The sums over one axis that begin in a backward.

    Args:
        shards: In the order in which a backward reaches them.
        device: The device of collectives.
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
        """Wait for the sums, which replace the gradients; return the names of the parameters whose sums had begun."""
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
