"""Lion: the sign of an interpolated momentum, with decoupled weight decay.

    c = beta1 m + (1 - beta1) g        p <- p (1 - lr weight_decay) - lr sign(c)        m <- beta2 m + (1 - beta2) g

Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675, algorithm 2. One moment instead
of AdamW's two. Its steps are larger than AdamW's: the paper takes a 3 to 10 times smaller learning rate and a 3 to 10
times larger weight decay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from lockstep.optim import kernels
from lockstep.optim.chunks import chunks

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.optim.chunks import Columns


class Lion(torch.optim.Optimizer):
    """Lion over torch's parameter groups, with `lr` and `weight_decay`; `make_moments` comes before the first step."""

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 1e-4, "weight_decay": 0.0, "betas": betas})

    def make_moments(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        self.gated_step(None)

    @torch.no_grad()
    def gated_step(self, found_inf: Tensor | None) -> None:
        """Make the step, but change nothing if `found_inf` (0-dim fp32 on the parameters' device) is 1."""
        for group, columns in self._chunks():
            parameters, grads, moments = columns
            beta1, beta2 = group["betas"]
            directions = list(torch._foreach_lerp(moments, grads, 1 - beta1))
            torch._foreach_sign_(directions)
            kernels.decay_and_step(parameters, directions, group["lr"], group["weight_decay"], found_inf)
            kernels.move_towards(moments, grads, 1 - beta2, found_inf)

    def _chunks(self) -> Iterator[tuple[dict[str, Any], Columns]]:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            moments = [self.state[parameter]["exp_avg"] for parameter in parameters]
            for columns in chunks((parameters, [parameter.grad for parameter in parameters], moments)):
                yield group, columns
