"""Knows all components, as do `shardings` and `engines`. Calls their constructors in order; what it can't build, it
refuses by name.

data --> facts --> model, weights --> transforms --> device --> optimizer --> sharding --> engine --> loader --> session
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.config.schema import Loader
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import DataFacts
from lockstep.data.loader import TrainingLoader, evaluation_batches
from lockstep.distributed.memory import peak_memory, rank_memory
from lockstep.distributed.mesh_position import mesh_position
from lockstep.distributed.rng import seed_everything
from lockstep.engine.input_names import refuse_unknown_names
from lockstep.models.blocks import blocks_in_line, repeated_blocks
from lockstep.models.build import blank_model, build_model, sketch_model
from lockstep.models.building_objectives import coupling
from lockstep.models.facts import parameter_facts
from lockstep.models.model_tensors import model_tensors
from lockstep.models.objectives import ClassifierLoss, TargetLoss
from lockstep.models.parameters import refuse_parameters
from lockstep.models.transformer import Transformer
from lockstep.models.weight_matching import match_initial_weights
from lockstep.optim.precision import LossScaler, needs_loss_scale, resolve_compute, set_tf32
from lockstep.plan.choosing import choose_strategy
from lockstep.plan.plan import Machine, make_plan
from lockstep.plan.schedule import learning_rate
from lockstep.plan.stages import stages_of
from lockstep.sharding.in_backward import UpdatedInBackward
from lockstep.sharding.pieces import Across
from lockstep.training.engines import computed_objective, engine_and_vote, unheard
from lockstep.training.evaluate import Evaluator
from lockstep.training.flops import training_flops
from lockstep.training.invariance import refuse_coupled
from lockstep.training.memory_watch import MemoryWatch
from lockstep.training.readback import readback_from
from lockstep.training.session import Components, Rate, Session
from lockstep.training.shardings import OptimizerOf, Parts, sharding_of
from lockstep.training.sources import make_objective, open_sources, users_model
from lockstep.training.user_objects import UserObjects
from lockstep.transforms.activation_checkpointing import RecomputeBlocks
from lockstep.transforms.activation_offload import OffloadActivations
from lockstep.transforms.compiling import Compile
from lockstep.transforms.order import transform
from lockstep.transforms.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.core.protocols import EvaluatedObjective, Source, Transform
    from lockstep.distributed.mesh_position import MeshPosition
    from lockstep.distributed.process_group import World
    from lockstep.engine.cutting import Cut, Cutting
    from lockstep.models.blank import Blank
    from lockstep.plan.mesh import Mesh
    from lockstep.plan.plan import Plan


def assemble(config: Config, world: World, given: UserObjects) -> Session:
    """Puts a run together on this rank; `world` is where it is among the others.

    Raises:
        ConfigError: something that was asked for can't be had; nothing has been trained yet.
    """
    seed_everything(config.run.seed)
    _set_determinism(config)
    set_tf32(config.precision.tf32)
    own = users_model(config, given)
    source, evaluation = open_sources(config, given, own)
    machine = _machine(config, world)
    blank = _blank(config, source.facts, given, world, machine)
    model = _model(config, source.facts, given, blank, own)
    refuse_parameters(model)
    refuse_unknown_names(model, config.model.inputs)
    plan = make_plan(config, world.size, source.facts, parameter_facts(model), machine)
    start = match_initial_weights(model, config.model)
    if blank is None and start is not None:
        start.put()
    objective, source, evaluation = make_objective(config, (source, evaluation), given, model)
    divided = _tensor_plan(config, plan.mesh, model)
    if divided:
        _refuse_for_parts(config, given, objective)
    computed = computed_objective(config, plan.mesh, model, objective)
    blocks = repeated_blocks(model)
    tensors = model_tensors(model)
    coupled, flops = coupling(model), training_flops(model, source, world.device)
    if plan.strategy == "fsdp":
        _refuse_selective_around_units(config, model, blocks)
    transforms = _transforms(config, model, blocks, world)
    model = transform(model, transforms, world.device)
    cut = _cut(config, plan.mesh, world, model, blocks, source)
    place = mesh_position(
        plan.mesh, world
    )  # what can be refused is refused by now: groups are made by all ranks together
    across = _spread(place, model, divided)
    if config.run.determinism == "invariant":
        refuse_coupled(model, objective)
    parts = Parts(
        config,
        world,
        plan,
        model,
        OptimizerOf(config, given, plan.groups),
        blank,
        start,
        place,
        blocks,
        list(tensors.shapes),
        cut,
        across,
        {} if isinstance(model, Transformer) and config.parallel.tensor_parallel.plan == "auto" else divided,
        source,
    )
    sharding = sharding_of(parts)
    plan = replace(plan, warnings=(*plan.warnings, *(() if start is None else start.notes())))
    dtype = resolve_compute(config.precision.compute, world.device)
    scaled = needs_loss_scale(dtype, config.parallel.fsdp.mixed_precision if plan.strategy == "fsdp" else None)
    scaler = LossScaler(config.precision.loss_scale, enabled=scaled, device=world.device)
    engine, consensus = engine_and_vote(parts, objective, computed, sharding)
    loader = TrainingLoader(
        source,
        plan.batch,
        place.share,
        config.run.seed,
        shuffle=config.data.shuffle,
        drop_last=config.data.drop_last,
        options=config.data.loader,
        device=world.device,
        count=objective.count,
    )
    config = config.model_copy(update={"optim": parts.optimizer_of.used})
    components = Components(
        config=config,
        plan=plan,
        world=world,
        place=place,
        objective=objective,
        sharding=sharding,
        tensors=tensors,
        engine=engine,
        loader=loader,
        source=source,
        evaluator=Evaluator(
            engine,
            sharding,
            objective,
            evaluation,
            _evaluation_size(config, plan),
            config.data.loader,
            place,
            world,
        ),
        consensus=consensus,
        readback=readback_from(world.device),
        scaler=scaler,
        rate=_rate(config, given),
        coupled=coupled,
        flops_per_token=flops,
        watch=_watch(config, transforms, world),
        updates_ahead=sharding.begin if isinstance(sharding, UpdatedInBackward) else None,
    )
    return Session(components)


def refuse_cuts(config: Config, mesh: Mesh, model: nn.Module) -> None:
    """As far as can be told without a forward.

    Raises:
        ConfigError: the model can't be divided so.
    """
    _tensor_plan(config, mesh, model)
    if config.parallel.strategy == "fsdp":
        from lockstep.sharding.wrapping import units

        units(model, config.parallel.fsdp, ())
    if mesh.pipeline > 1:
        from lockstep.engine.cutting import refuse_to_cut

        refuse_to_cut(model, blocks_in_line(model, repeated_blocks(model)), _cutting(config, mesh, 0))


def _evaluation_size(config: Config, plan: Plan) -> int:
    """Return the samples per forward of a rank in an evaluation. A pipeline stage holds one micro-batch's activations
    at a time here: `auto` gives it the whole share at once."""
    size = config.evaluation.micro_size
    if size != "auto":
        return size
    return plan.batch.micro_size * (plan.batch.accumulation if plan.mesh.pipeline > 1 else 1)


# --- single parts -------------------------------------------------------------------------------------------------


def _model(
    config: Config, facts: DataFacts, given: UserObjects, blank: Blank | None, own: nn.Module | None
) -> nn.Module:
    if blank is not None:
        return blank.model
    if own is not None:
        return own
    return build_model(config.model, facts, config.run.seed, trust_remote_code=given.trust_remote_code)


def _set_determinism(config: Config) -> None:
    if config.run.determinism == "default":
        return
    import os

    if config.run.determinism == "invariant":
        torch.set_num_threads(1)  # kernels add in another order with another number, which launchers derive from ranks

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it; read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _transforms(config: Config, model: nn.Module, blocks: Sequence[str], world: World) -> list[Transform]:
    chosen: list[Transform] = []
    options, compiles = config.memory.activation_checkpointing, config.model.compile
    by_compiler = compiles and options.mode == "budget"
    if options.mode != "none" and not by_compiler:
        chain = blocks_in_line(model, list(blocks)) if options.mode == "segments" else blocks
        chosen.append(RecomputeBlocks(options, chain, unheard, world.axis.broadcast))
    if config.memory.activation_offload == "cpu":
        chosen.append(OffloadActivations())
    if compiles:
        chosen.append(
            Compile(resolve_compute(config.precision.compute, world.device), options.budget if by_compiler else 1.0)
        )
    if config.parallel.ddp.sync_batchnorm:
        chosen.append(SyncBatchNorm())
    return chosen


def _refuse_selective_around_units(config: Config, model: nn.Module, blocks: Sequence[str]) -> None:
    """Raises ConfigError: torch's selective checkpointing (2.13) fails where a gather is repeated inside of a block."""
    from lockstep.sharding.wrapping import units

    options, fsdp = config.memory.activation_checkpointing, config.parallel.fsdp
    gathered_once = {"FULL_SHARD": "SHARD_GRAD_OP", "HYBRID_SHARD": "_HYBRID_SHARD_ZERO2"}.get(fsdp.sharding_strategy)
    if options.mode != "selective" or gathered_once is None:
        return
    chosen = tuple(f"{name}." for name in RecomputeBlocks(options, blocks).chosen(model))
    inner = next((name for name in units(model, fsdp, blocks) if name.startswith(chosen)), None)
    if inner is None:
        return
    around = next(name for name in chosen if inner.startswith(name)).removesuffix(".")
    why = (
        f"selective, but {inner} lies in {around} and is gathered apart from it, and again when {around} is computed "
        "again, which torch's selective checkpointing can't follow; take mode: full, parallel.fsdp.wrap: blocks, or "
        f"parallel.fsdp.sharding_strategy: {gathered_once}"
    )
    raise ConfigError(Problem("", "memory.activation_checkpointing.mode", why))


