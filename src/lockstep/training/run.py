"""A whole run on one rank: the loop, with its evaluations, saves and monitors.

each update: monitors see its report; requests of monitors, signals and clocks reach all ranks with the next vote
    something is scheduled or requested --> evaluate? --> save? --> stop?
at the end: evaluate --> save --> results
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core import heartbeat
from lockstep.core.errors import Paused, ReplicasDiffer, RolledBack, RunFailed, Stopped, blames_a_peer
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.records import EvaluationReport, Request, SaveReport, StepReport
from lockstep.distributed.process_group import is_timeout
from lockstep.loop.bad_updates import RollbackDue
from lockstep.loop.evaluate import EvaluationStopped
from lockstep.loop.replicas import CORRUPTED, StateNotFinite, difference
from lockstep.loop.session import Session, components_of, updates_of
from lockstep.resilience.notices import watched_notice
from lockstep.resilience.signals import RunSignals, run_signals
from lockstep.resilience.verdicts import NoTargets, NothingLearned
from lockstep.resuming.checkpoints import Checkpoints, rescuing
from lockstep.resuming.rollbacks import recorded

if TYPE_CHECKING:
    from lockstep.core.progress import Progress
    from lockstep.core.protocols import Monitor
    from lockstep.monitor.profiler import Profiler
    from lockstep.training.monitoring import UserLogs

_LAST_REPORT_S = 30.0
_POLL_S = 0.05  # between two looks at what requests something by the clock or a file, and at saves that have ended
_FOLLOWED = (Request.EVALUATE, Request.SAVE, Request.STOP, Request.PAUSE, Request.SNAPSHOT)
"""Requests for what follows the update that delivers them to all ranks."""


@dataclass(slots=True)
class ReplicaCheck:
    """Compares the replicas of a session's state; `every` is the updates between two comparisons, None: never."""

    session: Session
    every: int | None
    _compared_at: int = -1

    def compare(self) -> None:
        """Compare, unless that was done after this update; all ranks together. Raises ReplicasDiffer."""
        components, step = components_of(self.session), self.session.progress.steps
        if self.every is None or components.world.size == 1 or self._compared_at == step:
            return
        self._compared_at = step
        if (fault := difference(components)) is not None:
            raise ReplicasDiffer(f"step {step:,}: {fault.text}; {CORRUPTED}", fault.ranks)


