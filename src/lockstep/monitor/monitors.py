"""All monitors as one, for a microsecond a step.

    report --> kept, and no monitor wants a report before (step, seconds)?  --yes--> remember it, nothing else
                  |no
                  v
               show it to those that want it; ask each for the next report that it wants

A monitor that raises is dropped with one warning: a display never ends a training.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from lockstep.core.protocols import Monitor
from lockstep.core.records import (
    EvaluationReport,
    LeftOutSample,
    NumbersReport,
    Request,
    RestartReport,
    RunInfo,
    SaveReport,
    StepReport,
    Verdict,
)
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.rank_meters import MeterReport

_log = logging.getLogger("lockstep.monitor")
_NOTHING: tuple[Request, ...] = ()
_KEPT = Verdict.KEPT
_M = TypeVar("_M", bound=Monitor)


class NextReport(NamedTuple):
    """The next report that a monitor wants: at this step or this second of the run, whichever comes first."""

    step: float
    seconds: float


_AT_ONCE = NextReport(0, 0.0)


@dataclass(frozen=True, slots=True)
class EpochReport:
    """Sums over one epoch.

    Attributes:
        epoch: from 0.
        step: its last update.
        loss: mean over all valid targets of its kept updates; NaN if none was kept.
        samples: consumed by the run so far.
        seconds: since its first update began, evaluations in between included.
        whole: whether this process saw it from its first update on.
    """

    epoch: int
    step: int
    loss: float
    samples: int
    seconds: float
    whole: bool


class ReportWriter(Monitor, Protocol):
    """A monitor that also takes the sums of epochs, what user code logged, and the ranks' meters."""

    def epoch(self, report: EpochReport) -> None: ...

    def logged(self, step: int, logged: Logged) -> None:
        """Take what user code logged up to and with update `step`, merged over all ranks."""

    def measured(self, report: MeterReport) -> None:
        """Take the meters of all ranks over an interval."""

    def left_out(self, step: int, samples: Sequence[LeftOutSample]) -> None:
        """Take samples that are left out because they can't be used; known after update `step`."""
        return

    def bad_numbers(self, report: NumbersReport) -> None:
        """Take what is known of an update whose numbers are bad."""
        return


class ThrottledMonitor(ReportWriter, Protocol):
    """A monitor that needs only some of the reports. It always sees discarded updates and the last one."""

    def next_report(self) -> NextReport:
        """Return when the next report is wanted; called after each that was shown."""

    def begin_finish(self, error: BaseException | None) -> None:
        """Prepare `finish`, which may wait: all monitors begin before the first one is waited for."""
        return


