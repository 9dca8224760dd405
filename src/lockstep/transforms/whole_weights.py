"""Forwards with whole weights, gathered from the shards of a tensor-parallel model.

    divided          x --> W[:half] on rank 0, W[half:] on rank 1 --> ...
    whole weights    x --> W, gathered from both for this module's call alone --> ...     the same on each rank

It is for comparing: nowhere does it take more memory than one module's whole weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lockstep.distributed.forward_mode import ForwardMode


@contextmanager
def whole_weights(mode: ForwardMode, model: nn.Module) -> Iterator[None]:
    """Have each module gather its weights when it is called, and again in the backward, while the block runs. Gradients
    are those of the parameters, divided as they are. All ranks together."""
    modules: list[Any] = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    overridden = {module: module.__dict__["forward"] for module in modules if "forward" in module.__dict__}
    for module in modules:
        module.forward = partial(_with_whole_weights, module, module.forward)
    try:
        with mode.with_whole_weights():
            yield
    finally:
        for module in modules:
            del module.forward
        for module, forward in overridden.items():
            module.forward = forward


def _with_whole_weights(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
        return forward(*args, **kwargs)
    gather = partial(_gathered, module, forward)
    return checkpoint(gather, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _gathered(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    held: dict[str, Any] = dict(module._parameters)
    slots: dict[str, Any] = module._parameters
    try:
        slots |= {name: parameter.full_tensor() for name, parameter in held.items() if isinstance(parameter, DTensor)}
        return forward(*args, **kwargs)
    finally:
        slots |= held
