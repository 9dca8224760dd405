"""Convolutional classifiers of grayscale images, and of byte or token sequences.

    images [B, 1, height, width] -> stem -> blocks -> mean and maximum over pixels -> head -> logits [B, C]
    tokens [B, T] -> embedding -> stem [B, T/2, W] -> block -> halve [B, T/4, W] -> block -> ...
                  -> max and mean over positions -> head -> logits [B, C]

Group norm (Wu and He 2018, arXiv:1803.08494), not batch norm: a sample's loss must not depend on other samples. Padding
of a text is zeroed before each convolution and excluded from pooling.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.schema import ImageClassifierModel, TextClassifierModel
from lockstep.models.initialization import Rule, constant, normal


class ImageClassifier(nn.Module):
    """A residual network of images."""

    def __init__(self, section: ImageClassifierModel, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, section.width, 3, padding=1)
        self.blocks = nn.ModuleList(ImageConvBlock(section.width) for _ in range(section.layers))
        self.norm = group_norm(section.width)
        self.dropout = nn.Dropout(section.dropout)
        self.head = nn.Linear(2 * section.width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, C] for images [B, 1, height, width] float."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        x = F.gelu(self.norm(x))
        logits: Tensor = self.head(self.dropout(torch.cat((x.mean(dim=(2, 3)), x.amax(dim=(2, 3))), dim=1)))
        return logits


class ImageConvBlock(nn.Module):
    """A residual block; x [B, W, height, width] -> the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm = group_norm(width)
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = group_norm(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(F.gelu(self.first_norm(x)))
        change: Tensor = self.second(F.gelu(self.second_norm(h)))
        return x + change


def group_norm(width: int) -> nn.GroupNorm:
    """Return a norm with groups of 8 channels, or the nearest size that divides the width."""
    return nn.GroupNorm(width // math.gcd(width, 8), width)


def image_rule(name: str, tensor: Tensor) -> Rule:
    """Return the rule of a parameter's initial values.

    Convolutions and the head are normal with std sqrt(2 / inputs) (He et al. 2015, arXiv:1502.01852), except the last
    one of a block, which is zero, so that the block begins as the identity; norms are one, biases zero.
    """
    return _rule(name, tensor, math.sqrt(2 / tensor[0].numel()))


class TextClassifier(nn.Module):
    """A residual network of token sequences."""

    def __init__(self, section: TextClassifierModel, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, section.width)
        self.stem = nn.Conv1d(section.width, section.width, section.kernel, stride=2)
        self.blocks = nn.ModuleList(TextConvBlock(section.width, section.kernel) for _ in range(section.layers))
        self.norm = nn.LayerNorm(section.width)
        self.dropout = nn.Dropout(section.dropout)
        self.head = nn.Linear(2 * section.width, classes)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits [B, C] for tokens [B, T] int64 and mask [B, T] bool (false: padding behind the text)."""
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
        """Return [B, ceil(T/2), W] for [B, T, W], output i around input 2 i."""
        around = self.stem.kernel_size[0] - 1
        padded = F.pad(x.transpose(1, 2), (around // 2, around - around // 2))
        return F.gelu(self.stem(padded)).transpose(1, 2)


class TextConvBlock(nn.Module):
    """A residual block; x [B, T, W], valid [B, T, 1] -> [B, T, W]."""

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
    """Return the larger of two neighbors, ignoring padding: [B, ceil(T/2), W] for [B, T, W] and [B, T, 1]."""
    lowest = torch.finfo(x.dtype).min
    x = F.pad(x.masked_fill(~valid, lowest), (0, 0, 0, x.shape[1] % 2), value=lowest)
    samples, length, width = x.shape
    return x.view(samples, length // 2, 2, width).amax(dim=2).masked_fill(~valid[:, ::2], 0)


def pool(x: Tensor, valid: Tensor) -> Tensor:
    """Return maximum and mean over the valid positions, [B, 2 W]; zeros for an empty text."""
    maximum = x.masked_fill(~valid, torch.finfo(x.dtype).min).amax(dim=1)
    maximum = maximum.masked_fill(~valid.any(dim=1), 0)
    mean = (x * valid).sum(dim=1) / valid.sum(dim=1).clamp(min=1)
    return torch.cat((maximum, mean), dim=1)


def text_rule(name: str, tensor: Tensor) -> Rule:
    """Return the rule of `image_rule` with std sqrt(1 / inputs), or 1 for embeddings."""
    return _rule(name, tensor, 1.0 if name.startswith("embedding") else tensor[0].numel() ** -0.5)


def _rule(name: str, tensor: Tensor, std: float) -> Rule:
    if name.endswith("bias") or ".second." in name:
        return constant(0.0)
    return constant(1.0) if tensor.dim() == 1 else normal(std)
