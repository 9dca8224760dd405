"""How long a gradient is, exactly enough that a sharded and an unsharded run clip alike.

    few small tensors    one flat copy, one dot product                       (overhead decides)
    large ones           rows of 4,096, a norm each, then those norms' norm   (rounding decides)

On the CPU torch sums squares one after the other in fp32: of 20 million elements 0.2 % get lost, of 200 million
ones a third. Rows keep the relative error near 1e-7 at the same speed. NaN and infinity pass through.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.optim.kernels import flatten

_FLAT_ELEMENTS = 32_768
_ROW = 4_096
_EXACT = (torch.float32, torch.float64)


def squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements of all tensors.

    Returns:
        0-dim, on the gradients' device, in fp32, of lower precisions too (fp64 if one of them is).
    """
    if not grads:
        return torch.zeros(())
    grads = _exact(grads)
    if not grads[0].is_cuda:
        if sum(map(torch.numel, grads)) <= _FLAT_ELEMENTS:
            flat = flatten(grads)
            return torch.dot(flat, flat)
        norms = torch.cat([_row_norms(grad) for grad in grads])
    else:  # these kernels sum by blocks
        norms = torch.stack(torch._foreach_norm(list(grads)))
    return torch.dot(norms, norms)


def parameter_norms(grads: Sequence[Tensor]) -> list[float]:
    """The 2-norm of each tensor, as exact as the total."""
    return [float(squared_norm([grad]).double().sqrt()) for grad in grads]


def clip_divisor(norm: float | Tensor, clip_norm: float | None, loss_scale: float | Tensor) -> float | Tensor:
    """What to divide a gradient by: the loss scale, and what its norm exceeds `clip_norm` by.

        gradient / divisor = gradient / loss_scale x min(1, clip_norm / (norm + 1e-6))

    as in `torch.nn.utils.clip_grad_norm_`, but without a pass over the gradients.

    Args:
        norm: of the gradient before clipping, not scaled. If it isn't finite, the divisor means nothing.
        clip_norm: None: never clip.
    """
    if clip_norm is None:
        return loss_scale
    excess: float | Tensor = (norm + 1e-6) / clip_norm
    excess = excess.clamp(min=1.0) if isinstance(excess, Tensor) else max(1.0, excess)
    divisor: float | Tensor = loss_scale * excess
    return divisor


def _exact(grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """In one precision that sums well."""
    first = grads[0].dtype
    if first in _EXACT and all(grad.dtype is first for grad in grads):
        return grads
    wide = torch.float64 if any(grad.dtype is torch.float64 for grad in grads) else torch.float32
    return [grad.to(wide) for grad in grads]


def _row_norms(grad: Tensor) -> Tensor:
    """Norms of rows of 4,096 elements and of the rest, [rows]."""
    flat = grad.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    if whole == 0:
        return torch.linalg.vector_norm(flat, keepdim=True)
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    if whole == flat.numel():
        return norms
    return torch.cat([norms, torch.linalg.vector_norm(flat[whole:], keepdim=True)])
