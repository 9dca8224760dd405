"""Activation offload: activations are kept in the host's memory until the backward needs them.

forward     block --> activation --copied--> host (page-locked)     the GPU's copy is freed
backward                         <--copied-- host

With activation checkpointing, blocks' inputs are copied, and activations that are computed again stay on the GPU, as do
weights and small tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from lockstep.core.protocols import Transform

_SMALL = 1 << 16
"""Bytes below which a copy takes longer to start than it saves."""


class OffloadActivations(Transform):
    """Replaces the model's forward by one that offloads."""

    name = "memory.activation_offload"
    after = ("parallel.ddp.sync_batchnorm", "memory.activation_checkpointing")

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        return None  # the plan refuses it without GPUs

    def apply(self, model: nn.Module) -> nn.Module:
        cast("Any", model).forward = partial(_offloaded, model.forward, torch.accelerator.is_available())
        return model


def _offloaded(forward: Callable[..., Any], pinned: bool, *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    with ActivationsOnHost(pinned=pinned):
        return forward(*inputs, **named)


class ActivationsOnHost(saved_tensors_hooks):
    """A context in which tensors that autograd saves for the backward are saved in the host's memory.

    Args:
        pinned: Whether that memory is page-locked, from which copies are fast.

    Attributes:
        bytes: Number of bytes that were copied there.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.bytes = 0
        copying = save_on_cpu(pin_memory=pinned)

        def put(tensor: Tensor) -> object:
            # a product may save a view of a weight, which stays on the device anyway
            is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
            if tensor.nbytes < _SMALL or is_weight:
                return tensor
            self.bytes += tensor.nbytes
            return copying.pack_hook(tensor)

        def get(kept: Any) -> Tensor:
            return kept if isinstance(kept, Tensor) else copying.unpack_hook(kept)

        super().__init__(put, get)
