"""One process holds everything.

model --> gradient --> optimizer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from lockstep.sharding.state import live_state, restore_state, whole_gradients, whole_weights, without_gradient

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import Optimizer
    from lockstep.core.records import TrainingState

SquaredNorm = Callable[[Sequence["Tensor"]], "Tensor"]
NO_WINDOW: AbstractContextManager[object] = nullcontext()


class Single:
    """The oracle: every other strategy must reproduce what this one does.

    Args:
        squared_norm: of a list of gradients, as one 0-dim tensor.
        module: what a training forward calls, if it isn't the model itself.
    """

    averages_over = 1
    norm_is_whole = True

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, squared_norm: SquaredNorm, module: nn.Module | None = None
    ) -> None:
        self.module = module or model
        self.bare = model
        self._optimizer = optimizer
        self._parameters = trainable_parameters(model)
        self._squared_norm = squared_norm

    def window(self, last: bool) -> AbstractContextManager[object]:
        return NO_WINDOW

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        loss.backward(seed)  # type: ignore[no-untyped-call]

    def unreached(self) -> list[str]:
        return without_gradient(self.bare)

    def squared_norm(self) -> Tensor:
        return self._squared_norm(gradients(self._parameters))

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        self._optimizer.update(rate, divisor, keep)

    def synchronize(self) -> None:
        pass

    def weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        return whole_weights(self.bare, wanted)

    def gradients(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        return whole_gradients(self.bare, wanted)

    def close(self) -> None:
        pass

    def state(self) -> TrainingState:
        return live_state(self.bare, self._optimizer)

    def restore(self, state: TrainingState) -> None:
        restore_state(self.bare, self._optimizer, state)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Each once, tied ones too."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Those that there are, in the parameters' order."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
