"""What draws, or keeps count, on its own: data that are augmented by a user's code, models that depend on the batch."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from kit.small import CrossEntropy, Net, points


class Jittered(Dataset):
    """The points, moved by draws of Python's and torch's generators."""

    def __init__(self, samples: int = 40) -> None:
        self.points = points(samples)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point, kind = self.points[index]
        return point + 0.1 * torch.randn(4) + random.random(), kind


class Sometimes(Net):
    """Has a layer that only some batches use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.seldom = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(self.seldom(points) if points.sum() > 2 else points)


class Counting(Net):
    """Counts its forwards in a buffer that belongs to its state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return super().forward(points)


class Replacing(Counting):
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.forwards = self.forwards + 1
        return Net.forward(self, points)


class Double(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inner.double()

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(points.double())).float())


class Contrast(CrossEntropy):
    decomposes = False


class Noisy(Net):
    """Draws in each forward, also in evaluations, from the generators of torch, NumPy and Python."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(points) + np.random.rand() + random.random()
        return super().forward(points + 0.1 * noise)
