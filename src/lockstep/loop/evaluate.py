"""Evaluates the model on named sets: sums over all ranks, divided once. No sample counts twice.

Random numbers of a forward are keyed by set and batch, so that a repeated evaluation has the same metrics. If an
evaluation doesn't end, registered generators and buffers are restored.

So that a stop need not wait for the end, all ranks ask each other about twice a second, before the same batch, whether
one of them was asked to stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from lockstep.core import heartbeat
from lockstep.core.errors import UnusableSamples
from lockstep.core.keys import key
from lockstep.core.out_of_memory import note_location
from lockstep.core.records import EvaluationReport
from lockstep.data.loader import evaluation_batches
from lockstep.distributed import generators
from lockstep.distributed.user_collectives import print_once
from lockstep.monitor.metric_log import MetricLog, recording
from lockstep.plan.batch import micro_ranges
from lockstep.sharding.buffers import BufferSnapshot

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis
    from lockstep.core.records import Batch
    from lockstep.loop.components import Components


_VOTE_S = 0.5  # between two votes
_LEAST_S = 1e-6  # of a batch


class EvaluationStopped(Exception):
    """A rank was asked to stop, and all have left the evaluation before the same batch."""


def stoppable(batches: Iterable[Batch], stops: Callable[[], bool], axis: Axis) -> Iterator[Batch]:
    """Yield the batches, as many on all ranks. Raises EvaluationStopped before the same one if a rank was to stop.

    Args:
        stops: Returns whether this rank was asked to stop.
    """
    voted_at = following = 0
    voted = time.monotonic()
    for number, batch in enumerate(batches):
        if number == following:
            now, since = time.monotonic(), number - voted_at
            own = torch.tensor([float(stops()), now - voted], dtype=torch.float64)
            stopped, seconds = axis.sum(own).tolist()
            if stopped:
                raise EvaluationStopped
            mean = seconds / axis.size / since if since else _VOTE_S
            voted, voted_at = now, number
            following = number + max(1, int(_VOTE_S / max(mean, _LEAST_S)))
        yield batch


@contextmanager
def evaluation_named(name: str) -> Iterator[None]:
    """Have errors about samples that are read in the block, and the launcher's messages, name the evaluation set."""
    heartbeat.own().begin_evaluation(name)
    try:
        yield
    except UnusableSamples as error:
        text = f"data.evaluation.{name}: {error}. Mend it, or remove it from the set (data.bad_samples is for training)"
        raise UnusableSamples(text, error.samples, name) from error.__cause__


def evaluate(components: Components, step: int, stops: Callable[[], bool] | None = None) -> list[EvaluationReport]:
    """Return a report for each set after update `step`; the same reports on every rank.

    Args:
        stops: Returns whether this rank was asked to stop, upon which all raise EvaluationStopped; None: never.
    """
    components.sharding.state.synchronize()
    rank = components.world.rank
    before, buffers = generators.states(rank), BufferSnapshot(components.sharding.state.model)
    buffers.take()
    try:
        return [_evaluate_on(components, name, step, stops) for name in components.evaluation.sets]
    except BaseException:
        with suppress(RuntimeError):  # a device that has failed has no state to save
            generators.put(before, rank)  # the state may be saved, and the evaluation made again
            buffers.put_back()
        raise


def _evaluate_on(components: Components, name: str, step: int, stops: Callable[[], bool] | None) -> EvaluationReport:
    began, world, place, parts = time.perf_counter(), components.world, components.position, components.evaluation
    source, size, loader = parts.sets[name], parts.micro_size, components.config.data.loader
    batches = evaluation_batches(source, size, place.share, place.shares, loader, world.device)
    ranges = micro_ranges(source.facts.samples, size, place.share, place.shares)

    def keyed() -> Iterator[Batch]:
        voted = batches if stops is None else stoppable(batches, stops, world.axis)
        for batch, (first, _) in zip(voted, ranges, strict=True):
            parts.draws.set_for_evaluation(name, first, place.coordinates["pipeline"])
            yield batch

    try:
        with evaluation_named(name), recording(MetricLog()):  # what user code logs here is not of the training
            parts.metrics.reset()
            local_sums = components.engine.evaluate(keyed(), parts.metrics.update)
    except EvaluationStopped:
        raise
    except Exception as error:
        note_location(error, "evaluation", f"in the evaluation on {name}")
        raise
    names = sorted(local_sums)
    stacked = torch.stack([local_sums[key].to(world.device) for key in names])
    total = world.axis.sum(stacked if place.reports_metrics else torch.zeros_like(stacked)).tolist()
    sums = dict(zip(names, total, strict=True))
    loss_sum, count = sums.pop("loss_sum"), sums.pop("count")
    try:
        values = components.objective.metrics(loss_sum, count, sums).items()
        metrics = {metric: float(value) for metric, value in values}
    except Exception as error:  # a user's objective raises, on all ranks alike
        print_once(f"lockstep: only the loss of {name} can be computed: {type(error).__name__}: {error}")
        metrics = {"loss": loss_sum / count if count else math.nan}
    further, failures = parts.metrics.values(world.axis, counts=place.reports_loss)
    metrics |= further
    if parts.answers is not None:
        samples = parts.answers.samples_of(source)
        batches = evaluation_batches(source, size, place.share, place.shares, loader, world.device, samples)
        voted = batches if stops is None else stoppable(batches, stops, world.axis)
        ranges = micro_ranges(samples, size, place.share, place.shares)
        seeds = [key(components.config.run.seed, "answers", name, first) for first, _ in ranges]
        with evaluation_named(name):
            answered = parts.answers.evaluate(name, components.sharding.state.model, voted, seeds, world.axis)
        metrics |= answered[0]
        failures += answered[1]
    for failure in failures:
        print_once(f"lockstep: {name}: {failure}")
    return EvaluationReport(name, step, metrics, source.facts.samples, time.perf_counter() - began)
