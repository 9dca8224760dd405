"""Sums of many gradients over ranks, in buckets of one dtype: one is copied while the one before is sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis

_BUCKET = 25 * 2**20  # bytes of a message
_AT_ONCE = 2


class BucketSums:
    """Sums buckets over an axis, two at a time, since each needs a flat copy; `device` is the collectives'."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._axis = axis
        self._device = device
        self._under_way: deque[Callable[[], None]] = deque()

    @torch.no_grad()
    def start(self, bucket: Sequence[Tensor]) -> None:
        """Start to sum tensors of one dtype in place, the same ones in the same order on all ranks of the axis."""
        if len(self._under_way) == _AT_ONCE:
            self._under_way.popleft()()
        wait = self._axis.start_sum(torch.cat([tensor.reshape(-1) for tensor in bucket]).to(self._device))

        def finish() -> None:
            parts = torch.split(wait(), [tensor.numel() for tensor in bucket])
            torch._foreach_copy_(list(bucket), [part.view_as(own) for part, own in zip(parts, bucket, strict=True)])

        self._under_way.append(finish)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until all tensors have their sums."""
        while self._under_way:
            self._under_way.popleft()()


def sum_in_buckets(gradients: Iterable[Tensor], axis: Axis, device: torch.device) -> None:
    """Sum gradients over an axis in place, the same ones in the same order on all its ranks; see `BucketSums`."""
    if axis.size == 1:
        return
    sums = BucketSums(axis, device)
    for bucket in buckets(gradients):
        sums.start(bucket)
    sums.finish()


def buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield gradients of one dtype each, in an order that is the same on all ranks."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for same_dtype in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for gradient in same_dtype:
            if bucket and size + gradient.nbytes > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += gradient.nbytes
        yield bucket
