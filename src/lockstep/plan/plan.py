"""Plans a run from a config, a number of ranks, and the facts of dataset and model, before any process exists."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config.schema import Config, Parallel, PipelineParallel, Schedule, TensorParallelOptions, WeightAverage
from lockstep.core import formatting
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.plan.batch import BatchPlan, nearest_even_sizes, plan_batch
from lockstep.plan.choosing import ONE_RANK, SHARE_OF_STATE, Decision, choose_strategy, state_of
from lockstep.plan.features import FeatureRequest, check_features, refusal
from lockstep.plan.mesh import AXES, Mesh, mesh_of
from lockstep.plan.modules import ModuleParameters, describe_modules, parameters_by_module
from lockstep.plan.optimizers import Grouping, group_parameters
from lockstep.plan.placement import Placement, checkpoint_bytes, placements
from lockstep.plan.refusals import changed_options, refuse_for_partitions, refuse_variable
from lockstep.plan.schedule import epoch_length, horizon
from lockstep.plan.stages import bubble, stages_of
from lockstep.strategies.record import RunLayout, Strategy, resolved
from lockstep.strategies.registry import layout_of, layouts, strategies

_LEFT_OF_START = 0.1
"""Share of the first weights in an average; a larger one is warned about."""
_LONG_WAIT = 0.2
"""Fraction of the time; a larger pipeline bubble is warned about."""
_UNKNOWN = "unknown in advance"
_WRITTEN = 1e9
"""Bytes per second of a checkpoint, as `describe` states: about a local SSD, or a busy shared file system."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run.

    Attributes:
        ranks: Over all machines.
        strategy: Never `auto`.
        variant: Name of its layout: `fsdp-grad-op`, `pipeline-1f1b+fsdp`.
        why: Why `auto` chose the strategy.
        steps, samples, tokens: Of the whole run; None if unknown in advance.
        has_tokens: Whether the data consists of tokens, or the run's length is a number of them.
        epoch_samples, epoch_steps: 0 if unknown.
        parameters, trainable, frozen: Numbers of elements.
        modules: Parameters by module.
        groups: Trainable parameters by optimizer settings.
        placements: Bytes per rank under each strategy.
        warnings: Probable mistakes, a sentence each.
        checkpoint_bytes: Of a checkpoint, all ranks together.
        bubble: Share of its time that a rank of a pipeline waits.
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
    has_tokens: bool
    parameters: int
    trainable: int
    frozen: int
    modules: tuple[ModuleParameters, ...]
    groups: tuple[Grouping, ...]
    placements: tuple[Placement, ...]
    warnings: tuple[str, ...]
    checkpoint_bytes: int
    bubble: float = 0.0

    @property
    def placement(self) -> Placement:
        return next(row for row in self.placements if row.strategy == self.variant)


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about the machines of a run.

    Attributes:
        ranks: Ranks on one machine; None: all.
        memory: Bytes for each rank; None: assumed to suffice.
        device: Such as cpu or cuda; None: unknown.
        decision: What `auto` takes, where a simulation has shown it.
        undecided: Why a simulation has failed; empty: none was needed.
    """

    ranks: int | None = None
    memory: int | None = None
    device: str | None = None
    decision: Decision | None = None
    undecided: str = ""


def make_plan(
    config: Config,
    ranks: int,
    facts: DataFacts,
    parameters: Sequence[ParameterFacts],
    machine: Machine = Machine(),
    companion: Sequence[ParameterFacts] = (),
) -> Plan:
    """Plan a run on `ranks` processes.

    Args:
        companion: The parameters of a frozen second model, which take memory, too.

    Raises:
        ConfigError: The config doesn't work on this number of ranks, with this data, or with this model.
    """
    held = [*parameters, *companion]
    choice = choose_strategy(config, ranks, held, machine.memory, machine.decision)
    mesh, layout, batch = _layout_on(config, strategy := choice.strategy, ranks, machine)
    _refuse_number(facts.samples)
    epoch_steps, epoch_samples = epoch_length(facts, batch.global_size, config.data.drop_last)
    steps = horizon(config.run, batch.global_size, facts, config.data.drop_last)
    epochs, rest = divmod(steps or 0, epoch_steps)
    samples = None if steps is None else epochs * epoch_samples + rest * batch.global_size
    per_sample, total = facts.mean_tokens, sum(parameter.elements for parameter in parameters)
    trainable = sum(parameter.elements for parameter in parameters if parameter.trainable)
    check_features(request := FeatureRequest(config, layout, batch, total - trainable), machine.device)
    plan = Plan(
        ranks=ranks,
        strategy=strategy.name,
        variant=layout.name,
        why=choice.why,
        mesh=mesh,
        batch=batch,
        steps=steps,
        epoch_samples=epoch_samples,
        epoch_steps=epoch_steps,
        samples=samples,
        tokens=None if samples is None or per_sample is None else round(samples * per_sample),
        has_tokens=not (per_sample is facts.vocabulary is config.run.tokens is None),
        parameters=total,
        trainable=trainable,
        frozen=total - trainable,
        modules=parameters_by_module(parameters),
        groups=group_parameters(parameters, config.optim),
        placements=_possible(placements(state_of(config, ranks, held), ranks, layout, mesh), request),
        bubble=_waits(config.parallel.pipeline_parallel, mesh, batch),
        warnings=(),
        checkpoint_bytes=checkpoint_bytes(config, parameters),
    )
    return replace(plan, warnings=tuple(_warnings(config, strategy, plan, facts, machine)))


def _warnings(config: Config, strategy: Strategy, plan: Plan, facts: DataFacts, machine: Machine) -> Iterator[str]:
    yield from _batch_warnings(plan.batch, facts)
    yield from _schedule_warnings(config.schedule, plan.steps)
    yield from _average_warnings(config.optim.ema, plan.steps)
    yield from _idle(config.parallel, strategy, plan.mesh)
    yield from _bubble(config.parallel.pipeline_parallel, plan.bubble, plan.mesh, plan.batch)
    yield from _undecided(plan, machine.undecided)
    if not strategy.memory.offloads(strategy.options_of(config.parallel)):
        yield from _too_large(plan, machine.memory)
    elif machine.memory is not None:
        yield f"Up to {formatting.size(plan.placement.total)} of each rank's training state is in the host's memory."
    if strategy.hooks.check:
        yield from resolved(strategy.hooks.check)(config, plan)


def _possible(rows: Sequence[Placement], request: FeatureRequest) -> tuple[Placement, ...]:
    """Return the rows of strategies that don't refuse the run."""
    names = [name for name, layout in layouts().items() if refusal(replace(request, layout=layout)) is None]
    return tuple(row for row in rows if row.strategy in (request.layout.name, *names))


