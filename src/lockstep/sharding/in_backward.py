"""One process, and each parameter is updated as soon as its gradient is there: no two gradients are there at once.

    backward   head's gradient -> head updated, gradient let go -> block 3's gradient -> block 3 updated -> ...

What needs all gradients before the first update can't be had: clipping by the global norm, a second micro-batch, a
reduction over ranks, and discarding. A gradient that isn't finite has been applied by the time that it is seen, and
ends the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from lockstep.core.errors import RunFailed
from lockstep.sharding.single import NO_WINDOW, SquaredNorm, trainable_parameters
from lockstep.sharding.state import live_state, restore_state, whole_gradients, whole_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import Optimizer
    from lockstep.core.records import TrainingState


class UpdatedInBackward:
    """Args:
    optimizer: of all parameters; asked to update while one of them alone has a gradient.
    squared_norm: of a list of gradients, as one 0-dim tensor.
    """

    averages_over = 1
    norm_is_whole = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, squared_norm: SquaredNorm) -> None:
        self.module = self.bare = model
        self._optimizer = optimizer
        self._squared_norm = squared_norm
        self._rate = 0.0
        self._squares: dict[nn.Parameter, Tensor] = {}
        for parameter in trainable_parameters(model):
            parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]

    def begin(self, rate: float) -> None:
        """The next backward updates, at this learning rate."""
        self._rate = rate
        self._squares = {}

    def _update(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None, "the hook comes after the gradient"
        self._squares[parameter] = self._squared_norm([parameter.grad])
        self._optimizer.update(self._rate, 1.0, True)

    def window(self, last: bool) -> AbstractContextManager[object]:
        return NO_WINDOW

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        loss.backward(seed)  # type: ignore[no-untyped-call]

    def unreached(self) -> list[str]:
        trained = ((name, one) for name, one in self.bare.named_parameters() if one.requires_grad)
        return [name for name, parameter in trained if parameter not in self._squares]

    def squared_norm(self) -> Tensor:
        found = list(self._squares.values())
        return torch.stack(found).sum() if found else self._squared_norm([])

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        """Was made in the backward.

        Raises:
            RunFailed: it should have been discarded. On a GPU the host waits to learn it.
        """
        if not bool(keep):
            raise RunFailed(
                "a gradient is not finite, and under optim.in_backward it has been applied: the model is spoiled. Go "
                "on from the last checkpoint with optim.in_backward: false, which discards such updates"
            )

    def synchronize(self) -> None:
        pass

    def weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        return whole_weights(self.bare, wanted)

    def gradients(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        """None: they are gone."""
        return whole_gradients(self.bare, wanted)

    def close(self) -> None:
        pass

    def state(self) -> TrainingState:
        return live_state(self.bare, self._optimizer)

    def restore(self, state: TrainingState) -> None:
        restore_state(self.bare, self._optimizer, state)
