"""An exponential moving average of the weights, which evaluations and exports use; updates use the weights themselves.

    update > start, and every Nth:   average <- decay average + (1 - decay) weight      on each rank, for what it holds
    evaluation                       average <-> weight, and back

It begins as the weights after update `start`. (Polyak & Juditsky 1992; Izmailov et al. 2018, arXiv:1803.05407)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lockstep.core.protocols import Optimizer
from lockstep.distributed.shard_boxes import local_tensor
from lockstep.optim.kernels import move_towards
from lockstep.optim.named_state import AVERAGE, AVERAGED_UPDATES
from lockstep.optim.stepping import decided

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.config.schema import WeightAverage


class AveragedOptimizer(Optimizer):
    """An optimizer, with an average of its parameters."""

    def __init__(
        self, optimizer: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]], section: WeightAverage
    ) -> None:
        self._optimizer = optimizer
        self._section = section
        self._updates = 0
        trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self._names = [name for name, _ in trained]
        self._weights: list[Tensor] = [local_tensor(parameter.detach()) for _, parameter in trained]
        self._averages = [torch.zeros_like(weight) for weight in self._weights]

    @property
    def groups(self) -> list[dict[str, object]]:
        return self._optimizer.groups

    @torch.no_grad()
    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        section = self._section
        if self._updates == section.start:
            torch._foreach_copy_(self._averages, self._weights)
        self._optimizer.update(rate, divisor, keep)
        self._updates += 1
        if self._updates <= section.start or (self._updates - section.start) % section.every:
            return
        keep = decided(keep)
        if isinstance(keep, torch.Tensor):
            move_towards(self._averages, self._weights, 1 - section.decay, keep.logical_not().float())
        elif keep:
            move_towards(self._averages, self._weights, 1 - section.decay, None)

    @property
    def _has_begun(self) -> bool:
        return self._updates > self._section.start

    def evaluate(self) -> Callable[[], None] | None:
        if not self._has_begun:
            return self._optimizer.evaluate()
        self._swap()
        return self._swap

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in zip(self._weights, self._averages, strict=True):
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)

    def state_dict(self) -> dict[str, object]:
        state: dict[str, Any] = self._optimizer.state_dict()
        for name, average in zip(self._names, self._averages, strict=True):
            own = {AVERAGED_UPDATES: self._updates, **({AVERAGE: average} if self._has_begun else {})}
            state["parameters"][name] = {**state["parameters"].get(name, {}), **own}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state; the model has its weights.

        Without an average in it, one begins with the next update; those of parameters that were frozen begin now.
        """
        self._optimizer.load_state_dict(state)
        start, entries = self._section.start, [state["parameters"].get(name, {}) for name in self._names]
        updates = max((saved.get(AVERAGED_UPDATES, 0) for saved in entries if AVERAGE in saved), default=None)
        if updates is None:
            updates = min([start, *(saved.get(AVERAGED_UPDATES, start) for saved in entries)])
        self._updates = updates
        for average, weight, saved in zip(self._averages, self._weights, entries, strict=True):
            average.copy_(local_tensor(saved.get(AVERAGE, weight)))
