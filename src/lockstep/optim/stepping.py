"""Torch optimizers whose step can be discarded: nothing of it happened, to the bit.

gradients / divisor --> keep? --> step() --> cleared

host knows (CPU)        the step isn't made
only the GPU knows      kernels that take `found_inf` leave all as it was; for others every tensor is copied,
                        the step is made, and the device takes the copy or the new one. The host never waits.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError, Problem
from lockstep.optim.named_state import changed_groups, group_state, load_group_state, load_named_state, named_state

if TYPE_CHECKING:
    from torch import nn


def decided(keep: bool | Tensor) -> bool | Tensor:
    """Return a bool where reading costs no wait: only a tensor on another device stays one."""
    if isinstance(keep, Tensor) and keep.device.type == "cpu":
        return bool(keep)
    return keep


@torch.no_grad()
def step_if(keep: Tensor, tensors: Sequence[Tensor], step: Callable[[], object]) -> None:
    """Make the step; where `keep` (0-dim bool) is false, `tensors` (all that the step changes) are as before.

    Takes the memory of a copy of all of them while it runs.
    """
    before = [tensor.clone() for tensor in tensors]
    step()
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(keep, tensor, old))


def take_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """Return the gradients, and remove them from the parameters."""
    grads = []
    for parameter in parameters:
        grads.append(parameter.grad)
        parameter.grad = None
    return grads


class DeviceGatedOptimizer:
    """An optimizer whose whole state is tensors on the parameters' device, made at the start. On a GPU the device
    decides whether an update is kept, and the host doesn't wait."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._torch = optimizer

    @property
    def groups(self) -> list[dict[str, object]]:
        return self._torch.param_groups

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
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
    """An optimizer that keeps counts on the host, or any state. On a GPU the host waits at each update until it knows
    whether it is kept.

    Args:
        saves_groups: changes of the groups are saved: a user's optimizer may count there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, saves_groups: bool) -> None:
        self._torch = optimizer
        self._began = copy.deepcopy(group_state(optimizer)) if saves_groups else None

    @property
    def groups(self) -> list[dict[str, object]]:
        return self._torch.param_groups

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
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
    """Raise ConfigError for an optimizer that evaluates the loss itself: here an update is one gradient."""
    why = needs_closure(kind)
    if why is not None:
        raise ConfigError(Problem("", "optimizer", why))


def needs_closure(kind: type[torch.optim.Optimizer]) -> str | None:
    """Return why an optimizer of this class can't be used; None if its step works on existing gradients."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:
        return None
    return (
        f"{kind.__name__} evaluates the loss several times in a step (its step needs a closure), but an update here "
        "has one gradient; take an optimizer whose step() needs none, such as torch.optim.AdamW"
    )


def _prepare(optimizer: torch.optim.Optimizer, rate: float, divisor: float | Tensor) -> None:
    """Divide the gradients and set the learning rates."""
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
