"""One process that updates each parameter as soon as its gradient exists: no two gradients exist at once.

    backward   head's gradient -> head updated, gradient freed -> block 3's gradient -> block 3 updated -> ...

Nothing is possible that needs all gradients before the first update: clipping by the global norm, a second micro-batch,
a reduction over ranks, and discarding. A gradient that isn't finite is applied before it is seen, and ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from lockstep.core.errors import RunFailed
from lockstep.core.protocols import NO_CONTEXT, GradientStep

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import Optimizer
    from lockstep.sharding.context import SquaredNorm


class StepInBackward(GradientStep):
    """The step of a process that updates while the backward runs."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, squared_norm: SquaredNorm) -> None:
        self.module = model
        self._optimizer = optimizer  # of all parameters, called while one of them has a gradient
        self._squared_norm = squared_norm
        self._rate = 0.0
        self._squares: dict[nn.Parameter, Tensor] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]

    def begin_update(self, samples: int, rate: Callable[[], float]) -> None:
        self._rate = rate()
        self._squares = {}

    def _update(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None, "the hook comes after the gradient"
        self._squares[parameter] = self._squared_norm([parameter.grad])
        self._optimizer.update(self._rate, 1.0, True)

    def sync_context(self, last: bool) -> AbstractContextManager[object]:
        return NO_CONTEXT

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        loss.backward(seed)  # type: ignore[no-untyped-call]

    def parameters_without_gradient(self) -> list[str]:
        trained = ((name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad)
        return [name for name, parameter in trained if parameter not in self._squares]

    def squared_norm(self) -> Tensor:
        squares = list(self._squares.values())
        return torch.stack(squares).sum() if squares else self._squared_norm([])

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())  # they are freed

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        """Do nothing, since the backward has updated; raise RunFailed if the update should have been discarded."""
        if not bool(keep):  # on a GPU the host waits to learn it
            raise RunFailed(
                "a gradient is not finite, and under optim.in_backward it has been applied: the parameters are "
                "corrupt. Resume from the last checkpoint with optim.in_backward: false, which discards such updates"
            )
