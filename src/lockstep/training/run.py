"""A whole run on one rank: the loop, what is due in it, and who looks on.

for report in session:        requests of monitors, signals and clocks are heard in the next vote
    monitors look --> evaluate? --> save? --> stop?
evaluate --> save --> results
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from lockstep.core.errors import Paused, RunFailed
from lockstep.core.records import EvaluationReport, Request, SaveReport, StepReport
from lockstep.resilience.signals import run_signals
from lockstep.training.checkpoints import Checkpoints
from lockstep.training.rescue import rescuing
from lockstep.training.session import Session, components_of
from lockstep.training.triggers import Trigger

if TYPE_CHECKING:
    from lockstep.core.progress import Progress
    from lockstep.core.protocols import Monitor


class SaveFailed(RunFailed):
    """The last save failed; the model is as it was trained."""


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
        SaveFailed: the last save failed.
    """
    last: StepReport | None = None
    evaluations: tuple[EvaluationReport, ...] = ()
    evaluated_at = -1
    components = components_of(session)
    evaluation = Trigger(components.config.evaluation.every, Request.EVALUATE, components.plan.epoch_samples)
    with run_signals(shown=components.world.rank == 0) as signals, rescuing(session, SaveFailed):
        before = session.progress
        for report in session:
            last = report
            session.request(monitor.see(report))
            session.request(drain_log(report))
            session.request((*signals.requests(), *evaluation.requests(), *checkpoints.requests()))
            _tell(monitor, checkpoints.outcomes())
            stops = Request.STOP in report.requests
            found: tuple[EvaluationReport, ...] = ()
            if evaluation.after(before, session.progress, report):
                found = evaluations = _evaluate(session, monitor)
                evaluated_at = session.progress.steps
                evaluation.restart()
            wanted = checkpoints.is_best(found) or checkpoints.is_due(before, report)
            if stops or (wanted and not session.finished):  # at the end, what is evaluated there is saved with it
                checkpoints.save(found)
            if stops:
                _pause(session, monitor, checkpoints)
            before = session.progress
        found = evaluations if evaluated_at == session.progress.steps else ()
        if components.config.evaluation.at_end and not found:
            found = evaluations = _evaluate(session, monitor)
        checkpoints.is_best(found)
        checkpoints.save(found)
        _finish(monitor, checkpoints)
    return Results(session.progress, last, evaluations, session.seconds)


def _pause(session: Session, monitor: Monitor, checkpoints: Checkpoints) -> NoReturn:
    _finish(monitor, checkpoints)
    raise Paused(f"stopped at step {session.progress.steps:,}, as asked, and saved; start it again to go on")


def _finish(monitor: Monitor, checkpoints: Checkpoints) -> None:
    """The last save exists; or the run fails with the reason."""
    ended = checkpoints.finish()
    _tell(monitor, ended)
    while ended and ended[-1].made_room:  # each time with one checkpoint less
        checkpoints.save_again()
        ended = checkpoints.finish()
        _tell(monitor, ended)
    restored = checkpoints.restore_last()
    _tell(monitor, restored)
    ended = restored or ended
    if ended and ended[-1].failure is not None:
        raise SaveFailed(f"the state after step {ended[-1].step:,} could not be saved: {ended[-1].failure}")


def _tell(monitor: Monitor, ended: Iterable[SaveReport]) -> None:
    for report in ended:
        monitor.saved(report)


def _evaluate(session: Session, monitor: Monitor) -> tuple[EvaluationReport, ...]:
    reports = tuple(session.evaluate())
    for report in reports:
        session.request(monitor.evaluated(report))
    return reports
