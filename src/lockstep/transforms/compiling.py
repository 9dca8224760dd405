"""torch.compile, in place: parameters keep their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


class Compile:
    name = "model.compile"
    after = ("parallel.ddp.sync_batchnorm",)

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        return None

    def apply(self, model: nn.Module) -> nn.Module:
        model.compile()
        return model
