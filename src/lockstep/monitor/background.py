"""Monitors whose work is done by threads: no update waits for a disk, a network or the reader of standard output.

    update --> see(report) --> WorkQueue, bounded --> its thread: EventLog.see(report) --> metrics.jsonl
               microseconds    full: dropped, counted, reported once

    SIGKILL -> what is in the files stays; the line of the last milliseconds may be missing

    save   --> drain: all that was put before is written, unless the disk hangs
    end    --> close: all is written, within a limit

Each monitor has a queue of its own: a network that hangs stops no file.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from lockstep.core.errors import Failure
from lockstep.core.records import (
    EvaluationReport,
    LeftOutSample,
    NumbersReport,
    Request,
    RestartReport,
    RunInfo,
    SaveReport,
    StepReport,
)
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.monitors import EpochReport, NextReport, ReportWriter, ThrottledMonitor
from lockstep.monitor.rank_meters import MeterReport

MOST_WEIGHT = 10_000
_Work = tuple[Callable[..., object], tuple[object, ...], int]
_log = logging.getLogger("lockstep.monitor")
_HISTOGRAM_WEIGHT = 10
_LONGEST_REASON = 400  # characters
_CHARACTERS = 500  # of a text that weigh as much as a report
END_S = 30.0
"""How long the end of a run waits for its writers."""


class WorkQueue:
    """Calls functions in the order in which they were put, in a thread that starts with the first.

    Args:
        name: of the thread.
        most: weight of the waiting functions, at most. A single one is always taken, and those without weight.

    Attributes:
        dropped: Number of functions that were not called, since the queue was full or closed.
    """

    def __init__(self, name: str, most: int = MOST_WEIGHT) -> None:
        self._name = name
        self._most = most
        self._changed = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._weight = 0
        self._busy_since = math.inf
        self._thread: threading.Thread | None = None
        self._closed = False
        self.dropped = 0

    def put(self, act: Callable[..., object], *arguments: object, weight: int = 1) -> bool:
        """Add a call of a function, which must not raise; return whether it fitted. Never waits."""
        with self._changed:
            if self._closed or (self._waiting and weight and self._weight + weight > self._most):
                self.dropped += 1
                return False
            self._waiting.append((act, arguments, weight))
            self._weight += weight
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            elif len(self._waiting) == 1:
                self._changed.notify_all()
        return True

    def drain(self, seconds: float = math.inf) -> bool:
        """Wait until all functions have been called; return False if that takes longer, or one already does."""
        limit = time.monotonic() + seconds
        with self._changed:
            while self._waiting or self._busy_since < math.inf:
                left = min(limit, self._busy_since + seconds) - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(None if left == math.inf else left)
        return True

    def close(self, seconds: float = math.inf) -> bool:
        """Wait as `drain` does, and call nothing more; return whether all functions were called."""
        done = self.drain(seconds)
        with self._changed:
            self._closed = True
            self.dropped += len(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
            while (work := self._next()) is not None:
                act, arguments, weight = work
                act(*arguments)
                del act, arguments, work  # and what they hold
                with self._changed:
                    self._weight -= weight
            if self._closed:
                return

    def _next(self) -> _Work | None:
        """Return the next call; None if nothing waits."""
        with self._changed:
            if self._waiting:
                self._busy_since = time.monotonic()
                return self._waiting.popleft()
            self._busy_since = math.inf
            self._changed.notify_all()
            return None


class BackgroundMonitor(ThrottledMonitor):
    """Passes reports to a writer in a thread.

    A writer that raises gets nothing more, with one warning.

    Args:
        every: steps between the reports that the writer gets.
        end_seconds: how long the end of the run waits for the writer.
        name: of the writer in messages; None: that of its class.
    """

    def __init__(
        self,
        writer: ReportWriter,
        every: int,
        end_seconds: float = END_S,
        most: int = MOST_WEIGHT,
        name: str | None = None,
    ) -> None:
        self._writer = writer
        self._name = name or type(writer).__name__
        self._every = every
        self.end_seconds = end_seconds
        self._queue = WorkQueue(f"lockstep-{self._name}", most)
        self._next_step = 0
        self._failed = False
        self._ends_at: float | None = None  # once it finishes

    def start(self, info: RunInfo) -> None:
        self._put(self._writer.start, info)

    def restarted(self, report: RestartReport) -> None:
        self._put(self._writer.restarted, report)

    def next_report(self) -> NextReport:
        return NextReport(self._next_step, math.inf)

    def see(self, report: StepReport) -> Iterable[Request]:
        self._next_step = report.step + self._every - report.step % self._every
        self._put(self._writer.see, report)
        return ()

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        self._put(self._writer.evaluated, report)
        return ()

    def saved(self, report: SaveReport) -> None:
        self._put(self._writer.saved, report, weight=0)  # never dropped

    def epoch(self, report: EpochReport) -> None:
        self._put(self._writer.epoch, report)

    def logged(self, step: int, logged: Logged) -> None:
        texts = sum(len(text) for text in logged.texts.values()) // _CHARACTERS
        pixels = sum(len(image.pixels) for image in logged.images.values()) // _CHARACTERS
        cells = sum(len(table.rows) * len(table.columns) for table in logged.tables.values())
        weight = 1 + len(logged.values) // 10 + _HISTOGRAM_WEIGHT * len(logged.histograms) + texts + pixels + cells
        weight = min(weight, MOST_WEIGHT // 2)  # else dropped if any wait
        self._put(self._writer.logged, step, logged, weight=weight)

    def measured(self, report: MeterReport) -> None:
        self._put(self._writer.measured, report, weight=1 + len(report.ranks))

    def left_out(self, step: int, samples: Sequence[LeftOutSample]) -> None:
        self._put(self._writer.left_out, step, samples, weight=0)  # never dropped

    def bad_numbers(self, report: NumbersReport) -> None:
        self._put(self._writer.bad_numbers, report, weight=0)

    def begin_finish(self, error: BaseException | None) -> None:
        """Let the writer finish, without waiting for it."""
        self._put(self._writer.finish, error, weight=0)
        self._ends_at = time.monotonic() + self.end_seconds

    def finish(self, error: BaseException | None) -> None:
        """Wait for the writer up to the limit, which began with `begin_finish`."""
        if self._ends_at is None:
            self.begin_finish(error)
        self._queue.drain(max(0.0, (self._ends_at or 0.0) - time.monotonic()))
        if not self._queue.close(0.0):
            _log.warning("%s has not ended within %g s: its last reports are lost", self._name, self.end_seconds)
        elif self._queue.dropped:
            _log.warning("%s was too slow for %d reports, which are lost", self._name, self._queue.dropped)

    def drain(self, seconds: float) -> bool:
        """Wait until the writer has taken all reports, in any thread; return False if it takes longer."""
        return self._queue.drain(seconds)

    def _put(self, act: Callable[..., object], *arguments: object, weight: int = 1) -> None:
        if self._failed:
            return
        if not self._queue.put(self._attempt, act, *arguments, weight=weight) and self._queue.dropped == 1:
            _log.warning("%s can't keep up: the run continues without some of its reports", self._name)

    def _attempt(self, act: Callable[..., object], *arguments: object) -> None:
        if self._failed:
            return
        try:
            act(*arguments)
        except Exception as error:
            self._failed = True
            reason = _known_reason(error)
            _log.warning(
                "%s failed and is left out from now on: %s", self._name, reason or repr(error), exc_info=reason is None
            )


def _known_reason(error: BaseException) -> str | None:
    """Return what to state of an error that isn't the writer's own: of the config, the disk, the network; else None."""
    if isinstance(error, Failure):
        return str(error)
    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, OSError):
        chain = chain.__cause__ or chain.__context__
    if chain is None:
        return None
    first = str(error).partition("\n")[0][:_LONGEST_REASON] or repr(error)
    cause = f"{chain.strerror}: {chain.filename}" if chain.strerror and chain.filename else str(chain)
    return first if chain is error or cause[:_LONGEST_REASON] in first else f"{first} ({cause[:_LONGEST_REASON]})"
