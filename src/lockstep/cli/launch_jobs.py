"""Jobs that `lockstep launch` submits: planned, submitted, and remembered in `launch/job.json` of their run's folder.

plan_jobs    one plan, or one for each run of a sweep where the launcher has no arrays
submit_jobs  --> SubmittedJob: status, follow, cancel          find_jobs  the same by an identifier or a folder
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from lockstep.cli.launch_command import job_command, runs_of
from lockstep.core.command_lines import command_line
from lockstep.core.errors import ConfigError, Failure, RunFailed
from lockstep.core.files import MAX_JSON_BYTES, read_bounded, write_atomically
from lockstep.core.jobs import JOB_FILES, HostOptions, JobCommand, JobStatus, LaunchedJob, LaunchPlan, SweepOptions
from lockstep.core.stopping import undo_on_stop, write_stderr

if TYPE_CHECKING:
    from lockstep.core.protocols import Launcher

_RECORD = "job.json"
_RUNS = ("*", "runs/*", "runs/*/*")  # folders of runs, and of a sweep's
_MOST_LISTED = 5


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted job of one run, or one job for each run of a sweep.

    Attributes:
        where: The launcher's name.
        jobs: The jobs, of a sweep in the order of its runs.
        folder: The folder of the run, or of all runs of a sweep; None if only an identifier is known.
    """

    where: str
    jobs: tuple[LaunchedJob, ...]
    folder: Path | None
    _launcher: Launcher

    @property
    def number(self) -> str:
        """Return the identifier of the job; of several jobs, the folder of all."""
        return self.jobs[0].number if len(self.jobs) == 1 else str(self.folder)

    def status(self) -> JobStatus:
        """Return the state: of several jobs a line for each, and the highest exit code once all have ended.

        Raises:
            ConfigError: The launcher knows no such job.
            RunFailed: It can't be asked.
        """
        with self._jobs_named():
            states = [self._launcher.status(job) for job in self.jobs]
        codes = [state.code for state in states if state.code is not None]
        return JobStatus("\n".join(state.text for state in states), max(codes) if len(codes) == len(states) else None)

    def follow(self) -> int:
        """Print the output until the end, of several jobs one after the other, and return the exit code."""
        with self._jobs_named():
            return max(self._launcher.follow(job) for job in self.jobs)

    def cancel(self) -> None:
        """Stop what has not ended, for good. Raises ConfigError: all has ended."""
        with self._jobs_named():
            live = [job for job in self.jobs if len(self.jobs) == 1 or self._launcher.status(job).code is None]
            for job in live or self.jobs[:1]:
                self._launcher.cancel(job)

    @contextmanager
    def _jobs_named(self) -> Iterator[None]:
        """Add the jobs that there are to an error about an identifier that no job has."""
        try:
            yield
        except ConfigError as error:
            if self.jobs[0].folder is not None or self._is_known(self.jobs[0]):
                raise
            raise ConfigError(f"{error}; {jobs_here(self.where)}") from None

    def _is_known(self, job: LaunchedJob) -> bool:
        try:
            self._launcher.status(job)
        except Failure:
            return False
        return True


@dataclass(frozen=True, slots=True)
class PlannedJobs:
    """Plans of one job or several, by the launcher of the name `where`."""

    where: str
    launcher: Launcher
    command: JobCommand
    plans: tuple[tuple[JobCommand, LaunchPlan], ...]

    @property
    def is_attached(self) -> bool:
        """Return whether the jobs end with this command."""
        return any(plan.attached for _, plan in self.plans)

    @property
    def notes(self) -> list[str]:
        """Return sentences that the user should read, each once."""
        return [*dict.fromkeys(note for _, plan in self.plans for note in plan.notes)]


def plan_jobs(
    where: str, launcher: Launcher, options: BaseModel, sweep: Sequence[str], typed: Sequence[str], words: Sequence[str]
) -> PlannedJobs:
    """Check a command line and plan what submits it. Raises ConfigError.

    Args:
        sweep: Texts KEY=A,B.
        typed: The whole command line after `lockstep launch WHERE`.
        words: The command, from its verb on.
    """
    command = job_command(where, sweep, typed, words, partial(_world_size, options))
    commands = runs_of(command) if command.sweep and not isinstance(options, SweepOptions) else [command]
    return PlannedJobs(where, launcher, command, tuple((each, launcher.plan(each, options)) for each in commands))


def submit_jobs(planned: PlannedJobs) -> SubmittedJob:
    """Submit the jobs and remember them, unless one of the same run has not ended. Raises Failure."""
    for command, _ in planned.plans:
        _refuse_second(planned.where, planned.launcher, command)
    jobs: list[LaunchedJob] = []

    def progress() -> str:
        way = command_line("lockstep", "launch", planned.where, "cancel", planned.command.run_folder)
        return f"{len(jobs)} of {len(planned.plans)} runs are submitted ({way} stops them)"

    with undo_on_stop(lambda: write_stderr(progress()) if jobs else None):
        for command, plan in planned.plans:
            try:
                number = _submit(planned, plan, command)
            except RunFailed as failure:
                if not jobs:
                    raise
                raise RunFailed(f"{progress()}, and the next is refused: {failure}") from None
            _write(planned, command.folder, {"job": number})
            jobs.append(LaunchedJob(number, command.folder))
            if len(planned.plans) > 1:
                _write(planned, planned.command.folder, {"jobs": {job.number: str(job.folder) for job in jobs}})
    return SubmittedJob(planned.where, tuple(jobs), planned.command.folder.parent, planned.launcher)


