"""Jobs that `lockstep launch` submits, one of a run at a time; `launch/job.json` of the run's folder remembers it."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, Failure
from lockstep.core.jobs import JOB_FILES, JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.core.terminal import command_line
from lockstep.launchers.tools import read_record, write_files

if TYPE_CHECKING:
    from lockstep.core.protocols import Launcher

_RECORD = "job.json"
_RUNS = ("*", "runs/*", "runs/*/*")  # folders of runs


def submit_job(where: str, launcher: Launcher, command: JobCommand, plan: LaunchPlan) -> LaunchedJob:
    """Submit the job and remember it, unless one of the same run has not ended. Raises Failure."""
    folder = command.folder
    _refuse_second(where, launcher, folder)
    is_new, earlier = not folder.parent.exists(), read_record(folder / _RECORD)
    if plan.number:  # so that it can be canceled if this process is killed
        _remember(where, command, plan.number)
    try:
        number = launcher.submit(plan)
    except Failure:
        if is_new:
            shutil.rmtree(folder.parent, ignore_errors=True)
        elif earlier:
            write_files({folder / _RECORD: json.dumps(earlier, indent=2) + "\n"})
        else:
            (folder / _RECORD).unlink(missing_ok=True)
        raise
    _remember(where, command, number)
    return LaunchedJob(number, folder)


def _remember(where: str, command: JobCommand, number: str) -> None:
    record = {"launcher": where, "job": number, "command": command.typed, "submitted": time.strftime("%FT%T%z")}
    write_files({command.folder / _RECORD: json.dumps(record, indent=2) + "\n"})


def find_job(where: str, text: str) -> LaunchedJob:
    """Return the job that an identifier or a folder of a run names. Raises ConfigError."""
    place = Path(text).expanduser()
    if not text or not place.is_dir():
        return LaunchedJob(text, _folder_of(where, text))
    job = _remembered(where, place / JOB_FILES)
    if job is None:
        raise ConfigError(f"no job was launched for {text}; give the job's identifier or another folder")
    return job


def _folder_of(where: str, number: str) -> Path | None:
    """Return the folder of a job's files, if it was launched from here. Raises ConfigError: by another launcher."""
    launchers: dict[str, Path] = {}
    for path in [record for pattern in _RUNS for record in Path().glob(f"{pattern}/{JOB_FILES}/{_RECORD}")]:
        with suppress(ConfigError):
            launcher, its_number = _read(path)
            if its_number == number:
                launchers[launcher] = path.parent
    if launchers and where not in launchers:
        launcher = next(iter(launchers))
        way = f"lockstep launch {launcher} status {number}"
        raise ConfigError(f"{number} is a job of {launcher} ({launchers[launcher].parent}), not of {where}: {way}")
    return launchers[where].absolute() if launchers else None


def _remembered(where: str, folder: Path) -> LaunchedJob | None:
    """Return the job of a run; None if no job was launched for it. Raises ConfigError."""
    if not (folder / _RECORD).is_file():
        return None
    launcher, number = _read(folder / _RECORD)
    if launcher != where:
        raise ConfigError(f"{folder.parent} was launched with {launcher}: lockstep launch {launcher} ...")
    return LaunchedJob(number, folder)


def _read(path: Path) -> tuple[str, str]:
    record = read_record(path)
    if not {"launcher", "job"} <= record.keys():
        raise ConfigError(f"{path} is damaged; give the job's identifier")
    return str(record["launcher"]), str(record["job"])


def _refuse_second(where: str, launcher: Launcher, folder: Path) -> None:
    try:
        job = _remembered(where, folder)
        status = JobStatus("", 0) if job is None else launcher.status(job)
    except ConfigError:  # long forgotten
        return
    if job is not None and status.code is None:
        way = command_line("lockstep", "launch", where, "cancel", job.number)
        raise ConfigError(f"this run has a job already ({status.text}); wait for its end, or stop it: {way}")
