"""An objective, a data source and an optimizer, for a config (`own_parts.yaml`) or for Python.

Waves [samples, 1] --> examples/squares.py:Curve --> a curve with nine of ten values below it
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import lockstep


class Quantile:
    """The pinball loss: its minimum is the value with `share` of the targets below it."""

    def __init__(self, share: float = 0.9) -> None:
        self.share = share

    def count(self, batch: lockstep.Batch) -> int:
        """Return the number of targets; the sum of an update, over all ranks, is divided by it."""
        return batch.targets.numel()

    def loss_sum(self, outputs: Tensor, batch: lockstep.Batch) -> Tensor:
        """Return the sum of the targets' losses, never a mean."""
        excess = batch.targets - outputs.float()
        return torch.maximum(self.share * excess, (self.share - 1) * excess).sum()


class Waves:
    """A source whose samples are computed from their numbers: nothing is stored."""

    draws = False  # a sample depends on its number only

    def __init__(self, samples: int = 1000) -> None:
        self.facts = lockstep.extend.DataFacts(samples, None)
        self.fingerprint = f"waves of {samples} samples"  # a run is resumed on the same data

    def fetch(self, indices) -> lockstep.Batch:
        """Return the samples at `indices` [samples]: the model's arguments and what the objective compares with."""
        x = torch.from_numpy(indices).unsqueeze(1) / self.facts.samples * 4 - 2
        y = torch.sin(math.pi * x) + torch.sin(12345.6 * x)  # the second term looks like noise
        return lockstep.Batch((x,), y, samples=len(indices), tokens=len(indices))


class SignMomentum(torch.optim.Optimizer):
    """Takes steps of equal size, in the direction of the gradients' running mean."""

    def __init__(self, params, lr: float = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update all parameters; Lockstep sets `lr`, clips, and skips the step if gradients aren't finite."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]  # saved in checkpoints, under the parameter's name
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.add_(mean.sign(), alpha=-group["lr"])
