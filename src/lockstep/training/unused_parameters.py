"""The check, after the first backward, that a gradient has reached every trained parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.plan.refusals import before_unused
from lockstep.sharding.single import unused_parameters

if TYPE_CHECKING:
    from lockstep.training.components import Components


def refuse_unused(components: Components) -> None:
    """Raise for parameters without a gradient, which are a bug; under DDP they would stop the next step."""
    if components.config.parallel.ddp.find_unused_parameters:
        return
    if unused := components.sharding.step.parameters_without_gradient():
        plan = components.plan
        raise unused_parameters(unused, remedy=before_unused(plan.strategy, plan.mesh))
