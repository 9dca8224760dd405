"""What each strategy divides, and what is left on one rank: bytes of parameters, gradients and optimizer state.

                 parameters   gradients   optimizer          a row a strategy: a new one joins by its row
    single            1           1           1              the number of ranks that a part is divided by
    dp                1           1           1
    ddp               1           1           1   + buckets
    fsdp              N           N           N
    zero2             1           N           N   + masters, a second copy of what is updated, divided too

Activations, and what torch and its libraries take for themselves, are not in here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.config.deepspeed import kept_whole
from lockstep.config.schema import Config, Optim
from lockstep.core.records import ParameterFacts
from lockstep.plan.batch import plan_batch
from lockstep.plan.grouping import is_hidden_matrix
from lockstep.plan.mesh import Mesh
from lockstep.plan.summation import most_held
from lockstep.plan.variants import factors

STEP_BYTES = 4  # a parameter's own count of updates, which torch keeps in fp32


@dataclass(frozen=True, slots=True)
class Division:
    """What a strategy does with the training state.

    Attributes:
        parameters, gradients, optimizer: what is divided by the mesh's shard axis; the rest is whole on each.
        buckets: gradients lie a second time in the buckets of an all-reduce, unless they are views of these.
        masters: each rank holds the values that it updates a second time, beside its optimizer state.
        kept_whole: small parameters, which are divided too.
        note: what the row means.
    """

    note: str
    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False
    buckets: bool = False
    masters: bool = False
    kept_whole: bool = False


DIVISIONS: Mapping[str, Division] = {
    "single": Division("one process holds everything"),
    "dp": Division("one process; the first GPU holds everything, each other one a copy of the parameters at times"),
    "ddp": Division("every rank holds everything", buckets=True),
    "fsdp": Division("all is divided; a block is gathered while it is used", True, True, True),
    "fsdp-grad-op": Division("as fsdp, but all blocks are gathered from forward to backward", True, True, True),
    "fsdp-no-shard": Division("every rank holds everything"),
    "fsdp-hybrid": Division("as fsdp, in each replica", True, True, True),
    "fsdp-hybrid-grad-op": Division("as fsdp-grad-op, in each replica", True, True, True),
    "zero0": Division("every rank holds everything"),
    "zero1": Division("optimizer state is divided, with the values that it updates", optimizer=True, masters=True),
    "zero2": Division("gradients too", gradients=True, optimizer=True, masters=True),
    "zero3": Division(
        "parameters too, of which small ones also lie whole", True, True, True, masters=True, kept_whole=True
    ),
}
_OF_REPLICAS = ("fsdp-hybrid", "fsdp-hybrid-grad-op")
"""Listed only where asked for: how many replicas there are is the user's choice."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Bytes on one rank (the fullest one, where a division leaves a rest).

    Attributes:
        strategy: a key of DIVISIONS.
        parameters: trained and frozen.
        gradients: of the trained ones, buckets included.
        optimizer: state between updates.
    """

    strategy: str
    parameters: int
    gradients: int
    optimizer: int
    note: str

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def placements(
    config: Config, ranks: int, parameters: Sequence[ParameterFacts], asked: str = "", mesh: Mesh | None = None
) -> tuple[Placement, ...]:
    """A row for every strategy that there is.

    Args:
        asked: the one that is planned, on its `mesh`; all others are on their usual ones.
    """
    listed = [name for name in DIVISIONS if name == asked or name not in _OF_REPLICAS]
    partial_sums = _partial_sums(config, ranks)
    shards = {asked: mesh.shard} if mesh is not None else {}
    rows = [_place(name, config, shards.get(name, ranks), parameters, partial_sums) for name in listed]
    if mesh is not None and (mesh.pieces > 1 or mesh.context > 1):
        rows.append(_place_cut(asked, config, mesh, parameters))
    return tuple(rows)


def _place_cut(variant: str, config: Config, mesh: Mesh, parameters: Sequence[ParameterFacts]) -> Placement:
    """Of a model or sequences that are cut: as of the strategy that holds the state, of an even part of the model."""
    state = factors(variant)[-1]
    shards = mesh.with_context(divided=DIVISIONS[state].gradients).shard
    row = _place(state, config, shards, parameters, 0)
    return Placement(
        strategy=variant,
        parameters=-(-row.parameters // mesh.pieces),
        gradients=-(-row.gradients // mesh.pieces),
        optimizer=-(-row.optimizer // mesh.pieces),
        note=f"each rank holds about a part of {mesh.pieces} of the model"
        if mesh.pieces > 1
        else f"each rank computes a part of {mesh.context} of each sequence",
    )


def _place(
    strategy: str, config: Config, ranks: int, parameters: Sequence[ParameterFacts], partial_sums: int
) -> Placement:
    division = DIVISIONS[strategy]
    trained = [parameter for parameter in parameters if parameter.trainable]
    gradients = _divided(sum(map(_bytes, trained)), ranks, division.gradients)
    copies = 2 if division.buckets and not config.parallel.ddp.gradient_as_bucket_view else 1
    state = sum(state_bytes(parameter, config.optim) for parameter in trained)
    masters = sum(map(_bytes, trained)) if division.masters else 0
    kept = _kept_whole(config, parameters) if division.kept_whole and ranks > 1 else 0
    return Placement(
        strategy=strategy,
        parameters=_divided(sum(map(_bytes, parameters)), ranks, division.parameters) + kept,
        gradients=gradients * (copies if division.gradients else copies + partial_sums),
        optimizer=_divided(state + masters, ranks, division.optimizer),
        note=division.note,
    )


def _kept_whole(config: Config, parameters: Sequence[ParameterFacts]) -> int:
    kept = kept_whole(config.parallel.deepspeed, [parameter.elements for parameter in parameters])
    return sum(_bytes(parameter) for parameter, whole in zip(parameters, kept, strict=True) if whole)


def _partial_sums(config: Config, ranks: int) -> int:
    """Of gradients that a rank holds at a time, at most, beside the one that a backward makes."""
    batch = config.batch
    if config.run.determinism != "invariant" or batch.micro_size == "auto":
        return 0
    cut = plan_batch(batch.global_size, batch.micro_size, ranks, fixed=True)
    shares = [cut.share(batch.global_size, rank) for rank in range(ranks)]
    return max(most_held(share.first, share.stop, share.terms) for share in shares)


def _divided(size: int, ranks: int, divided: bool) -> int:
    return -(-size // ranks) if divided else size


def _bytes(parameter: ParameterFacts) -> int:
    return parameter.elements * parameter.element_bytes


# --- optimizer state ----------------------------------------------------------------------------------------------


def state_bytes(parameter: ParameterFacts, optim: Optim) -> int:
    """What the optimizer keeps of a trained parameter; moments are in the parameter's own precision."""
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


_State = Callable[[ParameterFacts, Optim], int]
_STATES: Mapping[Literal["adamw", "adam", "sgd", "muon", "adafactor", "lion", "given"], _State] = {
    "adamw": _two_moments,
    "adam": _two_moments,
    "sgd": _momentum,
    "muon": _momentum_of_matrices,
    "adafactor": _factored,
    "lion": _one_moment,
    "given": _two_moments,  # nothing is known of it: as of the most common ones
}
