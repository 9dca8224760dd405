"""Text of unequal lengths: samples with different numbers of valid targets."""

from __future__ import annotations

import random

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from lockstep.core.records import Batch

PADDING = 0


class Ragged(Dataset):
    """Byte strings between 2 and `longest` bytes, the same ones each time."""

    def __init__(self, samples: int = 40, longest: int = 24) -> None:
        draws = random.Random(7)
        self.texts = [
            torch.tensor([draws.randrange(1, 64) for _ in range(draws.randrange(3, longest + 2))])
            for _ in range(samples)
        ]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.texts[index]


def collate(texts: list[torch.Tensor]) -> Batch:
    """Padded to the batch's longest; padding is no target."""
    longest = max(len(text) for text in texts) - 1
    tokens = torch.full((len(texts), longest), PADDING)
    targets = torch.full((len(texts), longest), -100)
    for row, text in enumerate(texts):
        tokens[row, : len(text) - 1] = text[:-1]
        targets[row, : len(text) - 1] = text[1:]
    return Batch({"tokens": tokens}, targets, len(texts), int((targets >= 0).sum()))


def collate_in_sevens(texts: list[torch.Tensor]) -> Batch:
    """Padded to a multiple of seven tokens: odd and even lengths, but few, since each new shape costs a strategy that
    divides tensors a second."""
    batch = collate(texts)
    missing = -batch.targets.shape[1] % 7
    tokens = F.pad(batch.inputs["tokens"], (0, missing), value=PADDING)
    targets = F.pad(batch.targets, (0, missing), value=-100)
    return Batch({"tokens": tokens}, targets, batch.samples, batch.tokens)


def collate_aligned(texts: list[torch.Tensor]) -> Batch:
    """The same for models of the transformers library: the targets are the inputs, which the objective shifts."""
    longest = max(len(text) for text in texts)
    ids = torch.full((len(texts), longest), PADDING)
    mask = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
    return Batch(
        {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100), len(texts), int(mask.sum())
    )
