"""What follows from a config, a number of ranks, a data set and a model: all of it, before any process exists.

config + ranks + DataFacts + ParameterFacts --> Plan --> describe (people), as_json (programs)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config.schema import Config, Parallel, PipelineParallel, Schedule, TensorParallelOptions
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.plan.batch import BatchPlan, nearest_even_sizes, plan_batch
from lockstep.plan.choosing import SHARE_OF_STATE, choose_strategy, format_bytes, state_of
from lockstep.plan.features import FeatureRequest, check_features
from lockstep.plan.grouping import Grouping, group_parameters
from lockstep.plan.mesh import AXES, Mesh, mesh_of
from lockstep.plan.placement import Placement, placements
from lockstep.plan.refusals import changed_options, refuse_for_partitions, refuse_variable
from lockstep.plan.schedule import epoch_length, horizon
from lockstep.plan.stages import bubble, stages_of
from lockstep.strategies.record import Strategy, resolved
from lockstep.strategies.registry import layout_of, strategies

_LONG_WAIT = 0.2
"""Share of the time; from here on it is warned of."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    ranks: processes, over all machines.
    strategy: never `auto`.
    variant: of the strategy, by its one name (`plan.variants`).
    why: the strategy was chosen, if that was left to us.
    mesh: how the ranks are laid out.
    batch: how the global batch is cut.
    steps: updates of the whole run; None if only running tells.
    epoch_samples: samples that an epoch trains on.
    epoch_steps: updates in an epoch.
    samples, tokens: of the whole run; None if only running tells.
    parameters, trainable, frozen: numbers of elements.
    groups: of the trainable parameters, by settings of the optimizer.
    placements: bytes per rank under each strategy.
    warnings: what a user may not have wanted, a sentence each.
    """

    ranks: int
    strategy: str
    variant: str
    why: str | None
    mesh: Mesh
    batch: BatchPlan
    steps: int | None
    epoch_samples: int
    epoch_steps: int
    samples: int | None
    tokens: int | None
    parameters: int
    trainable: int
    frozen: int
    groups: tuple[Grouping, ...]
    placements: tuple[Placement, ...]
    warnings: tuple[str, ...]

    @property
    def placement(self) -> Placement:
        """Of the strategy that is planned."""
        return next(row for row in self.placements if row.strategy == self.variant)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan may know of where it will run.

    Attributes:
        ranks: on one machine; None: all.
        memory: bytes for each rank's own use; None: unknown, and taken to be enough.
        device: that ranks compute on, cpu or cuda; None: unknown, unless the config says.
    """

    ranks: int | None = None
    memory: int | None = None
    device: str | None = None


def make_plan(
    config: Config,
    ranks: int,
    facts: DataFacts,
    parameters: Sequence[ParameterFacts],
    machine: Machine = Machine(),
) -> Plan:
    """Plans a run on `ranks` processes.

    Raises:
        ConfigError: what was asked can't be done on so many ranks, with this data, or with this model.
    """
    chosen = choose_strategy(config, ranks, parameters, machine.memory)
    strategy = chosen.strategy
    mesh = mesh_of(config.parallel, strategy, ranks, machine.ranks)
    layout = layout_of(config.parallel, strategy)
    refuse_for_partitions(config, layout, mesh)
    if facts.samples < 1:
        raise ConfigError(Problem("", "data.train", "the data set has no samples, so there is nothing to train on"))
    batch = _batch_on(config, strategy, mesh)
    drop_last = config.data.drop_last
    epoch_steps, epoch_samples = epoch_length(facts, batch.global_size, drop_last)
    steps = horizon(config.run, batch.global_size, facts, drop_last)
    samples = None if steps is None else _samples_after(steps, epoch_steps, epoch_samples, batch.global_size)
    per_sample = facts.tokens_per_sample
    trainable = sum(parameter.elements for parameter in parameters if parameter.trainable)
    total = sum(parameter.elements for parameter in parameters)
    check_features(FeatureRequest(config, layout, batch, total - trainable), machine.device)
    plan = Plan(
        ranks=ranks,
        strategy=strategy.name,
        variant=layout.name,
        why=chosen.why,
        mesh=mesh,
        batch=batch,
        steps=steps,
        epoch_samples=epoch_samples,
        epoch_steps=epoch_steps,
        samples=samples,
        tokens=None if samples is None or per_sample is None else samples * per_sample,
        parameters=total,
        trainable=trainable,
        frozen=total - trainable,
        groups=group_parameters(parameters, config.optim),
        placements=placements(state_of(config, ranks, parameters), ranks, layout, mesh),
        warnings=(
            *_batch_warnings(batch, facts),
            *_schedule_warnings(config.schedule, steps),
            *_bubble(config.parallel.pipeline_parallel, mesh, batch),
            *_idle(config.parallel, strategy, mesh),
        ),
    )
    plan = replace(plan, warnings=(*plan.warnings, *_too_large(plan, machine.memory)))
    if not strategy.check:
        return plan
    return replace(plan, warnings=(*plan.warnings, *resolved(strategy.check)(config, plan)))