class SaveFailed(RunFailed):
    """The last save failed; the model is as it was trained."""

    kind = FailureKind.SAVE_FAILED


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a run, identical on every rank.

    Attributes:
        last: report of the last update; None if the run made none.
        evaluations: the last report of each evaluation set.
        seconds: of the whole run over all its attempts.
        stopped_early: why it ended before its length; None: it did not.
    """

    progress: Progress
    last: StepReport | None
    evaluations: tuple[EvaluationReport, ...]
    seconds: float
    stopped_early: str | None


def run(
    session: Session, monitor: Monitor, checkpoints: Checkpoints, user_logs: UserLogs, profiler: Profiler
) -> Results:
    """Train, evaluate and save as configured, from the session's progress to the end.

    Raises:
        Paused: all ranks were asked to stop after the same update, and its state is saved.
        SaveFailed: the last save failed.
        NothingLearned, NoTargets: it has learned nothing, or no longer.
    """
    components = components_of(session)
    checkpoints.evaluations.schedule()
    place = components.config.recovery.notice if components.world.local_rank == 0 else None
    replicas = ReplicaCheck(session, components.config.recovery.compare_every)
    with run_signals(shown=components.world.rank == 0) as signals, watched_notice(place):
        loop = _Loop(session, monitor, checkpoints, user_logs, profiler, signals, replicas)
        with (
            rescuing(session, SaveFailed, NothingLearned, NoTargets, StateNotFinite, ReplicasDiffer, RolledBack),
            loop.complete_history(),
            closing(profiler),
        ):
            profiler.start(session.progress.steps)
            heartbeat.begin_stage(heartbeat.Stage.TRAINING, session.progress.steps)
            try:
                stops = loop.train()
                if not stops:
                    loop.finish(at_end=components.config.evaluation.at_end)
                heartbeat.begin_stage(heartbeat.Stage.END)
            except RollbackDue as due:
                raise recorded(due, components, checkpoints) from None
            except EvaluationStopped:
                stops = True
                replicas.compare()
                checkpoints.save(loop.report_saves)
            _finish(checkpoints, loop.report_saves)
            if stops:
                raise Paused(
                    f"stopped at step {session.progress.steps:,}, as requested, and saved; start it again to resume"
                )
    evaluations, seconds = checkpoints.evaluations, session.seconds
    stopped_early = "a monitor requested it" if loop.is_ended else evaluations.early_stopping.reason
    return Results(session.progress, loop.last, evaluations.reports, seconds, stopped_early)


@dataclass(slots=True)
class _Loop:
    """Runs what follows each update.

    Attributes:
        is_ended: a monitor has ended the run before its length.
        follow_at: the first step that something scheduled may follow; before it, only requests are followed.
        poll_at: the time of the next look at clocks and files.
    """

    session: Session
    monitor: Monitor
    checkpoints: Checkpoints
    user_logs: UserLogs
    profiler: Profiler
    signals: RunSignals
    replicas: ReplicaCheck
    last: StepReport | None = None
    is_ended: bool = False
    follow_at: float = 0
    poll_at: float = 0.0

    def train(self) -> bool:
        """Train to the run's end, or until it stops early; return whether a request stopped it, saved."""
        session, checkpoints = self.session, self.checkpoints
        evaluations, early_stopping = checkpoints.evaluations, checkpoints.evaluations.early_stopping
        if evaluations.due:  # the attempt before ended without it
            self._evaluate()
        checkpoints.save_evaluated(self.report_saves)
        for before in updates_of(session, self.is_followed) if early_stopping.reason is None else ():
            if self.user_logs.log.entries or self.user_logs.taken:
                session.request(self.user_logs.updated(before.steps + 1))
            requests = self._show(session.reports)
            if self.signals.raised or time.monotonic() >= self.poll_at:
                self._poll()
            if requests or session.progress.steps >= self.follow_at:
                if self.replicas.every is not None and session.progress.steps % self.replicas.every == 0:
                    self.replicas.compare()
                if self.follow(before, requests):
                    return True
                self.profiler.updated(session.progress.steps)
                self.follow_at, self.poll_at = session.progress.steps + self._updates_left(), 0.0
                if self.is_ended or early_stopping.reason is not None:
                    break
        if self.last is not None:
            session.bad_updates.verdicts.refuse_untrained(self.last.step)
        return False

    def is_followed(self, before: Progress) -> bool:
        """Return whether something that needs the report is scheduled after the update that began at `before`."""
        checkpoints, now = self.checkpoints, self.session.progress
        if now.steps < self.follow_at:
            return self.session.finished
        is_scheduled = checkpoints.evaluations.due or checkpoints.trigger.follows(before, now)
        return self.session.finished or is_scheduled or checkpoints.snapshots.is_due()

    def _updates_left(self) -> float:
        """Return how many updates from now on, at least, nothing scheduled comes after."""
        session, checkpoints = self.session, self.checkpoints
        now, most = session.progress, session.batch_plan.global_size
        every = (self.replicas.every, checkpoints.snapshots.every)
        return min(
            checkpoints.evaluations.trigger.updates_left(now, most),
            checkpoints.trigger.updates_left(now, most),
            1 if self.profiler.is_active else math.inf,
            *(each - now.steps % each for each in every if isinstance(each, int)),
        )

    def _poll(self) -> None:
        """Request what signals, clocks and files ask for, and report the saves that have ended."""
        checkpoints = self.checkpoints
        own = (*self.signals.requests(), *checkpoints.evaluations.trigger.requests())
        own += (*checkpoints.requests(), *self.profiler.requests())
        self.session.request(own)
        if ended := checkpoints.outcomes():
            self.report_saves(ended)
        is_repeated = Request.NO_SNAPSHOT in own  # in each vote
        self.poll_at = 0.0 if is_repeated else time.monotonic() + _POLL_S

    def _show(self, reports: Iterable[StepReport]) -> set[Request]:
        """Show what has arrived; return the requests of all ranks in it."""
        requests: set[Request] = set()
        for report in reports:
            self.last = report
            if report.requests:
                self.checkpoints.evaluations.receive(report)
                self.profiler.see(report)
                requests |= report.requests
            if own := self.monitor.see(report):
                self.session.request(own)
            self.user_logs.see(report)
        return requests

    def follow(self, before: Progress, requests: set[Request]) -> bool:
        """Evaluate and save, if that is scheduled or requested; return whether the run stops here, saved."""
        session, checkpoints = self.session, self.checkpoints
        if not requests.isdisjoint(_FOLLOWED):
            session.reports.flush()  # a request that came late: the last update's report belongs before
            requests |= self._show(session.reports)
        if checkpoints.evaluations.due:
            self._evaluate()
        is_due = checkpoints.trigger.follows(before, session.progress, requests)
        saves = checkpoints.evaluations.is_best or is_due
        self.is_ended = Request.STOP in requests and not session.finished
        stops = Request.PAUSE in requests
        if stops or (saves and not session.finished):  # at the end, the last evaluation is saved with the state
            self.replicas.compare()
            checkpoints.save(self.report_saves)
        if checkpoints.snapshots.is_due(requests) and not (stops or session.finished):
            self.replicas.compare()
            checkpoints.snapshots.take()
        return stops

    def finish(self, *, at_end: bool) -> None:
        """Evaluate for the last time, and start the last save."""
        if at_end and not self.checkpoints.evaluations.is_done:
            self._evaluate(at_end=True)
        self.replicas.compare()
        self.checkpoints.save(self.report_saves)

    def report_saves(self, ended: Iterable[SaveReport]) -> None:
        for report in ended:
            self.monitor.saved(report)

    @contextmanager
    def complete_history(self) -> Iterator[None]:
        """Show the reports that are left when an error ends the block, before the state is saved."""
        try:
            yield
        except BaseException as error:
            hangs = isinstance(error, Stopped) or blames_a_peer(error) or is_timeout(error)
            for report in self.session.reports.last(0.0 if hangs else _LAST_REPORT_S):
                self.checkpoints.evaluations.receive(report)
                self.monitor.see(report)
            self.user_logs.show_bad_updates()
            raise

    def _evaluate(self, *, at_end: bool = False) -> None:
        reports = self.session.evaluate(self.signals.stops)
        for report in reports:
            self.session.request(self.monitor.evaluated(report))
        self.checkpoints.evaluations.take(reports, at_end=at_end)


def _finish(checkpoints: Checkpoints, report_saves: Callable[[Iterable[SaveReport]], None]) -> None:
    while True:
        ended = checkpoints.finish()
        report_saves(ended)
        if not ended or not ended[-1].made_room:  # else with one checkpoint less on the disk
            break
        checkpoints.save_again()
    if ended and ended[-1].failure is not None:
        raise SaveFailed(f"the state after step {ended[-1].step:,} could not be saved: {ended[-1].failure}")
