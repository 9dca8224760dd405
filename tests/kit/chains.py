"""Models that a pipeline can be cut from, and some that it can't, and says why."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Takes its input by name, and something that is the same for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 9)
        self.outer = nn.Linear(9, 7)

    def forward(self, *, hidden: Tensor, scale: Tensor) -> tuple[Tensor, None]:
        return hidden + scale * self.outer(torch.tanh(self.inner(hidden))), None


class Chain(nn.Module):
    """Points in, four blocks, classes out. No size divides by two."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 7)
        self.offset = nn.Parameter(torch.zeros(7))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 3)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.lift(points) + self.offset
        scale = torch.full((), 0.5)
        for block in self.blocks:
            hidden, _ = block(hidden=hidden, scale=scale)
        return self.head(self.norm(hidden))


class WithNorms(Chain):
    """Keeps running means before, in and after its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7))  # type: ignore[assignment]
        self.norm = nn.BatchNorm1d(7)  # type: ignore[assignment]


def unequal() -> nn.Sequential:
    """What goes from layer to layer has another size each time."""
    sizes = (4, 9, 6, 11, 3)
    pairs = [(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair][:-1])


class HeadFirst(Chain):
    """Defines what comes after the blocks before them."""

    def __init__(self) -> None:
        super().__init__()
        head, blocks = self.head, self.blocks
        del self.head, self.blocks
        self.head = head
        self.blocks = blocks


class Skips(Chain):
    """Its blocks also take what came before the first."""

    def forward(self, points: Tensor) -> Tensor:
        hidden = start = self.lift(points) + self.offset
        for block in self.blocks:
            hidden, _ = block(hidden=hidden, scale=start.mean())
        return self.head(self.norm(hidden))


class Repeats(Chain):
    """Two of its blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].inner.weight = self.blocks[0].inner.weight  # type: ignore[union-attr]


class Widens(Chain):
    """A block makes another shape than it takes."""

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.lift(points) + self.offset
        for number, block in enumerate(self.blocks):
            hidden, _ = block(hidden=hidden, scale=torch.full((), 0.5))
            if number == 1:
                hidden = torch.cat([hidden, hidden])
        return self.head(self.norm(hidden))[: len(points)]
