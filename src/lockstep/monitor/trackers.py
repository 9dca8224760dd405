"""Passes reports to a tracker, and keeps its identifier, so that a resumed run continues the same record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from lockstep.core.errors import Stopped
from lockstep.core.files import write_atomically
from lockstep.core.records import EvaluationReport, Request, RestartReport, RunInfo, SaveReport, StepReport
from lockstep.core.tracking import TrackedRun, Tracker
from lockstep.monitor.jsonl import read_object
from lockstep.monitor.meters import Throughput, update_values
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.monitors import EpochReport, ReportWriter
from lockstep.monitor.rank_meters import MeterReport, meter_values


class TrackerMonitor(ReportWriter):
    """Turns reports into scalars, histograms, texts, images and tables, under the same names for all trackers.

    Args:
        checkpoint: Returns the path or address of the checkpoint of a step.
        every, seconds: Between points: steps, and at least seconds.
    """

    def __init__(
        self,
        tracker: Tracker,
        name: str,
        run: TrackedRun,
        checkpoint: Callable[[int], str],
        every: int,
        seconds: float = 0.0,
    ) -> None:
        self._tracker = tracker
        self._run = run
        self._checkpoint = checkpoint
        self._every, self._seconds = every, seconds
        self._pending: StepReport | None = None
        self._file = Path(run.folder) / f"{re.sub(r'[^A-Za-z0-9_]+', '-', name)}.json"
        self._throughput = Throughput()
        self._facts: RunInfo | None = None
        self._next_seconds = 0.0

    def start(self, info: RunInfo) -> None:
        self._facts = info
        Path(self._run.folder).mkdir(exist_ok=True)
        known = read_object(self._file).get("run")
        identifier = self._tracker.start(replace(self._run, tracker_id=known, resumed_from=info.resumed_from))
        if identifier is not None and identifier != known:
            write_atomically(self._file, json.dumps({"run": identifier}) + "\n")

    def restarted(self, report: RestartReport) -> None:
        self._tracker.rolled_back(report.step, report.attempt)

    def see(self, report: StepReport) -> Iterable[Request]:
        self._throughput.add(report)
        self._pending = report
        is_point = report.step % self._every == 0 and report.seconds >= self._next_seconds
        if report.step == 1 or is_point or not report.kept:
            self._record()
        return ()

    def _record(self) -> None:
        report, self._pending = self._pending, None
        if report is not None:
            self._next_seconds = report.seconds + self._seconds
            self._tracker.scalars(report.step, update_values(report, self._throughput.moving, self._facts))

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        self._throughput.pause(report.step, report.seconds)
        values = {f"evaluation/{report.name}/{name}": value for name, value in report.metrics.items()}
        self._tracker.scalars(report.step, values)
        return ()

    def saved(self, report: SaveReport) -> None:
        if report.failure is None:
            self._tracker.scalars(report.step, {"save/seconds": report.seconds, "save/lost_seconds": report.lost})
            self._tracker.checkpoint(report.step, self._checkpoint(report.step))

    def epoch(self, report: EpochReport) -> None:
        self._tracker.scalars(report.step, {"epoch/loss": report.loss, "epoch/seconds": report.seconds})

    def logged(self, step: int, logged: Logged) -> None:
        if numbers := logged.numbers():
            self._tracker.scalars(step, numbers)
        if logged.histograms:
            self._tracker.histograms(step, {name: value.bins() for name, value in logged.histograms.items()})
        if logged.texts:
            self._tracker.texts(step, logged.texts)
        if images := logged.images:
            self._tracker.images(step, images)
        if tables := logged.tables:
            self._tracker.tables(step, tables)

    def measured(self, report: MeterReport) -> None:
        self._tracker.scalars(report.step, meter_values(report))

    def finish(self, error: BaseException | None) -> None:
        self._record()
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        self._tracker.finish(None if error is None else "stopped" if stopped else f"{type(error).__name__}: {error}")