def _watch(config: Config, transforms: Sequence[Transform], world: World) -> MemoryWatch | None:
    options = config.memory.activation_checkpointing
    if options.mode != "adaptive":
        return None
    switch = next(one.switch for one in transforms if isinstance(one, RecomputeBlocks))
    limit = rank_memory(world)
    return MemoryWatch(
        switch,
        used=lambda: peak_memory(world.device) / limit,
        threshold=options.threshold,
        look_every=options.look_every,
        speaks=world.rank == 0,
    )


def _tensor_plan(config: Config, mesh: Mesh, model: nn.Module) -> dict[str, str]:
    """How each module is divided, if any is."""
    if mesh.tensor == 1:
        return {}
    from lockstep.models.transformer import SEQUENCE_PLAN, TENSOR_PLAN
    from lockstep.transforms.tensor_plans import tensor_plan

    options = config.parallel.tensor_parallel
    ours = SEQUENCE_PLAN if options.sequence_parallel else TENSOR_PLAN
    return tensor_plan(model, options, mesh.tensor, ours if isinstance(model, Transformer) else None)


def _spread(place: MeshPosition, model: nn.Module, plan: Mapping[str, str]) -> Across | None:
    """Divides the matrices that this rank has."""
    if not plan:
        return None
    from lockstep.transforms.tensor_parallel import spread  # DTensors take 0.5 s to import

    assert place.device_mesh is not None, "a model whose matrices are divided has a mesh"
    found = spread(model, plan, place.device_mesh["tensor"])
    return Across(place.tensor, found.alike, found.partial)


