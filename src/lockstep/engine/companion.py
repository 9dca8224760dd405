"""The companion's forward: what an objective needs of a frozen second model's outputs, as a part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.modes import evaluation_mode
from lockstep.core.protocols import UsesCompanion
from lockstep.engine.eager import call

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import EvaluatedObjective, LooksAhead
    from lockstep.core.records import Batch

Context = Callable[[], AbstractContextManager[object]]


class Companion:
    """Adds to each batch what the objective needs of the companion's outputs.

    Args:
        autocast: Makes the context of a forward.
        muted: Makes a context that drops what user code logs.
        within: Makes the context in which `model` computes as the companion.

    Raises:
        ConfigError: The objective compares with no other model.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: EvaluatedObjective,
        autocast: Context,
        muted: Context,
        within: Context = nullcontext,
    ) -> None:
        if not isinstance(objective, UsesCompanion):
            why = (
                f"a {type(objective).__name__} compares with no other model; remove it, or write a class with loss_sum"
            )
            raise ConfigError(Problem("", "objective.companion", why))
        self._model = model
        self._objective = objective
        self._autocast = autocast
        self._muted = muted
        self._within = within

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Batch:
        with self._muted(), self._within(), self._autocast():
            outputs = call(self._model, batch.inputs)
        return replace(batch, companion=self._objective.from_companion(outputs, batch))


class Ahead:
    """Completes the micro-batches of an update, or of an evaluation, by sums over all of them and all ranks.

    Args:
        model: As an evaluation calls it.
        add: Adds a tensor over the ranks.
    """

    def __init__(
        self,
        companion: Callable[[Batch], Batch],
        model: nn.Module,
        objective: LooksAhead,
        add: Callable[[Tensor], Tensor],
        autocast: Context,
        muted: Context,
    ) -> None:
        self._companion = companion
        self._model = model
        self._objective = objective
        self._add = add
        self._autocast = autocast
        self._muted = muted

    @torch.no_grad()
    def __call__(self, micro_batches: Iterable[Batch]) -> list[Batch]:
        """Return them, all of which are held, in the order of `micro_batches`. All ranks together."""
        with self._muted(), evaluation_mode(self._model):
            batches = [self._companion(batch) for batch in micro_batches]
            sums = [self._sums(batch) for batch in batches]
        total = self._add(torch.stack(sums).sum(0))
        return [self._objective.completed(batch, total) for batch in batches]

    def _sums(self, batch: Batch) -> Tensor:
        ahead = self._objective.ahead(batch)
        with self._autocast():
            outputs = call(self._model, ahead.inputs)
        return self._objective.sums_ahead(outputs, ahead) * bool(batch.samples)  # padding has no weight
