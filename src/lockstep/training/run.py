"""A whole run on one rank: the loop, what is due in it, and who looks on.

for report in steps(session):        requests of monitors, signals and clocks are heard in the next vote
    monitors look --> evaluate? --> save? --> stop?
evaluate --> save --> results
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from lockstep.core.errors import GiveUp, Paused
from lockstep.core.records import EvaluationReport, Request, SaveReport, StepReport
from lockstep.plan.schedule import is_due
from lockstep.resilience.signals import StopSignals, stop_signals
from lockstep.training.checkpoints import Checkpoints
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
        seconds: of the whole run over all its attempts, evaluations included.
    """

    progress: Progress
    last: StepReport | None
    evaluations: tuple[EvaluationReport, ...]
    seconds: float


def run(
    session: Session,
    monitor: Monitor,
    checkpoints: Checkpoints,
    drain_log: Callable[[StepReport], Iterable[Request]],
) -> Results:
    """Trains until the config's budget is used up, evaluating and saving when due.

    Args:
        drain_log: called with each report; shows what user code has logged.

    Raises:
        Paused: somebody asked for it; all ranks stop at the same update, and it is saved.
        GiveUp: the last save failed.
    """
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
            session.request(checkpoints.requests())
            _tell(monitor, checkpoints.outcomes())
            stops = Request.STOP in report.requests
            found: tuple[EvaluationReport, ...] = ()
            if _evaluation_is_due(session, before, report):
                found = evaluations = _evaluate(session, monitor)
                evaluated_at = session.progress.steps
                clock.restart()
            if stops or checkpoints.is_best(found) or checkpoints.is_due(before, report):
                checkpoints.save(found)
            if stops:
                _pause(session, monitor, checkpoints, signals.heard)
            before = session.progress
        found = evaluations if evaluated_at == session.progress.steps else ()
        if session.rooms.config.evaluation.at_end and not found:
            found = evaluations = _evaluate(session, monitor)
        checkpoints.is_best(found)
        checkpoints.save(found)
        _finish(monitor, checkpoints)
    return Results(session.progress, last, evaluations, session.seconds)


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


def _pause(session: Session, monitor: Monitor, checkpoints: Checkpoints, heard: str | None) -> NoReturn:
    _finish(monitor, checkpoints)
    step = session.progress.steps
    raise Paused(f"stopped at step {step:,}, as asked by {heard or 'another rank'}, and saved; start it again to go on")


def _finish(monitor: Monitor, checkpoints: Checkpoints) -> None:
    """The last save exists; or the run fails with the reason."""
    ended = checkpoints.finish()
    _tell(monitor, ended)
    if ended and ended[-1].failure is not None:
        raise GiveUp(f"the state after step {ended[-1].step:,} could not be saved: {ended[-1].failure}")


def _tell(monitor: Monitor, ended: Iterable[SaveReport]) -> None:
    for report in ended:
        monitor.saved(report)


def _evaluate(session: Session, monitor: Monitor) -> tuple[EvaluationReport, ...]:
    reports = tuple(session.evaluate())
    for report in reports:
        session.request(monitor.evaluated(report))
    return reports
