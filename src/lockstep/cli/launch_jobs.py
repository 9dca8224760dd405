"""Jobs that `lockstep launch` submits, one of a run at a time; `launch/job.json` of the run's folder remembers it."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, Failure
from lockstep.core.files import MAX_JSON_BYTES, read_bounded, write_atomically
from lockstep.core.jobs import JOB_FILES, JobCommand, LaunchedJob, LaunchPlan
from lockstep.core.terminal import command_line
from lockstep.launchers.tools import write_files

if TYPE_CHECKING:
    from lockstep.core.protocols import Launcher

_RECORD = "job.json"
_RUNS = ("*", "runs/*", "runs/*/*")  # folders of runs


def submit_job(where: str, launcher: Launcher, command: JobCommand, plan: LaunchPlan) -> LaunchedJob:
    """Submit the job and remember it, unless one of the same run has not ended. Raises Failure.

    Nothing new is left behind if it is refused.
    """
    folder = command.folder
    _refuse_second(where, launcher, folder)
    run, record = folder.parent, folder / _RECORD
    new = [place for place in (run, *run.parents) if not place.exists()]
    before = record.read_text() if record.is_file() else None
    if plan.number:  # so that it can be canceled if this process is killed
        _remember(where, command, plan.number)
    try:
        number = launcher.submit(plan)
    except Failure:
        if new:
            shutil.rmtree(run, ignore_errors=True)
            with suppress(OSError):  # another run is in it by now
                for place in new[1:]:
                    place.rmdir()
        elif plan.number and before is None:
            record.unlink(missing_ok=True)
        elif plan.number and before is not None:
            write_atomically(record, before)
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
        missing = f"{text} has no {JOB_FILES}/{_RECORD}: no job was launched for it"
        raise ConfigError(f"{missing}; give the job's identifier or another folder")
    return job


def _folder_of(where: str, number: str) -> Path | None:
    """Return the folder of a job's files, if it was launched from here. Raises ConfigError: by another launcher."""
    launchers: dict[str, Path] = {}
    for path in [record for pattern in _RUNS for record in Path().glob(f"{pattern}/{JOB_FILES}/{_RECORD}")]:
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(read_bounded(path, MAX_JSON_BYTES))
            if record["job"] == number:
                launchers[str(record["launcher"])] = path.parent
    if launchers and where not in launchers:
        launcher = next(iter(launchers))
        way = f"lockstep launch {launcher} status {number}"
        raise ConfigError(f"{number} is a job of {launcher} ({launchers[launcher].parent}), not of {where}: {way}")
    return launchers[where].absolute() if launchers else None


def _remembered(where: str, folder: Path) -> LaunchedJob | None:
    """Return the job of a run; None if no job was launched for it. Raises ConfigError."""
    path = folder / _RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(read_bounded(path, MAX_JSON_BYTES))
        launcher, number = str(record["launcher"]), str(record["job"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is damaged; give the job's identifier") from None
    if launcher != where:
        raise ConfigError(f"{folder.parent} was launched with {launcher}: lockstep launch {launcher} ...")
    return LaunchedJob(number, folder)


def _refuse_second(where: str, launcher: Launcher, folder: Path) -> None:
    try:
        job = _remembered(where, folder)
        status = None if job is None else launcher.status(job)
    except ConfigError:  # long forgotten
        return
    if job is not None and status is not None and status.code is None:
        way = command_line("lockstep", "launch", where, "cancel", job.number)
        raise ConfigError(f"this run has a job already ({status.text}); wait for its end, or stop it: {way}")
