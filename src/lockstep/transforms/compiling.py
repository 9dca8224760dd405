"""torch.compile, in place: parameters keep their names."""

from __future__ import annotations

import torch
from torch import nn
from torch._functorch import config as functorch  # its only home, though documented


class Compile:
    """Args:
    compute: the precision of autocast; None for fp32.
    budget: share of the activation memory that torch's partitioner may keep; 1: what it likes.
    """

    def __init__(self, compute: torch.dtype | None, budget: float = 1.0) -> None:
        self._compute = compute
        self._budget = budget

    name = "model.compile"
    after = ("parallel.ddp.sync_batchnorm", "memory.activation_checkpointing", "memory.activation_offload")

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        grouped = any(isinstance(module, nn.GroupNorm) for module in model.modules())
        if grouped and device.type == "cpu" and self._compute is torch.bfloat16:
            return (  # seen in torch 2.13: the compiled backward gives NaN where the eager one doesn't
                "torch's CPU compiler gets the gradient of group norm in bf16 wrong; "
                "set precision.compute: fp32, or model.compile: false"
            )
        return None

    def apply(self, model: nn.Module) -> nn.Module:
        functorch.activation_memory_budget = self._budget  # of the process: read when the first forward is compiled
        model.compile()
        return model
