"""How an update is discarded: nothing of it happened, to the bit.

host knows (CPU)        the step isn't made
only the GPU knows      kernels that take `found_inf` leave all as it was; for others every tensor is copied,
                        the step is made, and the device takes the copy or the new one. The host never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn


def decided(keep: bool | Tensor) -> bool | Tensor:
    """A bool where reading costs no wait: only a tensor on another device stays one."""
    if isinstance(keep, Tensor) and keep.device.type == "cpu":
        return bool(keep)
    return keep


@torch.no_grad()
def step_if(keep: Tensor, tensors: Sequence[Tensor], step: Callable[[], object]) -> None:
    """Makes the step; where `keep` (0-dim bool) is false, `tensors` (all that the step changes) are as before.

    Takes the memory of a copy of all of them while it runs.
    """
    before = [tensor.clone() for tensor in tensors]
    step()
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(keep, tensor, old))


def take_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """The gradients, which the parameters then no longer have."""
    grads = []
    for parameter in parameters:
        grads.append(parameter.grad)
        parameter.grad = None
    return grads
