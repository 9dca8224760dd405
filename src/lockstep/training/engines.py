"""The engine of a parallelized model, the objective as a rank computes it, and the vote that goes with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.config.schema import Loader
from lockstep.core.errors import ConfigError, Problem
from lockstep.data.loader import evaluation_batches
from lockstep.distributed.consensus import DeviceConsensus, HostConsensus
from lockstep.distributed.rng import KeyedDraws
from lockstep.engine.eager import EagerEngine, call
from lockstep.models.chunked_loss import ChunkedHeadLoss, chunk_head_loss
from lockstep.models.objectives import ModelLoss, TargetLoss
from lockstep.models.transformer import Transformer
from lockstep.monitor.metric_log import MetricLog, recording
from lockstep.optim.precision import autocast_context, resolve_compute
from lockstep.strategies.registry import find_strategy

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.config.schema import Config, TensorParallelOptions
    from lockstep.core.protocols import Engine, EvaluatedObjective, Source
    from lockstep.core.records import Batch
    from lockstep.distributed.consensus import Consensus
    from lockstep.distributed.process_group import World
    from lockstep.plan.mesh import Mesh
    from lockstep.plan.plan import Plan
    from lockstep.training.parallelize import Parallelized


_CHECKED_LENGTH = 32  # positions of a sequence


def first_module_of(engine: Engine, model: nn.Module) -> nn.Module:
    """Return the module whose outputs are the first that this rank uses: the model, or a block of its stage."""
    first: nn.Module = getattr(engine, "first_module", model)
    return first


def computed_objective(
    loss_chunk: int | None, mesh: Mesh, model: nn.Module, objective: EvaluatedObjective
) -> EvaluatedObjective:
    """Return the objective as a rank computes it: for its positions, in the model's head.

    Raises:
        ConfigError: A partitioned model can't compute it.
    """
    if mesh.pipeline > 1 and isinstance(objective, ModelLoss) and not objective.decomposes:
        why = (
            f"{mesh.pipeline} stages, and the loss is the one that the forward of {type(model).__name__} computes, "
            "perhaps of all its layers (output_router_logits), which no stage has; leave it out, or give a custom "
            "objective"
        )
        raise ConfigError(Problem("", "parallel.pipeline", why))
    if mesh.context > 1:
        two_sequences = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        if not isinstance(objective, TargetLoss) or not objective.language or two_sequences:
            kind = "two sequences" if two_sequences else "an objective that isn't of tokens"
            why = f"{mesh.context} divides a sequence of tokens that all have targets, and here is {kind}; leave it out"
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
) -> Engine:
    """Return the engine of a model. All ranks together.

    Args:
        source: The training samples.
        objective: The objective as the user stated it.
        computed: The same as a rank computes it.
        masks: Makes a context for each forward of the model, in addition to autocast.

    Raises:
        ConfigError: The parallelized model doesn't compute what the whole model computes.
    """
    sharding, position, model = made.sharding, made.position, made.sharding.state.model
    autocast = _both(_autocast(config, plan, world), masks)
    draws = keyed_draws(config, plan, made, world)
    few = cache(lambda: next(evaluation_batches(source, 2, 0, 1, Loader(), world.device)))
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
    prepare = computed.show if isinstance(computed, ChunkedHeadLoss) else None
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
    return EagerEngine(sharding.step, model, computed, autocast, draws, muted_logging, prepare, world.clock)


def _both(
    outer: Callable[[], AbstractContextManager[object]], inner: Callable[[], AbstractContextManager[object]]
) -> Callable[[], AbstractContextManager[object]]:
    """Return what makes one context of two."""
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
    """Return the vote on the rank's device.

    Args:
        loss_sum: As of `Sharding`.
    """
    if world.device.type == "cpu":
        return HostConsensus(world.axis, loss_sum)
    return DeviceConsensus(world.axis, world.device, loss_sum)


def keyed_draws(config: Config, plan: Plan, made: Parallelized, world: World) -> KeyedDraws:
    """Return the random draws of forwards, keyed by micro-batch; in an invariant run its number counts all ranks.

    Ranks that share a sequence draw differently for their parts of it.
    """
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
    """Raise ConfigError if the model computes something else under its tensor plan. All ranks together.

    Args:
        few: Returns the samples to check with.
        forwards: The forward of the whole model, or of each of this rank's stages.
    """
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
    check = TensorCheck(model, made.tensor.whole_weights, made.tensor.plan, made.tensor.group, world.axis, world.device)
    with muted_logging():
        for forward in forwards:
            check.run(forward, batches)


def muted_logging() -> AbstractContextManager[object]:
    """Return a context in which what user code logs is dropped."""
    return recording(MetricLog())
