"""A dataset whose samples take a moment each, for runs in which something happens meanwhile."""

import time

import torch
from torch import Tensor

_SECONDS = 0.001


class SlowImages(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self._images = torch.rand(640, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(_SECONDS)
        return self._images[index], index % 10
