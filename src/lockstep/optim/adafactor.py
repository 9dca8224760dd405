"""Adafactor's step, of whole parameters or of sharded ones; an accelerator decides itself whether the update is kept.

    row, column     means of g^2 over the other dim, moving        variance = row x column / mean(row)
    u = g / sqrt(variance)        p <- p - rate (max(eps, rms(p)) u / max(1, rms(u) / d) + weight_decay p)

Shazeer & Stern 2018, arXiv:1804.04235, algorithm 4, with the variations of `torch.optim.Adafactor`, without its waits
for the device. The gradient's memory holds what is computed in between.

A rank that has rows of each parameter lacks four sums over rows, which ranks add in two calls, for all parameters at
once: of g^2 in each column, of `row` and of p^2; and then of u^2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from lockstep.optim import kernels
from lockstep.optim.chunks import CHUNK_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.distributed.shard_boxes import RowShards


def make_state(adafactor: torch.optim.Adafactor) -> None:
    """Make counts and moments now, so that a first update can be discarded, too; counts are on the device."""
    for group in adafactor.param_groups:
        for parameter in group["params"]:
            state = adafactor.state[parameter]
            state["step"] = torch.zeros((), device=parameter.device)
            if parameter.dim() > 1:
                *others, rows, columns = parameter.shape
                state["row_var"] = parameter.new_zeros((*others, rows, 1))
                state["col_var"] = parameter.new_zeros((*others, 1, columns))
            else:
                state["variance"] = torch.zeros_like(parameter)


@torch.no_grad()
def gated_step(adafactor: torch.optim.Adafactor, shards: RowShards | None, found_inf: Tensor | None) -> None:
    """Make the step of all parameters that have a gradient, but change nothing if `found_inf` (0-dim fp32) is 1.

    The gradients are overwritten. All ranks together, if parameters are sharded.
    """
    updates = [
        _Update(parameter, shards.shapes[name] if shards else parameter.shape, group, adafactor.state[parameter])
        for group in adafactor.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
        if parameter.grad is not None
    ]
    sums = _summed([update.count(found_inf) for update in updates], shards)
    squares = [(update.divide(of_update, found_inf),) for update, of_update in zip(updates, sums, strict=True)]
    for update, (square,) in zip(updates, _summed(squares, shards), strict=True):
        update.clip(square)
    for group in adafactor.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if parameters and group["lr"]:
            grads: list[Tensor] = [parameter.grad for parameter in parameters]
            kernels.decay_and_step(parameters, grads, 1.0, group["lr"] * group["weight_decay"], found_inf)


def _summed(values: Sequence[tuple[Tensor, ...]], shards: RowShards | None) -> Sequence[tuple[Tensor, ...]]:
    """Return these tensors of each parameter, summed over the ranks that hold its rows, in one call."""
    if shards is None or shards.axis.size == 1 or not values:
        return values
    flat = shards.axis.sum(torch.cat([value.reshape(-1) for of_parameter in values for value in of_parameter]))
    pieces = iter(torch.split(flat, [value.numel() for of_parameter in values for value in of_parameter]))
    return [tuple(next(pieces).view(value.shape) for value in of_parameter) for of_parameter in values]


class _Update:
    """The update of one parameter; this rank may have only rows of it; `shape` is the whole one's.

    It overwrites the gradient.
    """

    def __init__(
        self, parameter: Tensor, shape: Sequence[int], group: dict[str, Any], state: Mapping[str, Tensor]
    ) -> None:
        assert parameter.grad is not None, "a parameter without a gradient has no update"
        self._parameter = parameter
        self._grad = parameter.grad
        self._shape = shape
        self._group = group
        self._state = state
        small, self._least_rms = group["eps"]
        self._small = torch.finfo(parameter.dtype).eps if small is None else small
        self._is_matrix = len(shape) == 2  # of more dims, each matrix is on one rank

    def count(self, found_inf: Tensor | None) -> tuple[Tensor, ...]:
        """Count the update, and move the moments of rows; return sums over this rank's rows."""
        state, grad = self._state, self._grad
        state["step"] += 1.0 if found_inf is None else 1.0 - found_inf
        self._count = state["step"].clamp(min=1.0)  # 0 if the first update is discarded
        self._weight = (self._count ** self._group["beta2_decay"]).to(grad.dtype)
        square = _square_sum(self._parameter)
        if grad.dim() < 2:
            return (square,)
        rows = state["row_var"]
        _move(rows, torch.norm(grad, dim=-1, keepdim=True).square_().div_(grad.size(-1)), self._weight, found_inf)
        columns = torch.norm(grad, dim=-2, keepdim=True).square_()
        if self._is_matrix:
            return square, columns, rows.sum(dim=-2, keepdim=True)
        self._own = columns, rows.sum(dim=-2, keepdim=True)
        return (square,)

    def divide(self, sums: tuple[Tensor, ...], found_inf: Tensor | None) -> Tensor:
        """Divide the gradient by the root of its variance, given the sums over all rows; return its sum of squares."""
        state, grad, small = self._state, self._grad, self._small
        rate = self._count.rsqrt().clamp(max=self._group["lr"])
        self._alpha = rate * (sums[0].sqrt() / prod(self._shape) ** 0.5).clamp(min=self._least_rms)
        if grad.dim() < 2:
            _move(state["variance"], grad.square(), self._weight, found_inf)
            grad.mul_(state["variance"].clamp(min=small * small).rsqrt_())
        else:
            of_columns, of_rows = sums[1:] if self._is_matrix else self._own
            rows, columns, height = state["row_var"], state["col_var"], self._shape[-2]
            _move(columns, of_columns.div_(height), self._weight, found_inf)
            mean = of_rows.div_(height).clamp_(min=small)
            split = max(1, CHUNK_BYTES // max(1, grad.nbytes // max(1, grad.size(-2))))
            for grad_part, row_part in zip(torch.split(grad, split, -2), torch.split(rows, split, -2), strict=True):
                grad_part.mul_((row_part @ columns).div_(mean).clamp_(min=small * small).rsqrt_())
        return _square_sum(grad)

    def clip(self, square: Tensor) -> None:
        """Scale the gradient by the rate, given its sum of squares over all rows."""
        rms = square.sqrt() / prod(self._shape) ** 0.5
        self._grad.mul_((self._alpha / (rms / self._group["d"]).clamp(min=1.0)).to(self._grad.dtype))


def _square_sum(tensor: Tensor) -> Tensor:
    return tensor.norm(2, dtype=torch.float32).square_()  # type: ignore[no-any-return]


def _move(moment: Tensor, mean: Tensor, weight: Tensor, found_inf: Tensor | None) -> None:
    """Move a factor of the moments, which is small, towards the mean, unless the update is discarded."""
    if found_inf is None:
        moment.lerp_(mean, weight)
    else:
        torch.where(found_inf == 1.0, moment, moment.lerp(mean, weight), out=moment)