def check_alone(config: Config) -> None:
    """Check what a strategy's options ask for, as far as it doesn't depend on the number of ranks or on the model.

    Nothing is imported for it that the config names: it may be somebody else's.

    Raises:
        ConfigError: it can't be done.
    """
    strategy = next((one for one in strategies() if one.name == config.parallel.strategy), None)
    if strategy is not None and strategy.check_alone:
        resolved(strategy.check_alone)(config)


def check_on_ranks(config: Config, ranks: int) -> None:
    """Check a run on so many ranks by arithmetic alone, without its model and data.

    Raises:
        ConfigError: it can't be done.
    """
    strategy = choose_strategy(config, ranks).strategy
    mesh = mesh_of(config.parallel, strategy, ranks)
    layout = layout_of(config.parallel, strategy)
    refuse_for_partitions(config, layout, mesh)
    check_features(FeatureRequest(config, layout, _batch_on(config, strategy, mesh), frozen=0))


def _batch_on(config: Config, strategy: Strategy, mesh: Mesh) -> BatchPlan:
    fixed = config.run.determinism == "invariant"
    if fixed:
        refuse_variable(config, strategy, mesh.ranks)
    return plan_batch(config.batch.global_size, config.batch.micro_size, mesh.shares, fixed=fixed, stages=mesh.pipeline)


def _samples_after(steps: int, epoch_steps: int, epoch_samples: int, global_size: int) -> int:
    epochs, rest = divmod(steps, epoch_steps)
    return epochs * epoch_samples + rest * global_size


# --- warnings -----------------------------------------------------------------------------------------------------


def _too_large(plan: Plan, memory: int | None) -> list[str]:
    if memory is None or plan.placement.total <= memory:
        return []
    automatic = [strategy for strategy in strategies() if strategy.automatic]
    whole = next(row.total for row in plan.placements if row.strategy == automatic[0].variants[0].name)
    ranks, divides = math.ceil(whole / (SHARE_OF_STATE * memory)), automatic[-1].name
    remedy = (
        f"parallel.strategy: {divides} divides it"
        if ranks <= plan.ranks
        else f"{divides} takes {ranks:,} ranks like these"
    )
    return [
        f"The training state takes {format_bytes(plan.placement.total)} of a rank's memory, which is "
        f"{format_bytes(memory)}: it doesn't fit. To have room for activations, too, {remedy}."
    ]


def _batch_warnings(batch: BatchPlan, facts: DataFacts) -> list[str]:
    found = []
    if facts.samples < batch.global_size:
        found.append(
            f"An epoch has {facts.samples:,} samples, fewer than batch.global_size {batch.global_size:,}: "
            f"each update sees {facts.samples:,}."
        )
    if not batch.even:
        below, above = nearest_even_sizes(batch.global_size, batch.micro_size, batch.ranks)
        sizes = (
            f"{above}" if below in (above, batch.global_size) or below > batch.global_size else f"{below} or {above}"
        )
        found.append(f"{_uneven(batch)} A batch.global_size of {sizes} fills them all.")
    return found


def _uneven(batch: BatchPlan) -> str:
    cut = f"{batch.ranks} x {batch.accumulation} micro-batches of {batch.micro_size} (ranks x accumulation)"
    wait = f": {batch.waste:.1%} of the ranks' time goes to filler or waiting" if batch.waste else ""
    return f"batch.global_size {batch.global_size:,} does not fill {cut}{wait}."


def _schedule_warnings(schedule: Schedule, steps: int | None) -> list[str]:
    warmup = schedule.warmup_steps
    if not warmup or steps is None:
        return []
    if warmup >= steps:
        return [
            f"schedule.warmup_steps {warmup:,} is not less than the {steps:,} steps of the run: "
            f"the learning rate never reaches its peak."
        ]
    if schedule.kind == "warmup-stable-decay" and warmup / steps + schedule.decay_ratio > 1:
        return [
            f"schedule.warmup_steps {warmup:,} reaches into the last {schedule.decay_ratio:.0%} of {steps:,} steps, "
            f"where the learning rate decays: it never reaches its peak."
        ]
    return []


