"""Adam and AdamW of parameters at rest in bf16, without fp32 copies: computed in fp32, rounded stochastically.

    value      1.0000   1.0017   1.0078        0.0017 above: up with the probability 0.0017 / 0.0078, else down
    bf16         |--------|--------|

The nearest bf16 number loses steps that are smaller than half the distance to the next; the expected value of this one
is the value itself (Zamirai et al. 2020, arXiv:2010.06192). The moments are in bf16, too, and rounded alike.

The random bits are a hash of the run's seed, the parameter's name, the update and the element's place in the whole
parameter: the same under every strategy, and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from lockstep.core.protocols import Optimizer
from lockstep.distributed.shard_boxes import mesh_intervals
from lockstep.optim.named_state import load_named_state, named_state
from lockstep.optim.stepping import decided, take_gradients

if TYPE_CHECKING:
    from torch import nn

    from lockstep.distributed.shard_boxes import RowShards
    from lockstep.optim.fused import Group, Groups

_CHUNK = 1 << 23  # elements; their temporaries have 400 MB
_MOMENTS = ("exp_avg", "exp_avg_sq")


class RoundedAdam(Optimizer):
    """Adam or, if `decoupled`, AdamW over torch's groups with `names` and `lr_scale`.

    Args:
        shards: How ranks hold the parameters; None: they are whole.
    """

    def __init__(
        self,
        groups: Groups,
        betas: tuple[float, float],
        eps: float,
        *,
        decoupled: bool,
        seed: int,
        shards: RowShards | None,
    ) -> None:
        rule = torch.optim.AdamW if decoupled else torch.optim.Adam
        self._torch = rule(groups, betas=betas, eps=eps)
        self._betas, self._eps, self._decoupled = betas, eps, decoupled
        named = [pair for group in groups for pair in zip(group["names"], group["params"], strict=True)]
        self._keys = {each: _wrapped(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode())) for name, each in named}
        self._places = {each: _place(name, each, shards) for name, each in named}
        for parameter in self._keys:
            state = self._torch.state[parameter]
            state["step"] = torch.zeros((), device=parameter.device)
            state |= {entry: torch.zeros_like(parameter) for entry in _MOMENTS}

    @property
    def groups(self) -> list[dict[str, object]]:
        return self._torch.param_groups

    @torch.no_grad()
    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        keep = decided(keep)
        for group in self._torch.param_groups:
            group["lr"] = rate * group["lr_scale"]
            for parameter, grad in zip(group["params"], take_gradients(group["params"]), strict=True):
                if grad is not None and keep is not False:
                    self._step(group, parameter, grad, divisor, keep)

    def _step(
        self, group: Group, parameter: nn.Parameter, grad: Tensor, divisor: float | Tensor, keep: bool | Tensor
    ) -> None:
        state = self._torch.state[parameter]
        step = state["step"] + 1
        beta1, beta2 = self._betas
        size = group["lr"] / (1 - beta1**step)
        correction = 1 - beta2**step
        key = step.to(torch.int32) * 0x27D4EB2F ^ self._keys[parameter]
        for places, own in _chunks(self._places[parameter], (parameter.detach(), grad, *map(state.get, _MOMENTS))):
            old, gradient, *moments = own
            value, g = old.float(), gradient.float() / divisor
            if self._decoupled:
                value.mul_(1 - group["lr"] * group["weight_decay"])
            else:
                g.add_(value, alpha=group["weight_decay"])
            mean = moments[0].float().lerp_(g, 1 - beta1)
            square = moments[1].float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
            value.sub_(mean * size / (square / correction).sqrt_().add_(self._eps))
            bits = _mixed(places * -0x61C88647 + key)
            more = _mixed(bits + 1)
            noises = bits >> 16 & 0xFFFF, bits & 0xFFFF, more & 0xFFFF
            for tensor, new, noise in zip((old, *moments), (value, mean, square), noises, strict=True):
                rounded = stochastically_rounded(new, noise)
                tensor.copy_(torch.where(keep, rounded, tensor) if isinstance(keep, Tensor) else rounded)
        state["step"].copy_(torch.where(keep, step, state["step"]) if isinstance(keep, Tensor) else step)

    def state_dict(self) -> dict[str, object]:
        return named_state(self._torch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_named_state(self._torch, state["parameters"])


def stochastically_rounded(value: Tensor, noise: Tensor) -> Tensor:
    """Return an fp32 tensor in bf16, where `noise` (int32, 0 to 65,535) decides between the two next numbers."""
    return (value.view(torch.int32) + noise).bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)


def _mixed(bits: Tensor) -> Tensor:
    """Return a hash of each int32: the last steps of MurmurHash3 (Appleby, public domain); products wrap around."""
    bits = (bits ^ bits >> 16 & 0xFFFF) * -0x7A143595
    bits = (bits ^ bits >> 13 & 0x7FFFF) * -0x3D4D51CB
    return bits ^ bits >> 16 & 0xFFFF


def _wrapped(number: int) -> int:
    """Return a number as an int32 has it."""
    return (number + 2**31) % 2**32 - 2**31


def _place(name: str, parameter: nn.Parameter, shards: RowShards | None) -> tuple[tuple[int, int], ...]:
    """Return where this rank's part begins along each dim, and the stride of the dim in the whole parameter."""
    whole = tuple(parameter.shape) if shards is None else shards.shapes[name]
    begins = [0] * len(whole)
    dim = next((dim for dim, size in enumerate(parameter.shape) if size != whole[dim]), None)
    if dim is not None and shards is not None:
        begins[dim] = mesh_intervals(whole[dim], [shards.axis.size], [1])[shards.axis.rank][0]
    strides = [1] * len(whole)
    for each in range(len(whole) - 2, -1, -1):
        strides[each] = strides[each + 1] * whole[each + 1]
    return tuple(zip(begins, strides, strict=True))


def _chunks(
    place: tuple[tuple[int, int], ...], tensors: tuple[Any, ...]
) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Yield the places of elements in the whole parameter, int32, and the parts of tensors that are there."""
    first = tensors[0]
    if not first.numel():  # other ranks have all of it
        return
    rows = max(1, _CHUNK * len(first) // first.numel()) if first.ndim else 1
    parts = zip(*(tensor.split(rows) for tensor in tensors), strict=True) if first.ndim else iter([tensors])
    for number, part in enumerate(parts):
        places = torch.zeros((), dtype=torch.int32, device=first.device)
        for dim, (begin, stride) in enumerate(place):
            begin += number * rows if dim == 0 else 0
            along = torch.arange(part[0].shape[dim], dtype=torch.int32, device=first.device)
            places = places.unsqueeze(-1) + (along * _wrapped(stride) + _wrapped(begin * stride))
        yield places, part
