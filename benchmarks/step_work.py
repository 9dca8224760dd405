"""The models that the contestants of step_overhead.py train: so small that the overhead of a step matters.

    mlp      64 -> 64 -> 10, batch 8, from tensors     forward and backward take about 0.1 ms
    items    the same from a dataset of dicts
    images   a small CNN, uint8 -> float in the dataset
    gpt      GPT-2's shape, made small                 about 8 ms a step

The stopwatch is in the model: each forward notes the time, in the same way for all contestants and without callbacks.
A step lasts from one forward to the next.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

CLIP_NORM = 1.0
WEIGHT_DECAY = 0.01


class Stopwatch:
    """The times at which each forward began."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def note(self) -> None:
        self.times.append(time.perf_counter())

    def microseconds(self, first: int, last: int) -> float:
        """Return the duration of a step, over those from forward `first` to forward `last`."""
        return (self.times[last] - self.times[first]) / (last - first) * 1e6


class MLP(nn.Module):
    """x [B, 64] -> logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = Stopwatch()
        self.inner = nn.Linear(64, 64)
        self.outer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        self.watch.note()
        return self.outer(F.relu(self.inner(x)))


class CNN(nn.Module):
    """x [B, 3, 32, 32] -> logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = Stopwatch()
        self.first = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.second = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        self.watch.note()
        return self.head(F.relu(self.second(F.relu(self.first(x)))).mean((2, 3)))


class GPT(nn.Module):
    """tokens [B, T] -> logits [B, T, V]; learned positions, layer norms, biases, GELU, tied head."""

    def __init__(
        self, layers: int = 4, width: int = 64, heads: int = 4, length: int = 32, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.watch = Stopwatch()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        self.watch.note()
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """x [B, T, W] -> [B, T, W]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.attention(self.attention_norm(x)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over targets; logits [..., V], targets [...]."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Rows(Dataset[dict[str, Tensor]]):
    """Samples by name, as most people's datasets and the Trainer of transformers have them."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": decoded(self.x[index]), "labels": self.y[index]}


def decoded(x: Tensor) -> Tensor:
    """Return points as they are, and images in [0, 1]."""
    return x.float() / 255 if x.dtype == torch.uint8 else x


@dataclass(frozen=True)
class Work:
    """A model with its data and settings.

    Attributes:
        data: (samples) -> inputs and targets.
        dataset: Of these; peers have the same one.
        batch: Samples per rank and step.
        warm_up: Steps that are not timed.
        objective: Lockstep's name for what `loss_of` computes.
    """

    title: str
    model: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    batch: int
    steps: int
    warm_up: int
    rate: float
    objective: str
    dataset: Callable[[Tensor, Tensor], Dataset[Any]] = TensorDataset


def points(samples: int) -> tuple[Tensor, Tensor]:
    """Return points [samples, 64] and the classes [samples] that a fixed random projection gives them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 64, generator=generator)
    return x, (x @ torch.randn(64, 10, generator=generator)).argmax(-1)


def images(samples: int) -> tuple[Tensor, Tensor]:
    """Return noise [samples, 3, 32, 32] (uint8), brighter in the classes [samples] of higher numbers."""
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(10, (samples,), generator=generator)
    noise = torch.randint(128, (samples, 3, 32, 32), generator=generator)
    return (noise + 12 * y.view(-1, 1, 1, 1)).to(torch.uint8), y


def text(samples: int, length: int = 32) -> tuple[Tensor, Tensor]:
    """Return bytes of the standard library's source [samples, length], and the bytes after them."""
    content, files = b"", sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    while len(content) <= samples * length:
        content += files.pop(0).read_bytes()
    stream = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    return stream[: samples * length].view(-1, length), stream[1 : samples * length + 1].view(-1, length)


WORKS = {
    "mlp": Work("a two-layer MLP of width 64, batch 8", MLP, points, 8, 2000, 200, 1e-3, "classification"),
    "items": Work("the MLP, from a dataset of dicts", MLP, points, 8, 2000, 200, 1e-3, "classification", Rows),
    "images": Work(
        "a small CNN, from a dataset of images, batch 16", CNN, images, 16, 400, 50, 1e-3, "classification", Rows
    ),
    "gpt": Work("a GPT-2-shaped model of about 8 ms", GPT, text, 4, 300, 50, 1e-3, "next-token"),
}
