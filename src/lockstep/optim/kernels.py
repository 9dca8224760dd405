"""The private names of torch that this package calls; `tests/optim/test_kernels.py` compares each with the public API.

fused_adamw, fused_adam, fused_sgd
    The kernels behind `torch.optim.*(fused=True)`, around which `Optimizer.step` spends 35 to 50 us of Python.
    They divide gradients by `grad_scale`, and change nothing where `found_inf` is 1. The caller counts steps.
flatten
    Concatenates tensors without a Python call for each. A single tensor is returned itself, so callers may only read.
muon_rate
    The scale of `torch.optim.Muon`, which can't gate its `step`.
scale_update
    The arithmetic of `torch.amp.GradScaler.update` in one kernel on the device, without the host waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import _muon

if TYPE_CHECKING:
    from torch import Tensor

fused_adamw: Callable[..., None] = torch._fused_adamw_
fused_adam: Callable[..., None] = torch._fused_adam_
fused_sgd: Callable[..., None] = torch._fused_sgd_

_native: Any = torch._C._nn
flatten: Callable[[Sequence[Tensor]], Tensor] = _native.flatten_dense_tensors

scale_update: Callable[[Tensor, Tensor, Tensor, float, float, int], Tensor] = torch._amp_update_scale_

muon_rate: Callable[[float, str | None, torch.Size], float] = _muon._adjust_lr


def decay_and_step(
    parameters: list[Tensor],
    directions: list[Tensor],
    rate: float,
    weight_decay: float,
    found_inf: Tensor | None,
    *,
    ascend: bool = False,
) -> None:
    """Compute p <- p - rate (direction + weight_decay p) in place, unless `found_inf` (0-dim fp32) is 1.

    Args:
        ascend: Take the directions with the opposite sign.
    """
    fused_sgd(
        parameters,
        directions,
        [],
        lr=rate,
        momentum=0.0,
        weight_decay=weight_decay,
        nesterov=False,
        dampening=0.0,
        maximize=ascend,
        is_first_step=False,
        grad_scale=None,
        found_inf=found_inf,
    )


def move_towards(starts: list[Tensor], ends: list[Tensor], weight: float, found_inf: Tensor | None) -> None:
    """Compute start <- start + weight (end - start) in place, unless `found_inf` (0-dim fp32) is 1."""
    decay_and_step(starts, ends, weight, 1.0, found_inf, ascend=True)
