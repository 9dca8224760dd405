"""A session from a config: calls the constructors of its components in order; what can't be built is refused by name.

data --> model --> plan --> objective --> parallelize --> engine, vote --> loader --> session
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.config.schema import Loader
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import DataFacts
from lockstep.data.loader import TrainingLoader, evaluation_batches
from lockstep.distributed.memory import peak_memory, rank_memory
from lockstep.distributed.rng import seed_everything
from lockstep.engine.input_names import refuse_unknown_names
from lockstep.models.build import build_meta_model, build_model, parameter_facts, sketch_model
from lockstep.models.building_objectives import coupling
from lockstep.models.model_tensors import model_tensors
from lockstep.models.objectives import ClassifierLoss, TargetLoss
from lockstep.models.parameters import refuse_parameters
from lockstep.models.weight_matching import match_initial_weights
from lockstep.optim.precision import LossScaler, resolve_compute, set_tf32
from lockstep.plan.choosing import choose_strategy
from lockstep.plan.plan import Machine, make_plan
from lockstep.plan.schedule import learning_rate
from lockstep.training.engines import build_engine, computed_objective
from lockstep.training.evaluate import Evaluator
from lockstep.training.flops import training_flops
from lockstep.training.invariance import refuse_coupled
from lockstep.training.memory_watch import MemoryWatch
from lockstep.training.optimizer_factory import ConfiguredOptimizer
from lockstep.training.parallelize import WholeModel, load_builder, parallelize, tensor_plan_of
from lockstep.training.readback import readback_from
from lockstep.training.session import Components, Rate, Session
from lockstep.training.sources import make_objective, open_sources, users_model
from lockstep.training.user_objects import UserObjects, user_transforms

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.core.protocols import EvaluatedObjective, Source
    from lockstep.distributed.process_group import World
    from lockstep.models.meta_model import MetaModel
    from lockstep.models.model_tensors import ModelTensors
    from lockstep.plan.plan import Plan
    from lockstep.transforms.activation_checkpointing import RecomputeBlocks


def assemble(config: Config, world: World, given: UserObjects) -> Session:
    """Return the session of a run on this rank.

    Args:
        world: This rank's place among all.

    Raises:
        ConfigError: The config asks for what is impossible; nothing has been trained yet.
    """
    _set_process(config)
    prepared = _prepare(config, world, given)
    whole, plan, source, objective = prepared.whole, prepared.plan, prepared.source, prepared.objective
    optimizer = ConfiguredOptimizer(config.optim, plan.groups, given.optimizer)
    made = parallelize(whole, config, plan, world, optimizer, user_transforms(config, given))
    engine, consensus = build_engine(made, config, plan, world, source, objective, prepared.computed)

    dtype = resolve_compute(config.precision.compute, world.device)
    scaled = dtype is torch.float16 or made.sharding.rounds_to_fp16
    loader = TrainingLoader(
        source,
        plan.batch,
        made.position.share,
        config.run.seed,
        shuffle=config.data.shuffle,
        drop_last=config.data.drop_last,
        options=config.data.loader,
        device=world.device,
        count=objective.count,
    )
    config = config.model_copy(update={"optim": optimizer.used})  # a user's optimizer may state its rate
    components = Components(
        config=config,
        plan=plan,
        world=world,
        place=made.position,
        objective=objective,
        sharding=made.sharding,
        tensors=prepared.tensors,
        engine=engine,
        loader=loader,
        source=source,
        evaluator=Evaluator(
            engine,
            made.sharding,
            objective,
            prepared.evaluation,
            _evaluation_size(config, plan),
            config.data.loader,
            made.position,
            world,
        ),
        consensus=consensus,
        readback=readback_from(world.device),
        scaler=LossScaler(config.precision.loss_scale, enabled=scaled, device=world.device),
        rate=_rate(config, given),
        coupled=prepared.coupled,
        flops_per_token=prepared.flops,
        watch=_memory_watch(config, made.recomputed, world),
    )
    return Session(components)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is known before the model is parallelized; see `Components`."""

    whole: WholeModel
    plan: Plan
    source: Source
    evaluation: Mapping[str, Source]
    objective: EvaluatedObjective
    computed: EvaluatedObjective
    tensors: ModelTensors
    coupled: str | None
    flops: float | None


