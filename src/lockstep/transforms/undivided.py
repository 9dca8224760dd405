"""What a model computed before its matrices were divided, from the parts that there are.

    divided      x --> W[:half] on rank 0, W[half:] on rank 1 --> ...
    undivided    x --> W, put together from both for this module's call alone --> ...     the same on each rank

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


class Undivided:
    """Attributes:
    now: what divides inputs and outputs of modules is to leave them alone. A backward may ask in another thread.
    """

    now = False


@contextmanager
def undivided(model: nn.Module) -> Iterator[None]:
    """While it lasts, each module puts its weights together when it is called, and again when a backward gets there.
    Gradients are those of the parameters, divided as they are. All ranks together."""
    modules: list[Any] = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    overridden = {module: module.__dict__["forward"] for module in modules if "forward" in module.__dict__}
    for module in modules:
        module.forward = partial(_with_whole_weights, module, module.forward)
    Undivided.now = True
    try:
        yield
    finally:
        Undivided.now = False
        for module in modules:
            del module.forward
        for module, forward in overridden.items():
            module.forward = forward


def _with_whole_weights(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not any(isinstance(one, DTensor) for one in module._parameters.values()):
        return forward(*args, **kwargs)
    once = partial(_gathered, module, forward)
    return checkpoint(once, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _gathered(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    held: dict[str, Any] = dict(module._parameters)
    slots: dict[str, Any] = module._parameters
    try:
        slots |= {name: one.full_tensor() for name, one in held.items() if isinstance(one, DTensor)}
        return forward(*args, **kwargs)
    finally:
        slots |= held
