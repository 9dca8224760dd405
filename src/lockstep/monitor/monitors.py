"""Shows a run's reports to its monitors: a user's in the loop, Lockstep's own writers each in a thread.

    report --> BackgroundWriter.put --> bounded queue --> its thread: EventLog.see(report) --> metrics.jsonl

A save drains the queues; the end of the run waits for them, within a limit. A writer that raises is dropped.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from lockstep.core.errors import Failure
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

END_S = 30.0
"""How long the end of a run waits for a writer."""
_MOST_WEIGHT = 10_000
_CHARACTERS = 500  # of texts, and bytes of images, that weigh as much as a report
_SECONDS = 0.1  # until writers get a report whatever its step
_PAUSE_S = 0.05  # of a writer that has written all: waking a thread costs the training loop more than a line does
_NOTHING: tuple[Request, ...] = ()
_KEPT = Verdict.KEPT
_log = logging.getLogger("lockstep.monitor")


@dataclass(frozen=True, slots=True)
class EpochReport:
    """Sums over one epoch.

    Attributes:
        loss: Mean over all valid targets of its kept updates; NaN if none was kept.
        samples: Consumed by the run so far.
        whole: Whether this process saw it from its first update on.
    """

    epoch: int
    step: int
    loss: float
    samples: int
    seconds: float
    whole: bool


class ReportWriter(Monitor, Protocol):
    """A monitor that also takes the sums of epochs, what user code logged, and the ranks' meters."""

    def epoch(self, report: EpochReport) -> None:
        """Take the sums of an epoch."""
        return

    def logged(self, step: int, logged: Logged) -> None:
        """Take what user code logged up to update `step`, merged over all ranks."""
        return

    def measured(self, report: MeterReport) -> None:
        """Take the meters of all ranks over an interval."""
        return

    def left_out(self, step: int, samples: Sequence[LeftOutSample]) -> None:
        """Take samples that can't be used."""
        return

    def bad_numbers(self, report: NumbersReport) -> None:
        """Receive an update with bad numbers."""
        return


