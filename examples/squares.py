"""A model and a dataset of one's own, for a config (`squares.yaml`) or for Python: a curve is learnt from points.

x in [-2, 2]  -->  Curve  -->  x squared
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import log


class Curve(nn.Module):
    """A number in, a number out."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.hidden = nn.Linear(1, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


class SquaredError:
    """What to train for: how many targets a batch has, and the sum of their losses."""

    decomposes = True

    def count(self, batch) -> int:
        return batch.targets.numel()

    def loss_sum(self, outputs: Tensor, batch) -> Tensor:
        errors = outputs.float() - batch.targets
        log.mean("absolute_error", errors.abs().sum(), errors.numel())
        return errors.square().sum()


def points(number: int = 1000) -> TensorDataset:
    """Each sample is (input, target); the target comes last."""
    x = torch.linspace(-2, 2, number).unsqueeze(1)
    return TensorDataset(x, x.square())
