"""A small residual convolutional classifier of grey images.

    images [B, 1, height, width] -> stem -> blocks -> mean and maximum over pixels -> head -> logits [B, C]

    block:   x + conv(gelu(norm(conv(gelu(norm(x))))))

Group norm (Wu and He 2018, arXiv:1803.08494), not batch norm: a sample's loss must not depend on the samples that
happen to be computed with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.schema import ImageClassifierModel
from lockstep.models.initialization import Rule, constant, normal


class ImageClassifier(nn.Module):
    """Args:
    section: its shape.
    classes: number of classes.
    """

    def __init__(self, section: ImageClassifierModel, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, section.width, 3, padding=1)
        self.blocks = nn.ModuleList(ImageConvBlock(section.width) for _ in range(section.layers))
        self.norm = group_norm(section.width)
        self.dropout = nn.Dropout(section.dropout)
        self.head = nn.Linear(2 * section.width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """images [B, 1, height, width] float -> logits [B, C]."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        x = F.gelu(self.norm(x))
        logits: Tensor = self.head(self.dropout(torch.cat((x.mean(dim=(2, 3)), x.amax(dim=(2, 3))), dim=1)))
        return logits


class ImageConvBlock(nn.Module):
    """x [B, W, height, width] -> the same shape."""

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
    """Groups of 8 channels, or the nearest size that divides the width."""
    return nn.GroupNorm(width // math.gcd(width, 8), width)


def rule_of(name: str, tensor: Tensor) -> Rule:
    """Convolutions and the head normal with std sqrt(2 / inputs) (He et al. 2015, arXiv:1502.01852), a block's last one
    zero (it begins as the identity); norms one, biases zero."""
    if name.endswith("bias") or ".second." in name:
        return constant(0.0)
    if tensor.dim() == 1:
        return constant(1.0)
    return normal(math.sqrt(2 / tensor[0].numel()))
