"""An evaluation set and a model that interrupt the process that evaluates, once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from kit import small
from kit.drawing import Noisy
from torch import Tensor
from torch.utils.data import Dataset


class Interrupting(Dataset):
    """`small.points`; the evaluation number `at` is interrupted on one rank by SIGTERM, or by an exception."""

    def __init__(self, how: str, rank: int, at: int, marker: str) -> None:
        self._points = small.points(12, 1)
        self._how = how
        self._is_here = rank == int(os.environ.get("RANK", "0"))
        self._at = at
        self._marker = Path(marker)
        self._read = 0
        self._interrupts = False

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self._read += not torch.is_grad_enabled()  # not when the set is inspected
        earlier = (self._at - 1) * len(self) // int(os.environ.get("WORLD_SIZE", "1"))
        if self._read == earlier + 1 and self._is_here and not self._marker.exists():
            self._marker.touch()
            self._interrupts = True
            if self._how == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
        if self._interrupts and self._how == "raise":
            raise ValueError("planted")
        return self._points[index]


class Killed(Noisy):
    """Kills rank 1 in its second forward of an evaluation."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self._marker = Path(marker)
        self._forwards = 0

    def forward(self, points: Tensor) -> Tensor:
        self._forwards += not self.training and "RANK" in os.environ
        if self._forwards == 2 and os.environ["RANK"] == "1" and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(points)
