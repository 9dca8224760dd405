"""What shardings have in common: those in which every rank holds everything, and those in which each holds a part.

                  a rank's parameters    the optimizer works on    weights, gradients, state
HeldWhole         all                    them                      read as they are
HeldInParts       of each its part       plain tensors, that part  gathered, tensor by tensor
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from lockstep.sharding.local_parts import trained_parts
from lockstep.sharding.state import live_state, restore_state, whole_gradients, whole_weights, without_gradient

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import Optimizer
    from lockstep.core.records import TrainingState
    from lockstep.sharding.buffers import SharedBuffers
    from lockstep.sharding.local_parts import Part
    from lockstep.sharding.pieces import Pieces

SquaredNorm = Callable[[Sequence["Tensor"]], "Tensor"]
"""Of a list of gradients, as one 0-dim tensor."""

OptimizerOf = Callable[[Iterable[tuple[str, "nn.Parameter"]]], "Optimizer"]
"""Makes the optimizer of named parameters: plain ones, this rank's parts."""

NO_WINDOW: AbstractContextManager[object] = nullcontext()


class HeldWhole:
    """Args:
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
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
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


class HeldInParts(ABC):
    """Args:
    buffers: of all ranks with the same part.
    pieces: who holds what of a model that is cut.
    whole: give the optimizer the model's parameters, not this rank's parts: it is a user's, and may look at shapes.
    """

    averages_over = 1
    norm_is_whole = False

    def __init__(
        self,
        model: nn.Module,
        optimizer_of: OptimizerOf,
        squared_norm: SquaredNorm,
        buffers: SharedBuffers,
        pieces: Pieces,
        *,
        whole: bool = False,
    ) -> None:
        self.bare = self.module = model
        self._squared_norm = squared_norm
        self._buffers = buffers
        self._pieces = pieces
        self._whole = whole
        self._parts = trained_parts(model)
        self._by_name = {part.name: part for part in self._parts}
        self._optimizer = optimizer_of((part.name, part.whole if whole else part.local) for part in self._parts)

    @property
    @abstractmethod
    def _alike(self) -> int:
        """How many ranks hold the same part."""

    @abstractmethod
    def _reduce(self) -> None:
        """Makes the gradients those of the whole update, when somebody first asks for them; at the same point on every
        rank."""

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        loss.backward(seed)  # type: ignore[no-untyped-call]

    def unreached(self) -> list[str]:
        return without_gradient(self.bare)

    def squared_norm(self) -> Tensor:
        """This rank's share: each of those that hold the same part counts a fraction of it."""
        self._reduce()
        counted = [part.gradient for part in self._reached if self._pieces.counts(part.name)]
        return self._squared_norm(counted) / self._alike

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        if not self._whole:
            for part in self._parts:
                part.hand_over()
        self._optimizer.update(rate, divisor, keep)

    def synchronize(self) -> None:
        self._buffers.synchronize()

    def weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        return self._pieces.whole(whole_weights(self.bare, wanted or self._pieces.several), wanted)

    def gradients(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        self._reduce()
        return self._pieces.whole(whole_gradients(self.bare, wanted or self._pieces.several), wanted)

    def close(self) -> None:  # noqa: B027
        """Holds nothing to let go of."""

    def state(self) -> TrainingState:
        return self._pieces.state(live_state(self.bare, self._optimizer, self._shown))

    def restore(self, state: TrainingState) -> None:
        restore_state(self.bare, self._optimizer, self._pieces.own(state), self._fit)

    @property
    def _reached(self) -> list[Part]:
        """Those that a gradient has reached."""
        return [part for part in self._parts if part.whole.grad is not None]

    def _shown(self, name: str, value: Tensor) -> Tensor:
        return self._by_name[name].shown(value)

    def _fit(self, name: str, value: Tensor) -> Tensor:
        part = self._by_name[name]
        value = part.fit(value)
        return part.as_whole(value.to(part.local.device)) if self._whole and part.is_like(value) else value


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Those that there are, in the parameters' order."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
