"""Which runs a proof is made of: strategies x ranks x (optimizer, micro-batches). Arithmetic alone, no torch.

reference     the recipe on one process
as asked      the recipe's optimizer, micro size and global size, under each strategy
accumulated   the same in two micro-batches or more a rank
sgd           accumulated, under SGD with momentum: linear in the gradient, where Adam normalizes its noise
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config.schema import Config, Parallel, Schedule
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem
from lockstep.plan.batch import plan_batch
from lockstep.plan.choosing import choose_strategy
from lockstep.plan.mesh import AXES, Mesh, mesh_of
from lockstep.plan.plan import check_on_ranks
from lockstep.plan.refusals import changed_options
from lockstep.strategies.fsdp import Precise
from lockstep.strategies.partitions import AXES as PARTITIONED
from lockstep.strategies.record import RunLayout
from lockstep.strategies.registry import AUTO, PLAIN, REFERENCE, find_strategy, layout_of, layouts, written_name
from lockstep.strategies.registry import strategies as registered

_SGD_RATE = 0.02
_LOSS_SCALE = 1024.0


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a proof.

    Attributes:
        number: Its place among all.
        strategy: The name of its layout.
        optimizer: By name.
        accumulation: Micro-batches a rank.
        reference: The name of the run that it is compared with.
    """

    number: int
    strategy: str
    ranks: int
    optimizer: str
    accumulation: int
    reference: str
    config: Config


@dataclass(frozen=True, slots=True)
class RefusedCase:
    """A run that a strategy refuses."""

    case: Case
    reason: str


