"""Models and data as they often are: a nanoGPT-like model, (X, Y) arrays, string labels.

python examples/nanogpt.py
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep

CONFIG = {"batch": {"global_size": 16}, "optim": {"lr": 0.01}, "run": {"steps": 20}}


class GPT(nn.Module):
    """Returns (logits, loss): a forward that takes `targets` gets them, and its loss is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(128, 32), nn.Linear(32, 128)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1], device=idx.device)
        logits = self.head(self.block(self.embed(idx), src_mask=mask, is_causal=True))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def main() -> None:
    text = torch.tensor(list(b"to be, or not to be, that is the question: " * 20))
    windows = text.unfold(0, 33, 8)
    inputs, targets = windows[:, :-1], windows[:, 1:].contiguous()
    finished = lockstep.train(CONFIG, model=GPT, train_dataset=(inputs, targets))
    print(f"(logits, loss): {finished.summary['loss']:.3f}")

    points = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    names = np.where(points.sum(axis=1) > 0, "cat", "dog")
    known, classes = np.unique(names, return_inverse=True)  # string labels become numbers
    finished = lockstep.train(
        CONFIG,
        model=lambda: nn.Linear(4, len(known)),
        train_dataset=(points, classes),  # for columns by name: {"input": points, "label": classes}
        objective=nn.CrossEntropyLoss(),
    )
    print(f"arrays: {finished.summary['loss']:.3f}")


if __name__ == "__main__":
    main()