class BackgroundWriter:
    """Calls a writer in a thread of its own, in order. Calls beyond the weight `most` are dropped, with a warning.

    Args:
        end_seconds: How long the end of the run waits for the writer.
        name: In messages; by default the writer's class.
    """

    def __init__(
        self, writer: ReportWriter, end_seconds: float = END_S, most: int = _MOST_WEIGHT, name: str | None = None
    ) -> None:
        self._writer = writer
        self._end_seconds = end_seconds
        self._most = most
        self._name = name or type(writer).__name__
        self._calls: SimpleQueue[tuple[Callable[[ReportWriter], object], int] | threading.Event | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._weight = 0
        self._dropped = 0
        self._closed = False
        self._urgent = threading.Event()
        self._ended = threading.Event()
        self._ends_at = math.inf
        threading.Thread(target=self._run, name=f"lockstep-{self._name}", daemon=True).start()

    def put(self, call: Callable[[ReportWriter], object], weight: int = 1) -> None:
        """Queue a call. One without a weight is never dropped."""
        with self._lock:
            if self._closed:
                return
            is_full = bool(weight and self._weight and self._weight + weight > self._most)
            self._dropped += is_full
            if not is_full:
                self._weight += weight
                self._calls.put((call, weight))
        if is_full and self._dropped == 1:
            _log.warning("%s can't keep up: the run continues without some of its reports", self._name)

    def drain(self, seconds: float) -> bool:
        """Wait until all that was put before is written; return False if it takes longer."""
        done = threading.Event()
        self._calls.put(done)
        self._urgent.set()
        return self._ended.is_set() or done.wait(seconds)

    def begin_finish(self, error: BaseException | None) -> None:
        """Let the writer finish, without waiting for it."""
        self.put(lambda writer: writer.finish(error), 0)
        self._calls.put(None)
        self._urgent.set()
        self._ends_at = time.monotonic() + self._end_seconds

    def finish(self) -> None:
        """Wait for the writer, until `end_seconds` after `begin_finish`."""
        left = self._ends_at - time.monotonic()
        if not self._ended.wait(None if left == math.inf else max(0.0, left)):
            _log.warning("%s has not ended within %g s: its last reports are lost", self._name, self._end_seconds)
        elif self._dropped:
            _log.warning("%s was too slow for %d reports, which are lost", self._name, self._dropped)
        self._closed = True
        self._ended.set()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            if isinstance(item, threading.Event):
                self._urgent.clear()
                item.set()
                continue
            call, weight = item
            try:
                if not self._closed:
                    call(self._writer)
            except Exception as error:
                self._closed = True
                reason = _known_reason(error)
                text = "%s failed and is left out from now on: %s"
                _log.warning(text, self._name, reason or repr(error), exc_info=reason is None)
            del call, item  # and what they hold
            with self._lock:
                self._weight -= weight
            if self._calls.empty():
                self._urgent.wait(_PAUSE_S)
        self._ended.set()


def _known_reason(error: BaseException) -> str | None:
    """Return the message of an error of the config, the disk or the network; None for a fault of the writer."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    if not any(isinstance(each, Failure | OSError) for each in chain):
        return None
    first, root = str(error).partition("\n")[0] or repr(error), str(chain[-1])
    return first if root in first else f"{first} ({root})"


class Monitors:
    """Shows reports to all monitors.

    Args:
        writers: See every `every`th step, one after a tenth of a second, each discarded update, each spike, the last
            update of an epoch, and the one before an evaluation or the end.
        others: A user's monitors, which see every report. The requests are the union of their answers.
    """

    def __init__(
        self, writers: Sequence[BackgroundWriter] = (), others: Sequence[Monitor] = (), every: int = 1
    ) -> None:
        self._writers = writers
        self._others = list(others)
        self._every = every
        self._next_step: float = 0 if writers else math.inf
        self._next_seconds = self._next_step
        self._last: StepReport | None = None
        self._written: StepReport | None = None
        self._epoch = _Epochs(0)

    def start(self, info: RunInfo) -> None:
        self._epoch = _Epochs(info.epoch_samples)
        self._write(lambda writer: writer.start(info))
        self._ask_others("start", info)

    def restarted(self, report: RestartReport) -> None:
        self._write(lambda writer: writer.restarted(report))
        self._ask_others("restarted", report)

    def see(self, report: StepReport) -> Iterable[Request]:
        self._last = report
        requests = self._ask_others("see", report) if self._others else _NOTHING
        epoch = self._epoch
        if report.verdict is _KEPT:
            if count := report.count:
                epoch.loss += report.loss * count
                epoch.count += count
            early = report.step < self._next_step and report.seconds < self._next_seconds
            if early and report.samples < epoch.end and not report.spike:
                return requests
        self._write_last()
        if (ended := epoch.after(report)) is not None:
            self._write(lambda writer: writer.epoch(ended))
        return requests

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        self._write_last()
        self._write(lambda writer: writer.evaluated(report))
        return self._ask_others("evaluated", report)

    def saved(self, report: SaveReport) -> None:
        self._write(lambda writer: writer.saved(report), 0)
        self._ask_others("saved", report)

    def logged(self, step: int, logged: Logged) -> None:
        size = sum(map(len, logged.texts.values())) + sum(len(image.pixels) for image in logged.images.values())
        others = len(logged.values) // 10 + 10 * len(logged.histograms) + 100 * len(logged.tables)
        weight = 1 + others + size // _CHARACTERS
        self._write(lambda writer: writer.logged(step, logged), min(weight, _MOST_WEIGHT // 2))

    def measured(self, report: MeterReport) -> None:
        self._write(lambda writer: writer.measured(report), 1 + len(report.ranks))

    def left_out(self, step: int, samples: Sequence[LeftOutSample]) -> None:
        self._write(lambda writer: writer.left_out(step, samples), 0)

    def bad_numbers(self, report: NumbersReport) -> None:
        self._write(lambda writer: writer.bad_numbers(report), 0)

    def finish(self, error: BaseException | None) -> None:
        self._write_last()
        for writer in self._writers:
            writer.begin_finish(error)
        self._ask_others("finish", error)
        for writer in self._writers:
            writer.finish()

    def _write_last(self) -> None:
        report = self._last
        if report is None or report is self._written or not self._writers:
            return
        self._written = report
        self._next_step = report.step + self._every - report.step % self._every
        self._next_seconds = report.seconds + _SECONDS
        self._write(lambda writer: writer.see(report))

    def _write(self, call: Callable[[ReportWriter], object], weight: int = 1) -> None:
        for writer in self._writers:
            writer.put(call, weight)

    def _ask_others(self, method: str, argument: object) -> set[Request]:
        requests: set[Request] = set()
        for monitor in list(self._others):
            try:
                answer = getattr(monitor, method)(argument)
                requests.update(_requests(monitor, method, answer) if method in ("see", "evaluated") else ())
            except Exception as error:
                self._others.remove(monitor)
                name = type(monitor).__name__
                _log.warning("%s failed and is left out from now on: %r", name, error, exc_info=True)
        return requests


def _requests(monitor: Monitor, method: str, answer: object) -> Sequence[Request]:
    if answer is None:
        return ()
    requests: list[Any] = list(answer) if isinstance(answer, Iterable) else [answer]
    if not all(isinstance(request, Request) for request in requests):
        raise TypeError(
            f"{type(monitor).__name__}.{method} returned {answer!r}; return a list of lockstep.extend.Request, or None"
        )
    return requests


class _Epochs:
    """The sums of the running epoch, which is over at `end` samples."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.end: float = 0 if samples else math.inf
        self.loss = 0.0
        self.count = 0.0
        self._whole = True
        self._began = 0.0

    def after(self, report: StepReport) -> EpochReport | None:
        """Return the epoch's report if this update was its last."""
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
