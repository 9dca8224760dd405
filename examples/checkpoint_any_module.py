"""Activation checkpointing of any module, in a custom loop: `python examples/checkpoint_any_module.py`."""

from __future__ import annotations

import torch
from torch import nn

import lockstep


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return x + scale * self.inner(x)


class Model(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


model = Model()
made = lockstep.checkpoint_activations(model, blocks=[Block], every=1)
print(made)  # activation checkpointing, full: blocks.0, blocks.1, blocks.2 and 9 more
model(torch.randn(8, 32)).square().mean().backward()
