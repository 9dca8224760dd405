"""A convolutional classifier of byte or token sequences.

    tokens [B, T] -> embedding -> stem [B, T/2, W] -> block -> halve [B, T/4, W] -> block -> ...
                  -> max and mean over positions -> head -> logits [B, C]

    stem:    gelu(conv), every second position
    block:   x + conv(gelu(conv(norm(x))))      norm over the width alone, position by position
    halve:   the larger of two neighbours

Padding, which lies behind the text, is zeroed before each convolution and left out of all that pools: how far a batch
is padded doesn't change a sample's logits. Halving makes an update take half the time; on the functions of the standard
library it reached 84 % in 50 s of one core, where full length was at 80 %.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.schema import TextClassifierModel
from lockstep.models.initialization import Rule, constant, normal


class TextClassifier(nn.Module):
    """Args:
    section: its shape.
    vocabulary: number of token ids.
    classes: number of classes.
    """

    def __init__(self, section: TextClassifierModel, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, section.width)
        self.stem = nn.Conv1d(section.width, section.width, section.kernel, stride=2)
        self.blocks = nn.ModuleList(TextConvBlock(section.width, section.kernel) for _ in range(section.layers))
        self.norm = nn.LayerNorm(section.width)
        self.dropout = nn.Dropout(section.dropout)
        self.head = nn.Linear(2 * section.width, classes)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """tokens [B, T] int64, mask [B, T] bool (true: a token, false: padding behind the text; none: no padding) ->
        logits [B, C]."""
        valid = (torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask).unsqueeze(-1)
        x = self._stem(self.embedding(tokens) * valid)
        valid = valid[:, ::2]
        for index, block in enumerate(self.blocks):
            if index:
                x, valid = halve(x, valid), valid[:, ::2]
            x = block(x, valid)
        logits: Tensor = self.head(self.dropout(pool(self.norm(x), valid)))
        return logits

    def _stem(self, x: Tensor) -> Tensor:
        """[B, T, W] -> [B, ceil(T/2), W], output i around input 2 i."""
        around = self.stem.kernel_size[0] - 1
        padded = F.pad(x.transpose(1, 2), (around // 2, around - around // 2))
        return F.gelu(self.stem(padded)).transpose(1, 2)


class TextConvBlock(nn.Module):
    """x [B, T, W], valid [B, T, 1] -> [B, T, W]."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Conv1d(width, width, kernel, padding="same")
        self.second = nn.Conv1d(width, width, kernel, padding="same")

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        h = self.norm(x) * valid
        h = F.gelu(self.first(h.transpose(1, 2))) * valid.transpose(1, 2)
        change: Tensor = self.second(h).transpose(1, 2)
        return x + change


def halve(x: Tensor, valid: Tensor) -> Tensor:
    """[B, T, W] and [B, T, 1] -> [B, ceil(T/2), W]: the larger of two neighbours; padding is the smaller of any two."""
    lowest = torch.finfo(x.dtype).min
    x = F.pad(x.masked_fill(~valid, lowest), (0, 0, 0, x.shape[1] % 2), value=lowest)
    samples, length, width = x.shape
    return x.view(samples, length // 2, 2, width).amax(dim=2).masked_fill(~valid[:, ::2], 0)


def pool(x: Tensor, valid: Tensor) -> Tensor:
    """Maximum and mean over the valid positions: [B, T, W] and [B, T, 1] -> [B, 2 W]. A text of none gives zeros."""
    most = x.masked_fill(~valid, torch.finfo(x.dtype).min).amax(dim=1)
    most = most.masked_fill(~valid.any(dim=1), 0)
    mean = (x * valid).sum(dim=1) / valid.sum(dim=1).clamp(min=1)
    return torch.cat((most, mean), dim=1)


def rule_of(name: str, tensor: Tensor) -> Rule:
    """Convolutions and the head normal with std sqrt(1 / inputs), a block's last one zero (it begins as the identity);
    embeddings normal with std 1; norms one, biases zero."""
    if name.endswith("bias") or ".second." in name:
        return constant(0.0)
    if tensor.dim() == 1:
        return constant(1.0)
    return normal(1.0 if name.startswith("embedding") else tensor[0].numel() ** -0.5)
