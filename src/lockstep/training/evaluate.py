"""Judges the model on a named set: sums over all ranks, divided once. No sample counts twice, whatever the ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from lockstep.core.out_of_memory import mark
from lockstep.core.records import EvaluationReport
from lockstep.data.loader import evaluation_batches
from lockstep.distributed.user_collectives import print_once
from lockstep.monitor.metric_log import MetricLog, recording

if TYPE_CHECKING:
    from lockstep.core.protocols import EvaluatedObjective, Source
    from lockstep.training.session import Session


def evaluate(session: Session) -> list[EvaluationReport]:
    """Every evaluation set, in the order of the config; the same reports on every rank."""
    session.rooms.sharding.synchronize()
    return [evaluate_on(session, name, source) for name, source in session.rooms.evaluation.items()]


def evaluate_on(session: Session, name: str, source: Source) -> EvaluationReport:
    """One set."""
    rooms, began = session.rooms, time.perf_counter()
    batches = evaluation_batches(
        source,
        micro_size(session),
        rooms.place.share,
        rooms.place.shares,
        rooms.config.data.loader,
        rooms.world.device,
    )
    try:
        with recording(MetricLog()):  # what user code logs of an evaluation is not part of the training's curves
            mine = rooms.engine.evaluate(batches)
    except Exception as error:
        mark(error, "evaluation", f"in the evaluation on {name}")
        raise
    names = sorted(mine)
    told = torch.stack([mine[key].to(rooms.world.device) for key in names])
    total = rooms.world.axis.sum(told if rooms.place.reports_metrics else torch.zeros_like(told)).tolist()
    sums = dict(zip(names, total, strict=True))
    loss_sum, count = sums.pop("loss_sum"), sums.pop("count")
    metrics = _metrics(rooms.objective, name, loss_sum, count, sums)
    return EvaluationReport(name, session.progress.steps, metrics, source.facts.samples, time.perf_counter() - began)


def _metrics(
    objective: EvaluatedObjective, name: str, loss_sum: float, count: float, sums: Mapping[str, float]
) -> dict[str, float]:
    """What people read. A user's own that raises costs all but the loss, not the run: all ranks have the same sums."""
    try:
        return {metric: float(value) for metric, value in objective.metrics(loss_sum, count, sums).items()}
    except Exception as error:
        print_once(f"lockstep: metrics of {name} can't be computed, but for the loss: {type(error).__name__}: {error}")
        return {"loss": loss_sum / count if count else math.nan}


def micro_size(session: Session) -> int:
    """Samples per forward of a rank in an evaluation. Of stages each has but its own activations at a time here: `auto`
    gives them the whole share at once."""
    size, plan = session.rooms.config.evaluation.micro_size, session.rooms.plan
    if size != "auto":
        return size
    return plan.batch.micro_size * (plan.batch.accumulation if plan.mesh.pipeline > 1 else 1)
