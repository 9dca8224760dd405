"""Evaluates the model on named sets: sums over all ranks, divided once. No sample counts twice.

Random numbers that a forward draws are keyed by set and batch: an evaluation that is repeated, after a failure or on
the weights that the run has left, has the same metrics. Registered generators have a state instead, which is restored
if the evaluation doesn't end; so are buffers, which a forward may change in evaluation mode, too.

A rank that is asked to stop need not wait for the end: about twice a second all ranks ask each other, before the same
batch, whether one of them is, and then leave the evaluation together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lockstep.core.out_of_memory import note_location
from lockstep.core.records import EvaluationReport
from lockstep.data.loader import evaluation_batches
from lockstep.distributed import generators
from lockstep.distributed.user_collectives import print_once
from lockstep.monitor.metric_log import MetricLog, recording
from lockstep.plan.batch import micro_ranges
from lockstep.sharding.buffers import BufferSnapshot
from lockstep.training.sources import evaluation_named

if TYPE_CHECKING:
    from lockstep.config.schema import Loader
    from lockstep.core.protocols import Axis, Engine, EvaluatedObjective, Source
    from lockstep.core.records import Batch
    from lockstep.distributed.mesh_position import MeshPosition
    from lockstep.distributed.process_group import World
    from lockstep.distributed.rng import KeyedDraws
    from lockstep.sharding.context import Sharding


_VOTE_S = 0.5  # between two votes
_LEAST_S = 1e-6  # of a batch


class EvaluationStopped(Exception):
    """A rank was asked to stop, and all have left the evaluation before the same batch."""


class StopVote:
    """The votes of an evaluation's ranks on whether to leave it.

    Args:
        stops: Returns whether this rank was asked to stop.
        axis: All ranks; each has as many batches.
    """

    def __init__(self, stops: Callable[[], bool], axis: Axis) -> None:
        self._stops = stops
        self._axis = axis
        self._batches = self._voted_at = self._next = 0
        self._voted = time.monotonic()

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches. Raises EvaluationStopped before the same one on all ranks."""
        for batch in batches:
            if self._batches == self._next:
                self._vote()
            self._batches += 1
            yield batch

    def _vote(self) -> None:
        now, since = time.monotonic(), self._batches - self._voted_at
        own = torch.tensor([float(self._stops()), now - self._voted], dtype=torch.float64)
        stops, seconds = self._axis.sum(own).tolist()
        if stops:
            raise EvaluationStopped
        mean = seconds / self._axis.size / since if since else _VOTE_S
        self._voted, self._voted_at = now, self._batches
        self._next = self._batches + max(1, int(_VOTE_S / max(mean, _LEAST_S)))


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
    draws: KeyedDraws

    def evaluate(self, step: int, stops: Callable[[], bool] | None = None) -> list[EvaluationReport]:
        """Return a report for each set after update `step`; the same reports on every rank.

        Args:
            stops: Returns whether this rank was asked to stop; None: the evaluation isn't to be left.

        Raises:
            EvaluationStopped: On all ranks, because one was asked to stop.
        """
        self.sharding.state.synchronize()
        vote = StopVote(stops, self.world.axis) if stops is not None else None
        before, buffers = generators.states(self.world.rank), BufferSnapshot(self.sharding.state.model)
        buffers.take()
        try:
            return [self._evaluate_on(name, source, step, vote) for name, source in self.sources.items()]
        except BaseException:
            with suppress(RuntimeError):  # a device that has failed has no state to save
                generators.put(before, self.world.rank)  # the state may be saved, and the evaluation made again
                buffers.put_back()
            raise

    def _evaluate_on(self, name: str, source: Source, step: int, vote: StopVote | None) -> EvaluationReport:
        began, place, device = time.perf_counter(), self.place, self.world.device
        batches = evaluation_batches(source, self.micro_size, place.share, place.shares, self.loader, device)
        try:
            with (
                evaluation_named(name),
                recording(MetricLog()),
            ):  # what user code logs here is not part of the training's curves
                voted = batches if vote is None else vote.over(batches)
                local_sums = self.engine.evaluate(self._keyed(voted, name, source))
        except EvaluationStopped:
            raise
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

    def _keyed(self, batches: Iterable[Batch], name: str, source: Source) -> Iterator[Batch]:
        """Yield the batches, each after the generators are set for its forward."""
        place = self.place
        ranges = micro_ranges(source.facts.samples, self.micro_size, place.share, place.shares)
        for batch, (first, _) in zip(batches, ranges, strict=True):
            self.draws.set_for_evaluation(name, first, place.coordinates["pipeline"])
            yield batch


def _metrics(
    objective: EvaluatedObjective, name: str, loss_sum: float, count: float, sums: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics; if a user's objective raises, on all ranks alike, only the loss."""
    try:
        return {metric: float(value) for metric, value in objective.metrics(loss_sum, count, sums).items()}
    except Exception as error:
        print_once(f"lockstep: metrics of {name} can't be computed, but for the loss: {type(error).__name__}: {error}")
        return {"loss": loss_sum / count if count else math.nan}
