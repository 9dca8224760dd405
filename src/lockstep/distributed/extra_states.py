"""Restores what modules save by torch's `get_extra_state`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_KEY = "_extra_state"  # torch's


def set_extra_states(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Set modules' extra states: copying into the tensors of a `state_dict` doesn't change them."""
    if any(name.endswith(_KEY) for name in state):
        for prefix, module in model.named_modules():
            name = f"{prefix}.{_KEY}".lstrip(".")
            if name in state:
                module.set_extra_state(state[name])
