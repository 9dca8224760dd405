"""Adam, AdamW and SGD as one kernel call per group of parameters, on lists that are made once.

The kernel divides by the divisor while it reads the gradients, so unscaling and clipping cost no pass. A discarded
update makes no call on the CPU; on a GPU, where the host doesn't know yet, the kernel changes nothing.

Groups and state are a torch optimizer's, under torch's names. State is made at the start, so that a first update can be
discarded: torch's fused SGD would leave a moment of uninitialized memory.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError
from lockstep.core.protocols import Optimizer
from lockstep.optim import kernels
from lockstep.optim.named_state import load_named_state, named_state
from lockstep.optim.stepping import decided, take_gradients

if TYPE_CHECKING:
    from torch import nn

Group = dict[str, Any]
Groups = list[Group]
Column = list[Any]
Columns = tuple[Column, ...]


def fused_adam(groups: Groups, betas: tuple[float, float], eps: float, *, decoupled: bool) -> FusedOptimizer:
    """Return Adam or, if `decoupled`, AdamW, over torch's groups with `lr_scale`; all parameters are on one device.

    Kingma & Ba 2015, arXiv:1412.6980; Loshchilov & Hutter 2019, arXiv:1711.05101.
    """
    rule = torch.optim.AdamW if decoupled else torch.optim.Adam
    kernel = kernels.fused_adamw if decoupled else kernels.fused_adam
    adam = rule(groups, betas=betas, eps=eps, fused=True)
    return FusedOptimizer(adam, lambda group, parameters: _AdamCall(kernel, group, parameters, adam))


def fused_sgd(groups: Groups, momentum: float, *, nesterov: bool) -> FusedOptimizer:
    """Return SGD over groups as of `fused_adam`; with momentum as in torch: moment <- momentum x moment + gradient."""
    sgd = torch.optim.SGD(groups, momentum=momentum, nesterov=nesterov, fused=True)
    return FusedOptimizer(sgd, lambda group, parameters: _SGDCall(group, parameters, sgd))


class FusedOptimizer(Optimizer):
    """A torch optimizer with one kernel call for each group, and for each precision in it."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, make_call: Callable[[Group, list[nn.Parameter]], _AdamCall | _SGDCall]
    ) -> None:
        self._torch = optimizer
        self._make_call = make_call
        self._scale = torch.ones((), dtype=torch.float32, device=_only_device(optimizer))
        self._host_scale = self._scale.numpy() if self._scale.is_cpu else None
        self._bind()
        optimizer.register_load_state_dict_post_hook(lambda _: self._bind())

    def _bind(self) -> None:
        """Make the calls; again whenever torch's `load_state_dict` has replaced groups and tensors."""
        self._calls = [
            self._make_call(group, [parameter for parameter in group["params"] if parameter.dtype is dtype])
            for group in self._torch.param_groups
            for dtype in dict.fromkeys(parameter.dtype for parameter in group["params"])
        ]

    @property
    def groups(self) -> list[dict[str, object]]:
        return self._torch.param_groups

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        keep = keep if keep is True else decided(keep)
        if keep is False:
            for call in self._calls:
                take_gradients(call.parameters)
            return
        scale = self._grad_scale(divisor)
        found_inf = None if keep is True else keep.logical_not().float()
        for call in self._calls:
            call.group["lr"] = rate * call.group["lr_scale"]
            grads: Column = take_gradients(call.parameters)
            columns = call.columns
            if any(map(operator.is_, grads, itertools.repeat(None))):
                grads, columns = _present(grads, columns)
            if grads:
                call.run(grads, columns, scale, found_inf)

    def _grad_scale(self, divisor: float | Tensor) -> Tensor | None:
        """Return the divisor as the kernels take it: 0-dim fp32 on the parameters' device, or None for 1."""
        if isinstance(divisor, Tensor):
            return divisor.to(self._scale)
        if divisor == 1.0:
            return None
        if self._host_scale is None:
            return torch.full_like(self._scale, divisor)
        self._host_scale[()] = divisor  # 0.05 us; torch's fill_ takes 0.7
        return self._scale

    def state_dict(self) -> dict[str, object]:
        return named_state(self._torch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_named_state(self._torch, state["parameters"])


class _AdamCall:
    """The Adam call of a group; its step counts are views of one vector, so that counting is one addition."""

    def __init__(
        self,
        kernel: Callable[..., None],
        group: Group,
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.group = group
        self.parameters = parameters
        self._kernel = kernel
        self._counts = torch.zeros(len(parameters), device=parameters[0].device)
        self._host_counts = self._counts.numpy() if self._counts.device.type == "cpu" else None
        steps = list(self._counts)
        for parameter, count in zip(parameters, steps, strict=True):
            state = optimizer.state[parameter]
            state["step"] = count.copy_(state.get("step", count))
        self.columns: Columns = (parameters, *_states(optimizer, parameters, ("exp_avg", "exp_avg_sq")), steps)

    def run(self, grads: Column, columns: Columns, scale: Tensor | None, found_inf: Tensor | None) -> None:
        parameters, exp_avgs, exp_avg_sqs, steps = columns
        if self._host_counts is not None and found_inf is None and len(steps) == len(self.parameters):
            self._host_counts += 1.0  # takes a quarter of the time of torch's add_
        else:
            self._count(steps, found_inf)
        group = self.group
        beta1, beta2 = group["betas"]
        self._kernel(
            parameters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=found_inf,
        )

    def _count(self, steps: Column, found_inf: Tensor | None) -> None:
        increment = 1.0 if found_inf is None else 1.0 - found_inf
        if len(steps) < len(self.parameters):
            torch._foreach_add_(steps, increment)
        else:
            self._counts.add_(increment)


class _SGDCall:
    def __init__(self, group: Group, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.group = group
        self.parameters = parameters
        entries = ("momentum_buffer",) if group["momentum"] else ()
        self.columns: Columns = (parameters, *_states(optimizer, parameters, entries))

    def run(self, grads: Column, columns: Columns, scale: Tensor | None, found_inf: Tensor | None) -> None:
        parameters, *moments = columns
        group = self.group
        kernels.fused_sgd(
            parameters,
            grads,
            moments[0] if moments else [],
            lr=group["lr"],
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            dampening=0.0,
            maximize=False,
            is_first_step=False,  # moments start at zero, which gives the same first moment: the gradient
            grad_scale=scale,
            found_inf=found_inf,
        )


def _states(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], entries: tuple[str, ...]) -> Columns:
    for parameter in parameters:
        for entry in entries:
            if entry not in optimizer.state[parameter]:
                optimizer.state[parameter][entry] = torch.zeros_like(parameter)
    return tuple([optimizer.state[parameter][entry] for parameter in parameters] for entry in entries)


def _present(grads: Column, columns: Columns) -> tuple[Column, Columns]:
    present = [index for index, grad in enumerate(grads) if grad is not None]
    return [grads[index] for index in present], tuple([column[index] for index in present] for column in columns)


def _only_device(optimizer: torch.optim.Optimizer) -> torch.device:
    devices: set[torch.device] = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    if len(devices) > 1:
        raise ConfigError(
            f"the model's parameters are on {' and '.join(sorted(map(str, devices)))}; a rank trains on one device"
        )
    return devices.pop() if devices else torch.device("cpu")
