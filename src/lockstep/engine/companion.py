"""The companion's forward: what an objective needs of a frozen second model's outputs, as a part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.protocols import UsesCompanion
from lockstep.engine.eager import call

if TYPE_CHECKING:
    from torch import nn

    from lockstep.core.protocols import EvaluatedObjective
    from lockstep.core.records import Batch

Context = Callable[[], AbstractContextManager[object]]


class Companion:
    """Adds to each batch what the objective needs of the companion's outputs.

    Args:
        autocast: Makes the context of a forward.
        muted: Makes a context that drops what user code logs.

    Raises:
        ConfigError: The objective compares with no other model.
    """

    def __init__(self, model: nn.Module, objective: EvaluatedObjective, autocast: Context, muted: Context) -> None:
        if not isinstance(objective, UsesCompanion):
            why = (
                f"a {type(objective).__name__} compares with no other model; remove it, or write a class with loss_sum"
            )
            raise ConfigError(Problem("", "objective.companion", why))
        self._model = model
        self._objective = objective
        self._autocast = autocast
        self._muted = muted

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Batch:
        with self._muted(), self._autocast():
            outputs = call(self._model, batch.inputs)
        return replace(batch, companion=self._objective.from_companion(outputs, batch))