def _refuse_number(samples: int) -> None:
    if not 0 < samples < 2**62:
        why = "2^62 samples or more; return less from __len__, such as 10**12" if samples else "no samples"
        raise ConfigError(Problem("", "data.train", f"the dataset has {why}"))


def check_alone(config: Config) -> None:
    """Check a strategy's options without ranks and model, and without importing code. Raises ConfigError."""
    for strategy in strategies():
        if strategy.name == config.parallel.strategy and strategy.hooks.check_alone:
            resolved(strategy.hooks.check_alone)(config)


def check_on_ranks(config: Config, ranks: int) -> None:
    """Check a run on a number of ranks without its model and data. Raises ConfigError."""
    _, layout, batch = _layout_on(config, choose_strategy(config, ranks).strategy, ranks)
    check_features(FeatureRequest(config, layout, batch, frozen=0))


def _layout_on(
    config: Config, strategy: Strategy, ranks: int, machine: Machine = Machine()
) -> tuple[Mesh, RunLayout, BatchPlan]:
    mesh = mesh_of(config.parallel, strategy, ranks, machine.ranks)
    layout = layout_of(config.parallel, strategy)
    refuse_for_partitions(config, layout, mesh)
    fixed = config.run.determinism == "invariant"
    if fixed:
        refuse_variable(config, strategy, ranks)
    size, micro_size = config.batch.global_size, config.batch.micro_size
    if micro_size == "auto" and machine.decision is not None:
        micro_size = machine.decision.micro_size
    return mesh, layout, plan_batch(size, micro_size, mesh.shares, fixed=fixed, stages=mesh.pipeline)


