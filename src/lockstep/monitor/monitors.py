"""All watchers as one monitor, for a microsecond a step.

    report --> kept, and nobody wants to look before (step, seconds)?  --yes--> remember it, nothing else
                  |no
                  v
               show it to every watcher; ask each when it wants the next one

A watcher that raises is dropped with one warning: nobody's display ends a training.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lockstep.core.protocols import Monitor
from lockstep.core.records import EvaluationReport, Request, RunFacts, SaveReport, StepReport, Verdict
from lockstep.monitor.journal import Logged
from lockstep.monitor.watchers import EpochReport, Watcher

_log = logging.getLogger("lockstep.monitor")
_NOTHING: tuple[Request, ...] = ()
_KEPT = Verdict.KEPT
_M = TypeVar("_M", bound=Monitor)


class Monitors:
    """Fans out; the requests are the union of all answers.

    Args:
        watchers: see a report when they want to.
        others: monitors of a user's, which see every report; their time is the user's.
    """

    def __init__(self, watchers: Sequence[Watcher] = (), others: Sequence[Monitor] = ()) -> None:
        self._watchers = list(watchers)
        self._others = list(others)
        self._next_step: float = 0
        self._next_seconds: float = 0.0
        self._last: StepReport | None = None
        self._last_shown: StepReport | None = None
        self._epoch = _Epochs(0)

    def start(self, facts: RunFacts) -> None:
        self._epoch = _Epochs(facts.epoch_samples)
        self._for_all(lambda monitor: monitor.start(facts))

    def see(self, report: StepReport) -> Iterable[Request]:
        self._last = report
        epoch = self._epoch
        if report.verdict is _KEPT:
            count = report.count
            epoch.loss += report.loss * count
            epoch.count += count
            if (
                report.step < self._next_step
                and report.seconds < self._next_seconds
                and report.samples < epoch.end
                and not self._others
            ):
                return _NOTHING
        return self._look(report)

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        requests: set[Request] = set(self._show_last())
        self._for_all(lambda monitor: requests.update(monitor.evaluated(report)))
        return requests

    def saved(self, report: SaveReport) -> None:
        self._for_all(lambda monitor: monitor.saved(report))

    def journal(self, step: int, logged: Logged) -> None:
        """What user code logged; only this room's watchers take it."""
        self._for_watchers(lambda watcher: watcher.journal(step, logged))

    def finish(self, error: BaseException | None) -> None:
        self._show_last()
        self._for_all(lambda monitor: monitor.finish(error))

    def _look(self, report: StepReport) -> Iterable[Request]:
        requests: set[Request] = set()
        for monitor in list(self._others):
            self._guard(self._others, monitor, lambda monitor: requests.update(monitor.see(report)))
        if self._is_wanted(report):
            requests.update(self._show_last())
        ended = self._epoch.after(report)
        if ended is not None:
            self._for_watchers(lambda watcher: watcher.epoch(ended))
        self._plan_next_look()
        return requests

    def _show_last(self) -> set[Request]:
        """Shows the latest report to the watchers, unless they have seen it."""
        requests: set[Request] = set()
        last = self._last
        if last is not None and last is not self._last_shown:
            self._last_shown = last
            self._for_watchers(lambda watcher: requests.update(watcher.see(last)))
        return requests

    def _is_wanted(self, report: StepReport) -> bool:
        due = report.step >= self._next_step or report.seconds >= self._next_seconds
        return due or report.verdict is not _KEPT

    def _plan_next_look(self) -> None:
        looks = [watcher.next_look() for watcher in self._watchers]
        self._next_step = min((look.step for look in looks), default=math.inf)
        self._next_seconds = min((look.seconds for look in looks), default=math.inf)

    def _for_watchers(self, act: Callable[[Watcher], object]) -> None:
        for watcher in list(self._watchers):
            self._guard(self._watchers, watcher, act)

    def _for_all(self, act: Callable[[Monitor], object]) -> None:
        self._for_watchers(act)
        for monitor in list(self._others):
            self._guard(self._others, monitor, act)

    def _guard(self, among: list[_M], monitor: _M, act: Callable[[_M], object]) -> None:
        try:
            act(monitor)
        except Exception as error:
            among.remove(monitor)
            _log.warning("%s failed and is left out from now on: %r", type(monitor).__name__, error, exc_info=True)


class _Epochs:
    """Adds up the epoch that is running.

    Attributes:
        end: cursor at which it is over.
        loss, count: sums over its kept updates.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.end: float = 0 if samples else math.inf
        self.loss = 0.0
        self.count = 0.0
        self._whole = True
        self._began = 0.0

    def after(self, report: StepReport) -> EpochReport | None:
        """The epoch's report, if this update was its last."""
        if not self._samples:
            return None
        if not self.end:
            self._whole = report.samples - report.update_samples <= report.epoch * self._samples
            self._began = 0.0 if report.step == 1 else report.seconds
            self.end = (report.epoch + 1) * self._samples
        if report.samples < self.end:
            return None
        loss = self.loss / self.count if self.count else math.nan
        seconds = report.seconds - self._began
        ended = EpochReport(report.epoch, report.step, loss, report.samples, seconds, self._whole)
        self.end += self._samples
        self.loss, self.count, self._whole, self._began = 0.0, 0.0, True, report.seconds
        return ended
