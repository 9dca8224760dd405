"""Buffers that are state, such as running means: each rank's forwards change its own.

What a forward starts from, what is judged and what is saved are the first rank's, as under DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor, nn


def saved_buffers(model: nn.Module) -> list[Tensor]:
    """Buffers that belong to the model's state, not tables that every rank computes alike."""
    saved = set(model.state_dict())
    return [buffer for name, buffer in model.named_buffers() if name in saved]


def broadcast_buffers(buffers: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """The first rank's, to all."""
    for buffer in buffers:
        dist.broadcast(buffer, group=group, group_src=0)
