"""Bytes of parameters, gradients and optimizer state on one rank under each strategy, and bytes sent in an update.

                 parameters   gradients   optimizer          what each strategy's record states:
    single            1           1           1              the number of ranks that a part is divided by
    ddp               1           1           1   + buckets
    fsdp              N           N           N
    zero2             1           N           N   + masters, a second copy of what is updated, divided too

Activations, and what torch and its libraries take for themselves, are not in here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.records import ParameterFacts
from lockstep.plan.batch import plan_batch
from lockstep.plan.grouping import is_hidden_matrix
from lockstep.plan.summation import most_held
from lockstep.strategies.record import Strategy, Traffic, Update, Variant, Volume, resolved
from lockstep.strategies.registry import find_variant, strategies

if TYPE_CHECKING:
    from lockstep.config.schema import BatchConfig, Optim, Parallel
    from lockstep.plan.mesh import Mesh
    from lockstep.strategies.record import RunLayout

STEP_BYTES = 4  # a parameter's own count of updates, which torch keeps in fp32


@dataclass(frozen=True, slots=True)
class Placement:
    """Bytes on one rank (the fullest one, where a division leaves a rest).

    Attributes:
        strategy: The name of a variant or a layout.
        parameters: Trained and frozen.
        gradients: Of the trained ones, buckets included.
        optimizer: State between updates.
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
    """The training state whose bytes are counted.

    Attributes:
        partial_sums: Gradients that a rank holds at most, beside the one that a backward makes.
    """

    parallel: Parallel
    optim: Optim
    parameters: Sequence[ParameterFacts]
    partial_sums: int = 0


def placements(
    state: State, ranks: int, layout: RunLayout | None = None, mesh: Mesh | None = None
) -> tuple[Placement, ...]:
    """Return a row for every variant of every strategy; hybrids, whose replicas the user chooses, only where planned.

    Args:
        layout: The one that is planned, on its `mesh`; all others are on their usual ones.
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


def partial_sums(batch: BatchConfig, ranks: int) -> int:
    """Return the partial sums of gradients that a rank of an invariant run holds at most."""
    if batch.micro_size == "auto":
        return 0
    plan = plan_batch(batch.global_size, batch.micro_size, ranks, fixed=True)
    shares = [plan.share(batch.global_size, rank) for rank in range(ranks)]
    return max(most_held(share.first, share.stop, share.terms) for share in shares)


def _place_partitioned(layout: RunLayout, state: State, mesh: Mesh) -> Placement:
    """Return the row of an even part of the model, under the strategy that holds the state."""
    shards = mesh.with_context(divided=layout.variant.state.gradients).shard
    whole = State(state.parallel, state.optim, state.parameters)
    row = _place(layout.strategy, layout.variant, whole, shards)
    return Placement(
        strategy=layout.name,
        parameters=-(-row.parameters // mesh.pieces),
        gradients=-(-row.gradients // mesh.pieces),
        optimizer=-(-row.optimizer // mesh.pieces),
        note=f"each rank holds about a part of {mesh.pieces} of the model"
        if mesh.pieces > 1
        else f"each rank computes a part of {mesh.context} of each sequence",
    )


def _place(strategy: Strategy, variant: Variant, state: State, ranks: int) -> Placement:
    sharding, options = variant.state, strategy.options_of(state.parallel)
    trained = [parameter for parameter in state.parameters if parameter.trainable]
    gradients = _divided(sum(map(_bytes, trained)), ranks, sharding.gradients)
    copies = sharding.gradient_copies(options) + (0 if sharding.gradients else state.partial_sums)
    optimizer = sum(state_bytes(parameter, state.optim) for parameter in trained)
    masters = sum(map(_bytes, trained)) if sharding.masters else 0
    kept = 0
    if sharding.kept_whole and ranks > 1:
        whole = resolved(sharding.kept_whole)(options, [parameter.elements for parameter in state.parameters])
        kept = sum(_bytes(parameter) for parameter, is_whole in zip(state.parameters, whole, strict=True) if is_whole)
    return Placement(
        strategy=variant.name,
        parameters=_divided(sum(map(_bytes, state.parameters)), ranks, sharding.parameters) + kept,
        gradients=gradients * copies,
        optimizer=_divided(optimizer + masters, ranks, sharding.optimizer),
        note=sharding.note,
    )


def _divided(size: int, ranks: int, divided: bool) -> int:
    return -(-size // ranks) if divided else size


def _bytes(parameter: ParameterFacts) -> int:
    return parameter.elements * parameter.element_bytes


def traffic(name: str, volume: Volume, ranks: int, *, micro_batches: int = 1, replicas: int = 1) -> Traffic:
    """Return the bytes that a rank sends in an update under the variant of this name.

    Args:
        micro_batches: Of an update, on each rank; gradients of ddp and fsdp are reduced once, in the last of them.
        replicas: Of a hybrid; it divides `ranks`.
    """
    assert ranks % replicas == 0
    return find_variant(name)[1].sends(Update(volume, ranks // replicas, replicas, micro_batches))


# --- optimizer state ----------------------------------------------------------------------------------------------


def state_bytes(parameter: ParameterFacts, optim: Optim) -> int:
    """Return the bytes that the optimizer keeps of a trained parameter; moments are in the parameter's precision."""
    return _STATES[optim.name](parameter, optim)


def _two_moments(parameter: ParameterFacts, optim: Optim) -> int:
    return 2 * _bytes(parameter) + STEP_BYTES


def _momentum(parameter: ParameterFacts, optim: Optim) -> int:
    return _bytes(parameter) if optim.momentum else 0


def _one_moment(parameter: ParameterFacts, optim: Optim) -> int:
    return _bytes(parameter)


def _momentum_of_matrices(parameter: ParameterFacts, optim: Optim) -> int:
    return _bytes(parameter) if is_hidden_matrix(parameter) else _two_moments(parameter, optim)


def _factored(parameter: ParameterFacts, optim: Optim) -> int:
    """A row and a column instead of a matrix (Shazeer & Stern 2018, arXiv:1804.04235, section 3)."""
    if len(parameter.shape) < 2:
        return _bytes(parameter) + STEP_BYTES
    rows, columns = parameter.shape[-2:]
    return math.prod(parameter.shape[:-2]) * (rows + columns) * parameter.element_bytes + STEP_BYTES


_STATES: Mapping[str, Callable[[ParameterFacts, Optim], int]] = {
    "adamw": _two_moments,
    "adam": _two_moments,
    "sgd": _momentum,
    "muon": _momentum_of_matrices,
    "adafactor": _factored,
    "lion": _one_moment,
    "custom": _two_moments,
    "given": _two_moments,  # nothing is known of it: as of the most common ones
}
