"""Jobs that `lockstep launch` has submitted: remembered in `launch/job.json` of their run's folder."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, Failure
from lockstep.core.files import MAX_JSON_BYTES, read_bounded
from lockstep.core.jobs import JOB_FILES, JobCommand, LaunchedJob, LaunchPlan

if TYPE_CHECKING:
    from lockstep.core.protocols import Launcher

_RECORD = "job.json"


def submit_job(where: str, launcher: Launcher, command: JobCommand, plan: LaunchPlan) -> LaunchedJob:
    """Submit the job and remember it, unless one of the same run has not ended. Raises Failure."""
    _refuse_second(where, launcher, command)
    number = _submit(launcher, plan, command.folder)
    _remember(where, command, number)
    return LaunchedJob(number, command.folder)


def _submit(launcher: Launcher, plan: LaunchPlan, folder: Path) -> str:
    """Submit the job and return its identifier; leave no new folder behind if it is refused."""
    existed = folder.parent.exists()
    try:
        return launcher.submit(plan)
    except Failure:
        if not existed:
            shutil.rmtree(folder.parent, ignore_errors=True)
        raise


def _remember(where: str, command: JobCommand, number: str) -> None:
    from lockstep.launchers.tools import write_files

    record = {"launcher": where, "job": number, "command": command.typed, "submitted": time.strftime("%FT%T%z")}
    write_files({command.folder / _RECORD: json.dumps(record, indent=2) + "\n"})


def job_of(where: str, text: str) -> LaunchedJob:
    """Return the job that an identifier or a run's folder names. Raises ConfigError."""
    if not Path(text).is_dir():
        return LaunchedJob(text)
    job = _remembered(where, Path(text, JOB_FILES))
    if job is None:
        raise ConfigError(f"{text} has no {JOB_FILES}/{_RECORD}: no job was launched for it; give the job's identifier")
    return job


def _remembered(where: str, folder: Path) -> LaunchedJob | None:
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


def _refuse_second(where: str, launcher: Launcher, command: JobCommand) -> None:
    """Raise ConfigError if a job of the same run has not ended."""
    try:
        job = _remembered(where, command.folder)
        status = launcher.status(job) if job is not None else None
    except ConfigError:  # long forgotten
        return
    if job is not None and status is not None and status.code is None:
        way = f"lockstep launch {where} cancel {job.number}"
        raise ConfigError(f"this run has a job already ({status.text}); wait for its end, or stop it: {way}")
