"""What the backward needs waits in the host's memory.

forward     block --> activation --copied--> host (page-locked)     the GPU's copy is let go
backward                         <--copied-- host

With activation checkpointing it is blocks' inputs that are copied, and what is computed again stays where it is.
Weights and small tensors stay, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

_SMALL = 1 << 16
"""Bytes below which a copy takes longer to start than it saves."""


class OffloadActivations:
    """Replaces the model's forward."""

    name = "memory.activation_offload"
    after = ("parallel.ddp.sync_batchnorm", "memory.activation_checkpointing")

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        return None  # that it is for GPUs is known from the plan

    def apply(self, model: nn.Module) -> nn.Module:
        cast("Any", model).forward = partial(_offloaded, model.forward, torch.cuda.is_available())
        return model


def _offloaded(forward: Callable[..., Any], pinned: bool, *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    with ActivationsOnHost(pinned=pinned):
        return forward(*inputs, **named)


class ActivationsOnHost(saved_tensors_hooks):
    """While it is entered, what is saved for a backward is saved in the host's memory.

    Args:
        pinned: page-locked, from which copies are fast.

    Attributes:
        bytes: that were copied there.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.bytes = 0
        copying = save_on_cpu(pin_memory=pinned)

        def put(tensor: Tensor) -> object:
            if tensor.nbytes < _SMALL or _is_weight(tensor):
                return tensor
            self.bytes += tensor.nbytes
            return copying.pack_hook(tensor)

        def get(kept: Any) -> Tensor:
            return kept if isinstance(kept, Tensor) else copying.unpack_hook(kept)

        super().__init__(put, get)


def _is_weight(tensor: Tensor) -> bool:
    """Or a view of one, such as a product saves: it stays on the device anyway."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
