"""Refuses what doesn't work with a partitioned model, or makes bits depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep.config.schema import TransformerModel
from lockstep.core.errors import ConfigError, Problem
from lockstep.strategies.registry import REFERENCE, find_strategy, strategies

if TYPE_CHECKING:
    from lockstep.config.schema import BatchConfig, Config, Model, Parallel, PipelineParallel
    from lockstep.plan.mesh import Mesh
    from lockstep.strategies.record import RunLayout, Strategy

_FIXED_STAGES = {"zbv": 2, "gpipe": 1, "1f1b": 1}


def refuse_for_partitions(config: Config, layout: RunLayout, mesh: Mesh) -> None:
    """Refuse what isn't possible with a partitioned model or sequences. Raises ConfigError."""
    if mesh.pieces > 1 or mesh.context > 1:
        _raise_all(_for_partitions(config, layout, mesh))


def before_unused(strategy: str, mesh: Mesh) -> str:
    """Return what must change before `find_unused_parameters` is accepted, as "leave x out and "."""
    if not find_strategy(strategy).combines.finds_unused:
        return "take parallel.strategy: ddp and "
    axes = [f"parallel.{axis}" for axis in ("pipeline", "tensor") if getattr(mesh, axis) > 1]
    return f"leave {' and '.join(axes)} out and " if axes else ""


def _for_partitions(config: Config, layout: RunLayout, mesh: Mesh) -> Iterator[tuple[str, str]]:
    parallel = config.parallel
    axis = "pipeline" if mesh.pipeline > 1 else "tensor" if mesh.tensor > 1 else "context"
    where = f"with parallel.{axis} {getattr(mesh, axis)}"
    if config.run.determinism == "invariant":
        yield "run.determinism", f"invariant needs every rank to compute the whole model; {where} take deterministic"
    if mesh.pieces == 1:
        return
    for strategy in strategies():
        for name, value in changed_options(parallel, strategy) if strategy.combines.whole_model else ():
            message = f"{value} is for {strategy.combines.whole_model}, which isn't used {where}; leave it out"
            yield f"parallel.{strategy.section}.{name}", message
    if mesh.pipeline > 1:
        yield from _of_pipelines(parallel.pipeline_parallel, layout)
    if mesh.tensor > 1:
        yield from _of_heads(config.model, mesh.tensor)
    if mesh.pipeline > 1 and mesh.tensor > 1 and parallel.tensor_parallel.sequence_parallel:
        yield (
            "parallel.tensor_parallel.sequence_parallel",
            "true, but pipeline stages pass on all positions; write false, or leave parallel.pipeline out",
        )


def changed_options(parallel: Parallel, strategy: Strategy) -> list[tuple[str, object]]:
    """Return the options that differ from their defaults."""
    if strategy.options is None:
        return []
    options = strategy.options_of(parallel)
    return [(name, getattr(options, name)) for name, usual in strategy.options() if getattr(options, name) != usual]


def _of_heads(model: Model, degree: int) -> Iterator[tuple[str, str]]:
    if not isinstance(model, TransformerModel):
        return
    for name, size in (("heads", model.heads), ("key-value heads", model.kv_heads or model.heads)):
        if size % degree:
            yield "parallel.tensor", f"{degree} doesn't divide the {size} {name}; take {nearest_divisors(size, degree)}"
            return


def nearest_divisors(size: int, degree: int) -> str:
    """Return the divisors of `size` next to `degree`."""
    below = max(number for number in range(1, min(size, degree) + 1) if size % number == 0)
    above = next((number for number in range(degree, size + 1) if size % number == 0), None)
    return f"{below}" if above is None else f"{below} or {above}"


def _of_pipelines(options: PipelineParallel, layout: RunLayout) -> Iterator[tuple[str, str]]:
    for partition in layout.partitions:
        if (conflict := layout.strategy.combines.conflicts.get(partition.name)) is not None:
            yield conflict[0], conflict[1].format(schedule=options.schedule)
    fixed = _FIXED_STAGES.get(options.schedule)
    if fixed is not None and options.stages_per_rank not in ("auto", fixed):
        other = "" if options.schedule == "zbv" else "take interleaved-1f1b, or "
        yield (
            "parallel.pipeline_parallel.stages_per_rank",
            f"{options.stages_per_rank}, but {options.schedule} has {fixed} a rank; {other}leave it out",
        )


# --- invariant runs -----------------------------------------------------------------------------------------------


def refuse_variable(config: Config, strategy: Strategy, ranks: int) -> None:
    """Refuse what makes the bits of an invariant run depend on the ranks. Raises ConfigError."""
    _raise_all(_variable(config.batch, config.parallel, strategy, ranks, compiles=config.model.compile))


def _variable(
    batch: BatchConfig, parallel: Parallel, strategy: Strategy, ranks: int, *, compiles: bool
) -> Iterator[tuple[str, str]]:
    why = "under run.determinism invariant"
    if batch.micro_size == "auto":
        size = -(-batch.global_size // ranks)
        yield (
            "batch.micro_size",
            f"auto splits an update by the number of ranks; {why} give a number, the same for all: "
            f"{size} is what auto gives on {ranks} {'rank' if ranks == 1 else 'ranks'}",
        )
    if not strategy.exactness.invariant:
        able = " or ".join(
            other.name for other in strategies() if other.exactness.invariant and not other.exactness.reference
        )
        yield (
            "parallel.strategy",
            f"{strategy.name} adds gradients in an order that depends on the ranks; {why} take {able}, or "
            f"{REFERENCE.name} on one rank",
        )
    for other in strategies():
        changed = dict(changed_options(parallel, other))
        for name in (name for name in other.exactness.varying_options if name in changed):
            message = other.exactness.varying_options[name].format(value=changed[name], why=why)
            yield f"parallel.{other.section}.{name}", message
    if compiles:
        yield (
            "model.compile",
            f"compiles for the shapes that a rank sees first, so that kernels depend on the ranks; {why} take false",
        )


def _raise_all(problems: Iterator[tuple[str, str]]) -> None:
    if refused := [Problem("", key, message) for key, message in problems]:
        raise ConfigError(refused)
