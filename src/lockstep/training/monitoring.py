"""The monitors and meters of a run on this rank, as its config has them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.assembly.user_objects import user_monitors, user_trackers
from lockstep.config.writing import to_public
from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import Request
from lockstep.core.tracking import TrackedRun, Tracker
from lockstep.distributed.collective_meter import CollectiveMeter
from lockstep.distributed.memory import memory_gauges
from lockstep.loop.session import components_of
from lockstep.monitor import history
from lockstep.monitor.console import Console
from lockstep.monitor.events import EventLog
from lockstep.monitor.folder import METRICS, TENSORBOARD, TRACKERS, RunFolder
from lockstep.monitor.host_gauges import host_gauges
from lockstep.monitor.jsonl import finite
from lockstep.monitor.metric_log import MetricLog, collected
from lockstep.monitor.monitors import BackgroundWriter, Monitors, ReportWriter
from lockstep.monitor.nvidia import gpu_gauges
from lockstep.monitor.prometheus import PrometheusEndpoint
from lockstep.monitor.rank_meters import MeterFiles, RankMeters
from lockstep.monitor.tensorboard import TensorBoard
from lockstep.monitor.trackers import TrackerMonitor

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.assembly.user_objects import UserObjects
    from lockstep.config.schema import Config
    from lockstep.core.records import RunInfo, StepReport
    from lockstep.loop.session import Session
    from lockstep.resuming.checkpoints import Checkpoints


class UserLogs:
    """Collects what all ranks log.

    Attributes:
        log: of this rank, since the last update that is recorded.
        taken: what was logged up to recorded updates, until their reports have arrived.
    """

    def __init__(self, session: Session, monitors: Monitors, log: MetricLog) -> None:
        self._session = session
        self._axis = components_of(session).world.axis
        self._every = components_of(session).config.monitor.every
        self._monitors = monitors
        self.log = log
        self.taken: dict[int, MetricLog] = {}  # by steps without an arrived report
        self._has_entries = session.progress.steps > 0  # of a run that resumes, the first update may be recorded

    def updated(self, step: int) -> tuple[Request, ...]:
        """Return this rank's request to collect, after update `step`, whose report may still be on its way."""
        if step % self._every == 0:
            self.taken[step] = self.log.take()
        return (Request.SHOW_LOG,)

    def see(self, report: StepReport) -> None:
        """Collect what was logged up to this update, if it is recorded and a rank has requested it."""
        if self._session.left_out.unseen:
            self._monitors.left_out(report.step, self._session.left_out.take_new())
        if self._session.bad_updates.unseen:
            self.show_bad_updates()
        self._has_entries |= Request.SHOW_LOG in report.requests
        if report.step % self._every:
            return
        log = self.taken.pop(report.step, None)
        if self._has_entries:
            self._show(report.step, log or MetricLog())
        elif log is not None:
            next(iter(self.taken.values()), self.log).put_back(log)

    def show_bad_updates(self) -> None:
        """Show the news about bad updates."""
        for bad in self._session.bad_updates.take_new():
            self._monitors.bad_numbers(bad)

    def finish(self, step: int) -> None:
        """Collect what is left after the last update; all ranks together."""
        self._show(step, self.log)

    def _show(self, step: int, log: MetricLog) -> None:
        logged = collected(log, self._axis)
        self._has_entries = bool(logged)  # who has logged will do so again
        if logged:
            self._monitors.logged(step, logged)


class Meters:
    """Measures this rank's updates; on the first rank, `files` has the meters of all. Free with meter_seconds 0."""

    def __init__(self, session: Session, folder: Path) -> None:
        components = components_of(session)
        world, seconds = components.world, components.config.monitor.meter_seconds
        self._measures = seconds > 0
        self._collectives = CollectiveMeter(world.clock, world.reduced)
        writes = self._measures and world.rank == 0
        self.files = MeterFiles(folder, world.notices, seconds, world.size) if writes else None
        self._meters = RankMeters(
            world.clock,
            world.notices,
            world.rank,
            lambda: session.progress.steps,
            [self._collectives.gauges, memory_gauges(world.device), *host_gauges(folder), *gpu_gauges(world.device)],
            self.files,
        )

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure while the block runs; then all is written that has been posted."""
        if not self._measures:
            yield
            return
        with self._collectives.measuring():
            self._meters.start()
            try:
                yield
            finally:
                self._meters.finish()

    def stop(self) -> None:
        """Post for the last time."""
        if self._measures:
            self._meters.stop()


def refuse_missing_packages(config: Config) -> None:
    """Raise ConfigError if the packages of a monitor in the config aren't installed."""
    if config.monitor.prometheus is not None and importlib.util.find_spec("prometheus_client") is None:
        text = f"it needs the package prometheus-client: {pip_install('prometheus')}"
        raise ConfigError(Problem("", "monitor.prometheus", text))


def make_monitors(
    config: Config, recipe: str, given: UserObjects, folder: Path, checkpoints: Checkpoints, meters: Meters
) -> Monitors:
    """Return the monitors of the first rank, and make their files the history that checkpoints refer to."""
    options, path = config.monitor, RunFolder.open(folder).path
    public, environment = finite(to_public(config)), checkpoints.environment

    def tracked(name: str, tracker: Tracker, own_folder: Path, seconds: float = 0.0) -> ReportWriter:
        run = TrackedRun(checkpoints.run, recipe, str(own_folder), public, environment)
        place = checkpoints.place
        return TrackerMonitor(tracker, name, run, lambda step: f"{place}/step-{step:08d}", options.every, seconds)

    log = EventLog(path / METRICS, options.every)
    files, writers = [*log.files], [BackgroundWriter(log)]
    if options.tensorboard:
        board = TensorBoard(path / TENSORBOARD)
        files += board.files
        writer = tracked("tensorboard", board, path / TENSORBOARD, 0.1)  # more points a second can't be seen
        writers.append(BackgroundWriter(writer, name="TensorBoard"))
    if options.prometheus is not None:
        writers.append(BackgroundWriter(PrometheusEndpoint(options.prometheus)))
    if meters.files is not None:
        files.append(meters.files.file)
    checkpoints.history = history.HistoryFiles(files, [writer.drain for writer in writers])
    writers.append(BackgroundWriter(Console(options.every, options.progress), math.inf))  # its reader is waited for
    for name, tracker in user_trackers(config, given).items():
        writers.append(BackgroundWriter(tracked(name, tracker, folder / TRACKERS), name=f"tracker {name}"))
    monitors = Monitors(writers, user_monitors(config, given), options.every)
    if meters.files is not None:
        meters.files.show = monitors.measured
    return monitors


@contextmanager
def started(monitors: Monitors, facts: RunInfo) -> Iterator[None]:
    """Start the monitors, and finish them with the block's exception, if any."""
    monitors.start(facts)
    try:
        yield
    except BaseException as error:
        monitors.finish(error)
        raise
    monitors.finish(None)
