"""Cross-entropy of logits sharded by the vocabulary: ranks exchange four numbers a target.

    rank 0    logits of tokens 0-31     maximum --.   sum of exp, target's logit, sum --.
    rank 1    logits of tokens 32-63    maximum --+-> sum of exp, target's logit, sum --+-> log sum exp - target's logit

(Shoeybi et al. 2019, arXiv:1909.08053, section 3.) The gradient of a rank's own logits needs no communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lockstep.distributed.collectives import RankGroup, maximum
from lockstep.distributed.shard_boxes import full_tensor, is_sharded, local_shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


def vocab_parallel_cross_entropy_sum(logits: Tensor, targets: Tensor, label_smoothing: float, ignored: int) -> Tensor:
    """Return the same sum as `objectives.cross_entropy_sum`.

    Args:
        logits: [..., V], a DTensor, sharded along its last dim over the ranks of its one axis.
        targets: [...], the same on all of these ranks.
    """
    boxes = local_shards(logits).boxes
    first_token = boxes[0].offsets[-1] if boxes else 0
    sharded = cast("DTensor", logits)
    shard = sharded.to_local()
    columns, tokens = shard.reshape(targets.numel(), shard.shape[-1]).float(), targets.reshape(-1)  # perhaps no column
    of_all = (logits.shape[-1], sharded.device_mesh.get_group(), label_smoothing)
    apply: Callable[..., Tensor] = _CrossEntropy.apply
    return apply(columns, tokens - first_token, tokens != ignored, *of_all)


def full_logits(logits: Tensor) -> Tensor:
    """Return the logits, gathered on each rank if they are sharded."""
    return full_tensor(logits) if is_sharded(logits) else logits


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, columns: Tensor, valid: Tensor, vocabulary: int, group: ProcessGroup, smoothing: float
    ) -> Tensor:
        """Return the sum over valid targets, 0-dim.

        Args:
            logits: This rank's columns, [N, V of this rank] fp32.
            columns: The targets' columns in it, [N]; outside of it if another rank has the target's logit.
        """
        width = logits.shape[1]
        largest = logits.amax(1) if width else logits.new_full((len(logits),), -torch.inf)
        shifted = logits - maximum(largest, group).unsqueeze(1)
        is_here = (columns >= 0) & (columns < width)
        columns = columns.clamp(0, max(0, width - 1)).unsqueeze(1)
        target = shifted.gather(1, columns).squeeze(1) * is_here if width else torch.zeros_like(largest)
        exponents = shifted.exp()
        sums = torch.stack([exponents.sum(1), target, shifted.sum(1)])
        total, target, logit_sum = RankGroup(group).sum(sums)
        losses = total.log() - (1 - smoothing) * target - smoothing / vocabulary * logit_sum
        ctx.save_for_backward(exponents.div_(total.unsqueeze(1)), columns, is_here, valid)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        return torch.where(valid, losses, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return softmax - (1 - e) [v = y] - e / V, for target y with label smoothing e."""
        softmax, columns, is_here, valid = ctx.saved_tensors
        gradients = softmax - ctx.smoothing / ctx.vocabulary
        if gradients.shape[1]:
            gradients.scatter_add_(1, columns, ((ctx.smoothing - 1) * is_here.to(gradients.dtype)).unsqueeze(1))
        return gradients.mul_((gradient * valid).unsqueeze(1)), None, None, None, None, None
