"""Any torch optimizer as one whose step can be discarded: it is asked to `step()`, or not.

gradients / divisor --> keep? --> step() --> cleared
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError, Problem
from lockstep.optim.discard import decided, step_if, take_gradients
from lockstep.optim.named_state import changed_groups, group_state, load_group_state, load_named_state, named_state


class DeviceGatedOptimizer:
    """For optimizers whose whole state is tensors on the parameters' device, there from the start. On a GPU the host
    doesn't wait to learn whether an update is kept."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._torch = optimizer

    @property
    def groups(self) -> list[dict[str, object]]:
        return self._torch.param_groups

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        """See `core.protocols.Optimizer`."""
        keep = decided(keep)
        if keep is not False:
            _prepare(self._torch, rate, divisor)
        if isinstance(keep, Tensor):
            step_if(keep, self._changed(), self._torch.step)
        elif keep:
            self._torch.step()
        _clear(self._torch)

    def state_dict(self) -> dict[str, object]:
        return named_state(self._torch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_named_state(self._torch, state["parameters"])

    def _changed(self) -> list[Tensor]:
        parameters = [parameter for parameter in _parameters(self._torch) if parameter.grad is not None]
        return [*parameters, *(value for parameter in parameters for value in self._torch.state[parameter].values())]


class HostGatedOptimizer:
    """For optimizers that keep counts with the host, or anything at all. On a GPU the host waits for each update to
    learn whether it is kept.

    Args:
        saves_groups: what changes in the groups belongs to the state: a user's optimizer may count there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, saves_groups: bool) -> None:
        self._torch = optimizer
        self._began = copy.deepcopy(group_state(optimizer)) if saves_groups else None

    @property
    def groups(self) -> list[dict[str, object]]:
        return self._torch.param_groups

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        """See `core.protocols.Optimizer`."""
        if bool(keep):
            _prepare(self._torch, rate, divisor)
            self._torch.step()
        _clear(self._torch)

    def state_dict(self) -> dict[str, object]:
        state = named_state(self._torch)
        return state if self._began is None else state | {"groups": changed_groups(self._torch, self._began)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._began is not None:
            load_group_state(self._torch, state["groups"])
        load_named_state(self._torch, state["parameters"])


def refuse_closures(kind: type[torch.optim.Optimizer]) -> None:
    """Raises ConfigError for an optimizer that evaluates the loss itself: here an update is one gradient."""
    why = needs_closure(kind)
    if why is not None:
        raise ConfigError(Problem("", "optimizer", why))


def needs_closure(kind: type[torch.optim.Optimizer]) -> str | None:
    """Why an optimizer of this class can't be used; None: its step works on gradients that are there."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:
        return None
    return (
        f"{kind.__name__} evaluates the loss several times in a step (its step needs a closure), but an update here "
        "has one gradient; take an optimizer whose step() needs none, such as torch.optim.AdamW"
    )


def _prepare(optimizer: torch.optim.Optimizer, rate: float, divisor: float | Tensor) -> None:
    """Divides the gradients and sets the learning rates."""
    if isinstance(divisor, Tensor) or divisor != 1.0:
        grads = [parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None]
        if grads:
            torch._foreach_div_(grads, divisor.to(grads[0]) if isinstance(divisor, Tensor) else divisor)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def _clear(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        take_gradients(group["params"])


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
