"""Models that see sequences, by what they know of positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep

WIDTH = 12


class Attending(nn.Module):
    """Learnt positions and one causal attention. tokens [B, T] -> logits [B, T, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.place = nn.Embedding(64, WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 64)

    def positions(self, tokens: Tensor) -> Tensor:
        return lockstep.positions(tokens.shape[1], tokens.device)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.place(self.positions(tokens))
        query, key, value = self.mixed(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: Tensor = self.head(x + seen.transpose(1, 2).flatten(2))
        return logits


class Unaware(Attending):
    """Takes its own tokens for the first ones."""

    def positions(self, tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[1])


class Neighbours(Attending):
    """Looks at the token before, in another way than by attention."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv1d(WIDTH, WIDTH, 2)
        self.embedding.register_forward_hook(self._look)

    def _look(self, module: nn.Module, inputs: object, x: Tensor) -> Tensor:
        return x + self.before(F.pad(x.transpose(1, 2), (1, 0))).transpose(1, 2)


class UnawareInTraining(Attending):
    """Takes its own tokens for the first ones while it trains."""

    def positions(self, tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[1]) if self.training else super().positions(tokens)


class Jittering(Attending):
    """Draws in training, for each position, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = nn.Buffer(torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        logits = F.dropout(super().forward(tokens), 0.5, self.training)
        return logits + 1e-3 * torch.rand(logits.shape) if self.training else logits


class Changing(Attending):
    """What it computes depends on how often it was called while it trained, and on what it was given before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self._lengths = 0, list[int]()

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self._lengths.append(tokens.shape[1])
        return super().forward(tokens) * (1 + 0.1 * self.calls + 0.01 * len(self._lengths))
