"""Buffers that are state, such as running means: each rank's forwards change its own.

What a forward starts from, what is judged and what is saved are the first rank's, as under DistributedDataParallel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn


class SharedBuffers:
    """Buffers that belong to the model's state, not tables that every rank computes alike."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """`group`: of the ranks that have the same model; None: all."""
        self._group = group
        saved = set(model.state_dict())
        self._buffers = [buffer for name, buffer in model.named_buffers() if name in saved]
        self._update_begins = True

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def before_forward(self, last: bool) -> None:
        """Of a micro-batch; the first of an update starts from the first rank's.

        Args:
            last: it is the update's last.
        """
        if self._update_begins:
            self.synchronize()
        self._update_begins = last

    def synchronize(self) -> None:
        """The first rank's, to all."""
        for buffer in self._buffers:
            dist.broadcast(buffer, group=self._group, group_src=0)
