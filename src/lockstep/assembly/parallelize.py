"""How a model is parallelized, from top to bottom.

transforms            checkpointing, offload, compiling, a user's own, in the order of their rules
pipeline partition    this rank keeps its stages
tensor parallel       and other transforms that come after the partition
shard                 the strategy shards the parameters
materialize           parameters get memory and values, on this rank's device
build                 optimizer, gradient step, model state

Then the engine is built, which is checked to compute what the whole model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from lockstep.config.schema import HuggingFaceData
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.protocols import LooksAhead, Transform
from lockstep.data.loader import first_batch
from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.consensus import DeviceConsensus, HostConsensus
from lockstep.distributed.forward_mode import ForwardMode
from lockstep.distributed.mesh_position import MeshPosition, mesh_position, stage_pair
from lockstep.distributed.rng import KeyedDraws
from lockstep.engine.companion import Ahead, Companion
from lockstep.engine.eager import EagerEngine, call
from lockstep.models.adapters import without_adapter
from lockstep.models.attention_masks import refuse_packed
from lockstep.models.blocks import blocks_in_line, repeated_blocks
from lockstep.models.chunked_loss import ChunkedHeadLoss, chunk_head_loss
from lockstep.models.objectives import ModelLoss, TargetLoss
from lockstep.models.transformer import Transformer
from lockstep.monitor.metric_log import MetricLog, recording
from lockstep.optim.norms import squared_norm
from lockstep.optim.precision import autocast_context, resolve_compute
from lockstep.plan.refusals import before_unused
from lockstep.plan.stages import stages_of
from lockstep.sharding.buffers import is_expanded
from lockstep.sharding.context import Builder, OptimizerFactory, Sharding, ShardingContext
from lockstep.sharding.partition import ModelPartition
from lockstep.strategies.record import resolved
from lockstep.strategies.registry import find_strategy
from lockstep.transforms.activation_checkpointing import RecomputeBlocks
from lockstep.transforms.activation_offload import OffloadActivations
from lockstep.transforms.compiling import Compile
from lockstep.transforms.order import apply_transforms, split_at

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lockstep.config.schema import ActivationCheckpointing, Config, PipelineParallel, Run, TensorParallelOptions
    from lockstep.core.protocols import Engine, EvaluatedObjective, Source
    from lockstep.core.records import Batch, Inputs
    from lockstep.distributed.consensus import Consensus
    from lockstep.distributed.process_group import World
    from lockstep.engine.partitioning import PartitionSpec
    from lockstep.engine.stages import PartitionedModel
    from lockstep.models.meta_model import MetaModel
    from lockstep.models.weight_matching import WeightMatch
    from lockstep.plan.mesh import Mesh
    from lockstep.plan.plan import Plan
    from lockstep.transforms.context_parallel import ContextParallel
    from lockstep.transforms.tensor_parallel import TensorParallel


class SyncBatchNorm(Transform):
    """Replaces batch norms by torch's SyncBatchNorm."""

    name = "parallel.ddp.sync_batchnorm"

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        if device.type == "cpu":
            return "torch's SyncBatchNorm needs GPUs; on the CPU, group norm does not depend on the batch at all"
        return None

    def apply(self, model: nn.Module) -> nn.Module:
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted


PARTITION = "parallel.pipeline"
"""The name of the pipeline partition in rules of transforms."""

