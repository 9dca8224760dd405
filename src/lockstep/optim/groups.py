"""The rules of the config as torch's parameter groups.

A user's optimizer may also set a learning rate: its argument, or its class's default, is the peak if `optim.lr` isn't
set; two different values are refused. A group with its own `lr` keeps its ratio to the others. The same holds for
weight decay, except that the default of an optimizer's class is ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import ParameterFacts
from lockstep.distributed.shard_boxes import dtype_name
from lockstep.plan.optimizers import group_parameters

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lockstep.config.schema import Optim
    from lockstep.plan.optimizers import Grouping


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], optim: Optim, planned: Sequence[Grouping] | None = None
) -> list[dict[str, Any]]:
    """Return the trainable parameters in groups that any torch optimizer takes, with `names` and the factor `lr_scale`.

    Args:
        planned: Groups of the whole model, if these are only some of its parameters. Empty groups are kept, so that
            all ranks have the same groups.

    Raises:
        ConfigError: No parameter is trainable, or a rule matches none.
    """
    named = dict(named_parameters)
    groups = planned or group_parameters([facts_of(name, parameter) for name, parameter in named.items()], optim)
    return [
        {
            "params": [named[name] for name in group.names if name in named],
            "names": [name for name in group.names if name in named],
            "lr": optim.lr * group.lr_scale,
            "lr_scale": group.lr_scale,
            "weight_decay": group.weight_decay,
        }
        for group in groups
    ]


def facts_of(name: str, parameter: nn.Parameter) -> ParameterFacts:
    """Return what planning needs to know about a parameter."""
    dtype = dtype_name(parameter.dtype)
    return ParameterFacts(name, tuple(parameter.shape), parameter.element_size(), parameter.requires_grad, dtype)


def user_groups(groups: list[dict[str, Any]], optim: Optim) -> list[dict[str, Any]]:
    """Return the groups that a user's function gets: with `lr` only if the config sets it."""
    if "lr" in optim.model_fields_set:
        return groups
    return [{key: value for key, value in group.items() if key != "lr"} for group in groups]


def settle_user_settings(optimizer: torch.optim.Optimizer, optim: Optim) -> Optim:
    """Set `lr_scale` and `weight_decay` in the groups of a user's optimizer; return the section with the values used.

    Raises:
        ConfigError: The optimizer and the config set different values.
    """
    decay, peak = _user_value(optimizer, optim, "weight_decay"), _user_value(optimizer, optim, "lr")
    if "lr" in optim.model_fields_set:
        peak = optim.lr
    elif peak is None:
        peak = float(optimizer.defaults.get("lr", optim.lr))
    for group in optimizer.param_groups:
        scale = group.get("lr_scale", 1.0)
        default = peak * (scale if "lr" in optim.model_fields_set else 1.0)
        own = float(group.get("lr", default))
        group["lr_scale"] = scale * (own / default if default else 1.0)
        if decay is not None and group.get("weight_decay") == optim.weight_decay != 0:
            group["weight_decay"] = decay
    return optim.model_copy(update={"lr": peak, "weight_decay": optim.weight_decay if decay is None else decay})


def _user_value(optimizer: torch.optim.Optimizer, optim: Optim, name: str) -> float | None:
    if name not in optimizer.defaults:
        return None
    own, configured = float(optimizer.defaults[name]), float(getattr(optim, name))
    if _class_default(type(optimizer), name) == own:
        return None
    if name in optim.model_fields_set and own != configured:
        why = f"{configured:g} in the config, but the optimizer has {name} {own:g}; remove one of them"
        raise ConfigError(Problem("", f"optim.{name}", why))
    return own


def _class_default(kind: type, name: str) -> object:
    """Return the default of an argument of a class, or of the nearest base that names it, below `**kwargs`."""
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameter = inspect.signature(vars(base)["__init__"]).parameters.get(name)
            if parameter is not None:
                return parameter.default
    return None
