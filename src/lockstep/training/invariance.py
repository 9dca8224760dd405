"""What would make bits depend on the ranks in an invariant run, and what such a run prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, Problem
from lockstep.models.building_objectives import coupling

if TYPE_CHECKING:
    from torch import nn

    from lockstep.core.protocols import EvaluatedObjective

NOTE = (
    "run.determinism invariant: each rank computes with one thread on the CPU; training has the same bits on any "
    "number of ranks, evaluations may differ in their last digits"
)


def refuse_coupled(model: nn.Module, objective: EvaluatedObjective) -> None:
    """Raise ConfigError if samples of different micro-batches or ranks depend on each other."""
    coupled = coupling(model)
    if coupled is not None:
        message = (
            f"invariant, but the model has {coupled}, which ties the samples of a rank together (running means are "
            f"each rank's own); take deterministic, or a model without it, such as one with layer or group norm"
        )
        raise ConfigError(Problem("", "run.determinism", message))
    if not objective.decomposes:
        message = (
            "invariant, but the objective says that its loss is not the sum of its samples' losses (decomposes is "
            "False), so it may look at other ranks' samples; take deterministic"
        )
        raise ConfigError(Problem("", "run.determinism", message))