def _refuse_for_parts(config: Config, given: UserObjects, objective: EvaluatedObjective) -> None:
    """Raises ConfigError: something that was handed over doesn't know what to do with parts of matrices."""
    if given.optimizer is not None:
        why = (
            "an optimizer that was handed over may look at a parameter's shape, and with parallel.tensor it gets parts"
        )
        raise ConfigError(
            Problem("", "parallel.tensor", f"{why}; name one in optim.name, or leave parallel.tensor out")
        )
    if config.parallel.tensor_parallel.loss_parallel and not isinstance(objective, TargetLoss | ClassifierLoss):
        why = "true, but an objective of your own takes whole logits; write false"
        raise ConfigError(Problem("", "parallel.tensor_parallel.loss_parallel", why))


def _cut(
    config: Config, mesh: Mesh, world: World, model: nn.Module, blocks: Sequence[str], source: Source
) -> Cut | None:
    """This rank's stages, if the model is cut into any."""
    if mesh.pipeline == 1:
        return None
    from lockstep.engine.cutting import Cut

    asked = _cutting(config, mesh, mesh.coordinates(world.rank)["pipeline"])
    sample = next(evaluation_batches(source, 1, 0, 1, Loader(), torch.device("cpu")))
    return Cut(model, blocks_in_line(model, blocks), asked, world.device, sample.inputs, unheard)


def _cutting(config: Config, mesh: Mesh, rank: int) -> Cutting:
    from lockstep.engine.cutting import Cutting

    options = config.parallel.pipeline_parallel
    return Cutting(
        rank=rank,
        ranks=mesh.pipeline,
        schedule=options.schedule,
        stages_per_rank=stages_of(options.schedule, options.stages_per_rank),
        split=None if options.split == "auto" else options.split,
    )


def _rate(config: Config, given: UserObjects) -> Rate:
    custom, schedule, optim = given.schedule, config.schedule, config.optim
    if custom is not None:
        return lambda done, step, steps: optim.lr * custom(step, steps)
    return lambda done, step, steps: learning_rate(optim, schedule, done, step, steps)


def _machine(config: Config, world: World) -> Machine:
    memory = rank_memory(world) if config.parallel.strategy == "auto" else None
    return Machine(world.machine_ranks, memory, world.device.type)


def _blank(config: Config, facts: DataFacts, given: UserObjects, world: World, machine: Machine) -> Blank | None:
    """A model that is to be divided gets its values afterwards, if they can come part by part."""
    strategy: str = config.parallel.strategy
    divided = any(degree != 1 for degree in (config.parallel.pipeline, config.parallel.tensor))
    if strategy == "auto" and world.size > 1 and config.model.kind not in ("given", "custom"):
        sketch = sketch_model(config.model, facts, trust_remote_code=given.trust_remote_code)
        strategy = choose_strategy(config, world.size, parameter_facts(sketch), machine.memory).strategy.name
    if strategy != "fsdp" and not divided:
        return None
    return blank_model(config.model, facts, config.run.seed, trust_remote_code=given.trust_remote_code)