def _prepare(config: Config, world: World, given: UserObjects) -> _Prepared:
    """Return data, model, plan and objective; what the config asks for in vain is refused here, without a
    collective."""
    own = users_model(config, given)
    source, evaluation = open_sources(config, given, own)
    automatic = config.parallel.strategy == "auto"
    memory = rank_memory(world.device, world.axis, world.machine_ranks) if automatic else None
    machine = Machine(world.machine_ranks, memory, world.device.type)
    meta = _meta_model(config, source.facts, given, world, machine)
    model = own if own is not None else meta.model if meta is not None else _whole(config, source.facts, given)
    refuse_parameters(model)
    refuse_unknown_names(model, config.model.inputs)
    plan = make_plan(config, world.size, source.facts, parameter_facts(model), machine)
    pretrained = match_initial_weights(model, config.model)
    if pretrained is not None:
        plan = replace(plan, warnings=(*plan.warnings, *pretrained.notes()))
        if meta is None:
            pretrained.put()

    objective, source, evaluation = make_objective(config, (source, evaluation), given, model)
    tensor_plan = tensor_plan_of(config, plan.mesh, model)
    if tensor_plan:
        _refuse_for_tensor_parallel(config, given, objective)
    computed = computed_objective(config, plan.mesh, model, objective)
    if config.run.determinism == "invariant":
        refuse_coupled(model, objective)

    tensors, coupled, flops = model_tensors(model), coupling(model), training_flops(model, source, world.device)
    sample = evaluation_batches(source, 1, 0, 1, Loader(), torch.device("cpu"))
    whole = WholeModel(model, list(tensors.shapes), meta, pretrained, tensor_plan, lambda: next(sample).inputs)
    return _Prepared(whole, plan, source, evaluation, objective, computed, tensors, coupled, flops)


def _set_process(config: Config) -> None:
    """Set what is the process's: seeds, determinism, TF32."""
    seed_everything(config.run.seed)
    set_tf32(config.precision.tf32)
    if config.run.determinism == "default":
        return
    if config.run.determinism == "invariant":
        torch.set_num_threads(1)  # kernels add in another order with another number, which launchers derive from ranks
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it; read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _whole(config: Config, facts: DataFacts, given: UserObjects) -> nn.Module:
    return build_model(config.model, facts, config.run.seed, trust_remote_code=given.trust_remote_code)


def _meta_model(
    config: Config, facts: DataFacts, given: UserObjects, world: World, machine: Machine
) -> MetaModel | None:
    """Return a model that gets its values after it is divided; None: it isn't divided, or they can't come in parts."""
    strategy: str = config.parallel.strategy
    partitioned = any(degree != 1 for degree in (config.parallel.pipeline, config.parallel.tensor))
    if strategy == "auto" and world.size > 1 and config.model.kind not in ("given", "custom"):
        sketch = sketch_model(config.model, facts, trust_remote_code=given.trust_remote_code)
        strategy = choose_strategy(config, world.size, parameter_facts(sketch), machine.memory).strategy.name
    if not partitioned and (strategy == "auto" or load_builder(strategy).shard is None):
        return None
    return build_meta_model(config.model, facts, config.run.seed, trust_remote_code=given.trust_remote_code)


def _evaluation_size(config: Config, plan: Plan) -> int:
    """Return the samples per forward of a rank in an evaluation. A pipeline stage holds one micro-batch's activations
    at a time here: `auto` gives it the whole share at once."""
    size = config.evaluation.micro_size
    if size != "auto":
        return size
    return plan.batch.micro_size * (plan.batch.accumulation if plan.mesh.pipeline > 1 else 1)


def _refuse_for_tensor_parallel(config: Config, given: UserObjects, objective: EvaluatedObjective) -> None:
    """Raise ConfigError if a user's object can't work on parts of matrices."""
    if given.optimizer is not None or config.optim.target is not None:
        why = (
            "an optimizer that was handed over may look at a parameter's shape, and with parallel.tensor it gets "
            "parts; name one in optim.name, or leave parallel.tensor out"
        )
        raise ConfigError(Problem("", "parallel.tensor", why))
    if config.parallel.tensor_parallel.loss_parallel and not isinstance(objective, TargetLoss | ClassifierLoss):
        why = "true, but an objective of your own takes whole logits; write false"
        raise ConfigError(Problem("", "parallel.tensor_parallel.loss_parallel", why))


def _memory_watch(config: Config, recomputed: RecomputeBlocks | None, world: World) -> MemoryWatch | None:
    options = config.memory.activation_checkpointing
    if options.mode != "adaptive" or recomputed is None:
        return None
    limit = rank_memory(world.device, world.axis, world.machine_ranks)
    return MemoryWatch(
        recomputed.switch,
        used=lambda: peak_memory(world.device) / limit,
        threshold=options.threshold,
        look_every=options.look_every,
        speaks=world.rank == 0,
    )


def _rate(config: Config, given: UserObjects) -> Rate:
    custom, schedule, optim = given.schedule, config.schedule, config.optim
    if custom is not None:
        return lambda done, step, steps: optim.lr * custom(step, steps)
    return lambda done, step, steps: learning_rate(optim, schedule, done, step, steps)
