"""Which runs a proof is made of: strategies x ranks x (optimizer, micro-batches). Arithmetic alone, no torch.

reference     the recipe on one process
as asked      the recipe's optimizer, micro size and global size, under each strategy
accumulated   the same in two micro-batches or more a rank
sgd           accumulated, under SGD with momentum: linear in the gradient, where Adam normalises its noise
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lockstep.config.schema import Config, FSDPPrecision, Parallel, Schedule
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem
from lockstep.plan.batch import plan_batch
from lockstep.plan.mesh import AXES, Mesh, mesh_of
from lockstep.plan.plan import check_on_ranks, resolve_strategy
from lockstep.plan.variants import CUTS, VARIANTS, factors, is_cut, variant_of

Precise = Literal["fp32", "bf16", "fp16"]
SINGLE = "single"
_SGD_RATE = 0.02
_LOSS_SCALE = 1024.0


@dataclass(frozen=True, slots=True)
class Case:
    """One run.

    Attributes:
        number: its place among all.
        strategy: by its one name (`plan.variants`).
        optimizer: by name.
        accumulation: micro-batches a rank.
        reference: name of the run it is compared with.
    """

    number: int
    strategy: str
    ranks: int
    optimizer: str
    accumulation: int
    reference: str
    config: Config


@dataclass(frozen=True, slots=True)
class Refused:
    """A run that a strategy says it can't make."""

    case: Case
    reason: str


