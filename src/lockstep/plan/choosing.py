"""Chooses the strategy of a run: the one in the config, or the first automatic one with a training state that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config.schema import Config
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.formatting import size
from lockstep.core.records import ParameterFacts
from lockstep.plan.batch import plan_batch
from lockstep.plan.features import FeatureRequest, refusal
from lockstep.plan.placement import State, partial_sums, placements
from lockstep.strategies.record import Strategy
from lockstep.strategies.registry import AUTO, REFERENCE, find_strategy, layout_of, strategies

ONE_RANK = "there is one rank"
SHARE_OF_STATE = 0.6
"""The fraction of a rank's memory that the training state may take; the rest is left to activations."""
USABLE = 0.9
"""The fraction that tensors may take; an allocator keeps some, and leaves gaps."""

TOKEN_BYTES = 16
"""The ids and the target of a token."""

_PLENTY = 0.5
_STATE_PER_PARAMETER, _ACTIVATIONS_PER_INPUT, _ACTIVATIONS_PER_PARAMETER = 8, 2_000, 10  # bytes per byte, at most
"""Several times what models need; only a run that is small beside the memory passes."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Strategy and micro-batch of `auto`, found by simulated steps, and why."""

    strategy: str
    micro_size: int
    why: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategy of a run, and why `auto` chose it."""

    strategy: Strategy
    why: str | None = None


def choose_strategy(
    config: Config,
    ranks: int,
    parameters: Sequence[ParameterFacts] = (),
    memory: int | None = None,
    decision: Decision | None = None,
) -> Choice:
    """Return the strategy in the config, or the one that `auto` chooses.

    `auto` takes single on one rank; on more, the simulation's decision, or the first automatic strategy that fits.

    Raises:
        ConfigError: The strategy is only for one process.
    """
    if config.parallel.strategy == AUTO:
        if decision is not None:
            return Choice(find_strategy(decision.strategy), decision.why)
        return _automatic(config, ranks, parameters, memory)
    strategy = find_strategy(config.parallel.strategy)
    why = None if decision is None or config.batch.micro_size != "auto" else decision.why
    if strategy.combines.one_process and ranks > 1:
        first = next(other for other in strategies() if other.combines.automatic)
        reason = f"{strategy.name} is {strategy.combines.one_process}, but there are {ranks} ranks"
        raise ConfigError(Problem("", "parallel.strategy", f"{reason}; start 1 rank, or take {first.name}"))
    return Choice(strategy, why)


def _automatic(config: Config, ranks: int, parameters: Sequence[ParameterFacts], memory: int | None) -> Choice:
    first, *others = (strategy for strategy in strategies() if strategy.combines.automatic)
    if ranks == 1:
        return Choice(REFERENCE, ONE_RANK)
    if config.run.determinism == "invariant":
        return Choice(first, "run.determinism invariant needs every rank to hold whole gradients")
    if memory is None:
        return Choice(first, "a rank's memory isn't known here; set it by plan --memory 80GiB")
    pieces = math.prod(degree for degree in (config.parallel.pipeline, config.parallel.tensor) if degree != "auto")
    rows = {row.strategy: row.total // pieces for row in placements(state_of(config, ranks, parameters), ranks)}
    whole = rows[first.variants[0].name]
    takes = f"the training state takes {size(whole)} of the {size(memory)} that a rank has"
    if whole <= SHARE_OF_STATE * memory:
        return Choice(first, takes)
    batch = plan_batch(config.batch.global_size, config.batch.micro_size, ranks)
    frozen = sum(each.elements for each in parameters if not each.trainable)
    for strategy in others:
        why = refusal(FeatureRequest(config, layout_of(config.parallel, strategy), batch, frozen))
        if why is None:
            return Choice(strategy, takes)
        takes += f", but {why}"
    return Choice(first, takes)


def is_plenty(config: Config, ranks: int, parameters: Sequence[ParameterFacts], sample_bytes: int, memory: int) -> bool:
    """Return whether any strategy fits by far, so that `auto` needs no simulation: a bound, not an estimate."""
    model = sum(parameter.bytes for parameter in parameters)
    share = -(-config.batch.global_size // ranks)
    samples = share if config.batch.micro_size == "auto" else min(share, config.batch.micro_size)
    activations = samples * (_ACTIVATIONS_PER_INPUT * sample_bytes + _ACTIVATIONS_PER_PARAMETER * model)
    return _STATE_PER_PARAMETER * model + activations <= _PLENTY * memory


def state_of(config: Config, ranks: int, parameters: Sequence[ParameterFacts]) -> State:
    """Return the training state to count."""
    sums = partial_sums(config.batch, ranks) if config.run.determinism == "invariant" else 0
    return State(config.parallel, config.optim, parameters, sums)
