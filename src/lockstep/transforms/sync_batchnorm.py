"""Batch norm over the samples of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lockstep.core.protocols import Transform

if TYPE_CHECKING:
    import torch


class SyncBatchNorm(Transform):
    """Replaces batch norms by torch's SyncBatchNorm."""

    name = "parallel.ddp.sync_batchnorm"

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        if device.type == "cpu":
            return "torch's SyncBatchNorm needs GPUs; on the CPU, group norm does not depend on the batch at all"
        return None

    def apply(self, model: nn.Module) -> nn.Module:
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted
