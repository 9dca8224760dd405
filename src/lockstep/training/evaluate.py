"""Evaluates the model on named sets: sums over all ranks, divided once. No sample counts twice."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lockstep.core.out_of_memory import note_location
from lockstep.core.records import EvaluationReport
from lockstep.data.loader import evaluation_batches
from lockstep.distributed.user_collectives import print_once
from lockstep.monitor.metric_log import MetricLog, recording

if TYPE_CHECKING:
    from lockstep.config.schema import Loader
    from lockstep.core.protocols import Engine, EvaluatedObjective, Source
    from lockstep.distributed.mesh_position import MeshPosition
    from lockstep.distributed.process_group import World
    from lockstep.sharding.context import Sharding


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a session's model.

    Attributes:
        sources: evaluation sets by name, in the order of the config.
        micro_size: samples per forward of a rank.
    """

    engine: Engine
    sharding: Sharding
    objective: EvaluatedObjective
    sources: Mapping[str, Source]
    micro_size: int
    loader: Loader
    place: MeshPosition
    world: World

    def evaluate(self, step: int) -> list[EvaluationReport]:
        """Return a report for each set after update `step`; the same reports on every rank."""
        self.sharding.state.synchronize()
        return [self._evaluate_on(name, source, step) for name, source in self.sources.items()]

    def _evaluate_on(self, name: str, source: Source, step: int) -> EvaluationReport:
        began, place, device = time.perf_counter(), self.place, self.world.device
        batches = evaluation_batches(source, self.micro_size, place.share, place.shares, self.loader, device)
        try:
            with recording(MetricLog()):  # what user code logs here is not part of the training's curves
                local_sums = self.engine.evaluate(batches)
        except Exception as error:
            note_location(error, "evaluation", f"in the evaluation on {name}")
            raise
        names = sorted(local_sums)
        stacked = torch.stack([local_sums[key].to(device) for key in names])
        total = self.world.axis.sum(stacked if place.reports_metrics else torch.zeros_like(stacked)).tolist()
        sums = dict(zip(names, total, strict=True))
        loss_sum, count = sums.pop("loss_sum"), sums.pop("count")
        metrics = _metrics(self.objective, name, loss_sum, count, sums)
        return EvaluationReport(name, step, metrics, source.facts.samples, time.perf_counter() - began)


def _metrics(
    objective: EvaluatedObjective, name: str, loss_sum: float, count: float, sums: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics; if a user's objective raises, on all ranks alike, only the loss."""
    try:
        return {metric: float(value) for metric, value in objective.metrics(loss_sum, count, sums).items()}
    except Exception as error:
        print_once(f"lockstep: metrics of {name} can't be computed, but for the loss: {type(error).__name__}: {error}")
        return {"loss": loss_sum / count if count else math.nan}