def find_jobs(where: str, launcher: Launcher, text: str) -> SubmittedJob:
    """Return the job that an identifier or a folder of a run names, or those of a sweep. Raises ConfigError."""
    place = Path(text).expanduser()
    if not text or not place.is_dir():
        return SubmittedJob(where, (LaunchedJob(text, _folder_of(where, text)),), None, launcher)
    jobs = _remembered(where, place / JOB_FILES)
    if not jobs:
        missing = f"{text} has no {JOB_FILES}/{_RECORD}: no job was launched for it"
        raise ConfigError(f"{missing}; give the job's identifier or another folder; {jobs_here(where)}")
    return SubmittedJob(where, jobs, place, launcher)


def jobs_here(where: str) -> str:
    """Return which jobs a launcher was given from the current folder, as the end of a sentence."""
    jobs = [f"{job} ({folder.parent})" for folder, launcher, job in _jobs_below(Path()) if launcher == where]
    if not jobs:
        return f"no job of {where} was launched from {Path.cwd()}"
    return f"of {where} there are {', '.join(jobs[:_MOST_LISTED])}{' and more' if len(jobs) > _MOST_LISTED else ''}"


def _folder_of(where: str, number: str) -> Path | None:
    """Return the folder of a job's files, if it was launched from here. Raises ConfigError: by another launcher."""
    launchers = {launcher: folder for folder, launcher, job in _jobs_below(Path()) if job == number}
    if launchers and where not in launchers:
        launcher = next(iter(launchers))
        way = f"lockstep launch {launcher} status {number}"
        raise ConfigError(f"{number} is a job of {launcher} ({launchers[launcher].parent}), not of {where}: {way}")
    return launchers[where].absolute() if launchers else None


def _jobs_below(place: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the folder, the launcher and the identifier of the jobs of runs here and in `runs`, the newest first."""
    records = [record for pattern in _RUNS for record in place.glob(f"{pattern}/{JOB_FILES}/{_RECORD}")]
    for path in sorted(records, key=_modified, reverse=True):
        try:
            record = json.loads(read_bounded(path, MAX_JSON_BYTES))
            if "job" in record:
                yield path.parent, str(record["launcher"]), str(record["job"])
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _world_size(options: object, ranks: int | None) -> int | None:
    """Return the number of ranks on all nodes; None if the command line doesn't show it."""
    if isinstance(options, HostOptions):
        return options.world_size(ranks)
    return None if ranks is None else int(getattr(options, "nodes", 1)) * ranks


def _submit(planned: PlannedJobs, plan: LaunchPlan, command: JobCommand) -> str:
    """Submit the job and return its identifier; leave nothing new behind if it is refused."""
    run, record = command.folder.parent, command.folder / _RECORD
    new = [folder for folder in (run, *run.parents) if not folder.exists()]
    before = record.read_text() if record.is_file() else None
    if plan.number:  # so that it can be canceled if this process is killed
        _write(planned, command.folder, {"job": plan.number})
    try:
        return planned.launcher.submit(plan)
    except Failure:
        if new:
            shutil.rmtree(run, ignore_errors=True)
            with suppress(OSError):  # another run is in it by now
                for folder in new[1:]:
                    folder.rmdir()
        elif plan.number and before is None:
            record.unlink(missing_ok=True)
        elif plan.number and before is not None:
            write_atomically(record, before)
        raise


def _write(planned: PlannedJobs, folder: Path, jobs: dict[str, object]) -> None:
    from lockstep.launchers.tools import write_files

    record = {"launcher": planned.where, **jobs, "command": planned.command.typed}
    write_files({folder / _RECORD: json.dumps({**record, "submitted": time.strftime("%FT%T%z")}, indent=2) + "\n"})


def _remembered(where: str, folder: Path) -> tuple[LaunchedJob, ...]:
    """Return the jobs of a run or a sweep; none if no job was launched for it. Raises ConfigError."""
    path = folder / _RECORD
    if not path.is_file():
        return ()
    try:
        record = json.loads(read_bounded(path, MAX_JSON_BYTES))
        launcher = str(record["launcher"])
        folders = {str(number): Path(of_run) for number, of_run in record.get("jobs", {}).items()}
        jobs = folders or {str(record["job"]): folder}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is damaged; give the job's identifier") from None
    if launcher != where:
        raise ConfigError(f"{folder.parent} was launched with {launcher}: lockstep launch {launcher} ...")
    return tuple(LaunchedJob(number, of_run) for number, of_run in jobs.items())


def _refuse_second(where: str, launcher: Launcher, command: JobCommand) -> None:
    """Raise ConfigError if a job of the same run has not ended."""
    try:
        states = [(job, launcher.status(job)) for job in _remembered(where, command.folder)]
    except ConfigError:  # long forgotten
        return
    for job, status in states:
        if status.code is None:
            way = command_line("lockstep", "launch", where, "cancel", job.number)
            raise ConfigError(f"this run has a job already ({status.text}); wait for its end, or stop it: {way}")
