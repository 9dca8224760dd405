"""Models and a dataset that request more memory than there is, each at another place of a run."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

PEBIBYTE = 1 << 50
SAMPLE_BYTES = 160 << 20
TOUCHED_BYTES = 512 << 20
ROOM = 1 << 30


class Greedy(nn.Module):
    """Asks for a pebibyte at `where`, on rank `rank`."""

    def __init__(self, where: str = "", rank: int = 0) -> None:
        super().__init__()
        self.where = where if int(os.environ.get("RANK", "0")) == rank else ""
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.limited = False
        if where == "init":
            torch.empty(PEBIBYTE, dtype=torch.uint8)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward" or (self.where == "evaluation" and not self.training):
            torch.empty(PEBIBYTE, dtype=torch.uint8)
        if self.where == "limit":
            self._use_memory(len(x))
        if self.where == "group":
            torch.ones(len(x), TOUCHED_BYTES, dtype=torch.uint8)
        if self.where == "hog":
            self.held: list[Tensor] = []
            while True:
                self.held.append(torch.ones(16 << 20, dtype=torch.uint8))
        for block in self.blocks:
            x = block(x)
        return _Backward.apply(x) if self.where == "backward" else x  # type: ignore[no-any-return,no-untyped-call]

    def _use_memory(self, samples: int) -> None:
        """Of a process that may use a gibibyte more than it had at its first forward."""
        if not self.limited:
            line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line)
            limit = int(line.split()[1]) * 1024 + ROOM
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            self.limited = True
        torch.empty(samples, SAMPLE_BYTES, dtype=torch.uint8)


class Crowded(Greedy):
    """Memory of rank 0 runs out with more than two samples, from forward `begins` on, as often as a file has it.

    Args:
        neighbor: A file with the number of times that are left; another process has the memory while it exists.
    """

    def __init__(self, neighbor: str, begins: int) -> None:
        super().__init__()
        self.neighbor = Path(neighbor)
        self.left = begins - 1

    def forward(self, x: Tensor) -> Tensor:
        is_first = os.environ.get("RANK", "0") == "0"
        self.left -= 1
        if is_first and self.left < 0 and len(x) > 2 and self.neighbor.exists():
            times = int(self.neighbor.read_text()) - 1
            self.neighbor.write_text(str(times)) if times else self.neighbor.unlink()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return super().forward(x)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if "RANK" in os.environ:  # a simulation, which is no rank, gets through
            bytearray(PEBIBYTE)
        return gradient


class Items(Dataset[Any]):
    """64 items; item `bad` can't be read, or asks for a pebibyte."""

    def __init__(self, bad: int = -1, memory: bool = False) -> None:
        self.bad = bad
        self.memory = memory

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.bad:
            if self.memory:
                bytearray(PEBIBYTE)
            raise ValueError("no such image")
        return torch.full((8,), float(index)), index % 8
