"""Errors for a model that calls `block.forward(x)`, which runs no hooks.

Hooks gather the weights under fsdp, and a pipeline's stages replace the call.
"""

from __future__ import annotations

import traceback
from itertools import pairwise

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep.core.errors import ConfigError, Problem


def forward_called(name: str, key: str, remedy: str = "") -> ConfigError:
    """Return the error for a module whose forward is called by itself.

    Args:
        key: Of the config, that needs the hooks.
        remedy: What else would do.
    """
    why = f"the model calls {name}.forward by itself, so that hooks don't run; call the module, {name}(...){remedy}"
    return ConfigError(Problem("", key, why))


def not_gathered(model: nn.Module, error: Exception) -> ConfigError | None:
    """Return the error for weights that a forward uses while fsdp has them sharded; None: it has other reasons."""
    if "mixed torch.Tensor and DTensor" not in str(error):
        return None
    names = {id(module): name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)}
    entered: set[int] = set()
    for (caller, _), (frame, _) in pairwise(traceback.walk_tb(error.__traceback__)):
        module = id(frame.f_locals.get("self"))
        if module in names and module not in entered and caller.f_globals.get("__name__") != nn.Module.__module__:
            return forward_called(names[module], "parallel.strategy", ", or set parallel.fsdp.wrap: root")
        entered.add(module)
    return None
