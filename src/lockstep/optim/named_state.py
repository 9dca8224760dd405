"""Optimizer state under the names of the model's parameters, never under an optimizer's numbers.

    torch:   state[parameter]["exp_avg"]     <-->     {"parameters": {"layers.0.weight": {"exp_avg": ...}},
                                                       "groups": [{...}, ...]}

Any split of the parameters into groups can read it again. The `lr` and `weight_decay` of groups come from the
config and aren't saved; `groups` is empty but for a user's optimizer that keeps state there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.core.errors import RunFailed

if TYPE_CHECKING:
    from torch import nn

_CONFIGURED = frozenset({"params", "names", "lr", "lr_scale"})


def named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters by the `names` of each group; without names, by place (`0.3`: fourth of the first
    group)."""
    named: list[tuple[str, nn.Parameter]] = []
    for place, group in enumerate(optimizer.param_groups):
        parameters = group["params"]
        names = group.get("names") or [f"{place}.{index}" for index in range(len(parameters))]
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
    """Return all that the groups hold besides parameters and what the config sets."""
    return [{key: value for key, value in group.items() if key not in _CONFIGURED} for group in optimizer.param_groups]


def changed_groups(optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the values of each group that have changed; an empty list if none has.

    Args:
        before: the earlier `group_state`.
    """
    changes = [
        {key: value for key, value in group.items() if key not in old or _differs(value, old[key])}
        for group, old in zip(group_state(optimizer), before, strict=True)
    ]
    return changes if any(changes) else []


def _differs(value: object, old: object) -> bool:
    return isinstance(value, Tensor) or type(value) is not type(old) or bool(value != old)


def load_group_state(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Load the groups' changed values, if there are any.

    Raises:
        RunFailed: the number of groups differs.
    """
    if not groups:
        return
    if len(groups) != len(optimizer.param_groups):
        raise RunFailed(
            f"the saved optimizer has {len(groups)} parameter groups, this one {len(optimizer.param_groups)}; "
            f"make it from the same groups"
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: _as(group.get(key), value) for key, value in saved.items() if key not in _CONFIGURED})


def _as(live: object, saved: object) -> object:
    """Return a saved list as the tuple that it was: JSON has none."""
    return tuple(saved) if isinstance(live, tuple) and isinstance(saved, list) else saved


@torch.no_grad()
def load_named_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Mapping[str, Any]]) -> None:
    """Copy the state into the optimizer; tensors that exist stay where they are, since others may hold them.

    Raises:
        RunFailed: parameters or shapes differ from the optimizer's; nothing has been changed.
    """
    named = named_parameters(optimizer)
    lacks, more = {name for name, _ in named} - set(parameters), set(parameters) - {name for name, _ in named}
    if lacks or more:
        parts = filter(None, (_some("lacks", lacks), _some("also has", more)))
        raise RunFailed(f"the saved optimizer state is of another model: it {' and '.join(parts)}")
    for name, parameter in named:
        _check_shapes(name, optimizer.state.get(parameter, {}), parameters[name])
    for name, parameter in named:
        live = optimizer.state[parameter]
        for entry, value in parameters[name].items():
            if isinstance(live.get(entry), Tensor):
                live[entry].copy_(value)
            else:
                live[entry] = _own(entry, value, parameter)


def _own(entry: str, value: object, parameter: nn.Parameter) -> object:
    """Return a copy on the parameter's device; counts of steps stay on the host, where torch keeps them."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if entry == "step" else value.to(parameter.device, copy=True)


def _some(verb: str, names: Iterable[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return f"{verb} {', '.join(shown[:3])}{more}" if shown else ""


def _check_shapes(name: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for entry, value in live.items():
        if not isinstance(value, Tensor):
            continue
        if entry not in saved:
            raise RunFailed(f"the saved optimizer state of {name} has no {entry}: it is another optimizer's")
        if value.shape != saved[entry].shape:
            raise RunFailed(f"{name}: {entry} is {_shape(value)} here, but {_shape(saved[entry])} in the saved state")


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"
