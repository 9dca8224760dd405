"""torch.compile, in place: parameters keep their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._functorch import config as functorch  # its only home, though documented

from lockstep.core.protocols import Transform


class Compile(Transform):
    """Compiles a model.

    Args:
        compute: The precision of autocast; None for fp32.
        budget: The share of the activation memory that torch's partitioner may keep; None: no limit.
    """

    name = "model.compile"
    after = ("parallel.ddp.sync_batchnorm", "memory.activation_checkpointing", "memory.activation_offload")

    def __init__(self, compute: torch.dtype | None, budget: float | None = None) -> None:
        self._compute = compute
        self._budget = budget

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        grouped = any(isinstance(module, nn.GroupNorm) for module in model.modules())
        if grouped and device.type == "cpu" and self._compute is torch.bfloat16:
            return (  # in torch 2.13 the compiled backward gives NaN where the eager one doesn't
                "torch's CPU compiler gets the gradient of group norm in bf16 wrong; "
                "set precision.compute: fp32, or model.compile: false"
            )
        return None

    def apply(self, model: nn.Module) -> nn.Module:
        model.compile()
        if self._budget is not None:
            compiled: Any = model
            compiled._compiled_call_impl = partial(_within_budget, self._budget, compiled._compiled_call_impl)
        return model


def _within_budget(budget: float, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a compiled model with torch's memory budget, which is process-wide and read when a graph is compiled."""
    with cast("Any", functorch).patch(activation_memory_budget=budget):
        return call(*args, **kwargs)
