"""Activation checkpointing: a block keeps its inputs alone, and what its backward needs is computed from them again.

                 forward                               backward
    kept         x -> block -> y     all in between    x <- gradients of the block
    recomputed   x -> block -> y     x                 x -> block again, with the draws and autocast it had -> gradients

A block's own `forward` is replaced, so that no name changes, and FSDP's hooks lie around it: what it gathers for a
block's backward is there when the block is computed again (Chen et al. 2016, arXiv:1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from lockstep.config.schema import ActivationCheckpointing

Unheard = Callable[[], AbstractContextManager[object]]
_CHANGED_BY_FORWARD = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class RecomputeBlocks:
    """Args:
    options: which blocks, and what of them.
    blocks: names of the model's repeated layers.
    unheard: makes the context of the second forward: what user code logs in it was heard in the first.
    """

    def __init__(self, options: ActivationCheckpointing, blocks: Sequence[str], unheard: Unheard = nullcontext) -> None:
        self._chosen = blocks[:: options.every]
        self._unheard = unheard

    name = "memory.activation_checkpointing"
    after = ("parallel.ddp.sync_batchnorm",)

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        if not self._chosen:
            return (
                f"a {type(model).__name__} has no repeated blocks: a ModuleList or Sequential of layers of one class; "
                "give it such a list, or leave memory.activation_checkpointing out"
            )
        for block in self._chosen:
            for name, module in model.get_submodule(block).named_modules(prefix=block):
                if isinstance(module, _CHANGED_BY_FORWARD) and module.track_running_stats:
                    return (
                        f"{name} keeps running means, which a second forward would count twice; take a norm without "
                        "them, such as group norm, or leave memory.activation_checkpointing out"
                    )
        return None

    def apply(self, model: nn.Module) -> nn.Module:
        for name in self._chosen:
            block = model.get_submodule(name)
            # A partial of the bound method: a copy of the model has one of its own
            block.forward = partial(_recomputed, block.forward, self._unheard)
        return model


def _recomputed(forward: Callable[..., Any], unheard: Unheard, *inputs: Any, **named: Any) -> Any:
    """What `forward` returns."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    # torch looks for tensors, whose device's draws it keeps, among the positional inputs alone
    call = partial(_call, forward, tuple(named)) if named else forward
    further: Mapping[str, Any] = {} if torch.compiler.is_compiling() else {"context_fn": lambda: (_HEARD, unheard())}
    return checkpoint(call, *inputs, *named.values(), use_reentrant=False, preserve_rng_state=True, **further)


def _call(forward: Callable[..., Any], names: tuple[str, ...], *inputs: Any) -> Any:
    """The last inputs go in by name."""
    first = len(inputs) - len(names)
    return forward(*inputs[:first], **dict(zip(names, inputs[first:], strict=True)))


_HEARD: AbstractContextManager[object] = nullcontext()
