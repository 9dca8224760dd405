"""What follows from a config, a number of ranks, a data set and a model: all of it, before any process exists.

config + ranks + DataFacts + ParameterFacts --> Plan --> describe (people), as_json (programs)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config import deepspeed
from lockstep.config.schema import Config, Parallel
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.plan.batch import BatchPlan, nearest_even_sizes, plan_batch
from lockstep.plan.features import cell, check_features
from lockstep.plan.grouping import Grouping, group_parameters
from lockstep.plan.invariance import refuse_variable
from lockstep.plan.mesh import AXES, Mesh, mesh_of
from lockstep.plan.pieces import refuse_for_pieces
from lockstep.plan.placement import Placement, placements
from lockstep.plan.schedule import epoch_length, horizon
from lockstep.plan.stages import bubble, stages_of
from lockstep.plan.variants import variant_of

_LONG_WAIT = 0.2
"""Share of the time; from here on it is warned of."""
_SHARE_OF_STATE = 0.6
"""Of a rank's memory; the rest is left to activations."""


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
    strategy, why = resolve_strategy(config, ranks, parameters, machine.memory)
    mesh = mesh_of(config.parallel, strategy, ranks, machine.ranks)
    variant = variant_of(config.parallel, strategy)
    refuse_for_pieces(config, strategy, mesh)
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
    check_features(config, variant, batch, total - trainable, machine.device)
    made = Plan(
        ranks=ranks,
        strategy=strategy,
        variant=variant,
        why=why,
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
        placements=placements(config, ranks, parameters, variant, mesh),
        warnings=(
            *_batch_warnings(batch, facts),
            *_schedule_warnings(config, steps),
            *_bubble(config, mesh, batch),
            *_idle(config, strategy, mesh),
        ),
    )
    made = replace(made, warnings=(*made.warnings, *_too_large(made, machine.memory)))
    if strategy == "deepspeed":
        deepspeed.check(config, derived_for_deepspeed(made))
        made = replace(made, warnings=(*made.warnings, *deepspeed.not_carried_out(config)))
    return made


def derived_for_deepspeed(plan: Plan) -> deepspeed.Derived:
    """The numbers that a DeepSpeed config is compared with, or filled in from."""
    return deepspeed.Derived(plan.ranks, plan.batch.micro_size, plan.batch.accumulation, plan.steps, plan.trainable)


def resolve_strategy(
    config: Config, ranks: int, parameters: Sequence[ParameterFacts], memory: int | None
) -> tuple[str, str | None]:
    """The strategy, and why, if it was left to us: single on one rank, ddp where it fits, otherwise fsdp.

    Args:
        memory: as of `Machine`.

    Raises:
        ConfigError: the strategy is for one process alone.
    """
    asked = config.parallel.strategy
    if asked == "auto":
        return _chosen(config, ranks, parameters, memory)
    if asked == "single" and ranks > 1:
        raise ConfigError(_strategy_problem(f"single is one process, but there are {ranks} ranks"))
    if asked == "dp" and ranks > 1:
        why = f"dp is one process over all its GPUs, but there are {ranks} ranks"
        raise ConfigError(_strategy_problem(why))
    return asked, None


def check_on_ranks(config: Config, ranks: int) -> None:
    """What is known of a run on so many ranks by arithmetic alone, without its model and data.

    Raises:
        ConfigError: it can't be done.
    """
    strategy, _ = resolve_strategy(config, ranks, (), None)
    mesh = mesh_of(config.parallel, strategy, ranks)
    refuse_for_pieces(config, strategy, mesh)
    batch = _batch_on(config, strategy, mesh)
    check_features(config, variant_of(config.parallel, strategy), batch, frozen=0)


def _batch_on(config: Config, strategy: str, mesh: Mesh) -> BatchPlan:
    fixed = config.run.determinism == "invariant"
    if fixed:
        refuse_variable(config, strategy, mesh.ranks)
    return plan_batch(config.batch.global_size, config.batch.micro_size, mesh.shares, fixed=fixed, stages=mesh.pipeline)


def _chosen(
    config: Config, ranks: int, parameters: Sequence[ParameterFacts], memory: int | None
) -> tuple[str, str | None]:
    if ranks == 1:
        return "single", "there is one rank"
    if config.run.determinism == "invariant":
        return "ddp", "run.determinism invariant needs every rank to hold whole gradients"
    pieces = math.prod(degree for degree in (config.parallel.pipeline, config.parallel.tensor) if degree != "auto")
    whole = next(row for row in placements(config, ranks, parameters) if row.strategy == "ddp").total // pieces
    if memory is None:
        return "ddp", "a rank's memory isn't known here; plan --memory 80GiB says it"
    takes = f"the training state takes {_bytes(whole)} of the {_bytes(memory)} that a rank has"
    if whole <= _SHARE_OF_STATE * memory:
        return "ddp", takes
    refused = cell(variant_of(config.parallel, "fsdp"), config.optim.name).why
    if refused:
        return "ddp", f"{takes}, but {config.optim.name} doesn't go with fsdp: {refused}"
    return "fsdp", takes


def _strategy_problem(why: str) -> Problem:
    return Problem("", "parallel.strategy", f"{why}; start 1 rank, or take ddp")


def _samples_after(steps: int, epoch_steps: int, epoch_samples: int, global_size: int) -> int:
    epochs, rest = divmod(steps, epoch_steps)
    return epochs * epoch_samples + rest * global_size


# --- warnings -----------------------------------------------------------------------------------------------------


def _too_large(plan: Plan, memory: int | None) -> list[str]:
    if memory is None or plan.placement.total <= memory:
        return []
    whole = next(row.total for row in plan.placements if row.strategy == "ddp")
    ranks = math.ceil(whole / (_SHARE_OF_STATE * memory))
    remedy = "parallel.strategy: fsdp divides it" if ranks <= plan.ranks else f"fsdp takes {ranks:,} ranks like these"
    return [
        f"The training state takes {_bytes(plan.placement.total)} of a rank's memory, which is {_bytes(memory)}: it "
        f"doesn't fit. To have room for activations, too, {remedy}."
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


def _schedule_warnings(config: Config, steps: int | None) -> list[str]:
    schedule, warmup = config.schedule, config.schedule.warmup_steps
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


def _idle(config: Config, strategy: str, mesh: Mesh) -> list[str]:
    """Options of strategies that this run isn't under: kept, for whoever changes the strategy alone, but said."""
    parallel, usual = config.parallel, Parallel()
    used = {"ddp": strategy == "ddp", "fsdp": strategy == "fsdp", "deepspeed": strategy == "deepspeed"}
    used |= {"pipeline_parallel": mesh.pipeline > 1, "tensor_parallel": mesh.tensor > 1}
    idle = [name for name, runs in used.items() if not runs and getattr(parallel, name) != getattr(usual, name)]
    if parallel.ddp.find_unused_parameters and strategy == "fsdp":
        idle = [name for name in idle if name != "ddp"]
    return [f"Options under parallel.{name} have no part in this run, which is under {strategy}." for name in idle]


def _bubble(config: Config, mesh: Mesh, batch: BatchPlan) -> list[str]:
    """Said if stages wait for a fifth of the time or more."""
    if mesh.pipeline == 1:
        return []
    schedule = config.parallel.pipeline_parallel.schedule
    per_rank = stages_of(schedule, config.parallel.pipeline_parallel.stages_per_rank)
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
        (row.strategy, *map(_bytes, (row.parameters, row.gradients, row.optimizer, row.total)))
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


def _bytes(size: int) -> str:
    """In binary units, three digits or so."""
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:,.4g} TiB"
