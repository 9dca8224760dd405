"""A whole run on one rank: the loop, what is due in it, and who looks on.

for report in steps(session):        requests of monitors, signals and clocks are heard in the next vote
    monitors look --> evaluate? --> stop?
evaluate --> results
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.errors import Stopped
from lockstep.core.records import EvaluationReport, Request, StepReport
from lockstep.plan.schedule import is_due
from lockstep.resilience.signals import StopSignals, stop_signals
from lockstep.training.session import Session, steps

if TYPE_CHECKING:
    from lockstep.config.every import Every
    from lockstep.core.progress import Progress
    from lockstep.core.protocols import Monitor


@dataclass(frozen=True, slots=True)
class Results:
    """What a run came to, identical on every rank.

    Attributes:
        last: report of the last update; None if the run made none.
        evaluations: the last report of each evaluation set.
        seconds: of the whole run, evaluations included.
    """

    progress: Progress
    last: StepReport | None
    evaluations: tuple[EvaluationReport, ...]
    seconds: float


def run(session: Session, monitor: Monitor, drain_log: Callable[[StepReport], Iterable[Request]]) -> Results:
    """Trains until the config's budget is used up, evaluating when due.

    Args:
        drain_log: called with each report; shows what user code has logged.

    Raises:
        Stopped: somebody asked for it; all ranks stop at the same update.
    """
    began = time.perf_counter()
    last: StepReport | None = None
    evaluations: tuple[EvaluationReport, ...] = ()
    evaluated_at = -1
    clock = EvaluationClock(session.rooms.config.evaluation.every)
    with stop_signals() as signals:
        before = session.progress
        for report in steps(session):
            last = report
            session.request(monitor.see(report))
            session.request(drain_log(report))
            session.request(_due_requests(signals, clock))
            if Request.STOP in report.requests:
                raise Stopped(f"stopped at step {report.step}, as asked by {signals.heard or 'another rank'}")
            if _evaluation_is_due(session, before, report):
                evaluations = _evaluate(session, monitor)
                evaluated_at = session.progress.steps
                clock.restart()
            before = session.progress
        if session.rooms.config.evaluation.at_end and evaluated_at != session.progress.steps:
            evaluations = _evaluate(session, monitor)
    return Results(session.progress, last, evaluations, time.perf_counter() - began)


class EvaluationClock:
    """Minutes can't be counted in steps: the first rank to reach them asks for an evaluation, and all make it."""

    def __init__(self, every: Every | None) -> None:
        self._seconds = every.number * 60 if every is not None and every.unit == "minutes" else None
        self.restart()

    def restart(self) -> None:
        self._began = time.monotonic()

    @property
    def rings(self) -> bool:
        return self._seconds is not None and time.monotonic() - self._began >= self._seconds


def _due_requests(signals: StopSignals, clock: EvaluationClock) -> tuple[Request, ...]:
    requests = signals.requests()
    return (*requests, Request.EVALUATE) if clock.rings else requests


def _evaluation_is_due(session: Session, before: Progress, report: StepReport) -> bool:
    if Request.EVALUATE in report.requests:
        return True
    every = session.rooms.config.evaluation.every
    if every is None or every.unit == "minutes":
        return False
    return is_due(every, before, session.progress, session.rooms.plan.epoch_samples)


def _evaluate(session: Session, monitor: Monitor) -> tuple[EvaluationReport, ...]:
    reports = tuple(session.evaluate())
    for report in reports:
        session.request(monitor.evaluated(report))
    return reports