_INVARIANT = "lockstep.sharding.invariant:BUILDER"
_CHECKED_LENGTH = 32  # positions of a sequence


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model before it is parallelized.

    Attributes:
        module: On the CPU, or on the meta device.
        tensors: Names of its parameters and saved buffers, in order.
        meta: Materializes a module on the meta device; None: the module has its values.
        pretrained: Weights that replace these values, if any.
        tensor_plan: Tensor-parallel style by module name; empty: no tensor parallelism.
        sample: Returns inputs of a few samples, on the CPU.
        deferred: Whether `draw` is left to the caller, since other values may follow.
    """

    module: nn.Module
    tensors: Sequence[str]
    meta: MetaModel | None
    pretrained: WeightMatch | None
    tensor_plan: Mapping[str, str]
    sample: Callable[[], Inputs]
    deferred: bool = False

    def draw(self, model: nn.Module, shards: Mapping[str, Any] | None = None) -> None:
        """Set the parameters of a model without values, or `shards` by their names, to their initial ones."""
        assert self.meta is not None, "the module has its values"
        overwritten = () if self.pretrained is None else [slot.name for slot, _ in self.pretrained.pairs]
        self.meta.draw(overwritten, shards or {})
        if self.pretrained is not None:
            self.pretrained.put(model, {**model.state_dict(keep_vars=True), **(shards or {})})

    def draw_sharded(self, sharding: Sharding) -> None:
        """Set the parameters of a strategy in use, which have no values yet, to their initial ones."""
        self.draw(sharding.state.model, sharding.state.flat)
        sharding.state.after_restore()


@dataclass(frozen=True, slots=True)
class Parallelized:
    """A model as this rank trains it; None: the rank has the whole model, matrices or sequences are whole."""

    position: MeshPosition
    stages: PartitionedModel | None
    tensor: TensorParallel | None
    context: ContextParallel | None
    sharding: Sharding


def parallelize(
    whole: WholeModel,
    config: Config,
    plan: Plan,
    world: World,
    optimizer: OptimizerFactory,
    custom: Sequence[Transform] = (),
) -> Parallelized:
    """Return the model as this rank trains it, all ranks together. Raises ConfigError if the model can't be."""
    model, blocks, device = whole.module, repeated_blocks(whole.module), world.device
    hooked = {
        name: each
        for name, each in model.named_parameters()
        if each._backward_hooks or each._post_accumulate_grad_hooks
    }
    builder = load_builder(plan.strategy, config.run.determinism)
    compute = resolve_compute(config.precision.compute, device)
    gathers = builder.shard is not None or find_strategy(plan.strategy).variant(config.parallel).state.parameters
    lowered = _cast_weights(whole, compute, world) if gathers else frozenset()
    position = cache(partial(mesh_position, plan.mesh, world))  # creates process groups, so it comes after refusals
    mode = ForwardMode()
    recomputed = recompute_blocks(config.memory.activation_checkpointing, blocks)
    tensor, context = _divisions(whole.tensor_plan, plan.mesh.context, position, mode, config.run)
    parallel = [transform for transform in (recomputed, tensor, context) if transform is not None]
    before, after = split_at(PARTITION, [*transforms_of(config, device), *parallel, *custom])

    model = apply_transforms(model, before, device)
    spec, stages = partition_spec(config.parallel.pipeline_parallel, plan.mesh, world.rank), None
    if spec is not None:
        from lockstep.engine.stages import PartitionedModel

        chain = blocks_in_line(model, blocks)
        stages = PartitionedModel(model, chain, spec, device, whole.sample(), muted_logging, mode)
    model = apply_transforms(model, after, device)
    _lay_out(model, sharded=not find_strategy(plan.strategy).memory.holds_everything)
    sharding_context = ShardingContext(
        model,
        config,
        plan,
        world,
        position(),
        blocks=blocks if stages is None else stages.blocks,
        partition=partition_of(model, whole.tensors, position(), stages, tensor, device),
        optimizer=optimizer,
        squared_norm=partial(squared_norm, device=world.device),
        cast_weights=lowered,
        compute=compute,
        has_values=not whole.deferred,
        unused_remedy=before_unused(plan.strategy, plan.mesh),
    )
    if builder.shard is not None:
        builder.shard(sharding_context)
    sharding = _with_hooks(hooked, _materialized(builder, sharding_context, whole))
    return Parallelized(position(), stages, tensor, context, sharding)


def _lay_out(model: nn.Module, *, sharded: bool) -> None:
    """Make parameters contiguous: all that are sharded, else those with elements that share memory."""
    for parameter in model.parameters():
        if not parameter.is_contiguous() and (sharded or is_expanded(parameter)):
            parameter.data = parameter.data.contiguous()


def _with_hooks(hooked: Mapping[str, nn.Parameter], sharding: Sharding) -> Sharding:
    """Return the sharding. Raises ConfigError if it has replaced parameters with a user's hooks."""
    shards = dict(sharding.state.model.named_parameters())
    lost = [name for name, parameter in hooked.items() if shards.get(name, parameter) is not parameter]
    if lost:
        why = (
            f"{', '.join(lost)}: a hook on the gradient is lost where the parameter is sharded; change the weight in "
            "the forward (torch.nn.utils.parametrize), or take ddp"
        )
        raise ConfigError(Problem("", "parallel.strategy", why))
    return sharding


