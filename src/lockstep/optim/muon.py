"""Muon's step, of whole matrices or of sharded ones; an accelerator decides itself whether the update is kept.

    buffer <- lerp(buffer, g, 1 - momentum)      g <- orthogonalize(lerp(g, buffer, momentum))      p <- p - rate g

Jordan et al. 2024; in bf16 the same arithmetic as `torch.optim.Muon`. A run in fp32 orthogonalizes in fp32: bf16 makes
steps of 4e-3 of the last bits, where strategies differ. The gradient's memory holds what is computed in between. Only
the orthogonalization takes whole matrices: see `whole_matrices`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lockstep.optim import kernels
from lockstep.optim.whole_matrices import replace_by_whole

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.distributed.shard_boxes import RowShards


def make_state(muon: torch.optim.Muon) -> None:
    """Make the momentum buffers now, so that a first update can be discarded, too."""
    for group in muon.param_groups:
        for parameter in group["params"]:
            muon.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


@torch.no_grad()
def gated_step(muon: torch.optim.Muon, dtype: torch.dtype, shards: RowShards | None, found_inf: Tensor | None) -> None:
    """Make the step of all parameters that have a gradient, but change nothing if `found_inf` (0-dim fp32) is 1.

    The gradients are overwritten. All ranks together, if matrices are sharded. It orthogonalizes in `dtype`.
    """
    for group in muon.param_groups:
        named = zip(group["names"], group["params"], strict=True)
        present = [(name, parameter) for name, parameter in named if parameter.grad is not None]
        if not present:
            continue
        names, parameters = [name for name, _ in present], [parameter for _, parameter in present]
        grads: list[Tensor] = [parameter.grad for parameter in parameters]
        buffers = [muon.state[parameter]["momentum_buffer"] for parameter in parameters]
        kernels.move_towards(buffers, grads, 1 - group["momentum"], found_inf)
        for grad, buffer in zip(grads, buffers, strict=True):
            if group["nesterov"]:
                grad.lerp_(buffer, group["momentum"])
            else:
                grad.copy_(buffer)
        orthogonalize = partial(_orthogonalized, group)
        if shards is None:
            for grad in grads:
                grad.copy_(orthogonalize(grad.to(dtype)))
        else:
            replace_by_whole(orthogonalize, grads, names, shards, dtype)
        for name, parameter, grad in zip(names, parameters, grads, strict=True):
            shape = torch.Size(shards.shapes[name]) if shards else parameter.shape
            scale = kernels.muon_rate(1.0, group["adjust_lr_fn"], shape)
            decay = group["weight_decay"] / scale  # of the rate without the scale, as torch has it
            kernels.decay_and_step([parameter], [grad], scale * group["lr"], decay, found_inf)


def _orthogonalized(group: dict[str, Any], matrix: Tensor) -> Tensor:
    """Return U V^T of the matrix, about, by a quintic Newton-Schulz iteration in its dtype; it is overwritten."""
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.size(0) > matrix.size(1)
    wide = matrix.T if is_tall else matrix
    wide.div_(wide.norm().clamp(min=group["eps"]))
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, gram, wide, beta=a)
    return wide.T if is_tall else wide
