"""A custom model, objective and dataset, used from a config (`squares.yaml`) or from Python: fit a curve to points.

x in [-2, 2]  -->  Curve  -->  x squared
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import log


class Curve(nn.Module):
    """A network with one hidden layer: x [B, 1] -> y [B, 1]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.hidden = nn.Linear(1, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


class SquaredError:
    """The objective: the number of targets in a batch, and the sum of their losses."""

    decomposes = True

    def count(self, batch) -> int:
        return batch.targets.numel()

    def loss_sum(self, outputs: Tensor, batch) -> Tensor:
        errors = outputs.float() - batch.targets
        log.mean("absolute_error", errors.abs().sum(), errors.numel())
        return errors.square().sum()


def points(number: int = 1000) -> TensorDataset:
    """Return a dataset of (input, target) pairs."""
    x = torch.linspace(-2, 2, number).unsqueeze(1)
    return TensorDataset(x, x.square())
