"""Adam, AdamW and SGD as one kernel call per group of parameters, on lists that are made once.

    gradients --+--> kernel(parameters, gradients, moments, steps, lr, grad_scale, found_inf) --> cleared
                |            |                                         |           |
                |            made once                                 divisor     not keep (on a GPU)
                +--> some are missing: the same call on the columns of those that are there

The kernel divides by the divisor while it reads the gradients, so unscaling and clipping cost no pass. An update that
is discarded makes no call on the CPU; on a GPU, where the host doesn't know yet, the kernel changes nothing.

A torch optimizer holds groups and state, under torch's own names (`exp_avg`, `exp_avg_sq`, `step`,
`momentum_buffer`), so code that reads a `torch.optim.AdamW` reads these. State is made at once, not at the first
update, so that a first update can be discarded too: torch's fused SGD would leave a moment of uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError
from lockstep.optim import kernels
from lockstep.optim.named_state import load_named_state, named_state
from lockstep.optim.stepping import decided, take_gradients

if TYPE_CHECKING:
    from torch import nn

Groups = list[dict[str, Any]]
Column = list[Any]
Columns = tuple[Column, ...]


class FusedAdam:
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) or, if `decoupled`, AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101).

    Args:
        groups: torch's, with `lr`, `lr_scale` and `weight_decay`; all parameters on one device.
    """

    def __init__(self, groups: Groups, betas: tuple[float, float], eps: float, *, decoupled: bool) -> None:
        rule = torch.optim.AdamW if decoupled else torch.optim.Adam
        kernel = kernels.fused_adamw if decoupled else kernels.fused_adam
        self._torch = rule(groups, betas=betas, eps=eps, fused=True)
        self._calls = _Calls(self._torch, lambda group, parameters: _AdamCall(kernel, group, parameters, self._torch))

    @property
    def groups(self) -> list[dict[str, object]]:
        return self._torch.param_groups

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        self._calls.update(rate, divisor, keep)

    def state_dict(self) -> dict[str, object]:
        return named_state(self._torch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_named_state(self._torch, state["parameters"])


class FusedSGD:
    """SGD; with momentum as torch has it: moment <- momentum x moment + gradient.

    Args:
        groups: as of FusedAdam.
    """

    def __init__(self, groups: Groups, momentum: float, *, nesterov: bool) -> None:
        self._torch = torch.optim.SGD(groups, momentum=momentum, nesterov=nesterov, fused=True)
        self._calls = _Calls(self._torch, lambda group, parameters: _SGDCall(group, parameters, self._torch))

    @property
    def groups(self) -> list[dict[str, object]]:
        return self._torch.param_groups

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        self._calls.update(rate, divisor, keep)

    def state_dict(self) -> dict[str, object]:
        return named_state(self._torch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_named_state(self._torch, state["parameters"])


class _Calls:
    """The kernel calls of an update: one for each group, and for each precision in it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        make: Callable[[dict[str, Any], list[nn.Parameter]], _AdamCall | _SGDCall],
    ) -> None:
        self._optimizer = optimizer
        self._make = make
        self._divisor = _Divisor(_one_device(optimizer))
        self._bind()
        optimizer.register_load_state_dict_post_hook(lambda _: self._bind())

    def _bind(self) -> None:
        """Make the calls, again whenever torch's `load_state_dict` has replaced groups and tensors."""
        self._calls = [
            self._make(group, parameters)
            for group in self._optimizer.param_groups
            for parameters in _by_precision(group["params"])
        ]

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        keep = decided(keep)
        if keep is False:
            for call in self._calls:
                take_gradients(call.parameters)
            return
        scale = self._divisor.as_tensor(divisor)
        found_inf = None if keep is True else keep.logical_not().float()
        for call in self._calls:
            call.group["lr"] = rate * call.group["lr_scale"]
            grads: Column = take_gradients(call.parameters)
            columns = call.columns
            if any(grad is None for grad in grads):
                grads, columns = _present(grads, columns)
            if grads:
                call.run(grads, columns, scale, found_inf)


class _AdamCall:
    """The Adam call of a group; its step counts are views of one vector, so that counting is one addition."""

    def __init__(
        self,
        kernel: Callable[..., None],
        group: dict[str, Any],
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.group = group
        self.parameters = parameters
        self._kernel = kernel
        states = [optimizer.state[parameter] for parameter in parameters]
        counts = torch.zeros(len(parameters), device=parameters[0].device)
        for parameter, state, count in zip(parameters, states, counts, strict=True):
            state["step"] = count.copy_(state.get("step", count))
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in state:
                    state[moment] = torch.zeros_like(parameter)
        self._counts = counts
        self._host_counts = counts.numpy() if counts.device.type == "cpu" else None
        names = ("exp_avg", "exp_avg_sq", "step")
        self.columns: Columns = (parameters, *([state[name] for state in states] for name in names))

    def run(self, grads: Column, columns: Columns, scale: Tensor | None, found_inf: Tensor | None) -> None:
        parameters, exp_avgs, exp_avg_sqs, steps = columns
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
        """Count one more update for these parameters, unless it is discarded."""
        more = 1.0 if found_inf is None else 1.0 - found_inf
        if len(steps) < len(self.parameters):
            torch._foreach_add_(steps, more)
        elif self._host_counts is not None and found_inf is None:
            self._host_counts += 1.0  # a quarter of what torch's add_ takes
        else:
            self._counts.add_(more)


class _SGDCall:
    def __init__(self, group: dict[str, Any], parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.group = group
        self.parameters = parameters
        self.columns: Columns = (parameters,)
        if group["momentum"] == 0:
            return
        states = [optimizer.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
        self.columns = (parameters, [state["momentum_buffer"] for state in states])

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


class _Divisor:
    """The divisor as the kernels take it: 0-dim fp32 on the parameters' device, or None for 1."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensor = torch.ones((), device=device)
        self._host = self._tensor.numpy() if device.type == "cpu" else None

    def as_tensor(self, divisor: float | Tensor) -> Tensor | None:
        if isinstance(divisor, Tensor):
            return divisor.to(self._device, torch.float32)
        if divisor == 1.0:
            return None
        if self._host is None:
            return torch.full((), divisor, device=self._device)
        self._host[()] = divisor  # 0.05 us; torch's fill_ takes 0.7
        return self._tensor


def _present(grads: Column, columns: Columns) -> tuple[Column, Columns]:
    """Return the gradients that there are, and their columns."""
    there = [index for index, grad in enumerate(grads) if grad is not None]
    return [grads[index] for index in there], tuple([column[index] for index in there] for column in columns)


def _by_precision(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return list(by_dtype.values())


def _one_device(optimizer: torch.optim.Optimizer) -> torch.device:
    devices: set[torch.device] = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    if len(devices) > 1:
        raise ConfigError(
            f"the model's parameters are on {' and '.join(sorted(map(str, devices)))}; a rank trains on one device"
        )
    return devices.pop() if devices else torch.device("cpu")