# --- warnings -----------------------------------------------------------------------------------------------------


def _undecided(plan: Plan, why: str) -> Iterator[str]:
    if why:
        took = f"`auto` took {plan.strategy} by the training state, and micro-batches of {plan.batch.micro_size}"
        yield f"The memory of this run was not simulated ({why}): {took}."


def _too_large(plan: Plan, memory: int | None) -> Iterator[str]:
    if memory is None or plan.placement.total <= memory:
        return
    first, *_, last = (strategy for strategy in strategies() if strategy.combines.automatic)
    rows = {row.strategy: row.total for row in plan.placements}
    remedy = ""
    if last.variants[0].name in rows and (whole := rows.get(first.variants[0].name)) is not None:
        ranks = math.ceil(whole / (SHARE_OF_STATE * memory))
        start = f"start {ranks:,} ranks under {last.name}"
        remedy = f" To train it, {start if ranks > plan.ranks else f'set parallel.strategy: {last.name}'}."
    takes, has = formatting.size(plan.placement.total), formatting.size(memory)
    yield f"The training state takes {takes} of the {has} of a rank: it doesn't fit.{remedy}"


def _batch_warnings(batch: BatchPlan, facts: DataFacts) -> Iterator[str]:
    size = batch.global_size
    if facts.samples < size:
        yield (
            f"An epoch has {facts.samples:,} samples, fewer than batch.global_size {size:,}: each update sees "
            f"{facts.samples:,}."
        )
    if not batch.even:
        below, above = nearest_even_sizes(size, batch.micro_size, batch.ranks)
        sizes = f"{above}" if below >= min(above, size) else f"{below} or {above}"
        split = f"{batch.ranks} x {batch.accumulation} micro-batches of {batch.micro_size} (ranks x accumulation)"
        wait = f": {batch.waste:.1%} of the ranks' time is spent on padding or waiting" if batch.waste else ""
        yield f"batch.global_size {size:,} does not fill {split}{wait}. A batch.global_size of {sizes} fills them all."


def _schedule_warnings(schedule: Schedule, steps: int | None) -> Iterator[str]:
    warmup = schedule.warmup_steps
    if not warmup or steps is None:
        return
    if warmup >= steps:
        yield (
            f"schedule.warmup_steps {warmup:,} is not less than the {steps:,} steps of the run: the learning rate "
            "never reaches its peak."
        )
    elif schedule.kind == "warmup-stable-decay" and warmup / steps + schedule.decay_ratio > 1:
        yield (
            f"schedule.warmup_steps {warmup:,} reaches into the last {schedule.decay_ratio:.0%} of {steps:,} steps, "
            f"where the learning rate decays: it never reaches its peak."
        )


def _average_warnings(section: WeightAverage | None, steps: int | None) -> Iterator[str]:
    if section is None or steps is None:
        return
    if section.start >= steps:
        yield f"optim.ema.start {section.start:,} is not less than the {steps:,} steps of the run: there is no average."
        return
    moves = (steps - section.start) // section.every
    if (left := section.decay**moves) > _LEFT_OF_START:
        decay = _LEFT_OF_START ** (1 / max(moves, 1))
        yield (
            f"optim.ema: {left:.0%} of the average at the end are the weights after step {section.start:,}, which "
            f"evaluations and exports then use; set a smaller decay, such as {decay:.4g}."
        )


def _idle(parallel: Parallel, strategy: Strategy, mesh: Mesh) -> Iterator[str]:
    idle = []
    for other in strategies():
        changed = [name for name, _ in changed_options(parallel, other)]
        if changed and other.name != strategy.name and strategy.combines.heeds.get(other.name) not in changed:
            idle.append(other.section)
    if mesh.pipeline == 1 and parallel.pipeline_parallel != PipelineParallel():
        idle.append("pipeline_parallel")
    if mesh.tensor == 1 and parallel.tensor_parallel != TensorParallelOptions():
        idle.append("tensor_parallel")
    for name in idle:
        yield f"Options under parallel.{name} have no effect in this run: its strategy is {strategy.name}."


