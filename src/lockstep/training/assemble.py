"""Builds a session from a config, component by component.

data --> model --> plan --> objective --> parallelize --> engine, vote --> loader --> session
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from lockstep.assembly.adapters import base_of, lower_frozen, quantize_base
from lockstep.assembly.companion import companion_facts, companion_identity, placed, precompute, whole_companion
from lockstep.assembly.deciding import machine_of
from lockstep.assembly.flops import training_flops
from lockstep.assembly.parallelize import (
    WholeModel,
    build_engine,
    companion_forward,
    computed_objective,
    consensus_of,
    keyed_draws,
    load_builder,
    packed_apart,
    parallelize,
    tensor_plan_of,
)
from lockstep.assembly.sources import make_objective, open_sources, prepared, users_model
from lockstep.assembly.user_objects import UserObjects, user_transforms
from lockstep.checkpoint.manifest import ELEMENT_BYTES
from lockstep.config.schema import Model
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import DataFacts
from lockstep.data.loader import TrainingLoader, first_batch
from lockstep.distributed.rng import seed_everything
from lockstep.engine.input_names import refuse_unknown_names
from lockstep.loop.components import Components, EvaluationParts, Purpose, Rate, UpdateParts
from lockstep.loop.plateau import PlateauRate
from lockstep.loop.readback import Readback
from lockstep.loop.session import Session
from lockstep.loop.text import Answers
from lockstep.models.attention_masks import decide_masks, refuse_packed, without_full_mask
from lockstep.models.build import build_meta_model, build_model, parameter_facts, sketch_model
from lockstep.models.building_objectives import coupling, lone_samples
from lockstep.models.heads import head_of
from lockstep.models.metrics import OWN, EvaluationMetrics, Outcome, outcome_of, own_metrics
from lockstep.models.model_tensors import model_tensors
from lockstep.models.objectives import ClassifierLoss, TargetLoss
from lockstep.models.parameters import refuse_parameters
from lockstep.models.weight_matching import match_initial_weights
from lockstep.optim.absent import NoOptimizer
from lockstep.optim.averaging import AveragedOptimizer
from lockstep.optim.groups import parameter_groups, user_groups
from lockstep.optim.optimizers import Elementwise, adapt_optimizer, build_elementwise, build_optimizer, custom_optimizer
from lockstep.optim.precision import LossScaler, resolve_compute, set_tf32
from lockstep.plan.choosing import choose_strategy
from lockstep.plan.plan import make_plan
from lockstep.plan.schedule import learning_rate
from lockstep.resuming.checkpoints import checkpoints_in
from lockstep.sharding import ModelState

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.assembly.parallelize import Parallelized
    from lockstep.config.schema import Config, Optim, Run, Schedule
    from lockstep.core.protocols import EvaluatedObjective, Optimizer, Source
    from lockstep.core.records import Inputs
    from lockstep.distributed.mesh_position import MeshPosition
    from lockstep.distributed.process_group import World
    from lockstep.distributed.shard_boxes import RowShards
    from lockstep.engine.companion import Companion
    from lockstep.models.meta_model import MetaModel
    from lockstep.models.model_tensors import ModelTensors
    from lockstep.plan.optimizers import Grouping
    from lockstep.plan.plan import Machine, Plan


def assemble(config: Config, world: World, given: UserObjects, purpose: Purpose = Purpose.TRAIN) -> Session:
    """Return the session of a run on this rank.

    Args:
        world: This rank's place among all.
        purpose: What follows; after RESUME and EVALUATE all weights must be set, or `Components.draw` called.

    Raises:
        ConfigError: The config can't be run; nothing has been trained yet.
    """
    _configure_process(config.run, config.precision.tf32)
    prepared = _prepare(config, world, given, purpose)
    whole, plan, source, objective = prepared.whole, prepared.plan, prepared.source, prepared.objective
    dtype = resolve_compute(config.precision.compute, world.device)
    own = config.optim, plan.groups, given.optimizer, dtype, config.run.seed
    optimizer = None if purpose is Purpose.EVALUATE else ConfiguredOptimizer(*own)
    made = parallelize(whole, config, plan, world, optimizer or NoOptimizer(), user_transforms(config, given))
    if purpose is Purpose.TRAIN:
        _refuse_not_finite(config.model, made.sharding.state, world)
    prepare, later = _companion(prepared, made, config, world, purpose)
    engine = build_engine(made, config, plan, world, source, objective, prepared.computed, prepared.masks, prepare)

    scaled = dtype is torch.float16 or made.sharding.rounds_to_fp16
    share = made.position.share
    loader = TrainingLoader(source, plan.batch, share, config.run.seed, config.data, world.device, objective.count)
    if optimizer is not None:  # a user's may state its rate
        config = config.model_copy(update={"optim": optimizer.used})
    components = Components(
        config=config,
        plan=plan,
        world=world,
        position=made.position,
        objective=objective,
        sharding=made.sharding,
        tensors=prepared.tensors,
        base=prepared.base,
        companion=prepared.identity,
        engine=engine,
        loader=loader,
        source=source,
        evaluation=EvaluationParts(
            prepared.evaluation,
            _metrics(config, prepared, world.device),
            _answers(config, prepared, world.device),
            _evaluation_size(config.evaluation.micro_size, prepared, made.position),
            keyed_draws(config, plan, made, world),
        ),
        update=UpdateParts(
            consensus_of(world, made.sharding.loss_sum),
            Readback(world.device, late=world.device.type != "cpu"),
            LossScaler(config.precision.loss_scale, enabled=scaled, device=world.device),
            _rate(config.optim, config.schedule, given.schedule),
        ),
        coupled=prepared.coupled,
        flops_per_token=prepared.flops,
        open_checkpoints=checkpoints_in,
        draw=partial(whole.draw_sharded, made.sharding) if whole.deferred else lambda: None,
        precompute=later,
    )
    return Session(components)


def _companion(
    prepared: _Prepared, made: Parallelized, config: Config, world: World, purpose: Purpose
) -> tuple[Companion | None, Callable[[Path | None], None]]:
    """Return what adds the companion's outputs to batches, if it is used in each; and `Components.precompute`."""
    model, plan, waiting = made.sharding.state.model, prepared.plan, [prepared.companion]
    of_run = config, plan, world, model, prepared.computed, prepared.masks

    def forward() -> Companion:
        return companion_forward(*of_run, placed(waiting.pop(), config, plan, world))

    if config.objective.second_model is None:
        return None, lambda folder: None
    if not config.objective.precompute:
        return forward(), lambda folder: None
    sources = dict(prepared.evaluation) | ({} if purpose is Purpose.EVALUATE else {"data.train": prepared.source})
    known = prepared.identity or prepared.base or config.run.seed
    origin = known, config.model, config.objective.second_model, config.precision

    def later(folder: Path | None) -> None:
        precompute(sources, forward, origin, plan, made.position, world, folder)
        waiting.clear()

    return None, later


