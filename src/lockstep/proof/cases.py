"""Chooses the runs that are compared: strategies x ranks x (optimizer, micro-batches). Without torch.

reference     the config on one process
configured    the config's optimizer, micro size and global size, under each strategy
accumulated   the same with two or more micro-batches per rank
sgd           accumulated, under SGD with momentum: linear in the gradient, where Adam normalizes its noise
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config.schema import Config, Parallel, Schedule
from lockstep.core.closest import did_you_mean
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.formatting import counted
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
    """One run that is compared with a reference.

    Attributes:
        number: Index among all cases, refused ones included.
        strategy: Name of its layout.
        optimizer: Of the run and its reference.
        accumulation: Micro-batches per rank.
    """

    number: int
    strategy: str
    ranks: int
    optimizer: str
    accumulation: int
    config: Config


@dataclass(frozen=True, slots=True)
class RefusedCase:
    """A run that a strategy refuses."""

    case: Case
    reason: str


@dataclass(frozen=True, slots=True)
class VerificationPlan:
    """All runs of a verification.

    Attributes:
        references: Single-process configs by optimizer.
        refused: Runs that are refused before any process starts.
        left_out: Runs that make no sense, and why.
        notes: What was changed in the config.
        not_covered: How the config partitions its model or sequences, if no run does, and the strategy to ask for.
    """

    references: Mapping[str, Config]
    cases: tuple[Case, ...]
    refused: tuple[RefusedCase, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    not_covered: str | None = None


def selected_layouts(names: str | Sequence[str]) -> list[str]:
    """Return the names of the selected layouts; `all`: every one. Raises ConfigError."""
    selected = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    known = layouts()
    if selected == ["all"]:
        return list(known)
    if not selected:
        raise ConfigError(Problem("strategies", "", f"names none; there are {', '.join(known)}"))
    unknown = [name for name in selected if name not in known]
    if unknown:
        hints = [f"there is no strategy {name!r}; {did_you_mean(name, known)}" for name in unknown]
        raise ConfigError([Problem("strategies", "", hint) for hint in hints])
    return list(dict.fromkeys(selected))


def plan_verification(
    config: Config, names: Sequence[str], ranks: Sequence[int], precision: Precise, gpus: int
) -> VerificationPlan:
    """Return the runs that compare a config under the named layouts; `gpus`: visible accelerators."""
    base, notes = _comparable(config, precision)
    linear, known = _with_sgd(base), layouts()
    reference = known[REFERENCE.name]
    references: dict[str, Config] = {each.optim.name: _with_layout(each, reference, 1) for each in (base, linear)}
    left_out: list[tuple[str, int, str]] = []
    cases: list[Case] = []
    refused: list[RefusedCase] = []
    for number_of_ranks in ranks:
        for name in names:
            reason = _reason_to_leave_out(known[name], number_of_ranks, gpus)
            if reason:
                left_out.append((name, number_of_ranks, reason))
                continue
            for case in _cases(base, linear, known[name], number_of_ranks):
                case = replace(case, number=len(cases) + len(refused))
                try:
                    check_on_ranks(case.config, case.ranks)
                    cases.append(case)
                except ConfigError as refusal:
                    refused.append(RefusedCase(case, str(refusal)))
    if config.precision.parameters != "fp32":
        cases = [replace(case, config=_with_fp32_parameters(case.config)) for case in cases]
        references = {name: _with_fp32_parameters(each) for name, each in references.items()}
        notes.append("precision.parameters is set to fp32, because stochastic rounding to bf16 hides small differences")
    not_covered = _not_covered(config.parallel, names, {case.strategy for case in cases})
    grouped = tuple(by_reason(left_out))
    return VerificationPlan(references, tuple(cases), tuple(refused), grouped, tuple(notes), not_covered)


def by_reason(runs: Iterable[tuple[str, int, str]]) -> list[str]:
    """Return each reason once, after its runs: `ddp on 1 rank, ddp on 2 ranks: reason`.

    Args:
        runs: Name, number of ranks, and reason of each.
    """
    reasons: dict[str, dict[str, None]] = {}
    for name, ranks, reason in runs:
        reasons.setdefault(reason, {})[f"{name} on {counted(ranks, 'rank')}"] = None
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


def _not_covered(parallel: Parallel, names: Sequence[str], run: Collection[str]) -> str | None:
    partitions = [f"parallel.{axis} {getattr(parallel, axis)}" for axis in PARTITIONED if getattr(parallel, axis) != 1]
    strategy = PLAIN if parallel.strategy == AUTO else find_strategy(parallel.strategy)
    layout = layout_of(parallel, PLAIN if strategy.combines.one_process else strategy)
    if not partitions or layout.name in run:
        return None
    fact = f"no run has {' and '.join(partitions)}, which the config sets"
    ask = f"; use --strategies {layout.name}" if layout.name in layouts() and layout.name not in names else ""
    return fact + ask


def _cases(base: Config, linear: Config, layout: RunLayout, ranks: int) -> Iterator[Case]:
    mesh = _mesh(base, layout, ranks)
    configured = plan_batch(base.batch.global_size, base.batch.micro_size, mesh.shares, stages=mesh.pipeline)
    half = max(1, -(-configured.micro_size // 2))
    accumulated = configured if configured.accumulation > 1 else plan_batch(base.batch.global_size, half, mesh.shares)
    runs: dict[tuple[str, int], tuple[Config, int]] = {}
    for config, batch in ((base, configured), (base, accumulated), (linear, accumulated)):
        runs.setdefault((config.optim.name, batch.accumulation), (config, batch.micro_size))
    if layout.strategy.exactness.reference:  # the config as it is on one process
        del runs[base.optim.name, configured.accumulation]
    for (optimizer, accumulation), (config, micro_size) in runs.items():
        batched = config.with_values(batch={"micro_size": micro_size})
        yield Case(0, layout.name, ranks, optimizer, accumulation, _with_layout(batched, layout, ranks))


def _mesh(config: Config, layout: RunLayout, ranks: int) -> Mesh:
    """Return the mesh; for a layout that will be refused on these ranks, one with the data axis only."""
    try:
        changed = _with_layout(config, layout, ranks)
        return mesh_of(changed.parallel, choose_strategy(changed, ranks).strategy, ranks)
    except ConfigError:
        return Mesh(data=ranks)


def _reason_to_leave_out(layout: RunLayout, ranks: int, gpus: int) -> str | None:
    strategy = layout.strategy
    if strategy.exactness.reference and ranks > 1:
        return f"{strategy.name} is the single-process reference"
    if strategy.combines.one_process and not strategy.exactness.reference and (ranks > 1 or gpus < 2):
        available = f", {gpus} available" if gpus < 2 else ""
        return f"{strategy.name} is one process with two or more GPUs{available}"
    if 0 < gpus < ranks:
        return f"each rank needs an accelerator of its own, {gpus} available; --launch.device cpu needs none"
    if layout.variant.mesh == "hybrid" and ranks % 2:
        return "two sharded replicas need an even number of ranks"
    if layout.partitions and ranks % 2:
        return "a model or sequence in two partitions needs an even number of ranks"
    if "+" in layout.name and ranks % 4:
        return "a combination of two partitionings needs a multiple of four ranks"
    return None


# --- configs ------------------------------------------------------------------------------------------------------


def _comparable(config: Config, precision: Precise) -> tuple[Config, list[str]]:
    """Return the config without what differs between ranks by design, and notes on what was changed."""
    notes = []
    degrees = [axis for axis in AXES if getattr(config.parallel, axis) not in ("auto", 1)]
    if degrees:
        notes.append(f"parallel.{', '.join(degrees)} ignored: verify sets the degrees of each strategy")
    changed: dict[str, Any] = {
        "precision": config.precision.model_copy(update={"compute": precision, "tf32": False}),
        "data": config.data.model_copy(update={"evaluation": {}}),
        "evaluation": type(config.evaluation)(),
        "checkpoint": type(config.checkpoint)(),
        "run": config.run.model_copy(update={"end_with": "last"}),
    }
    if config.precision.compute not in ("auto", precision):
        notes.append(f"precision.compute is set to {precision} instead of {config.precision.compute}")
    rounds = any(strategy.exactness.rounds_to_fp16(strategy.options_of(config.parallel)) for strategy in registered())
    scaled = precision == "fp16" or (precision != "fp32" and rounds)
    if scaled and config.precision.loss_scale.initial > _LOSS_SCALE:
        scale = config.precision.loss_scale.model_copy(update={"initial": _LOSS_SCALE})
        changed["precision"] = changed["precision"].model_copy(update={"loss_scale": scale})
        initial = f"precision.loss_scale.initial is set to {_LOSS_SCALE:g}"
        notes.append(f"{initial}, because the split of a batch decides where fp16 overflows")
    if precision == "fp32":
        changed["parallel"], rounding = _without_rounding(config.parallel)
        notes += [f"{key} is ignored in fp32" for key in rounding]
    if config.objective.precompute:
        changed["objective"] = config.objective.model_copy(update={"precompute": False})
        notes.append("objective.precompute is off: the reference of the whole dataset takes longer than these updates")
    if getattr(config.data.train, "shift", 0):
        train = config.data.train.model_copy(update={"shift": 0})
        changed["data"] = changed["data"].model_copy(update={"train": train})
        notes.append("data.train.shift is set to 0, because augmentation is random per rank and micro-batch")
    return config.model_copy(update=changed), notes


def _with_fp32_parameters(config: Config) -> Config:
    return config.model_copy(update={"precision": config.precision.model_copy(update={"parameters": "fp32"})})


def _without_rounding(parallel: Parallel) -> tuple[Parallel, list[str]]:
    keys = []
    for strategy in registered():
        for name in (name for name, _ in changed_options(parallel, strategy) if name in strategy.exactness.rounding):
            options = strategy.options_of(parallel)
            options = options.model_copy(update={name: getattr(type(options)(), name)})
            parallel = parallel.model_copy(update={strategy.section: options})
            keys.append(f"parallel.{strategy.section}.{name}")
    return parallel, keys


def _with_sgd(config: Config) -> Config:
    if config.optim.name == "sgd":
        return config
    optim = config.optim.model_copy(update={"name": "sgd", "lr": _SGD_RATE, "momentum": 0.9, "nesterov": False})
    return config.model_copy(update={"optim": optim, "schedule": Schedule(kind="constant")})


def _with_layout(config: Config, layout: RunLayout, ranks: int) -> Config:
    others = {*(config.parallel.model_extra or ())} - {layout.strategy.section}
    kept = config.parallel.model_dump(exclude_unset=True, exclude=others)
    degrees = {"data": "auto", "shard": "auto", "pipeline": 1, "context": 1, "tensor": 1}
    keys = {**layout.parallel, "strategy": written_name(layout.strategy)}
    parallel = Parallel.model_validate(_merged({**kept, **degrees}, keys))
    if layout.variant.mesh == "hybrid":
        parallel = parallel.model_copy(update={"data": 2})
    launch = config.launch.model_copy(update={"ranks": ranks})
    return config.model_copy(update={"parallel": parallel, "launch": launch})


def _merged(older: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(older)
    for name, value in newer.items():
        before = merged.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(before, value) if both else value  # type: ignore[arg-type]
    return merged