@dataclass(frozen=True, slots=True)
class Proof:
    """All that is to be run.

    Attributes:
        references: single processes by the name of their optimizer.
        cases: compared with them.
        refused: known before any process is started.
        left_out: strategy and ranks that make no sense together, and why.
        notes: what of the config was set otherwise for the proof.
    missing: how the config cuts its model or sequences, if no run does, and the strategy to ask for.
    """

    references: Mapping[str, Config]
    cases: tuple[Case, ...]
    refused: tuple[Refused, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    missing: str | None = None


def chosen(names: str | Sequence[str]) -> list[str]:
    """The strategies that are meant; `all` of them.

    Raises:
        ConfigError: there is no such strategy.
    """
    asked = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    if asked == ["all"]:
        return list(VARIANTS)
    problems = [Problem("strategies", "", _unknown(name)) for name in asked if name not in VARIANTS]
    if problems or not asked:
        raise ConfigError(problems or Problem("strategies", "", f"names none; there are {', '.join(VARIANTS)}"))
    return list(dict.fromkeys(asked))


def _unknown(name: str) -> str:
    near = closest_match(name, VARIANTS)
    return f"there is no strategy {name!r}; " + (
        f"did you mean {near}?" if near else f"there are {', '.join(VARIANTS)}"
    )


def plan_proof(config: Config, strategies: Sequence[str], ranks: Sequence[int], precision: Precise, gpus: int) -> Proof:
    """Args:
    config: what the user trains.
    gpus: that one process can use.
    """
    base, notes = _for_proof(config, precision)
    references: dict[str, Config] = {base.optim.name: _under(base, SINGLE, 1)}
    linear = _sgd(base)
    if base.optim.name != "sgd":
        references["sgd"] = _under(linear, SINGLE, 1)
    left_out: list[str] = []
    found: list[Case] = []
    refused: list[Refused] = []
    for number_of_ranks in ranks:
        for strategy in strategies:
            why = _left_out(strategy, number_of_ranks, gpus)
            if why:
                left_out.append(f"{strategy} on {_ranks(number_of_ranks)}: {why}")
                continue
            for case in _cases(base, linear, strategy, number_of_ranks):
                case = replace(case, number=len(found) + len(refused))
                reason = _refusal(case)
                if reason is None:
                    found.append(case)
                else:
                    refused.append(Refused(case, reason))
    missing = _missing(config.parallel, strategies, {case.strategy for case in found})
    return Proof(references, tuple(found), tuple(refused), tuple(left_out), tuple(notes), missing)


def _missing(asked: Parallel, strategies: Sequence[str], run: Collection[str]) -> str | None:
    cuts = [f"parallel.{axis} {getattr(asked, axis)}" for axis in CUTS if getattr(asked, axis) != 1]
    name = variant_of(asked, "ddp" if asked.strategy in ("auto", "single", "dp") else asked.strategy)
    if not cuts or name in run:
        return None
    said = f"{' with '.join(cuts)}, which the config asks for, is not among them"
    if name in VARIANTS:
        return said if name in strategies else f"{said}: --strategies {name}"
    nearest = max(VARIANTS, key=lambda one: len({*factors(one)} & {*factors(name)}))
    return f"{said}: the nearest is --strategies {nearest}"


def _cases(base: Config, linear: Config, strategy: str, ranks: int) -> Iterator[Case]:
    size, micro = base.batch.global_size, base.batch.micro_size
    mesh = _mesh(base, strategy, ranks)
    asked = plan_batch(size, micro, mesh.shares, stages=mesh.pipeline)
    smaller = plan_batch(size, max(1, -(-asked.micro_size // 2)), mesh.shares)
    smaller = asked if asked.accumulation > 1 else smaller
    runs = [(base, asked), (base, smaller), (linear, smaller)]
    if strategy == SINGLE:
        runs = runs[1:]  # the first is the reference
    seen = set()
    for config, batch in runs:
        mark = config.optim.name, batch.accumulation
        if mark in seen:
            continue
        seen.add(mark)
        cut = config.model_copy(update={"batch": config.batch.model_copy(update={"micro_size": batch.micro_size})})
        if strategy == SINGLE and batch == asked and config is base:
            continue
        yield Case(
            0, strategy, ranks, config.optim.name, batch.accumulation, config.optim.name, _under(cut, strategy, ranks)
        )


def _mesh(config: Config, strategy: str, ranks: int) -> Mesh:
    """Of a strategy that may be refused on so many ranks later: then as if all of them divided the data."""
    try:
        under = _under(config, strategy, ranks)
        return mesh_of(under.parallel, resolve_strategy(under, ranks, (), None)[0], ranks)
    except ConfigError:
        return Mesh(data=ranks)


def _refusal(case: Case) -> str | None:
    """What is wrong with it by arithmetic alone."""
    try:
        check_on_ranks(case.config, case.ranks)
    except ConfigError as refusal:
        return str(refusal)
    return None


def _left_out(strategy: str, ranks: int, gpus: int) -> str | None:
    parallel = _parallel(Parallel(), strategy)
    if strategy == SINGLE and ranks > 1:
        return "single is one process, which all others are compared with"
    if parallel.strategy == "dp" and (ranks > 1 or gpus < 2):
        return "dp is one process over two GPUs or more" + (f", and it sees {gpus}" if gpus < 2 else "")
    if _is_hybrid(parallel) and ranks % 2:
        return "two replicas, each divided, take an even number of ranks"
    if is_cut(strategy) and ranks % 2:
        return "a model or sequences cut in two take an even number of ranks"
    if "+" in strategy and ranks % 4:
        return "a product of two takes a multiple of four ranks"
    return None


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


# --- configs ------------------------------------------------------------------------------------------------------


def _for_proof(config: Config, precision: Precise) -> tuple[Config, list[str]]:
    """The config with what would differ by design taken out, and what that was."""
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
    mixed = config.parallel.fsdp.mixed_precision
    scaled = precision == "fp16" or (precision != "fp32" and mixed.rounds_to_fp16)
    if scaled and config.precision.loss_scale.initial > _LOSS_SCALE:
        scale = config.precision.loss_scale.model_copy(update={"initial": _LOSS_SCALE})
        changed["precision"] = changed["precision"].model_copy(update={"loss_scale": scale})
        notes.append(
            f"precision.loss_scale.initial is {_LOSS_SCALE:g}: where fp16 overflows depends on how a batch is cut"
        )
    if precision == "fp32" and mixed != FSDPPrecision():
        fsdp = config.parallel.fsdp.model_copy(update={"mixed_precision": FSDPPrecision()})
        changed["parallel"] = config.parallel.model_copy(update={"fsdp": fsdp})
        notes.append("parallel.fsdp.mixed_precision is left out: this proof is in fp32")
    if getattr(config.data.train, "shift", 0):
        changed["data"] = changed["data"].model_copy(
            update={"train": config.data.train.model_copy(update={"shift": 0})}
        )
        notes.append("data.train.shift is 0: augmentation is drawn for each rank and micro-batch")
    return config.model_copy(update=changed), notes


def _sgd(config: Config) -> Config:
    """Under SGD with momentum at a constant rate; clipping, decay and rules as they are."""
    if config.optim.name == "sgd":
        return config
    optim = config.optim.model_copy(update={"name": "sgd", "lr": _SGD_RATE, "momentum": 0.9, "nesterov": False})
    return config.model_copy(update={"optim": optim, "schedule": Schedule(kind="constant")})


def _under(config: Config, strategy: str, ranks: int) -> Config:
    """The config under a strategy on so many ranks, its degrees left to them."""
    launch = config.launch.model_copy(update={"ranks": ranks})
    return config.model_copy(update={"parallel": _parallel(config.parallel, strategy), "launch": launch})


def _parallel(asked: Parallel, strategy: str) -> Parallel:
    values = {
        **asked.model_dump(exclude_unset=True),
        "data": "auto",
        "shard": "auto",
        "pipeline": 1,
        "context": 1,
        "tensor": 1,
    }
    made = Parallel.model_validate(_laid_over(values, VARIANTS[strategy]))
    return made.model_copy(update={"data": 2}) if _is_hybrid(made) else made


def _laid_over(older: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings key by key, everything else replaced."""
    found = dict(older)
    for name, value in newer.items():
        before = found.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        found[name] = _laid_over(before, value) if both else value  # type: ignore[arg-type]
    return found


def _is_hybrid(parallel: Parallel) -> bool:
    return parallel.strategy == "fsdp" and "HYBRID" in parallel.fsdp.sharding_strategy
