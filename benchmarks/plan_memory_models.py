"""Models for `plan_memory.py` that are unlike the built-in ones: convolutions, recurrence, buffers, tied weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

TOKENS, LENGTH, CLASSES = 256, 48, 10


class Convolutions(nn.Module):
    """A residual network with batch norm, whose running means are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Recurrent(nn.Module):
    """An LSTM over tokens, with a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 64)
        self.layers = nn.LSTM(64, 96, num_layers=2, batch_first=True)
        self.register_buffer("weights", torch.linspace(0, 1, LENGTH)[None, :, None])
        self.head = nn.Linear(96, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.layers(self.embedding(x))
        return self.head((hidden * self.weights).mean(1))


class Tied(nn.Module):
    """A decoder without attention, whose embedding is also its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(3)
        )
        self.head = nn.Linear(128, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).mean(1)


class LowRank(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices beside it (LoRA, arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    """Return a frozen decoder of the transformers library, in which adapters alone are trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512, use_cache=False))
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name)))
    return model


class Pairs(Dataset[Any]):
    """Texts to translate: a target is shorter than its source."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(2, TOKENS, (LENGTH + LENGTH // 2,), generator=generator)
        return {
            "input_ids": ids[:LENGTH],
            "attention_mask": torch.ones(LENGTH, dtype=torch.int64),
            "labels": ids[LENGTH:],
        }


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(3, 24, 24, generator=generator), "labels": torch.tensor(index % CLASSES)}


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randint(TOKENS, (LENGTH,), generator=generator),
            "labels": torch.tensor(index % CLASSES),
        }
