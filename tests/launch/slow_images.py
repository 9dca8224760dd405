"""A dataset whose samples take a moment each, for runs in which something happens meanwhile."""

import time

import torch
from torch import Tensor


class SlowImages(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self, seconds: float = 0.001) -> None:
        self._seconds = seconds
        self._images = torch.rand(640, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self._seconds)
        return self._images[index], index % 10