def _refuse_not_finite(model: Model, state: ModelState, world: World) -> None:
    """Raise ConfigError, on all ranks, if the weights that a run starts from have a NaN or an infinity."""
    keys = {"init_from": model.init_from, "pretrained": getattr(model, "pretrained", None)}
    key = next((key for key, place in keys.items() if place is not None), None)
    if key is None:
        return
    names = cast("list[str | None]", world.axis.gather(state.weights_not_finite()))
    if (name := next(filter(None, names), None)) is not None:
        why = f"{name} has a NaN or an infinity in {keys[key]}, which has diverged or is damaged; take an earlier one"
        raise ConfigError(Problem("", f"model.{key}", why))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The facts and parts that exist before the model is parallelized; see `Components`."""

    whole: WholeModel
    plan: Plan
    source: Source
    evaluation: Mapping[str, Source]
    objective: EvaluatedObjective
    computed: EvaluatedObjective
    companion: WholeModel | None
    identity: Mapping[str, str | None] | None
    tensors: ModelTensors
    base: Mapping[str, str | None] | None
    coupled: str | None
    flops: float | None
    masks: Callable[[], AbstractContextManager[object]]


def _prepare(config: Config, world: World, given: UserObjects, purpose: Purpose) -> _Prepared:
    """Return data, model, plan and objective. Raises ConfigError, without a collective."""
    users = users_model(config, given)
    source, evaluation = open_sources(config, given, users)
    world.axis.barrier()  # another rank may have downloaded or tokenized them
    machine = machine_of(config, world, given, source, purpose)
    meta = _meta_model(config, source.facts, given, world, machine, purpose)
    if users is not None:
        model = users
    elif meta is not None:
        model = meta.model
    else:
        seed, trust = config.run.seed, given.trust_remote_code
        model = build_model(config.model, source.facts, seed, trust_remote_code=trust)
    base = base_of(config.model, model, world.axis)
    refuse_parameters(model, ELEMENT_BYTES)
    lower_frozen(model, config, world.device)
    refuse_unknown_names(model, config.model.inputs)
    own, trust = parameter_facts(model), given.trust_remote_code
    further = companion_facts(config, source.facts, own, trust_remote_code=trust)
    plan = make_plan(config, world.size, source.facts, own, machine, further)
    plan = replace(plan, warnings=(*plan.warnings, *lone_samples(model, plan)))
    pretrained = match_initial_weights(model, config.model)
    if pretrained is not None:
        plan = replace(plan, warnings=(*plan.warnings, *pretrained.notes()))
        if meta is None:
            pretrained.put(model)

    sample = partial(_first_inputs, source)
    companion = whole_companion(config, plan, source.facts, model, given, sample, world.device)
    objective, source, evaluation = make_objective(config, (source, evaluation), given, model)
    tensor_plan = tensor_plan_of(config.parallel.tensor_parallel, plan.mesh, model)
    if tensor_plan:
        _refuse_for_tensor_parallel(config, given, objective)
    computed = computed_objective(config.memory.loss_chunk, plan.mesh, model, objective)
    coupled = coupling(model)
    if config.run.determinism == "invariant":
        _refuse_coupled(coupled, objective)

    keeps, packs = plan.mesh.context > 1, packed_apart(config)
    for key in packs:
        refuse_packed(model, key, divided=keeps)
    removed, masks = decide_masks(model, partial(_first_inputs, source), keeps_masks=keeps, packs=bool(packs))
    if removed:
        source, evaluation = prepared((source, evaluation), without_full_mask)
    tensors, flops = model_tensors(model), training_flops(model, source, world.device)
    sample = partial(_first_inputs, source)
    checked = plan.mesh.tensor * plan.mesh.context > 1  # by forwards, before the first update
    is_saved_whole = tensors.adapter is None  # a base isn't in checkpoints
    deferred = meta is not None and purpose is not Purpose.TRAIN and not checked and is_saved_whole
    quantize_base(model, config, world.device)
    whole = WholeModel(model, list(tensors.shapes), meta, pretrained, tensor_plan, sample, deferred)
    world.axis.barrier()  # another rank may have downloaded or read weights
    identity = companion_identity(config, companion, world.axis)
    parts = (objective, computed, companion, identity, tensors, base, coupled, flops, masks)
    return _Prepared(whole, plan, source, evaluation, *parts)


def _first_inputs(source: Source) -> Inputs:
    return first_batch(source, 1).inputs


def _configure_process(run: Run, tf32: bool) -> None:
    seed_everything(run.seed)
    set_tf32(tf32)
    if run.determinism == "default":
        return
    if run.determinism == "invariant":
        torch.set_num_threads(1)  # kernels add in another order with another number, which launchers derive from ranks
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it; read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _meta_model(
    config: Config, facts: DataFacts, given: UserObjects, world: World, machine: Machine, purpose: Purpose
) -> MetaModel | None:
    """Return a model that gets its values after it is sharded; None: it needn't, or it can't."""
    reads_values = given.optimizer is not None or config.optim.target is not None or user_transforms(config, given)
    if purpose is not Purpose.TRAIN and not reads_values:
        return build_meta_model(config.model, facts, config.run.seed, trust_remote_code=given.trust_remote_code)
    strategy: str = config.parallel.strategy
    partitioned = any(degree != 1 for degree in (config.parallel.pipeline, config.parallel.tensor))
    if strategy == "auto" and world.size > 1 and config.model.kind not in ("given", "custom"):
        sketch = sketch_model(config.model, facts, trust_remote_code=given.trust_remote_code)
        parameters = parameter_facts(lower_frozen(sketch, config, world.device))
        parameters += companion_facts(config, facts, parameters, trust_remote_code=given.trust_remote_code)
        choice = choose_strategy(config, world.size, parameters, machine.memory, machine.decision)
        strategy = choice.strategy.name
    builder = None if strategy == "auto" else load_builder(strategy)
    if not partitioned and (builder is None or (builder.shard is None and not builder.shards_in_build(config))):
        return None
    return build_meta_model(config.model, facts, config.run.seed, trust_remote_code=given.trust_remote_code)


def _metrics(config: Config, prepared: _Prepared, device: torch.device) -> EvaluationMetrics:
    """Return the metrics of the config, for the outputs of the model. Raises ConfigError if they don't fit."""
    own, source, model = own_metrics(prepared.objective), prepared.source, prepared.whole.module
    metrics = config.evaluation.further if own is None else config.evaluation.metrics
    sections = [metric for metric in metrics if metric.arguments or metric.title not in (own or ())]
    if not sections:
        return EvaluationMetrics((), Outcome(OWN, None), device)
    objective, facts, head = prepared.objective, source.facts, head_of(model)
    size: int | None = getattr(config.model, "classes", None) or facts.classes
    if isinstance(objective, TargetLoss) and objective.language:
        size = getattr(config.model, "vocabulary", None) or facts.vocabulary
    batch = first_batch(source, 1)
    if head is not None:
        language = isinstance(objective, TargetLoss) and objective.language
        size = head.config.get_text_config().vocab_size if language else head.config.num_labels
        if head.kind == "multiple-choice":
            size = dict(batch.inputs)["input_ids"].shape[1]
    return EvaluationMetrics(sections, outcome_of(objective, batch, size), device)


