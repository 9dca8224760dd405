"""The sizes of a session's micro-batches, and how small they can become when memory runs out.

3 samples a rank, batch norm    size 3: 3          size 2: 2 + 1, and batch norm can't be computed of 1
4 samples a rank, batch norm    size 4: 4          size 2: 2 + 2
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.models.blocks import repeated_blocks
from lockstep.models.building_objectives import least_samples
from lockstep.plan.batch import smallest_micro_batch
from lockstep.training.out_of_memory import memory_factors
from lockstep.training.session import components_of

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.training.components import Components
    from lockstep.training.out_of_memory import MemoryFactors
    from lockstep.training.session import Session


def least_micro_size(components: Components) -> int:
    """Return the smallest `batch.micro_size` with which no micro-batch has too few samples for the model."""
    least, plan = least_samples(components.sharding.state.model), components.plan
    batch, current = plan.batch, plan.batch.micro_size
    if least == 1:
        return 1
    updates = [batch.global_size]
    rest = plan.epoch_samples % batch.global_size
    ends_epoch = plan.steps is None or plan.steps > plan.epoch_samples // batch.global_size
    if rest and ends_epoch and smallest_micro_batch(rest, current, batch.ranks) >= least:
        updates.append(rest)
    for size in range(1, current):
        if all(smallest_micro_batch(samples, size, batch.ranks) >= least for samples in updates):
            return size
    return current


def factors_of(config: Config, ranks: int, session: Session | None) -> MemoryFactors:
    """Return what determines how much memory a rank needs; without a session, as far as the config does."""
    factors = memory_factors(config, ranks)
    if session is None:
        return factors
    components = components_of(session)
    return replace(
        factors,
        micro_size=components.plan.batch.micro_size,
        least_size=least_micro_size(components),
        evaluation_size=components.evaluator.micro_size,
        strategy=components.plan.strategy,
        can_checkpoint=factors.can_checkpoint and bool(repeated_blocks(components.sharding.state.model)),
    )
