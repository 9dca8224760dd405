"""Bytes of parameters, gradients and optimizer state on one rank under each strategy.

                 parameters   gradients   optimizer          the number of ranks that share it
    single            1           1           1
    ddp               1           1           1   + buckets
    fsdp              N           N           N
    zero2             1           N           N   + masters, a second copy of what is updated, also sharded

Activations, and what torch and its libraries allocate, are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.records import ParameterFacts
from lockstep.plan.batch import plan_batch
from lockstep.plan.optimizers import OPTIMIZERS
from lockstep.plan.summation import most_held
from lockstep.strategies.record import Strategy, Variant, resolved
from lockstep.strategies.registry import strategies

if TYPE_CHECKING:
    from lockstep.config.schema import BatchConfig, Config, Optim, Parallel
    from lockstep.plan.mesh import Mesh
    from lockstep.strategies.record import RunLayout


@dataclass(frozen=True, slots=True)
class Placement:
    """Bytes on one rank, the fullest where shards differ.

    Attributes:
        strategy: The name of a variant or a layout.
        gradients: Buckets included.
        optimizer: State between steps.
    """

    strategy: str
    parameters: int
    gradients: int
    optimizer: int
    note: str

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class State:
    """The training state to count; `partial_sums`: further gradients that a rank holds at most."""

    parallel: Parallel
    optim: Optim
    parameters: Sequence[ParameterFacts]
    partial_sums: int = 0


def placements(
    state: State, ranks: int, layout: RunLayout | None = None, mesh: Mesh | None = None
) -> tuple[Placement, ...]:
    """Return a row for every variant of every strategy; hybrids only if planned.

    Args:
        layout: The planned one, on its `mesh`; all others are on their default meshes.
    """
    planned = layout.variant.name if layout is not None and not layout.partitions else None
    rows = []
    for strategy in strategies():
        for variant in strategy.variants:
            if variant.mesh != "hybrid" or variant.name == planned:
                shards = mesh.shard if mesh is not None and variant.name == planned else ranks
                rows.append(_place(strategy, variant, state, shards))
    if layout is not None and mesh is not None and (mesh.pieces > 1 or mesh.context > 1):
        rows.append(_place_partitioned(layout, state, mesh))
    return tuple(rows)


def checkpoint_bytes(config: Config, parameters: Sequence[ParameterFacts]) -> int:
    """Return the bytes of a checkpoint: parameters, without the frozen ones below an adapter, and optimizer state."""
    whole, optim = config.model.adapter is None, config.optim
    moments = sum(OPTIMIZERS[optim.name].state_bytes(each, optim) for each in parameters if each.trainable)
    average = sum(each.bytes for each in parameters if each.trainable) if optim.ema is not None else 0
    return moments + average + sum(each.bytes for each in parameters if each.trainable or whole)


def partial_sums(batch: BatchConfig, ranks: int) -> int:
    """Return the most partial sums of gradients that a rank of an invariant run holds."""
    if batch.micro_size == "auto":
        return 0
    plan = plan_batch(batch.global_size, batch.micro_size, ranks, fixed=True)
    shares = [plan.share(batch.global_size, rank) for rank in range(ranks)]
    return max(most_held(share.first, share.stop, share.terms) for share in shares)


def _place_partitioned(layout: RunLayout, state: State, mesh: Mesh) -> Placement:
    shards = mesh.with_context(divided=layout.variant.state.gradients).shard
    row = _place(layout.strategy, layout.variant, State(state.parallel, state.optim, state.parameters), shards)
    sizes = (row.parameters, row.gradients, row.optimizer)
    parameters, gradients, optimizer = (-(-size // mesh.pieces) for size in sizes)
    of_model = f"each rank holds about 1/{mesh.pieces} of the model"
    note = of_model if mesh.pieces > 1 else f"each rank computes 1/{mesh.context} of each sequence"
    return Placement(layout.name, parameters, gradients, optimizer, note)


def _place(strategy: Strategy, variant: Variant, state: State, ranks: int) -> Placement:
    sharding, options = variant.state, strategy.options_of(state.parallel)
    trained = [parameter for parameter in state.parameters if parameter.trainable]
    gradients = sum(parameter.bytes for parameter in trained)
    copies = sharding.gradient_copies(options) + (0 if sharding.gradients else state.partial_sums)
    facts = OPTIMIZERS[state.optim.name]
    unsharded = sum(facts.unsharded_bytes(parameter, state.optim) for parameter in trained)
    optimizer = sum(facts.state_bytes(parameter, state.optim) for parameter in trained) - unsharded
    if state.optim.ema is not None:
        optimizer += gradients  # as many bytes
    masters = gradients if sharding.masters else 0
    width = (strategy.memory.element_bytes(options)[0] or 4) if strategy.memory.in_fp32 else None
    sizes = [each.bytes if width is None else each.elements * width for each in state.parameters]
    kept = 0
    if sharding.kept_whole and ranks > 1:
        whole = resolved(sharding.kept_whole)(options, [parameter.elements for parameter in state.parameters])
        kept = sum(size for size, is_whole in zip(sizes, whole, strict=True) if is_whole)
    return Placement(
        strategy=variant.name,
        parameters=_share(sum(sizes), ranks, sharding.parameters) + kept,
        gradients=_share(gradients, ranks, sharding.gradients) * copies,
        optimizer=_share(optimizer + masters, ranks, sharding.optimizer) + unsharded,
        note=sharding.note,
    )


def _share(size: int, ranks: int, sharded: bool) -> int:
    return -(-size // ranks) if sharded else size