def _answers(config: Config, prepared: _Prepared, device: torch.device) -> Answers | None:
    if not config.evaluation.generate:
        return None
    return Answers(config, prepared.plan, prepared.whole.module, prepared.evaluation, device)


def _evaluation_size(size: int | Literal["auto"], prepared: _Prepared, position: MeshPosition) -> int:
    """Return the samples per forward of an evaluation: at most a rank's share of the largest set."""
    plan = prepared.plan
    if size == "auto":  # in a pipeline, the rank's whole share
        size = plan.batch.micro_size * (plan.batch.accumulation if plan.mesh.pipeline > 1 else 1)
    samples = max((source.facts.samples for source in prepared.evaluation.values()), default=1)
    return min(size, max(1, -(-samples // position.shares)))


def _refuse_for_tensor_parallel(config: Config, given: UserObjects, objective: EvaluatedObjective) -> None:
    """Raise ConfigError if a user's object can't work on parts of matrices."""
    if given.optimizer is not None or config.optim.target is not None:
        why = (
            "an optimizer of your own may look at a parameter's shape, and with parallel.tensor it gets "
            "parts; set optim.name to one of Lockstep's, or leave parallel.tensor out"
        )
        raise ConfigError(Problem("", "parallel.tensor", why))
    if config.parallel.tensor_parallel.loss_parallel and not isinstance(objective, TargetLoss | ClassifierLoss):
        why = "true, but this objective takes whole logits; write false"
        raise ConfigError(Problem("", "parallel.tensor_parallel.loss_parallel", why))


def _refuse_coupled(coupled: str | None, objective: EvaluatedObjective) -> None:
    """Raise ConfigError if samples of different micro-batches or ranks depend on each other in an invariant run."""
    if coupled is not None:
        why = f"invariant, but the model has {coupled}, which ties samples; take deterministic, or another norm"
    elif not objective.decomposes:
        why = "invariant, but the objective's loss is not the sum of its samples' losses; take deterministic"
    else:
        return
    raise ConfigError(Problem("", "run.determinism", why))


def _rate(optim: Optim, schedule: Schedule, custom: Callable[[int, int | None], float] | None) -> Rate:
    if custom is not None:
        return lambda done, step, steps: optim.lr * custom(step, steps)
    if schedule.kind == "plateau":
        return PlateauRate(optim, schedule)
    return partial(learning_rate, optim, schedule)


_NO_GROUPS = "doesn't support per-parameter options"  # in torch's message when LBFGS refuses groups


class ConfiguredOptimizer:
    """Makes the optimizer of the config, or a user's.

    Attributes:
        is_custom: Whether it is a user's.
        used: The settings in effect; a user's optimizer may change some when it is made.
    """

    def __init__(
        self,
        optim: Optim,
        groups: Sequence[Grouping],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None,
        compute: torch.dtype | None,
        seed: int,
    ) -> None:
        self._optim, self._groups, self._compute, self._seed = optim, groups, compute, seed
        self._make = make or custom_optimizer(optim)
        self.is_custom = self._make is not None
        self.used = optim

    def __call__(self, parameters: Iterable[tuple[str, nn.Parameter]], shards: RowShards | None = None) -> Optimizer:
        """Return the optimizer of these parameters; see `OptimizerFactory`."""
        parameters = list(parameters)
        optimizer = self._alone(parameters, shards)
        if self._optim.ema is None:
            return optimizer
        return AveragedOptimizer(optimizer, parameters, self._optim.ema)

    def _alone(self, parameters: Iterable[tuple[str, nn.Parameter]], shards: RowShards | None) -> Optimizer:
        groups = parameter_groups(parameters, self._optim, self._groups)
        if self._make is None:
            return build_optimizer(self._optim, groups, shards, self._compute, self._seed)
        try:
            made = self._make(user_groups(groups, self._optim))
        except (TypeError, ValueError) as error:
            key = "optim.arguments" if self._optim.target else "optimizer"
            reason = f"{self._optim.target or 'the function'} raised {type(error).__name__}: {error}"
            if _NO_GROUPS in str(error):
                reason = f"{error}; take one that has groups and a step() without a closure, such as AdamW"
            raise ConfigError(Problem("", key, reason)) from error
        optimizer, self.used = adapt_optimizer(made, self._optim)
        return optimizer

    def elementwise(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Elementwise:
        """Return an optimizer that may see the parameters flattened."""
        if self.is_custom:
            raise ConfigError(
                "an optimizer of your own may look at a parameter's shape, and DeepSpeed passes it flat parts; "
                "set optim.name to one of Lockstep's, or parallel.strategy to fsdp or ddp"
            )
        return build_elementwise(self._optim, parameter_groups(parameters, self._optim, self._groups))
