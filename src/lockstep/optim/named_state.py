"""Optimizer state under the names of the model's parameters, never under an optimizer's own numbers.

    torch:   state[parameter]["exp_avg"]     <-->     {"parameters": {"layers.0.weight": {"exp_avg": ...}},
                                                       "groups": [{...}, ...]}

Any split of the parameters into groups can read it again. The `lr` and `weight_decay` of groups are what the config
asks for and aren't saved; `groups` is empty but for a user's optimizer that keeps state of its own there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.core.errors import RunFailed

if TYPE_CHECKING:
    from torch import nn

_ASKED = frozenset({"params", "names", "lr", "lr_scale"})


def named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """By the `names` of each group; in a group without, by their places (`0.3`: the fourth of the first group)."""
    found: list[tuple[str, nn.Parameter]] = []
    for place, group in enumerate(optimizer.param_groups):
        parameters = group["params"]
        names = group.get("names") or [f"{place}.{index}" for index in range(len(parameters))]
        found += zip(names, parameters, strict=True)
    return found


def named_state(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The live tensors, not copies. A parameter that hasn't been updated yet may have no entries."""
    return {
        "parameters": {
            name: dict(optimizer.state.get(parameter, {})) for name, parameter in named_parameters(optimizer)
        },
        "groups": [],
    }


def group_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """All that the groups hold besides parameters and what the config asks for."""
    return [{key: value for key, value in group.items() if key not in _ASKED} for group in optimizer.param_groups]


def changed_groups(optimizer: torch.optim.Optimizer, began: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each group what isn't as it was; nothing at all if everything is.

    Args:
        began: its `group_state` then.
    """
    now = group_state(optimizer)
    found = [
        {key: value for key, value in group.items() if key not in before or _differs(value, before[key])}
        for group, before in zip(now, began, strict=True)
    ]
    return found if any(found) else []


def _differs(one: object, other: object) -> bool:
    return isinstance(one, Tensor) or type(one) is not type(other) or bool(one != other)


def load_group_state(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """What has changed in them, if anything.

    Raises:
        RunFailed: there are not as many groups.
    """
    if not groups:
        return
    if len(groups) != len(optimizer.param_groups):
        raise RunFailed(
            f"the saved optimizer has {len(groups)} parameter groups, this one {len(optimizer.param_groups)}; "
            f"make it from the same groups"
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: _as(group.get(key), value) for key, value in saved.items() if key not in _ASKED})


def _as(live: object, saved: object) -> object:
    """A text format knows no tuples."""
    return tuple(saved) if isinstance(live, tuple) and isinstance(saved, list) else saved


@torch.no_grad()
def load_named_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Mapping[str, Any]]) -> None:
    """Copies the state in; tensors that exist stay where they are, so that whoever holds them goes on with them.

    Raises:
        RunFailed: other parameters than the optimizer's, or other shapes; then nothing has been changed.
    """
    named = named_parameters(optimizer)
    _check_names(set(parameters), {name for name, _ in named})
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
    """A copy beside the parameter; counts of steps stay where torch keeps them: with the host."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if entry == "step" else value.to(parameter.device, copy=True)


def _check_names(saved: set[str], wanted: set[str]) -> None:
    if saved == wanted:
        return
    parts = [_some("lacks", wanted - saved), _some("also has", saved - wanted)]
    raise RunFailed(f"the saved optimizer state is of another model: it {' and '.join(filter(None, parts))}")


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
