"""The numbers of an update's valid targets, by which its loss is divided, and of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.records import GlobalBatch
    from lockstep.distributed.mesh_position import MeshPosition


def nonzero_count(count: float | Tensor) -> float | Tensor:
    """Return the divisor of a loss: 1 for an update without a valid target, whose sum is 0, so that none is 0 / 0.

    A count may be less than 1, since class weights count by their sum.
    """
    return (count or 1.0) if isinstance(count, float) else count.masked_fill(count == 0, 1.0)


def reported_counts(batch: GlobalBatch, position: MeshPosition) -> tuple[float, int]:
    """Return valid targets and tokens of a batch; 0 where another rank with the same samples counts them."""
    return (batch.count, batch.tokens) if position.reports_counts else (0, 0)
