"""How a model is parallelized, from top to bottom.

transforms            checkpointing, offload, compiling, a user's own, in the order that their rules give
pipeline partition    this rank keeps its stages
tensor parallel       and what else comes after the partition
shard                 the strategy divides the parameters
materialize           parameters get memory and values, on this rank's device
build                 optimizer, gradient step, model state
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, cast

from torch import nn

from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.forward_mode import ForwardMode
from lockstep.distributed.mesh_position import MeshPosition, mesh_position, stage_pair
from lockstep.models.blocks import blocks_in_line, repeated_blocks
from lockstep.optim.norms import squared_norm
from lockstep.optim.precision import resolve_compute
from lockstep.plan.refusals import before_unused
from lockstep.plan.stages import stages_of
from lockstep.sharding.context import Builder, OptimizerFactory, Sharding, ShardingContext
from lockstep.sharding.partition import ModelPartition
from lockstep.strategies.record import resolved
from lockstep.strategies.registry import find_strategy
from lockstep.training.engines import muted_logging
from lockstep.transforms.activation_checkpointing import RecomputeBlocks
from lockstep.transforms.activation_offload import OffloadActivations
from lockstep.transforms.compiling import Compile
from lockstep.transforms.order import apply_transforms, split_at
from lockstep.transforms.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    import torch

    from lockstep.config.schema import Config
    from lockstep.core.protocols import Transform
    from lockstep.core.records import Inputs
    from lockstep.distributed.process_group import World
    from lockstep.engine.partitioning import PartitionSpec
    from lockstep.engine.stages import PartitionedModel
    from lockstep.models.meta_model import MetaModel
    from lockstep.models.weight_matching import WeightMatch
    from lockstep.plan.mesh import Mesh
    from lockstep.plan.plan import Plan
    from lockstep.transforms.context_parallel import ContextParallel
    from lockstep.transforms.tensor_parallel import TensorParallel

PARTITION = "parallel.pipeline"
"""The name by which rules of transforms refer to the pipeline partition."""

_INVARIANT = "lockstep.sharding.invariant:BUILDER"


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model before it is parallelized.

    Attributes:
        module: On the CPU, or on the meta device.
        tensors: Names of its parameters and saved buffers, in order.
        meta: What yields the values of a module on the meta device; None: it has its values.
        pretrained: Weights that replace these values; None: none do.
        tensor_plan: How modules are divided over a tensor-parallel group, by name; empty: they aren't.
        sample: Returns inputs of a few samples, on the CPU.
    """

    module: nn.Module
    tensors: Sequence[str]
    meta: MetaModel | None
    pretrained: WeightMatch | None
    tensor_plan: Mapping[str, str]
    sample: Callable[[], Inputs]


@dataclass(frozen=True, slots=True)
class Parallelized:
    """A model as this rank trains it.

    Attributes:
        position: This rank's position in the mesh.
        stages: This rank's stages of a pipeline; None: it has the whole model.
        tensor: How matrices are divided; None: they are whole.
        context: What divides sequences; None: they are whole.
        recomputed: Its activation checkpointing, if any.
    """

    position: MeshPosition
    stages: PartitionedModel | None
    tensor: TensorParallel | None
    context: ContextParallel | None
    recomputed: RecomputeBlocks | None
    sharding: Sharding


def parallelize(
    whole: WholeModel,
    config: Config,
    plan: Plan,
    world: World,
    optimizer: OptimizerFactory,
    custom: Sequence[Transform] = (),
) -> Parallelized:
    """Return the model as this rank trains it. All ranks together.

    Args:
        custom: A user's transforms.

    Raises:
        ConfigError: The model can't be parallelized so.
    """
    model, blocks, device = whole.module, repeated_blocks(whole.module), world.device
    position = cache(partial(mesh_position, plan.mesh, world))  # makes groups: what can be refused is refused before
    mode = ForwardMode()
    recomputed = recompute_blocks(config, model, blocks, world)
    tensor = tensor_parallel(whole.tensor_plan, position, mode)
    context = context_parallel(config, plan.mesh, mode)
    chosen = [
        *transforms_of(config, device),
        *(transform for transform in (recomputed, tensor, context) if transform is not None),
    ]
    before, after = split_at(PARTITION, [*chosen, *custom])

    model = apply_transforms(model, before, device)
    spec = partition_spec(config, plan.mesh, world.rank)
    stages = partition_pipeline(model, blocks, spec, whole.sample, device, mode)
    model = apply_transforms(model, after, device)

    builder = load_builder(plan.strategy, config.run.determinism)
    given = ShardingContext(
        model,
        config,
        plan,
        world,
        position(),
        blocks=blocks if stages is None else stages.blocks,
        selective=recomputed.selective(model) if recomputed is not None else (),
        partition=partition_of(model, whole.tensors, position(), stages, tensor, device),
        optimizer=optimizer,
        squared_norm=squared_norm,
        unused_remedy=before_unused(plan.strategy, plan.mesh),
    )
    if builder.shard is not None:
        builder.shard(given)
    materialize(model, whole, device, move=builder.shard is None)
    return Parallelized(position(), stages, tensor, context, recomputed, builder.build(given))