@dataclass(frozen=True, slots=True)
class Proof:
    """All runs of a proof.

    Attributes:
        references: Single processes by the name of their optimizer.
        cases: The runs that are compared with them.
        refused: Known before any process is started.
        left_out: Strategy and ranks that make no sense together, and why.
        notes: What of the config was changed for the proof.
        missing: How the config partitions its model or sequences, if no run does, and the strategy to ask for.
    """

    references: Mapping[str, Config]
    cases: tuple[Case, ...]
    refused: tuple[RefusedCase, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    missing: str | None = None


def selected_layouts(names: str | Sequence[str]) -> list[str]:
    """Return the names of the layouts that are asked for; `all` of them.

    Raises:
        ConfigError: there is no such strategy.
    """
    asked = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    known = layouts()
    if asked == ["all"]:
        return list(known)
    listed = f"there are {', '.join(known)}"
    problems = []
    for name in (name for name in asked if name not in known):
        near = closest_match(name, known)
        hint = f"did you mean {near}?" if near else listed
        problems.append(Problem("strategies", "", f"there is no strategy {name!r}; {hint}"))
    if problems or not asked:
        raise ConfigError(problems or Problem("strategies", "", f"names none; {listed}"))
    return list(dict.fromkeys(asked))


def plan_proof(config: Config, names: Sequence[str], ranks: Sequence[int], precision: Precise, gpus: int) -> Proof:
    """Return the runs that prove a config.

    Args:
        config: What the user trains.
        names: Of layouts.
        gpus: The number that one process can use.
    """
    base, notes = _for_proof(config, precision)
    linear, known = _sgd(base), layouts()
    reference = known[REFERENCE.name]
    references: dict[str, Config] = {one.optim.name: _under(one, reference, 1) for one in (base, linear)}
    left_out: list[str] = []
    cases: list[Case] = []
    refused: list[RefusedCase] = []
    for number_of_ranks in ranks:
        for name in names:
            why = _left_out(known[name], number_of_ranks, gpus)
            if why:
                left_out.append(f"{name} on {number_of_ranks} rank{'s' * (number_of_ranks != 1)}: {why}")
                continue
            for case in _cases(base, linear, known[name], number_of_ranks):
                case = replace(case, number=len(cases) + len(refused))
                try:
                    check_on_ranks(case.config, case.ranks)
                    cases.append(case)
                except ConfigError as refusal:
                    refused.append(RefusedCase(case, str(refusal)))
    missing = _missing(config.parallel, names, {case.strategy for case in cases})
    return Proof(references, tuple(cases), tuple(refused), tuple(left_out), tuple(notes), missing)


def _missing(asked: Parallel, names: Sequence[str], run: Collection[str]) -> str | None:
    partitions = [f"parallel.{axis} {getattr(asked, axis)}" for axis in PARTITIONED if getattr(asked, axis) != 1]
    strategy = (
        PLAIN if asked.strategy == AUTO or find_strategy(asked.strategy).one_process else find_strategy(asked.strategy)
    )
    layout = layout_of(asked, strategy)
    if not partitions or layout.name in run:
        return None
    missing = f"{' with '.join(partitions)}, which the config asks for, is not among them"
    known = layouts()
    if layout.name in known:
        return missing if layout.name in names else f"{missing}: --strategies {layout.name}"
    nearest = max(known.values(), key=lambda one: len({*one.factors} & {*layout.factors}))
    return f"{missing}: the nearest is --strategies {nearest.name}"


def _cases(base: Config, linear: Config, layout: RunLayout, ranks: int) -> Iterator[Case]:
    size, micro = base.batch.global_size, base.batch.micro_size
    mesh = _mesh(base, layout, ranks)
    asked = plan_batch(size, micro, mesh.shares, stages=mesh.pipeline)
    smaller = plan_batch(size, max(1, -(-asked.micro_size // 2)), mesh.shares)
    smaller = asked if asked.accumulation > 1 else smaller
    runs = [(base, asked), (base, smaller), (linear, smaller)]
    is_reference = layout.strategy.reference  # the recipe as asked, on one process
    seen = set()
    for config, batch in runs[1:] if is_reference else runs:
        mark = config.optim.name, batch.accumulation
        if mark in seen:
            continue
        seen.add(mark)
        if is_reference and batch == asked and config is base:
            continue
        batched = config.model_copy(update={"batch": config.batch.model_copy(update={"micro_size": batch.micro_size})})
        name, optimizer = layout.name, config.optim.name
        yield Case(0, name, ranks, optimizer, batch.accumulation, optimizer, _under(batched, layout, ranks))


def _mesh(config: Config, layout: RunLayout, ranks: int) -> Mesh:
    """Return the mesh; of a layout that may be refused on so many ranks later, as if all of them divided the data."""
    try:
        under = _under(config, layout, ranks)
        return mesh_of(under.parallel, choose_strategy(under, ranks).strategy, ranks)
    except ConfigError:
        return Mesh(data=ranks)


def _left_out(layout: RunLayout, ranks: int, gpus: int) -> str | None:
    strategy = layout.strategy
    if strategy.reference and ranks > 1:
        return f"{strategy.name} is one process, which all others are compared with"
    if strategy.one_process and not strategy.reference and (ranks > 1 or gpus < 2):
        few = f", and it sees {gpus}" if gpus < 2 else ""
        return f"{strategy.name} is one process over two GPUs or more{few}"
    if layout.variant.mesh == "hybrid" and ranks % 2:
        return "two replicas, each divided, take an even number of ranks"
    if layout.partitions and ranks % 2:
        return "a model or sequences cut in two take an even number of ranks"
    if "+" in layout.name and ranks % 4:
        return "a product of two takes a multiple of four ranks"
    return None


# --- configs ------------------------------------------------------------------------------------------------------


def _for_proof(config: Config, precision: Precise) -> tuple[Config, list[str]]:
    """Return the config without what would differ by design, and what that was."""
    notes = []
    degrees = [axis for axis in AXES if getattr(config.parallel, axis) not in ("auto", 1)]
    if degrees:
        notes.append(f"parallel.{', '.join(degrees)}: not as asked; each strategy has degrees of its own here")
    changed: dict[str, Any] = {
        "precision": config.precision.model_copy(update={"compute": precision, "tf32": False}),
        "data": config.data.model_copy(update={"evaluation": {}}),
        "evaluation": type(config.evaluation)(),
        "checkpoint": type(config.checkpoint)(),
        "run": config.run.model_copy(update={"end_with": "last"}),
    }
    if config.optim.in_backward:
        changed["optim"] = config.optim.model_copy(update={"in_backward": False})
        notes.append("optim.in_backward is false: the proof compares gradients, which would be gone")
    if config.precision.compute not in ("auto", precision):
        notes.append(f"precision.compute is {precision}, not {config.precision.compute}")
    rounds = any(one.rounds_to_fp16(one.options_of(config.parallel)) for one in registered())
    scaled = precision == "fp16" or (precision != "fp32" and rounds)
    if scaled and config.precision.loss_scale.initial > _LOSS_SCALE:
        scale = config.precision.loss_scale.model_copy(update={"initial": _LOSS_SCALE})
        changed["precision"] = changed["precision"].model_copy(update={"loss_scale": scale})
        notes.append(
            f"precision.loss_scale.initial is {_LOSS_SCALE:g}: where fp16 overflows depends on how a batch is cut"
        )
    if precision == "fp32":
        changed["parallel"], rounding = _without_rounding(config.parallel)
        notes += [f"{key} is left out: this proof is in fp32" for key in rounding]
    if getattr(config.data.train, "shift", 0):
        changed["data"] = changed["data"].model_copy(
            update={"train": config.data.train.model_copy(update={"shift": 0})}
        )
        notes.append("data.train.shift is 0: augmentation is drawn for each rank and micro-batch")
    return config.model_copy(update=changed), notes


def _without_rounding(parallel: Parallel) -> tuple[Parallel, list[str]]:
    """Return the section without the options that round, and the keys of those that were given."""
    keys = []
    for strategy in registered():
        for name in (name for name, _ in changed_options(parallel, strategy) if name in strategy.rounding):
            options = strategy.options_of(parallel)
            options = options.model_copy(update={name: getattr(type(options)(), name)})
            parallel = parallel.model_copy(update={strategy.section: options})
            keys.append(f"parallel.{strategy.section}.{name}")
    return parallel, keys


def _sgd(config: Config) -> Config:
    """Return the config under SGD with momentum at a constant rate; clipping, decay and rules as they are."""
    if config.optim.name == "sgd":
        return config
    optim = config.optim.model_copy(update={"name": "sgd", "lr": _SGD_RATE, "momentum": 0.9, "nesterov": False})
    return config.model_copy(update={"optim": optim, "schedule": Schedule(kind="constant")})


def _under(config: Config, layout: RunLayout, ranks: int) -> Config:
    """Return the config under a layout on so many ranks, its degrees left to them."""
    others = {*(config.parallel.model_extra or ())} - {layout.strategy.section}
    asked = config.parallel.model_dump(exclude_unset=True, exclude=others)
    degrees = {"data": "auto", "shard": "auto", "pipeline": 1, "context": 1, "tensor": 1}
    keys = {**layout.parallel, "strategy": written_name(layout.strategy)}
    parallel = Parallel.model_validate(_merged({**asked, **degrees}, keys))
    if layout.variant.mesh == "hybrid":
        parallel = parallel.model_copy(update={"data": 2})
    launch = config.launch.model_copy(update={"ranks": ranks})
    return config.model_copy(update={"parallel": parallel, "launch": launch})


def _merged(older: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """Return mappings merged key by key, everything else replaced."""
    merged = dict(older)
    for name, value in newer.items():
        before = merged.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(before, value) if both else value  # type: ignore[arg-type]
    return merged
