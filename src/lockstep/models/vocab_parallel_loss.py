"""Cross-entropy of logits sharded by the vocabulary: ranks exchange three numbers a target.

    rank 0    logits of tokens 0-31     maximum --.   sum of exp, own target's logit --.
    rank 1    logits of tokens 32-63    maximum --+-> sum of exp, own target's logit --+-> log sum exp - target's logit

(Shoeybi et al. 2019, arXiv:1909.08053, section 3.) The gradient of a rank's own logits needs no message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.shard_boxes import full_tensor, is_sharded, local_shards

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class _Columns(NamedTuple):
    """The columns of the logits that this rank has.

    Attributes:
        first: token of the first.
        vocabulary: of all ranks.
        group: these ranks.
    """

    first: int
    vocabulary: int
    group: dist.ProcessGroup


def vocab_parallel_cross_entropy_sum(logits: Tensor, targets: Tensor, label_smoothing: float, ignored: int) -> Tensor:
    """Return what `objectives.cross_entropy_sum` returns.

    Args:
        logits: [..., V], a DTensor whose last dim is sharded over the ranks of its one axis.
        targets: [...], the same on all of them.
    """
    boxes = local_shards(logits).boxes
    first = boxes[0].offsets[-1] if boxes else 0
    sharded = cast("DTensor", logits)
    columns = _Columns(first, logits.shape[-1], sharded.device_mesh.get_group())
    here = sharded.to_local()
    flat, wanted = here.reshape(-1, here.shape[-1]).float(), targets.reshape(-1)
    loss: Tensor = _CrossEntropy.apply(flat, wanted, columns, label_smoothing, ignored)  # type: ignore[no-untyped-call]
    return loss


def full_logits(logits: Tensor) -> Tensor:
    """Return the logits gathered on each rank, if they are sharded."""
    return full_tensor(logits) if is_sharded(logits) else logits


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, logits: Tensor, targets: Tensor, columns: _Columns, smoothing: float, ignored: int
    ) -> Tensor:
        """logits [N, V here] fp32, targets [N] -> 0-dim."""
        first, vocabulary, group = columns
        width = logits.shape[1]
        largest = logits.amax(1) if width else logits.new_full((len(logits),), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        shifted = logits - largest.unsqueeze(1)
        place = targets - first
        is_here = (place >= 0) & (place < width)
        place = place.clamp(0, max(0, width - 1)).unsqueeze(1)
        own = shifted.gather(1, place).squeeze(1) * is_here if width else torch.zeros_like(largest)
        exponents = shifted.exp()
        sums = torch.stack([exponents.sum(1), own, shifted.sum(1)])
        dist.all_reduce(sums, group=group)
        total, own, everything = sums
        losses = total.log() - (1 - smoothing) * own - smoothing / vocabulary * everything
        valid = targets != ignored
        context.save_for_backward(exponents.div_(total.unsqueeze(1)), place, is_here, valid)
        context.smoothing, context.vocabulary = smoothing, vocabulary
        return torch.where(valid, losses, 0).sum()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return, for target y with label smoothing e: softmax - (1 - e) [v = y] - e / V."""
        softmax, place, is_here, valid = context.saved_tensors
        gradients = softmax - context.smoothing / context.vocabulary
        if gradients.shape[1]:
            gradients.scatter_add_(1, place, ((context.smoothing - 1) * is_here.to(gradients.dtype)).unsqueeze(1))
        return gradients.mul_((gradient * valid).unsqueeze(1)), None, None, None, None