def check_model(model: nn.Module, config: Config, plan: Plan) -> None:
    """Raise ConfigError if the model can't be parallelized so, as far as can be told without a forward."""
    tensor_plan_of(config, plan.mesh, model)
    check = find_strategy(plan.strategy).check_model
    if check:
        resolved(check)(model, config)
    spec = partition_spec(config, plan.mesh, 0)
    if spec is not None:
        from lockstep.engine.partitioning import check_partition

        check_partition(model, blocks_in_line(model, repeated_blocks(model)), spec)


def load_builder(strategy: str, determinism: str = "default") -> Builder:
    """Return what builds a strategy."""
    name = _INVARIANT if determinism == "invariant" else find_strategy(strategy).build
    return cast("Builder", resolved(name))


# --- transforms ---------------------------------------------------------------------------------------------------


def transforms_of(config: Config, device: torch.device) -> list[Transform]:
    """Return the transforms that the config names, apart from activation checkpointing and tensor parallelism."""
    chosen: list[Transform] = []
    options = config.memory.activation_checkpointing
    if config.memory.activation_offload == "cpu":
        chosen.append(OffloadActivations())
    if config.model.compile:
        budget = options.budget if options.mode == "budget" else None
        chosen.append(Compile(resolve_compute(config.precision.compute, device), budget))
    if config.parallel.ddp.sync_batchnorm:
        chosen.append(SyncBatchNorm())
    return chosen


def recompute_blocks(config: Config, model: nn.Module, blocks: Sequence[str], world: World) -> RecomputeBlocks | None:
    """Return the activation checkpointing that the config names; None: none, or the compiler does it."""
    options = config.memory.activation_checkpointing
    if options.mode == "none" or (options.mode == "budget" and config.model.compile):
        return None
    chain = blocks_in_line(model, list(blocks)) if options.mode == "segments" else blocks
    return RecomputeBlocks(options, chain, muted_logging, world.axis.broadcast)


def tensor_plan_of(config: Config, mesh: Mesh, model: nn.Module) -> dict[str, str]:
    """Return how each module is divided over the tensor axis; empty if the axis has one rank."""
    if mesh.tensor == 1:
        return {}
    from lockstep.models.transformer import SEQUENCE_PLAN, TENSOR_PLAN, Transformer
    from lockstep.transforms.tensor_plans import tensor_plan

    options = config.parallel.tensor_parallel
    own = SEQUENCE_PLAN if options.sequence_parallel else TENSOR_PLAN
    return tensor_plan(model, options, mesh.tensor, own if isinstance(model, Transformer) else None)


def tensor_parallel(
    plan: Mapping[str, str], position: Callable[[], MeshPosition], mode: ForwardMode
) -> TensorParallel | None:
    """Return the transform that divides matrices by the plan; None: the plan is empty."""
    if not plan:
        return None
    from lockstep.transforms.tensor_parallel import TensorParallel  # DTensors take 0.5 s to import

    return TensorParallel(plan, position, mode)


def context_parallel(config: Config, mesh: Mesh, mode: ForwardMode) -> ContextParallel | None:
    """Return the transform that divides sequences; None: they are whole."""
    if mesh.context == 1:
        return None
    from lockstep.transforms.context_parallel import ContextParallel

    return ContextParallel(mesh.context, mode, allow_untested=config.run.allow_untested)


# --- the pipeline partition ---------------------------------------------------------------------------------------


def partition_spec(config: Config, mesh: Mesh, rank: int) -> PartitionSpec | None:
    """Return how the model is partitioned into stages; None: it isn't."""
    if mesh.pipeline == 1:
        return None
    from lockstep.engine.partitioning import PartitionSpec

    options = config.parallel.pipeline_parallel
    return PartitionSpec(
        rank=mesh.coordinates(rank)["pipeline"],
        ranks=mesh.pipeline,
        schedule=options.schedule,
        stages_per_rank=stages_of(options.schedule, options.stages_per_rank),
        split=None if options.split == "auto" else options.split,
    )


def partition_pipeline(
    model: nn.Module,
    blocks: Sequence[str],
    spec: PartitionSpec | None,
    sample: Callable[[], Inputs],
    device: torch.device,
    mode: ForwardMode,
) -> PartitionedModel | None:
    """Remove other ranks' stages from the model, in place; return this rank's."""
    if spec is None:
        return None
    from lockstep.engine.stages import PartitionedModel

    return PartitionedModel(model, blocks_in_line(model, blocks), spec, device, sample(), muted_logging, mode)


def partition_of(
    model: nn.Module,
    names: Sequence[str],
    position: MeshPosition,
    stages: PartitionedModel | None,
    tensor: TensorParallel | None,
    device: torch.device,
) -> ModelPartition:
    """Return which rank holds which parts of the model. All ranks together: a group may be made."""
    shared = stages.shared if stages is not None else ()
    ends = stage_pair(position, stages.owners[0], stages.owners[-1]) if stages is not None and shared else LocalGroup()
    group = tensor.group if tensor is not None else None
    return ModelPartition(model, names, position.pipeline, shared=shared, ends=ends, device=device, tensor_group=group)


# --- values -------------------------------------------------------------------------------------------------------


def materialize(model: nn.Module, whole: WholeModel, device: torch.device, *, move: bool) -> None:
    """Give the parameters memory and values, each rank those that it holds.

    Args:
        move: Whether to move the model to the device; what a strategy has divided is there, or where it wants it.
    """
    if whole.meta is not None:
        whole.meta.materialize(device)
        if whole.pretrained is not None:
            whole.pretrained.put(model)
    if move:
        model.to(device)