def check_model(model: nn.Module, config: Config, plan: Plan) -> None:
    """Raise ConfigError if the model can't be parallelized so, as far as that shows without a forward."""
    tensor_plan_of(config.parallel.tensor_parallel, plan.mesh, model)
    check = find_strategy(plan.strategy).hooks.check_model
    if check:
        resolved(check)(model, config)
    for key in packed_apart(config):
        refuse_packed(model, key, divided=plan.mesh.context > 1)
    spec = partition_spec(config.parallel.pipeline_parallel, plan.mesh, 0)
    if spec is not None:
        from lockstep.engine.partitioning import check_partition

        check_partition(model, blocks_in_line(model, repeated_blocks(model)), spec)


def packed_apart(config: Config) -> list[str]:
    """Return the keys that put several texts into a sample, each for itself."""
    sections = {"data.train": config.data.train}
    sections |= {f"data.evaluation.{name}": section for name, section in config.data.evaluation.items()}
    return [
        f"{key}.packed"
        for key, section in sections.items()
        if isinstance(section, HuggingFaceData) and section.keeps_apart
    ]


def load_builder(strategy: str, determinism: str = "default") -> Builder:
    """Return what builds a strategy."""
    name = _INVARIANT if determinism == "invariant" else find_strategy(strategy).build
    return cast("Builder", resolved(name))


def _cast_weights(whole: WholeModel, compute: torch.dtype | None, world: World) -> frozenset[str]:
    """Return the names of the parameters that autocast casts wherever they are used. All ranks together."""
    if compute is None:
        return frozenset()
    from lockstep.engine.cast_weights import cast_weights

    names = cast_weights(whole.module, whole.sample(), compute, world.device, muted_logging)
    return frozenset(cast("list[str]", world.axis.broadcast(sorted(names))))  # the ranks' gathers must agree


# --- transforms ---------------------------------------------------------------------------------------------------


def transforms_of(config: Config, device: torch.device) -> list[Transform]:
    """Return the config's transforms, without activation checkpointing and tensor parallelism."""
    chosen: list[Transform] = []
    options = config.memory.activation_checkpointing
    if config.memory.activation_offload == "cpu":
        chosen.append(OffloadActivations(repeated_blocks))
    if config.model.compile:
        budget = options.budget if options.mode == "budget" else None
        chosen.append(Compile(resolve_compute(config.precision.compute, device), budget))
    if config.parallel.ddp.sync_batchnorm:
        chosen.append(SyncBatchNorm())
    return chosen


def recompute_blocks(options: ActivationCheckpointing, blocks: Sequence[str]) -> RecomputeBlocks | None:
    """Return the config's activation checkpointing; None: there is none, or the compiler does it."""
    return RecomputeBlocks(options, blocks, muted_logging) if options.mode in ("full", "selective") else None


def tensor_plan_of(options: TensorParallelOptions, mesh: Mesh, model: nn.Module) -> dict[str, str]:
    """Return the tensor-parallel style of each module by name; empty if the tensor axis has one rank."""
    if mesh.tensor == 1:
        return {}
    from lockstep.models.transformer import SEQUENCE_PLAN, TENSOR_PLAN, Transformer
    from lockstep.transforms.tensor_plans import tensor_plan

    own = SEQUENCE_PLAN if options.sequence_parallel else TENSOR_PLAN
    return tensor_plan(model, options, mesh.tensor, own if isinstance(model, Transformer) else None)


def _divisions(
    tensor_plan: Mapping[str, str], ranks: int, position: Callable[[], MeshPosition], mode: ForwardMode, run: Run
) -> tuple[TensorParallel | None, ContextParallel | None]:
    """Return the transforms that divide matrices, and sequences over N ranks; None: they stay whole."""
    tensor = context = None
    if tensor_plan:
        from lockstep.transforms.tensor_parallel import TensorParallel  # DTensors take 0.5 s to import

        tensor = TensorParallel(tensor_plan, position, mode)
    if ranks > 1:
        from lockstep.transforms.context_parallel import ContextParallel

        context = ContextParallel(ranks, mode, allow_untested=run.allow_untested)
    return tensor, context


# --- the pipeline partition ---------------------------------------------------------------------------------------


def partition_spec(options: PipelineParallel, mesh: Mesh, rank: int) -> PartitionSpec | None:
    """Return how the model is partitioned into stages; None: it isn't."""
    if mesh.pipeline == 1:
        return None
    from lockstep.engine.partitioning import PartitionSpec

    return PartitionSpec(
        rank=mesh.coordinates(rank)["pipeline"],
        ranks=mesh.pipeline,
        schedule=options.schedule,
        stages_per_rank=stages_of(options.schedule, options.stages_per_rank),
        split=None if options.split == "auto" else options.split,
    )


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