class Monitors:
    """Shows reports to all monitors; the requests are the union of their answers.

    Args:
        throttled: see a report when they want to.
        others: a user's monitors, which see every report; the time that they take is the user's.
        meters: reports that a thread appends; throttled monitors get them with the next report that is shown.
    """

    def __init__(
        self,
        throttled: Sequence[ThrottledMonitor] = (),
        others: Sequence[Monitor] = (),
        meters: deque[MeterReport] | None = None,
    ) -> None:
        self._throttled = list(throttled)
        self._meters: deque[MeterReport] = deque() if meters is None else meters
        self._others = list(others)
        self._next_step: float = 0
        self._next_seconds: float = 0.0
        self._last: StepReport | None = None
        self._shown: dict[ThrottledMonitor, StepReport] = {}  # the latest that each has seen
        self._wanted: dict[ThrottledMonitor, NextReport] = {}
        self._epoch = _Epochs(0)

    def start(self, info: RunInfo) -> None:
        self._epoch = _Epochs(info.epoch_samples)
        self._for_all(lambda monitor: monitor.start(info))

    def restarted(self, report: RestartReport) -> None:
        self._for_all(lambda monitor: monitor.restarted(report))

    def see(self, report: StepReport) -> Iterable[Request]:
        self._last = report
        requests = self._show_others(report) if self._others else _NOTHING
        epoch = self._epoch
        if report.verdict is _KEPT:
            if count := report.count:
                epoch.loss += report.loss * count
                epoch.count += count
            early = report.step < self._next_step and report.seconds < self._next_seconds
            if early and report.samples < epoch.end and not report.spike:
                return requests
        return self._show(report).union(requests)

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        requests: set[Request] = set(self._show_last())
        self._for_all(lambda monitor: requests.update(_requests(monitor, "evaluated", monitor.evaluated(report))))
        return requests

    def saved(self, report: SaveReport) -> None:
        self._for_all(lambda monitor: monitor.saved(report))

    def logged(self, step: int, logged: Logged) -> None:
        """Pass on what user code logged; only throttled monitors take it."""
        _for_each(self._throttled, lambda monitor: monitor.logged(step, logged))

    def left_out(self, step: int, samples: Sequence[LeftOutSample]) -> None:
        """Pass on samples that are left out; only throttled monitors take them."""
        _for_each(self._throttled, lambda monitor: monitor.left_out(step, samples))

    def bad_numbers(self, report: NumbersReport) -> None:
        """Pass on what is known of a bad update; only throttled monitors take it."""
        _for_each(self._throttled, lambda monitor: monitor.bad_numbers(report))

    def finish(self, error: BaseException | None) -> None:
        self._show_last()
        self._show_meters()
        _for_each(self._throttled, lambda monitor: monitor.begin_finish(error))
        self._for_all(lambda monitor: monitor.finish(error))

    def _show_others(self, report: StepReport) -> set[Request]:
        requests: set[Request] = set()
        _for_each(self._others, lambda monitor: requests.update(_requests(monitor, "see", monitor.see(report))))
        return requests

    def _show(self, report: StepReport) -> set[Request]:
        requests = self._show_to(report, everyone=not report.kept or bool(report.spike))
        if self._meters:
            self._show_meters()
        if (ended := self._epoch.after(report)) is not None:
            _for_each(self._throttled, lambda monitor: monitor.epoch(ended))
        wanted = [self._wanted[monitor] for monitor in self._throttled]
        self._next_step = min((at.step for at in wanted), default=math.inf)
        self._next_seconds = min((at.seconds for at in wanted), default=math.inf)
        return requests

    def _show_last(self) -> set[Request]:
        """Show the latest report to all throttled monitors."""
        return self._show_to(self._last, everyone=True) if self._last is not None else set()

    def _show_to(self, report: StepReport, *, everyone: bool) -> set[Request]:
        """Show a report to the throttled monitors that want it, or to all, but to none twice."""
        requests: set[Request] = set()
        for monitor in list(self._throttled):
            at = self._wanted.get(monitor, _AT_ONCE)
            is_wanted = everyone or report.step >= at.step or report.seconds >= at.seconds
            if is_wanted and self._shown.get(monitor) is not report:
                self._shown[monitor] = report
                try:
                    requests.update(monitor.see(report))
                    self._wanted[monitor] = monitor.next_report()
                except Exception as error:
                    _leave_out(self._throttled, monitor, error)
        return requests

    def _show_meters(self) -> None:
        while self._meters:
            report = self._meters.popleft()
            _for_each(self._throttled, lambda monitor: monitor.measured(report))  # noqa: B023  (called at once)

    def _for_all(self, act: Callable[[Monitor], object]) -> None:
        _for_each(self._throttled, act)
        _for_each(self._others, act)


def _for_each(monitors: list[_M], act: Callable[[_M], object]) -> None:
    """Call `act` with each monitor, and remove those that fail."""
    for monitor in list(monitors):
        try:
            act(monitor)
        except Exception as error:
            _leave_out(monitors, monitor, error)


def _leave_out(monitors: list[_M], monitor: _M, error: Exception) -> None:
    monitors.remove(monitor)
    _log.warning("%s failed and is left out from now on: %r", type(monitor).__name__, error, exc_info=True)


def _requests(monitor: Monitor, method: str, answer: object) -> Sequence[Request]:
    """Return the requests of a monitor's answer, which may be None.

    Raises:
        TypeError: It is anything else.
    """
    if answer is None:
        return ()
    requests: list[Any] = list(answer) if isinstance(answer, Iterable) else [answer]
    if not all(isinstance(request, Request) for request in requests):
        raise TypeError(
            f"{type(monitor).__name__}.{method} returned {answer!r}; return a list of lockstep.extend.Request, or None"
        )
    return requests


class _Epochs:
    """The sums of the running epoch.

    Attributes:
        end: number of samples at which the epoch is over.
        loss: sum over its kept updates, times their counts.
        count: sum over its kept updates.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.end: float = 0 if samples else math.inf
        self.loss = 0.0
        self.count = 0.0
        self._whole = True
        self._began = 0.0

    def after(self, report: StepReport) -> EpochReport | None:
        """Return the epoch's report if this update was its last."""
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
