"""Checks after the first backward: whether a gradient reached all parameters, and which buffers forwards changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.formatting import listed
from lockstep.distributed.user_collectives import print_once
from lockstep.plan.refusals import before_unused
from lockstep.sharding.single import unused_parameters

_NAMED = 3

if TYPE_CHECKING:
    from lockstep.sharding.buffers import BufferSnapshot
    from lockstep.training.components import Components


def refuse_unused(components: Components) -> None:
    """Raise for parameters without a gradient, which are a bug; under DDP they would stop the next step."""
    if components.config.parallel.ddp.find_unused_parameters:
        return
    if unused := components.sharding.step.parameters_without_gradient():
        plan = components.plan
        raise unused_parameters(unused, remedy=before_unused(plan.strategy, plan.mesh))


def note_changed_buffers(before: BufferSnapshot | None, micro_batches: int) -> None:
    """Print which buffers each of an update's forwards changes; of torch's norms, `plan` does."""
    changed = before.changed() if before is not None and micro_batches > 1 else []
    if changed:
        print_once(
            f"lockstep: the forward changes {listed(changed, _NAMED)} in each of {micro_batches} micro-batches: "
            "the run depends on batch.micro_size and the number of ranks (lockstep.step() counts updates)"
        )
