"""Show what user code logs on all ranks, at the steps that monitors record; and the model's histograms.

update     8        9        10  taken       11
log        a ...    ... b    ... c |         d ...
report     7        8        9               10: a rank has requested it --> a, b, c of all ranks, as step 10

A report may come one update late; what was logged meanwhile belongs to the next record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.records import Request
from lockstep.monitor.metric_log import MetricLog, collected
from lockstep.training.histograms import histograms_of
from lockstep.training.session import bad_updates_of, components_of, left_out_of

if TYPE_CHECKING:
    from lockstep.core.records import StepReport
    from lockstep.monitor.monitors import Monitors
    from lockstep.training.session import Session


class UserLogs:
    """Collects the entries of all ranks; free while nothing is logged."""

    def __init__(self, session: Session, monitors: Monitors, log: MetricLog) -> None:
        self._session = session
        self._axis = components_of(session).world.axis
        self._every = components_of(session).config.monitor.every
        self._histograms = histograms_of(components_of(session))
        self._monitors = monitors
        self._log = log
        self._taken: dict[int, MetricLog] = {}  # by steps whose reports haven't arrived
        self._has_entries = session.progress.steps > 0  # of a run that resumes, the first update may be recorded

    def updated(self, step: int) -> tuple[Request, ...]:
        """Return this rank's request to collect, after update `step`, whose report may still be on its way."""
        if self._histograms is not None:
            self._histograms.count_weights(step)
        if self._log.empty and all(log.empty for log in self._taken.values()):
            return ()
        if step % self._every == 0:
            self._taken[step] = self._log.take()
        return (Request.SHOW_LOG,)

    def see(self, report: StepReport) -> None:
        """Collect what was logged up to this update, if it is recorded and a rank has requested it."""
        if self._histograms is not None and (of_model := self._histograms.see(report)):
            self._monitors.logged(report.step, of_model)
        if left_out := left_out_of(self._session).take_new():
            self._monitors.left_out(report.step, left_out)
        self.show_bad_updates()
        self._has_entries |= Request.SHOW_LOG in report.requests
        if report.step % self._every:
            return
        log = self._taken.pop(report.step, None)
        if self._has_entries:
            self._show(report.step, log or MetricLog())
        elif log is not None:
            next(iter(self._taken.values()), self._log).put_back(log)

    def show_bad_updates(self) -> None:
        """Show what has become known of bad updates."""
        for bad in bad_updates_of(self._session).take_new():
            self._monitors.bad_numbers(bad)

    def finish(self, step: int) -> None:
        """Collect what is left after the last update; all ranks together."""
        self._show(step, self._log)

    def _show(self, step: int, log: MetricLog) -> None:
        logged = collected(log, self._axis)
        self._has_entries = bool(logged)  # who has logged will do so again
        if logged:
            self._monitors.logged(step, logged)
