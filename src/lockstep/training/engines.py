"""Every engine, the objective as it computes it, and the vote that goes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.config.schema import Loader
from lockstep.core.errors import ConfigError, Problem
from lockstep.data.loader import evaluation_batches
from lockstep.distributed.consensus import WithOrderedLoss, consensus_over
from lockstep.distributed.rng import KeyedDraws
from lockstep.engine.eager import Eager, call
from lockstep.engine.numbered import Numbered
from lockstep.models.chunked_loss import ChunkedHeadLoss, chunk_head_loss
from lockstep.models.objectives import ModelLoss, TargetLoss
from lockstep.monitor.metric_log import MetricLog, recording
from lockstep.optim.precision import autocast_context, resolve_compute
from lockstep.sharding.invariant import Invariant
from lockstep.training.shardings import Parts

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.core.protocols import Engine, EvaluatedObjective, Sharding
    from lockstep.core.records import Batch
    from lockstep.distributed.consensus import Consensus
    from lockstep.distributed.ring import Ring
    from lockstep.engine.in_context import InContext
    from lockstep.plan.mesh import Mesh


_REHEARSED = 32  # positions of a sequence


def computed_objective(
    config: Config, mesh: Mesh, model: nn.Module, objective: EvaluatedObjective
) -> EvaluatedObjective:
    """The objective as a rank computes it: of its own positions, in the model's head."""
    if mesh.pipeline > 1 and isinstance(objective, ModelLoss) and not objective.decomposes:
        why = (
            f"{mesh.pipeline} stages, and the loss is the one that the forward of {type(model).__name__} computes, "
            "perhaps of all its layers (output_router_logits), which no stage has; leave it out, or give an objective "
            "of your own"
        )
        raise ConfigError(Problem("", "parallel.pipeline", why))
    if mesh.context > 1:
        if not isinstance(objective, TargetLoss) or not objective.language or _has_two_sequences(model):
            kind = "two sequences" if _has_two_sequences(model) else "an objective that isn't of tokens"
            why = f"{mesh.context} divides a sequence of tokens that all have targets, and here is {kind}; leave it out"
            raise ConfigError(Problem("", "parallel.context", why))
        objective = objective.aligned()
    if config.memory.loss_chunk is not None:
        objective = chunk_head_loss(objective, model, config.memory.loss_chunk)
    return objective


def _has_two_sequences(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def engine_and_vote(
    parts: Parts, told: EvaluatedObjective, objective: EvaluatedObjective, sharding: Sharding
) -> tuple[Engine, Consensus]:
    """Args:
    told: what people asked for.
    objective: as it is computed.
    """
    config, place, world, cut = parts.config, parts.place, parts.world, parts.cut
    autocast = autocast_context(resolve_compute(config.precision.compute, world.device), world.device)
    consensus = consensus_over(world.axis, world.device)
    if cut is not None:
        from lockstep.engine.pipeline import Pipelined

        engine = Pipelined(
            sharding,
            objective,
            autocast,
            KeyedDraws(config.run.seed, place.share, world.device).set,
            unheard,
            cut=cut,
            schedule=config.parallel.pipeline_parallel.schedule,
            axis=place.pipeline,
            group=place.pipeline_group,
            device=world.device,
        )
        _rehearse_plan(parts, told, sharding.bare, [partial(engine.alone, stage) for stage in cut.mine])
        return engine, consensus
    if place.ring is not None:
        return _in_context(parts, place.ring, told, objective, sharding), consensus
    _rehearse_plan(parts, told, sharding.bare, [lambda batch: call(sharding.bare, batch.inputs)])
    prepare: Any = {"prepare": objective.show} if isinstance(objective, ChunkedHeadLoss) else {}
    if not isinstance(sharding, Invariant):
        part = place.coordinates["tensor"] if config.parallel.tensor_parallel.sequence_parallel else 0
        draws = KeyedDraws(config.run.seed, place.share, world.device, part)
        return Eager(sharding, objective, autocast, draws.set, unheard, **prepare), consensus
    eager = partial(Eager, sharding, objective, autocast, unheard=unheard, **prepare)
    draws = KeyedDraws(config.run.seed, 0, world.device)
    numbered = Numbered(eager, draws.set, partial(parts.plan.batch.share, rank=place.share), sharding.begin)
    return numbered, WithOrderedLoss(consensus, sharding.loss_sum)


def _rehearse_plan(
    parts: Parts, told: EvaluatedObjective, model: nn.Module, forwards: Sequence[Callable[[Batch], object]]
) -> None:
    """Of a plan that isn't ours. All ranks together.

    Args:
        forwards: of the whole model, or of each of this rank's stages.

    Raises:
        ConfigError: the model doesn't compute as the plan divides it.
    """
    across, world = parts.across, parts.world
    if across is None or not parts.on_trial:
        return
    from lockstep.engine.divided_matrices import Rehearsed, rehearse
    from lockstep.engine.rehearsing import beginning
    from lockstep.transforms.undivided import undivided  # DTensors take 0.5 s to import

    what = Rehearsed(
        model,
        undivided,
        parts.on_trial,
        across.alike,
        across.partial,
        across.axis,
        world.axis,
        world.device,
    )
    batch = next(evaluation_batches(parts.source, 2, 0, 1, Loader(), world.device))
    batches = [batch]
    if isinstance(told, TargetLoss) and told.language:  # long sequences may not fit where matrices are whole
        batches.insert(0, beginning(batch, told.targets_of(batch).shape[1], _REHEARSED))
    with unheard():
        for forward in forwards:
            rehearse(what, forward, batches)


def _in_context(
    parts: Parts, ring: Ring, objective: EvaluatedObjective, computed: EvaluatedObjective, sharding: Sharding
) -> InContext:
    assert isinstance(objective, TargetLoss), "others were refused"
    world, config = parts.world, parts.config
    if world.device.type == "cuda" and not config.run.allow_untested:
        why = f"{ring.size} was never tested on GPUs; --allow-untested tries it"
        raise ConfigError(Problem("", "parallel.context", why))
    from lockstep.engine.in_context import Divider, InContext

    divider = Divider(sharding.bare, ring, objective.targets_of)
    prepare = divider if not isinstance(computed, ChunkedHeadLoss) else _after(divider, computed.show)
    eager = Eager(
        sharding,
        computed,
        autocast_context(resolve_compute(config.precision.compute, world.device), world.device),
        KeyedDraws(config.run.seed, parts.place.share, world.device, parts.place.coordinates["context"]).set,
        unheard,
        prepare,
    )
    engine = InContext(eager, divider)
    with unheard():
        engine.rehearse(next(evaluation_batches(parts.source, 2, 0, 1, Loader(), world.device)), world.axis)
    return engine


def _after(first: Callable[[Batch], Batch], then: Callable[[Batch], Batch]) -> Callable[[Batch], Batch]:
    return lambda batch: then(first(batch))


def unheard() -> AbstractContextManager[object]:
    """What user code logs inside goes nowhere."""
    return recording(MetricLog())