def _materialized(builder: Builder, context: ShardingContext, whole: WholeModel) -> Sharding:
    """Return the strategy in use, its parameters with memory and, unless that is deferred, values."""
    config, device = context.config, context.world.device
    if whole.meta is not None and builder.shards_in_build(config):
        whole.meta.move_buffers(device)
        sharding = builder.build(context)
        if not whole.deferred:
            whole.draw_sharded(sharding)
        return sharding
    strategy = find_strategy(context.plan.strategy)
    offloaded = builder.shard is not None and strategy.memory.offloads(strategy.options_of(config.parallel))
    if whole.meta is not None:
        whole.meta.allocate(device, offloaded=offloaded)
        if not whole.deferred:
            whole.draw(context.model)
    if builder.shard is None:  # else it moves parameters itself
        context.model.to(device)
    return builder.build(context)


def computed_objective(
    loss_chunk: int | None, mesh: Mesh, model: nn.Module, objective: EvaluatedObjective
) -> EvaluatedObjective:
    """Return the objective as a rank computes it: for its positions, in the model's head. Raises ConfigError."""
    if mesh.pipeline > 1 and isinstance(objective, ModelLoss) and not objective.decomposes:
        why = (
            f"{mesh.pipeline} stages, and the loss is the one that the forward of {type(model).__name__} computes, "
            "perhaps of all its layers; leave it out, or give a custom objective"
        )
        raise ConfigError(Problem("", "parallel.pipeline", why))
    if mesh.context > 1:
        two_sequences = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        if not isinstance(objective, TargetLoss) or not objective.language or two_sequences:
            why = f"{mesh.context} divides one sequence of tokens that all have targets, and here is none; leave it out"
            raise ConfigError(Problem("", "parallel.context", why))
        objective = objective.aligned()
    if loss_chunk is not None:
        objective = chunk_head_loss(objective, model, loss_chunk)
    return objective


def build_engine(
    made: Parallelized,
    config: Config,
    plan: Plan,
    world: World,
    source: Source,
    objective: EvaluatedObjective,
    computed: EvaluatedObjective,
    masks: Callable[[], AbstractContextManager[object]],
    prepare: Callable[[Batch], Batch] | None,
) -> Engine:
    """Return the engine of a model. All ranks together.

    Args:
        computed: `objective` as a rank computes it.
        masks: Makes a context for each forward of the model, in addition to autocast.
        prepare: Adds the companion's outputs to a batch; None: there is no companion, or batches have them.

    Raises:
        ConfigError: The parallelized model doesn't compute what the whole model computes.
    """
    sharding, position, model = made.sharding, made.position, made.sharding.state.model
    autocast = _both(_autocast(config, plan, world), masks)
    draws = keyed_draws(config, plan, made, world)
    few = cache(lambda: first_batch(source, 2, world.device))
    check_tensor_plan = partial(_check_tensor_plan, made, config.parallel.tensor_parallel, world, few, objective)
    if made.stages is not None:
        from lockstep.engine.pipeline import PipelineEngine

        assert position.device_mesh is not None, "a partitioned model has a mesh"
        pipelined = PipelineEngine(
            sharding.step,
            computed,
            autocast,
            draws,
            muted_logging,
            clock=world.clock,
            stages=made.stages,
            schedule=config.parallel.pipeline_parallel.schedule,
            axis=position.pipeline,
            group=position.device_mesh.get_group("pipeline"),
            device=world.device,
        )
        pipelined.check(few().inputs)
        check_tensor_plan([partial(pipelined.run_alone, stage) for stage in made.stages.own])
        return pipelined
    prepare, ahead = _preparation(prepare, model, computed, world, autocast)
    if made.context is not None:
        from lockstep.engine.context_parallel import ContextEngine, SequenceDivider

        assert isinstance(objective, TargetLoss) and position.ring is not None, "others were refused"  # noqa: PT018
        divider = SequenceDivider(model, made.context, position.ring, objective.targets_of)
        divide: Any = divider if prepare is None else lambda batch: prepare(divider(batch))
        eager = EagerEngine(sharding.step, model, computed, autocast, draws, muted_logging, divide, world.clock)
        engine = ContextEngine(eager, divider)
        with muted_logging():
            engine.check(few(), world.axis)
        return engine
    check_tensor_plan([lambda batch: call(model, batch.inputs)])
    return EagerEngine(sharding.step, model, computed, autocast, draws, muted_logging, prepare, world.clock, ahead)