def _idle(parallel: Parallel, strategy: Strategy, mesh: Mesh) -> list[str]:
    """Name options that have no part in this run: they are kept, for whoever changes the strategy alone."""
    idle = []
    for other in strategies():
        changed = [name for name, _ in changed_options(parallel, other)]
        if changed and other.name != strategy.name and strategy.heeds.get(other.name) not in changed:
            idle.append(other.section)
    if mesh.pipeline == 1 and parallel.pipeline_parallel != PipelineParallel():
        idle.append("pipeline_parallel")
    if mesh.tensor == 1 and parallel.tensor_parallel != TensorParallelOptions():
        idle.append("tensor_parallel")
    return [f"Options under parallel.{name} have no part in this run, which is under {strategy.name}." for name in idle]


def _bubble(options: PipelineParallel, mesh: Mesh, batch: BatchPlan) -> list[str]:
    """Warn if stages wait for a fifth of the time or more."""
    if mesh.pipeline == 1:
        return []
    schedule = options.schedule
    per_rank = stages_of(schedule, options.stages_per_rank)
    waits = bubble(schedule, mesh.pipeline, per_rank, batch.accumulation)
    if waits < _LONG_WAIT:
        return []
    share = -(-batch.global_size // mesh.shares)
    finer = (
        f"; batch.micro_size {max(1, -(-share // (4 * mesh.pipeline)))} makes more of them"
        if batch.micro_size > 1
        else ""
    )
    return [
        f"{mesh.pipeline} stages with {_count(batch.accumulation, 'micro-batch', 'micro-batches')} under {schedule} "
        f"wait {waits:.0%} of the "
        f"time (the pipeline's bubble){finer}."
    ]


# --- showing ------------------------------------------------------------------------------------------------------


def describe(plan: Plan) -> str:
    """The plan for people: a few aligned lines and a table."""
    lines = [
        ("strategy", f"{strategy_of(plan)} on {_count(plan.ranks, 'rank')}"),
        *((("", told),) if (told := because(plan)) else ()),
        ("global batch", f"{plan.batch.among(plan.ranks)} samples per update"),
        ("steps", _steps(plan)),
        ("samples", _or_unknown(plan.samples)),
        ("tokens", _or_unknown(plan.tokens)),
        ("parameters", f"{plan.parameters:,} ({plan.trainable:,} trained, {plan.frozen:,} frozen)"),
    ]
    text = [f"{name:<14}{value}" for name, value in lines]
    return "\n".join([*text, "", *_table(plan), *(f"\nwarning: {warning}" for warning in plan.warnings)])


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for programs: plain values only."""
    found = dataclasses.asdict(plan)
    found["placements"] = [{**dataclasses.asdict(row), "total": row.total} for row in plan.placements]
    found["batch"] |= {"even": plan.batch.even, "waste": plan.batch.waste}
    return found


def _table(plan: Plan) -> list[str]:
    head = ("bytes per rank", "parameters", "gradients", "optimizer", "total")
    rows = [
        (row.strategy, *map(format_bytes, (row.parameters, row.gradients, row.optimizer, row.total)))
        for row in plan.placements
    ]
    marks = ["", *("  <-" if row.strategy == plan.variant else "" for row in plan.placements)]
    return [
        f"{name:<14}" + "".join(f"{cell:>14}" for cell in cells) + mark
        for (name, *cells), mark in zip([head, *rows], marks, strict=True)
    ]


def strategy_of(plan: Plan) -> str:
    """By its one name, and how the ranks are laid out."""
    axes = {axis: size for axis, size in zip(AXES, plan.mesh.sizes, strict=True) if size > 1 or axis == "data"}
    layout = f" ({' x '.join(map(str, axes.values()))}, {' x '.join(axes)})" if len(axes) > 1 else ""
    return plan.variant + layout


def because(plan: Plan) -> str | None:
    """Why this strategy was taken, if it was left to us and there was a choice."""
    return None if plan.why is None or plan.ranks == 1 else f"auto took {plan.strategy}: {plan.why}"


def _steps(plan: Plan) -> str:
    if plan.steps is None:
        return f"only running tells ({plan.epoch_steps:,} an epoch)"
    epochs = plan.steps / plan.epoch_steps
    return f"{plan.steps:,} ({plan.epoch_steps:,} an epoch, so {epochs:.4g} epochs)"


def _count(number: int, word: str, several: str | None = None) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {several or f'{word}s'}"


def _or_unknown(number: int | None) -> str:
    return "only running tells" if number is None else f"{number:,}"
