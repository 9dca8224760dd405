"""A whole run on one rank: the loop, with its evaluations, saves and monitors.

for report in session:        requests of monitors, signals and clocks reach all ranks with the next vote
    monitors see it --> evaluate? --> save? --> stop?
evaluate --> save --> results
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.errors import Paused, RunFailed
from lockstep.core.records import EvaluationReport, Request, SaveReport, StepReport
from lockstep.resilience.guard import ADVICE
from lockstep.resilience.signals import run_signals
from lockstep.training.checkpoints import Checkpoints
from lockstep.training.requests import Trigger
from lockstep.training.rescue import rescuing
from lockstep.training.session import Session, components_of, seconds_of

if TYPE_CHECKING:
    from lockstep.core.progress import Progress
    from lockstep.core.protocols import Monitor


class SaveFailed(RunFailed):
    """The last save failed; the model is as it was trained."""


class NothingLearned(RunFailed):
    """Every update of the run was discarded."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a run, identical on every rank.

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
    user_logs: Callable[[StepReport], Iterable[Request]],
) -> Results:
    """Train until the config's budget is used up, with the config's evaluations and saves.

    Args:
        user_logs: called with each report; shows what user code has logged.

    Raises:
        Paused: a rank was asked to stop; all ranks have stopped after the same update, and its state is saved.
        SaveFailed: the last save failed.
        NothingLearned: no update was kept.
    """

    def report_saves(ended: Iterable[SaveReport]) -> None:
        for report in ended:
            monitor.saved(report)

    last: StepReport | None = None
    evaluations: tuple[EvaluationReport, ...] = ()
    evaluated_at = -1
    components = components_of(session)
    evaluation = Trigger(components.config.evaluation.every, Request.EVALUATE, components.plan.epoch_samples)
    with run_signals(shown=components.world.rank == 0) as signals, rescuing(session, SaveFailed, NothingLearned):
        before = session.progress
        for report in session:
            last = report
            session.request(monitor.see(report))
            session.request(user_logs(report))
            session.request((*signals.requests(), *evaluation.requests(), *checkpoints.requests()))
            report_saves(checkpoints.outcomes())
            stops = Request.STOP in report.requests
            new: tuple[EvaluationReport, ...] = ()
            if evaluation.follows(before, session.progress, report):
                new = evaluations = _evaluate(session, monitor)
                evaluated_at = session.progress.steps
                evaluation.restart()
            saves = checkpoints.is_best(new) or checkpoints.is_due(before, report)
            if stops or (saves and not session.finished):  # at the end, the last evaluation is saved with the state
                checkpoints.save(new, report_saves)
            if stops:
                _finish(checkpoints, report_saves)
                raise Paused(
                    f"stopped at step {session.progress.steps:,}, as requested, and saved; start it again to resume"
                )
            before = session.progress
        _refuse_untrained(last)
        new = evaluations if evaluated_at == session.progress.steps else ()
        if components.config.evaluation.at_end and not new:
            new = evaluations = _evaluate(session, monitor)
        checkpoints.is_best(new)
        checkpoints.save(new, report_saves)
        _finish(checkpoints, report_saves)
    return Results(session.progress, last, evaluations, seconds_of(session))


def _refuse_untrained(last: StepReport | None) -> None:
    """Raise NothingLearned if a run of several updates has kept none."""
    if last is not None and last.discarded == last.step > 1:
        raise NothingLearned(
            f"all {last.step:,} updates had a loss or gradient that was not finite, and were discarded: nothing was "
            f"learned, and the model has its initial weights; {ADVICE}"
        )


def _evaluate(session: Session, monitor: Monitor) -> tuple[EvaluationReport, ...]:
    reports = tuple(session.evaluate())
    for report in reports:
        session.request(monitor.evaluated(report))
    return reports


def _finish(checkpoints: Checkpoints, report_saves: Callable[[Iterable[SaveReport]], None]) -> None:
    """Wait until the last save exists. Raises SaveFailed if it can't."""
    ended = checkpoints.finish()
    report_saves(ended)
    while ended and ended[-1].made_room:  # each time with one checkpoint less on the disk
        checkpoints.save_again()
        ended = checkpoints.finish()
        report_saves(ended)
    restored = checkpoints.restore_last()
    report_saves(restored)
    ended = restored or ended
    if ended and ended[-1].failure is not None:
        raise SaveFailed(f"the state after step {ended[-1].step:,} could not be saved: {ended[-1].failure}")
