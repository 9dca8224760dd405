"""Errors for a model that uses weights where they are not whole, or calls `block.forward(x)`, which runs no hooks."""

from __future__ import annotations

import re
import traceback

from torch import nn

from lockstep.core.errors import ConfigError, Problem

_OF_FSDP = re.compile(r"mixed torch.Tensor and DTensor|out of bounds for storage of size 0")
_OF_ZERO3 = re.compile(r"'ds_|_in_forward|PostBackwardFunction|\[0\]|\(0\)|mat2 must be a matrix|and 0x|x0\b")
"""torch's messages about weights of 0 elements, and about hooks of DeepSpeed in transformed or compiled modules."""


def forward_called(name: str, key: str, remedy: str = "") -> ConfigError:
    """Return the error for a direct call of a module's forward, without the hooks that `key` needs."""
    why = f"the model calls {name}.forward by itself, so that hooks don't run; call the module, {name}(...){remedy}"
    return ConfigError(Problem("", key, why))


def not_gathered(model: nn.Module, error: Exception) -> ConfigError | None:
    """Return the error for weights that are used while fsdp or ZeRO 3 has them sharded; None: it has other reasons."""
    is_zero3 = any("ds_tensor" in vars(parameter) for parameter in model.parameters())
    from torch.distributed.fsdp import FSDPModule  # takes half a second, and only a failure needs it

    known = _OF_ZERO3 if is_zero3 else _OF_FSDP if isinstance(model, FSDPModule) else None
    if known is None or not isinstance(error, RuntimeError | AttributeError) or not known.search(str(error)):
        return None
    names = {id(module): name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)}
    entered: set[int] = set()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = id(frame.f_locals.get("self"))
        if module in names and module not in entered and frame.f_globals.get("__name__") != nn.Module.__module__:
            return forward_called(names[module], "parallel.strategy", ", or set parallel.fsdp.wrap: root")
        entered.add(module)
    strategy, others = ("ZeRO stage 3", " or a compiled module") if is_zero3 else ("fsdp", "")
    remedy = "parallel.deepspeed.zero_stage: 2" if is_zero3 else "parallel.fsdp.wrap: root, or parallel.strategy: ddp"
    why = (
        f"{type(error).__name__}: {str(error).splitlines()[0]}. Under {strategy} a module's weights are whole only "
        f"while its own forward runs: if another module, the objective, torch.func, torch.autograd.grad{others} uses "
        f"them, set {remedy}"
    )
    return ConfigError(Problem("", "parallel.strategy", why))