def _waits(options: PipelineParallel, mesh: Mesh, batch: BatchPlan) -> float:
    if mesh.pipeline == 1:
        return 0.0
    per_rank = stages_of(options.schedule, options.stages_per_rank)
    return bubble(options.schedule, mesh.pipeline, per_rank, batch.accumulation)


def _bubble(options: PipelineParallel, waits: float, mesh: Mesh, batch: BatchPlan) -> Iterator[str]:
    if waits < _LONG_WAIT:
        return
    share = -(-batch.global_size // mesh.shares)
    size = max(1, -(-share // (4 * mesh.pipeline)))
    finer = f"; set batch.micro_size to {size} for more micro-batches" if batch.micro_size > 1 else ""
    yield f"Under {options.schedule}, {mesh.pipeline} stages wait {waits:.0%} of the time (pipeline bubble){finer}."


# --- output -------------------------------------------------------------------------------------------------------


def describe(plan: Plan) -> str:
    """Return the plan for people."""
    why = because(plan)
    steps = _UNKNOWN if plan.steps is None else f"{plan.steps:,}"
    number = f"{(plan.steps or 0) / max(plan.epoch_steps, 1):.4g}"
    epochs = "" if plan.steps is None else f", so {number} epoch{'s' * (number != '1')}"
    epoch = f" ({plan.epoch_steps:,} an epoch{epochs})" if plan.epoch_steps else ""
    written = formatting.duration(plan.checkpoint_bytes / _WRITTEN)
    lines = [
        ("strategy", f"{strategy_of(plan)} on {plan.ranks:,} rank{'s' * (plan.ranks != 1)}"),
        *([("", why)] if why else []),
        ("global batch", f"{plan.batch.product(plan.ranks)} samples per update"),
        ("steps", f"{steps}{epoch}"),
        ("samples", _UNKNOWN if plan.samples is None else f"{plan.samples:,}"),
        *([("tokens", _UNKNOWN if plan.tokens is None else f"{plan.tokens:,}")] if plan.has_tokens else []),
        ("checkpoint", f"{formatting.size(plan.checkpoint_bytes)}, {written} at {_WRITTEN / 1e9:g} GB/s"),
        ("parameters", f"{plan.parameters:,} ({plan.trainable:,} trained, {plan.frozen:,} frozen)"),
    ]
    text = [f"{name:<14}{value}" for name, value in lines]
    text += ["", describe_modules(plan.modules)]
    columns = ("parameters", "gradients", "optimizer", "total")
    rows: list[tuple[str, ...]] = [("bytes per rank", *columns, "")]
    for row in plan.placements:
        sizes = (formatting.size(getattr(row, column)) for column in columns)
        rows.append((row.strategy, *sizes, "<-" if row.strategy == plan.variant else ""))
    text += ["", *formatting.aligned(rows, left={0})]
    return "\n".join([*text, *(f"\nwarning: {warning}" for warning in plan.warnings)])


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values."""
    values = dataclasses.asdict(plan)
    values["placements"] = [{**dataclasses.asdict(row), "total": row.total} for row in plan.placements]
    values["checkpoint_seconds"] = plan.checkpoint_bytes / _WRITTEN
    values["batch"] |= {"even": plan.batch.even, "waste": plan.batch.waste}
    return values


def strategy_of(plan: Plan) -> str:
    """Return the name of the layout, with the mesh if it has several axes."""
    axes = {axis: size for axis, size in zip(AXES, plan.mesh.sizes, strict=True) if size > 1 or axis == "data"}
    layout = f" ({' x '.join(map(str, axes.values()))}, {' x '.join(axes)})" if len(axes) > 1 else ""
    return plan.variant + layout


def because(plan: Plan) -> str | None:
    """Return why `auto` chose this strategy, if there was a choice."""
    return None if plan.why in (None, ONE_RANK) else f"auto took {plan.strategy}: {plan.why}"
