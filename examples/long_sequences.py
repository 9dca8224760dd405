"""Context parallelism for a custom model, each sequence on 2 ranks: `python examples/long_sequences.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

LENGTH, TOKENS, WIDTH = 512, 32, 32


def places(tokens: Tensor) -> Tensor:
    return lockstep.positions(tokens.shape[1], tokens.device)  # instead of torch.arange(tokens.shape[1])


class Reader(nn.Module):
    """tokens [B, T] -> logits [B, T, TOKENS]."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.looking = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(places(tokens))
        query, key, value = self.looking(x)[:, None].chunk(3, dim=-1)  # one head
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: Tensor = self.head(x + seen[:, 0])
        return logits


def main() -> None:
    texts = torch.arange(LENGTH + 1).repeat(64, 1).add(torch.arange(64)[:, None]).remainder(TOKENS)  # counting
    finished = lockstep.train(
        {
            "objective": {"kind": "next-token"},
            "batch": {"global_size": 8},
            "optim": {"lr": 0.01},
            "parallel": {"strategy": "ddp", "context": 2},
            "run": {"steps": 40},
        },
        model=Reader,
        train_dataset=TensorDataset(texts[:, :-1], texts[:, 1:]),
        ranks=2,
    )
    print(finished.summary["strategy"], f"loss {finished.summary['loss']:.3f}")


if __name__ == "__main__":
    main()
