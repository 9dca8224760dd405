"""What an optimizer that was handed over says of its own learning rate and weight decay, beside the config.

    optim.lr said      optimizer's lr said      peak of the schedule
    yes                no, or the same          optim.lr
    no                 yes or no                the optimizer's: what was given to it, or its class's default
    yes                yes, another             refused

A group whose `lr` the user set keeps its ratio to the others. Weight decay is the same, but that a class's default
counts for nothing: groups come with what `optim` says.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch

    from lockstep.config.schema import Optim


def groups_to_make_of(groups: list[dict[str, Any]], optim: Optim) -> list[dict[str, Any]]:
    """The groups that a user's function gets: `lr` is among their keys if the config says one."""
    said = "lr" in optim.model_fields_set
    return [group if said else {key: value for key, value in group.items() if key != "lr"} for group in groups]


def settle(optimizer: torch.optim.Optimizer, optim: Optim) -> Optim:
    """Give the groups the `lr_scale` and `weight_decay` that hold for them.

    Returns:
        The section with the peak learning rate and the weight decay that are used.

    Raises:
        ConfigError: optimizer and config contradict each other.
    """
    decay = _given(optimizer, optim, "weight_decay")
    peak = _peak(optimizer, optim)
    for group in optimizer.param_groups:
        scale = group.get("lr_scale", 1.0)
        usual = peak * (scale if "lr" in optim.model_fields_set else 1.0)
        own = float(group.get("lr", usual))
        group["lr_scale"] = scale * (own / usual if usual else 1.0)
        if decay is not None and group.get("weight_decay") == optim.weight_decay != 0:
            group["weight_decay"] = decay
    return optim.model_copy(update={"lr": peak, "weight_decay": optim.weight_decay if decay is None else decay})


def _peak(optimizer: torch.optim.Optimizer, optim: Optim) -> float:
    given = _given(optimizer, optim, "lr")
    if "lr" in optim.model_fields_set:
        return optim.lr
    return float(optimizer.defaults.get("lr", optim.lr)) if given is None else given


def _given(optimizer: torch.optim.Optimizer, optim: Optim, name: str) -> float | None:
    """What the optimizer was made with; None: nothing, so that its class's default is there."""
    if name not in optimizer.defaults:
        return None
    own, said = float(optimizer.defaults[name]), float(getattr(optim, name))
    parameter = inspect.signature(type(optimizer).__init__).parameters.get(name)
    if parameter is not None and not callable(parameter.default) and parameter.default == own:
        return None
    if name in optim.model_fields_set and own != said:
        why = f"{said:g}, and the optimizer has {name} {own:g}; leave one out"
        raise ConfigError(Problem("", f"optim.{name}", why))
    return own
