"""Torch optimizers that can discard a step: all tensors are bitwise as if it hadn't been made.

host knows (CPU)             the step isn't made
only the device knows        kernels that take `found_inf` change nothing: no tensor is copied, and the host never waits
a custom optimizer there     the host waits, and doesn't make the step
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.protocols import Optimizer
from lockstep.distributed.shard_boxes import local_tensor
from lockstep.optim.named_state import changed_groups, group_state, load_group_state, load_named_state, named_state

if TYPE_CHECKING:
    from torch import nn


def decided(keep: bool | Tensor) -> bool | Tensor:
    """Return `keep` as a bool if it can be read without a wait: a tensor on an accelerator is returned as it is."""
    if isinstance(keep, Tensor) and keep.device.type == "cpu":
        return bool(keep)
    return keep


def take_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """Remove the gradients from the parameters and return them."""
    grads = []
    for parameter in parameters:
        grads.append(parameter.grad)
        parameter.grad = None
    return grads


class DeviceGatedOptimizer(Optimizer):
    """An optimizer with all state on the parameters' device, which decides whether an update is kept.

    Args:
        gated_step: makes the optimizer's step, which may overwrite gradients, but changes nothing if its argument,
            `found_inf` (0-dim fp32 on the parameters' device), is 1; None: the update is kept.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, gated_step: Callable[[Tensor | None], None]) -> None:
        self._torch = optimizer
        self._gated_step = gated_step

    @property
    def groups(self) -> list[dict[str, object]]:
        return self._torch.param_groups

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        keep = decided(keep)
        if keep is not False:
            _prepare(self._torch, rate, divisor)
        if isinstance(keep, Tensor):
            self._gated_step(keep.logical_not().float())
        elif keep:
            self._gated_step(None)
        _clear(self._torch)

    def state_dict(self) -> dict[str, object]:
        return named_state(self._torch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_named_state(self._torch, state["parameters"])


class HostGatedOptimizer(Optimizer):
    """A user's optimizer, with state of any kind, such as counts on the host or in groups.

    On an accelerator the host waits at each update until it knows whether it is kept.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._torch = optimizer
        self._train, self._eval = (getattr(optimizer, name, None) for name in ("train", "eval"))
        if self._train is not None and self._eval is not None:
            self._train()  # some begin in evaluation
        self._initial_groups = copy.deepcopy(group_state(optimizer))

    @property
    def groups(self) -> list[dict[str, object]]:
        return self._torch.param_groups

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        if bool(keep):
            _prepare(self._torch, rate, divisor)
            self._torch.step()
        _clear(self._torch)

    def evaluate(self) -> Callable[[], None] | None:
        train, evaluate = self._train, self._eval
        if train is None or evaluate is None:
            return None
        held = [local_tensor(parameter) for group in self._torch.param_groups for parameter in group["params"]]
        kept = [tensor.clone() for tensor in held]
        evaluate()

        def resume() -> None:
            train()
            for tensor, before in zip(held, kept, strict=True):  # what `train` computes back is rounded
                tensor.copy_(before)

        return resume

    def state_dict(self) -> dict[str, object]:
        state = named_state(self._torch)
        state["groups"] = changed_groups(self._torch, self._initial_groups)
        if own := own_state(self._torch):
            state["own"] = own
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_group_state(self._torch, state["groups"])
        load_own_state(self._torch, state.get("own", {}))
        load_named_state(self._torch, state["parameters"])


def refuse_closures(kind: type[torch.optim.Optimizer]) -> None:
    """Raise ConfigError for an optimizer that evaluates the loss itself in its step."""
    if (reason := closure_refusal(kind)) is not None:
        raise ConfigError(Problem("", "optimizer", reason))


def closure_refusal(kind: type[torch.optim.Optimizer]) -> str | None:
    """Return why an optimizer of this class can't be used; None if its step needs no closure."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:
        return None
    return (
        f"{kind.__name__} evaluates the loss several times in a step (its step needs a closure), but an update has "
        "one gradient; take an optimizer with a step() that needs no closure, such as torch.optim.AdamW"
    )


def _prepare(optimizer: torch.optim.Optimizer, rate: float, divisor: float | Tensor) -> None:
    if isinstance(divisor, Tensor) or divisor != 1.0:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        grads: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if grads:
            torch._foreach_div_(grads, divisor.to(grads[0]) if isinstance(divisor, Tensor) else divisor)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def _clear(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        take_gradients(group["params"])


_OF_TORCH = frozenset({"state", "param_groups"})


def own_state(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state outside of parameters and groups, live, as far as `state_dict` returns it."""
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
        optimizer.load_state_dict({**torch.optim.Optimizer.state_dict(optimizer), "state": {}, **entries})
        optimizer.state, optimizer.param_groups = state, groups  # parameters' are loaded by name
    kept: MutableMapping[Any, Any] = optimizer.state
    for key in [key for key in kept if isinstance(key, str)]:  # of a later moment than the saved one
        del kept[key]
    kept.update(own.get("shared", {}))
