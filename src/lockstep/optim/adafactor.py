"""Adafactor's step on an accelerator, which decides itself whether the update is kept.

    row, column     means of g^2 over the other dim, moving        variance = row x column / mean(row)
    u = g / sqrt(variance)        p <- p - rate (max(eps, rms(p)) u / max(1, rms(u) / d) + weight_decay p)

Shazeer & Stern 2018, arXiv:1804.04235, algorithm 4, with the variations of `torch.optim.Adafactor`, whose `step` makes
the host read three numbers of each parameter. Here counts and factors stay on the device, and the gradient's memory
holds what is computed in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lockstep.optim import kernels
from lockstep.optim.chunks import CHUNK_BYTES

if TYPE_CHECKING:
    from torch import Tensor


def make_state(adafactor: torch.optim.Adafactor) -> None:
    """Make counts and moments now, so that a first update can be discarded, too; counts are on the device."""
    for group in adafactor.param_groups:
        for parameter in group["params"]:
            state = adafactor.state[parameter]
            state["step"] = torch.zeros((), device=parameter.device)
            if parameter.dim() > 1:
                *others, rows, columns = parameter.shape
                state["row_var"] = parameter.new_zeros((*others, rows, 1))
                state["col_var"] = parameter.new_zeros((*others, 1, columns))
            else:
                state["variance"] = torch.zeros_like(parameter)


@torch.no_grad()
def gated_step(adafactor: torch.optim.Adafactor, found_inf: Tensor) -> None:
    """Make the step of all parameters that have a gradient, but change nothing if `found_inf` (0-dim fp32) is 1.

    The gradients are overwritten.
    """
    for group in adafactor.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            state = adafactor.state[parameter]
            state["step"] += 1.0 - found_inf
            _replace_gradient(parameter, parameter.grad, group, state, found_inf)
        if parameters and group["lr"]:
            grads: list[Tensor] = [parameter.grad for parameter in parameters]
            kernels.decay_and_step(parameters, grads, 1.0, group["lr"] * group["weight_decay"], found_inf)


def _replace_gradient(
    parameter: Tensor, grad: Tensor, group: dict[str, Any], state: Mapping[str, Tensor], found_inf: Tensor
) -> None:
    """Replace the gradient by what is to be subtracted from the parameter, and update the moments."""
    count = state["step"].clamp(min=1.0)  # 0 if the first update is discarded
    rate = count.rsqrt().clamp(max=group["lr"])
    small, least_rms = group["eps"]
    small = torch.finfo(parameter.dtype).eps if small is None else small
    alpha = rate * (parameter.norm(2, dtype=torch.float32) / parameter.numel() ** 0.5).clamp(min=least_rms)
    weight = (count ** group["beta2_decay"]).to(grad.dtype)
    if grad.dim() > 1:
        rows, columns = state["row_var"], state["col_var"]
        _move(rows, torch.norm(grad, dim=-1, keepdim=True).square_().div_(grad.size(-1)), weight, found_inf)
        _move(columns, torch.norm(grad, dim=-2, keepdim=True).square_().div_(grad.size(-2)), weight, found_inf)
        mean = rows.mean(dim=-2, keepdim=True).clamp_(min=small)
        height = max(1, CHUNK_BYTES // max(1, grad.nbytes // grad.size(-2)))
        for grad_part, row_part in zip(torch.split(grad, height, -2), torch.split(rows, height, -2), strict=True):
            grad_part.mul_((row_part @ columns).div_(mean).clamp_(min=small * small).rsqrt_())
    else:
        _move(state["variance"], grad.square(), weight, found_inf)
        grad.mul_(state["variance"].clamp(min=small * small).rsqrt_())
    rms = grad.norm(2, dtype=torch.float32) / grad.numel() ** 0.5
    grad.mul_((alpha / (rms / group["d"]).clamp(min=1.0)).to(grad.dtype))


def _move(moment: Tensor, mean: Tensor, weight: Tensor, found_inf: Tensor) -> None:
    """Move a factor of the moments, which is small, towards the mean, unless the update is discarded."""
    torch.where(found_inf == 1.0, moment, moment.lerp(mean, weight), out=moment)
