"""State that a user's optimizer keeps neither in parameters nor in groups.

    state["k"] = 3                                        --> {"shared": {"k": 3},
    state_dict() returns {"pullback": 0.5} in addition         "entries": {"pullback": 0.5}}

An attribute that `state_dict` doesn't return isn't seen, as by torch itself.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import RunFailed

_OF_TORCH = frozenset({"state", "param_groups"})


def own_state(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return what the optimizer keeps of its own, live; {} if there is nothing.

    Raises:
        RunFailed: A key of `state` is neither a parameter nor a string.
    """
    kept: Mapping[Any, Any] = optimizer.state
    shared: dict[Any, Any] = {key: value for key, value in kept.items() if not isinstance(key, Tensor)}
    for key in shared:
        if not isinstance(key, str):
            raise RunFailed(
                f"the optimizer's state has the key {key!r}: it can't be saved; parameters and strings can be keys"
            )
    entries: dict[str, Any] = {}
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        entries = {key: value for key, value in optimizer.state_dict().items() if key not in _OF_TORCH}
    return {"shared": shared, "entries": entries} if shared or entries else {}


def load_own_state(optimizer: torch.optim.Optimizer, own: dict[str, dict[str, Any]]) -> None:
    """Load what `own_state` has returned: entries by the optimizer's own `load_state_dict`."""
    if entries := own.get("entries"):
        state, groups = optimizer.state, optimizer.param_groups
        of_torch = torch.optim.Optimizer.state_dict(optimizer)
        optimizer.load_state_dict({**of_torch, "state": {}, **entries})
        optimizer.state, optimizer.param_groups = state, groups  # those of parameters are loaded by name
    kept: MutableMapping[Any, Any] = optimizer.state
    for key in [key for key in kept if isinstance(key, str)]:  # of a later moment than the saved one
        del kept[key]
    kept.update(own.get("shared", {}))