def _preparation(
    prepare: Callable[[Batch], Batch] | None,
    model: nn.Module,
    computed: EvaluatedObjective,
    world: World,
    autocast: Callable[[], AbstractContextManager[object]],
) -> tuple[Callable[[Batch], Batch] | None, Ahead | None]:
    """Return what prepares each micro-batch, and what prepares all of an update together."""
    if isinstance(computed, LooksAhead):
        return None, Ahead(prepare or (lambda batch: batch), model, computed, world.axis.sum, autocast, muted_logging)
    return computed.show if isinstance(computed, ChunkedHeadLoss) else prepare, None


def companion_forward(
    config: Config,
    plan: Plan,
    world: World,
    model: nn.Module,
    computed: EvaluatedObjective,
    masks: Callable[[], AbstractContextManager[object]],
    companion: nn.Module | None,
) -> Companion:
    """Return what adds the companion's outputs to a batch; arguments are as of `build_engine`.

    Args:
        companion: As this rank holds it; None: it is the model without its adapter.
    """
    autocast = _both(_autocast(config, plan, world), masks)
    within = partial(without_adapter, model) if companion is None else nullcontext
    return Companion(model if companion is None else companion, computed, autocast, muted_logging, within)


def _both(
    outer: Callable[[], AbstractContextManager[object]], inner: Callable[[], AbstractContextManager[object]]
) -> Callable[[], AbstractContextManager[object]]:
    if inner is nullcontext:
        return outer

    @contextmanager
    def both() -> Iterator[None]:
        with outer(), inner():
            yield

    return both


def _autocast(config: Config, plan: Plan, world: World) -> Callable[[], AbstractContextManager[object]]:
    is_whole = not find_strategy(plan.strategy).variant(config.parallel).state.parameters
    keeps_casts = is_whole and config.memory.activation_checkpointing.mode == "none"
    compute = resolve_compute(config.precision.compute, world.device)
    return autocast_context(compute, world.device, keeps_casts=keeps_casts)


def consensus_of(world: World, loss_sum: Callable[[], Tensor] | None) -> Consensus:
    """Return the vote on the rank's device; `loss_sum` as of `Sharding`."""
    if world.device.type == "cpu":
        return HostConsensus(world.axis, loss_sum)
    return DeviceConsensus(world.axis, world.device, loss_sum)


def keyed_draws(config: Config, plan: Plan, made: Parallelized, world: World) -> KeyedDraws:
    """Return the random draws of forwards, keyed by micro-batch and by a rank's part of a shared sequence."""
    position = made.position
    if config.run.determinism == "invariant":
        first = partial(plan.batch.share, rank=position.share)
        return KeyedDraws(config.run.seed, 0, world.device, first_of=lambda samples: first(samples).first)
    by_tensor = config.parallel.tensor_parallel.sequence_parallel and made.stages is None
    part = position.coordinates["tensor" if by_tensor else "context"]
    return KeyedDraws(config.run.seed, position.share, world.device, part)


def _check_tensor_plan(
    made: Parallelized,
    options: TensorParallelOptions,
    world: World,
    few: Callable[[], Batch],
    objective: EvaluatedObjective,
    forwards: Sequence[Callable[[Batch], object]],
) -> None:
    """Raise ConfigError if the model, or one of this rank's stages, computes something else under its tensor plan."""
    model = made.sharding.state.model
    is_own_plan = isinstance(model, Transformer) and options.plan == "auto"
    if made.tensor is None or made.tensor.group is None or is_own_plan:
        return
    from lockstep.engine.dry_run import first_positions
    from lockstep.engine.tensor_check import TensorCheck

    batch = few()
    batches = [batch]
    if isinstance(objective, TargetLoss) and objective.language:
        # long sequences may not fit into memory where matrices are whole
        batches.insert(0, first_positions(batch, objective.targets_of(batch).shape[1], _CHECKED_LENGTH))
    check = TensorCheck(model, made.tensor.whole_weights, made.tensor.group, world.axis, world.device)
    with muted_logging():
        for forward in forwards:
            check.run(forward, batches)


def muted_logging() -> AbstractContextManager[object]:
    """Return a context that drops what user code logs."""
    return recording(MetricLog())
