"""Bytes of parameters, gradients and optimizer state on one rank under each strategy, and bytes sent in a step.

                 parameters   gradients   optimizer          the number of ranks that share it
    single            1           1           1
    ddp               1           1           1   + buckets
    fsdp              N           N           N
    zero2             1           N           N   + masters, a second copy of what is updated, also sharded

Activations, and what torch and its libraries allocate, are not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.records import ParameterFacts
from lockstep.plan.batch import plan_batch
from lockstep.plan.optimizers import OPTIMIZERS
from lockstep.plan.summation import most_held
from lockstep.strategies.record import ELEMENT_BYTES, Strategy, Traffic, Update, Variant, Volume, resolved
from lockstep.strategies.registry import find_strategy, find_variant, strategies

if TYPE_CHECKING:
    from lockstep.config.schema import BatchConfig, Config, Optim, Parallel
    from lockstep.plan.batch import BatchPlan
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


def traffic(name: str, volume: Volume, ranks: int, *, micro_batches: int = 1, replicas: int = 1) -> Traffic:
    """Return the bytes that a rank sends in a step under the variant of this name.

    Args:
        micro_batches: Of each rank; ddp and fsdp reduce gradients once, in the last.
        replicas: Of a hybrid, a divisor of `ranks`.
    """
    assert ranks % replicas == 0
    return find_variant(name)[1].sends(Update(volume, ranks // replicas, replicas, micro_batches))


def sent_bytes(
    config: Config,
    layout: RunLayout,
    parameters: Sequence[ParameterFacts],
    mesh: Mesh,
    batch: BatchPlan,
    companion: Sequence[ParameterFacts] = (),
) -> float | None:
    """Return the bytes that a rank sends in a step; None where the model or its sequences are partitioned.

    Args:
        companion: The parameters of a second model; empty: there is none, or it is the model without its adapter.
    """
    if mesh.pieces > 1 or mesh.context > 1:
        return None
    if mesh.shares == 1:
        return 0.0
    config = config.with_values(parallel={"strategy": layout.strategy.name})
    volume = volume_of(config, parameters)
    replicas = mesh.data if layout.variant.mesh == "hybrid" else 1
    name = layout.variant.name
    sent = traffic(name, volume, mesh.shares, micro_batches=batch.accumulation, replicas=replicas).total
    if config.objective.second_model is None or not layout.variant.state.parameters:
        return sent
    forwards = [] if config.objective.precompute else [companion or parameters]
    forwards += [parameters] if config.objective.kind == "kto" else []
    gathered = [Volume(volume_of(config, each).parameters, gradients=0) for each in forwards]
    shards = mesh.shares // replicas
    return sent + sum(Update(each, shards, 1, 1).traffic(batch.accumulation, 0).total for each in gathered)


def volume_of(
    config: Config,
    parameters: Sequence[ParameterFacts],
    lowered: Collection[str] = (),
    at_root: Collection[str] = (),
) -> Volume:
    """Return the bytes of a model that travel, in the dtypes of gathers and reductions.

    Args:
        lowered: Parameters that autocast casts wherever they are used: fsdp and ZeRO-3 gather those in its type.
        at_root: Names of parameters in no block.
    """
    strategy, narrow = find_strategy(config.parallel.strategy), ELEMENT_BYTES.get(config.precision.compute, 4)
    facts, trained = OPTIMIZERS[config.optim.name], [parameter for parameter in parameters if parameter.trainable]
    everything, reduced = strategy.memory.element_bytes(strategy.options_of(config.parallel))
    gathered = {
        each.name: each.bytes
        if each.quantized
        else each.elements * (everything or (narrow if each.name in lowered else each.element_bytes))
        for each in parameters
    }
    return Volume(
        parameters=sum(gathered.values()),
        gradients=sum(parameter.elements * reduced for parameter in trained),
        at_root=sum(gathered[name] for name in at_root),
        exchanged=narrow * sum(facts.exchanged(parameter, config.optim) for parameter in trained),
        summed=sum(facts.summed_bytes(parameter, config.optim) for parameter in trained),
    )
