"""Optimizer state under the names of the model's parameters, instead of torch's parameter numbers.

It can be loaded with any other split of the parameters into groups. The `lr` and `weight_decay` of groups come from
the config; `groups` is empty except for a user's optimizer that keeps state there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.core.errors import RunFailed
from lockstep.core.formatting import listed

if TYPE_CHECKING:
    from torch import nn

AVERAGE, AVERAGED_UPDATES = "averaged_weight", "averaged_updates"
"""Entries of `AveragedOptimizer`, which other optimizers leave out."""
_CONFIGURED = frozenset({"params", "names", "lr", "lr_scale"})


def named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters with the `names` of each group, or their indices (`0.3`: fourth of the first group)."""
    named: list[tuple[str, nn.Parameter]] = []
    for group_index, group in enumerate(optimizer.param_groups):
        parameters = group["params"]
        names = group.get("names") or [f"{group_index}.{index}" for index in range(len(parameters))]
        named += zip(names, parameters, strict=True)
    return named


def named_state(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the live tensors, not copies. A parameter that hasn't been updated yet may have no entries."""
    return {
        "parameters": {
            name: dict(optimizer.state.get(parameter, {})) for name, parameter in named_parameters(optimizer)
        },
        "groups": [],
    }


def group_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups' entries besides parameters and configured values."""
    return [{key: value for key, value in group.items() if key not in _CONFIGURED} for group in optimizer.param_groups]


def changed_groups(optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the values of each group that differ from `before`, an earlier `group_state`; [] if none does."""

    def differs(value: object, old: object) -> bool:
        return isinstance(value, Tensor) or type(value) is not type(old) or bool(value != old)

    changes = [
        {key: value for key, value in group.items() if key not in old or differs(value, old[key])}
        for group, old in zip(group_state(optimizer), before, strict=True)
    ]
    return changes if any(changes) else []


def load_group_state(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Load the groups' changed values, if there are any."""
    if not groups:
        return
    if len(groups) != len(optimizer.param_groups):
        raise RunFailed(
            f"the saved optimizer has {len(groups)} parameter groups, this one {len(optimizer.param_groups)}; "
            f"make it from the same groups"
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key not in _CONFIGURED:
                was_tuple = isinstance(group.get(key), tuple) and isinstance(value, list)  # JSON has no tuples
                group[key] = tuple(value) if was_tuple else value


@torch.no_grad()
def load_named_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Mapping[str, Any]]) -> None:
    """Copy the state into the optimizer's tensors; raise RunFailed, and change nothing, if names or shapes differ."""
    named = named_parameters(optimizer)
    names = {name for name, _ in named}
    missing, unexpected = names - set(parameters), set(parameters) - names
    if missing or unexpected:
        differences = (("lacks", missing), ("also has", unexpected))
        text = " and ".join(f"{verb} {listed(sorted(names), 3)}" for verb, names in differences if names)
        raise RunFailed(f"the saved optimizer state is of another model: it {text}")
    for name, parameter in named:
        _check_shapes(name, optimizer.state.get(parameter, {}), parameters[name])
    for name, parameter in named:
        live = optimizer.state[parameter]
        for entry, value in parameters[name].items():
            if entry in (AVERAGE, AVERAGED_UPDATES):
                continue
            if isinstance(live.get(entry), Tensor):
                live[entry].copy_(value)
            elif not isinstance(value, Tensor):
                live[entry] = value
            elif entry == "step":  # torch keeps step counts on the host
                live[entry] = value.clone()
            else:
                live[entry] = value.to(parameter.device, copy=True)


def _check_shapes(name: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for entry, value in live.items():
        if not isinstance(value, Tensor):
            continue
        if entry not in saved:
            raise RunFailed(f"the saved optimizer state of {name} has no {entry}: it is another optimizer's")
        if value.shape != saved[entry].shape:
            here, there = list(value.shape), list(saved[entry].shape)
            raise RunFailed(f"{name}: {entry} is {here} here, but {there} in the saved state")
