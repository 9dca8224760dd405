"""Models that a pipeline can partition, and some that it refuses with a reason."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lockstep

TENSOR_PLAN = {
    "lift": "colwise_gather_output",
    "blocks.*.inner": "colwise_gather_output",
    "blocks.*.outer": "rowwise_split_input",
    "head": "colwise_gather_output",
}
"""Of a Chain; none of these has a size that two ranks could halve."""


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


class Spare(Chain):
    """Has a layer that its forward never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)


class WithNorms(Chain):
    """Keeps running means before, in and after its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7))  # type: ignore[assignment]
        self.norm = nn.BatchNorm1d(7)  # type: ignore[assignment]


class Centering(nn.Linear):
    """Subtracts the running mean of its inputs, which its training forwards replace or change in place."""

    def __init__(self, inputs: int, outputs: int, *, replaces: bool) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("center", torch.zeros(inputs))
        self._replaces = replaces

    def forward(self, points: Tensor) -> Tensor:
        centered = super().forward(points - self.center)
        if self.training:
            share = 0.3 * points.detach().mean(0)
            if self._replaces:
                self.center = 0.7 * self.center + share
            else:
                self.center.mul_(0.7).add_(share)
        return centered


class Centered(Chain):
    """Keeps running means before its blocks and after them."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.lift = Centering(4, 7, replaces=replaces)
        self.head = Centering(7, 3, replaces=replaces)


class Counting(nn.Linear):
    """Counts its training forwards in a buffer that each of them replaces."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, points: Tensor) -> Tensor:
        self.forwards = self.forwards + self.training
        return super().forward(points)


class Counted(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.lift = Counting(4, 7)


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


class Telling(Chain):
    """Logs means of what it computes before, in and after its blocks."""

    def __init__(self) -> None:
        super().__init__()
        for name, module in (("before", self.lift), ("in", self.blocks[1]), ("after", self.norm)):
            module.register_forward_hook(partial(self._tell, name))

    def _tell(self, name: str, module: nn.Module, given: object, made: Any) -> None:
        values = made[0] if isinstance(made, tuple) else made
        if self.training:
            lockstep.log.mean(name, values.detach().sum(), values.numel())


class BothSides(Chain):
    """Adds its offset before the blocks and after them."""

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.lift(points) + self.offset
        for block in self.blocks:
            hidden, _ = block(hidden=hidden, scale=torch.full((), 0.5))
        return self.head(self.norm(hidden + self.offset))


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


class Between(Chain):
    """Its forward computes something between two blocks."""

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.lift(points) + self.offset
        for block in self.blocks:
            hidden = hidden + block(hidden=hidden, scale=torch.full((), 0.5))[0]
        return self.head(self.norm(hidden))


class InPlace(Chain):
    """Its forward changes what one block has made before the next is given it."""

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.lift(points) + self.offset
        for block in self.blocks:
            hidden, _ = block(hidden=hidden, scale=torch.full((), 0.5))
            hidden.add_(0.1)
        return self.head(self.norm(hidden))


class InTraining(Chain):
    """Its forward computes something between two blocks in training alone."""

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.lift(points) + self.offset
        for block in self.blocks:
            hidden, _ = block(hidden=hidden, scale=torch.full((), 0.5))
            hidden = hidden * 0.5 if self.training else hidden
        return self.head(self.norm(hidden))


class LeavesOut(Chain):
    """Two of its blocks are never met."""

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.lift(points) + self.offset
        for block in self.blocks[:2]:
            hidden, _ = block(hidden=hidden, scale=torch.full((), 0.5))
        return self.head(self.norm(hidden))


class Keeps(Chain):
    """What it makes before the blocks is used behind them, too."""

    def forward(self, points: Tensor) -> Tensor:
        hidden = start = self.lift(points) + self.offset
        for block in self.blocks:
            hidden, _ = block(hidden=hidden, scale=torch.full((), 0.5))
        return self.head(self.norm(hidden + start))


class Twice(Chain):
    """It goes through each block a second time."""

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.lift(points) + self.offset
        for block in self.blocks:
            for _ in range(2):
                hidden, _ = block(hidden=hidden, scale=torch.full((), 0.5))
        return self.head(self.norm(hidden))


class Turned(nn.Module):
    """Passes on a tensor that isn't contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Turning() for _ in range(4))
        self.head = nn.Linear(4, 3)

    def forward(self, points: Tensor) -> Tensor:
        hidden = points[:, None, :].expand(-1, 4, -1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(dim=1))


class _Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.inner(hidden)).transpose(1, 2)
