"""Runs a command on instances of EC2 that are started for it, and terminated after it.

plan      the script of an instance, and all calls with their parameters      submit    makes the calls, or undoes them
status    instances by their tag, and what they have put into the bucket      cancel    save, stop, remove everything
follow    the log of instance 0, then its results; then nothing is left that is paid for

Every machine with the right credentials can do this: a job's identifier names its region, bucket and tag.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError, Failure, Problem, RunFailed, Stopped
from lockstep.core.files import MAX_JSON_BYTES, read_bounded
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.core.stopping import write_stderr
from lockstep.core.terminal import echo
from lockstep.launchers.aws_batch import ElsewhereJob, plan_elsewhere, submit_elsewhere
from lockstep.launchers.aws_bundle import project_files
from lockstep.launchers.aws_calls import AwsCalls, NoAccess, known_region, wait_until
from lockstep.launchers.aws_instances import LIVE, console_end, instances, reason_of, remove, state_of
from lockstep.launchers.aws_names import AwsJob, job_named
from lockstep.launchers.aws_objects import JobObjects
from lockstep.launchers.aws_options import AwsOptions, bucket_parts, check, checkpoints
from lockstep.launchers.aws_plan import AwsFacts, facts_of, launch_calls, uses_efa
from lockstep.launchers.aws_prices import cost_note
from lockstep.launchers.aws_start import RECORD_FILE, SCRIPT_FILE, start
from lockstep.launchers.aws_user_data import NodeJob, user_data
from lockstep.launchers.tools import job_name, write_files

_POLL_S = 5.0
_PATIENCE_S = 300.0  # without an answer of AWS, while a job is followed
_STOPPING_S = 600.0  # for a run to save and stop
_OTHERS_S = 300.0  # between the end of one instance and those of the others


class AwsLauncher:
    """The launcher `aws`."""

    options = AwsOptions

    def plan(self, command: JobCommand, options: AwsOptions) -> LaunchPlan:
        """Return the script of an instance and the calls; asks AWS for what it can, and changes nothing."""
        check(command, options)
        region = known_region(options.region, options.profile)
        if options.kind != "ec2":
            return plan_elsewhere(command, options, job_name(command.name, secrets.token_hex(3)), region)
        files, notes = project_files(options.source)
        _refuse_missing(command, options, {path.as_posix() for path in files})
        bucket, prefix = bucket_parts(options)
        job = AwsJob(region, bucket, prefix, job_name(command.name, secrets.token_hex(3)))
        aws = AwsCalls(region, options.profile, attempts=2)
        unknown, facts = "", AwsFacts()
        try:
            facts = facts_of(aws, options)
        except NoAccess as failure:
            unknown = str(failure)
            notes.append(
                f"AWS wasn't asked for the image and the instance type, so the calls aren't complete: {unknown}"
            )
        node = NodeJob(job.name, job.place, region, bool(files), uses_efa(options, facts))
        record = {
            "job": job.identifier,
            "profile": options.profile,
            "nodes": options.nodes,
            "run_folder": command.run_folder.as_posix(),
            "boot_minutes": options.boot_minutes,
            "source": options.source,
            "unknown": unknown,
        }
        notes += _notes(command, options)
        notes.append(
            cost_note(
                None if unknown else aws,
                region,
                str(options.type),
                options.nodes,
                spot=options.spot or options.spot_only,
            )
        )
        return LaunchPlan(
            {
                command.folder / SCRIPT_FILE: user_data(command, options, node),
                command.folder / RECORD_FILE: json.dumps(record, indent=2) + "\n",
            },
            launch_calls(command, options, job, facts, has_project=bool(files)),
            tuple(notes),
        )

    def submit(self, plan: LaunchPlan) -> str:
        """Make the calls, and wait until the instances run; if anything fails or a signal comes, remove all of it."""
        if not any(path.name == SCRIPT_FILE for path in plan.files):
            return submit_elsewhere(plan)
        record = json.loads(next(text for path, text in plan.files.items() if path.name == RECORD_FILE))
        if record["unknown"]:
            raise RunFailed(record["unknown"])
        write_files(plan.files)
        start(plan, record)
        return str(record["job"])

    def status(self, job: LaunchedJob) -> JobStatus:
        """Return the job's state."""
        if ElsewhereJob.owns(job.number):
            return ElsewhereJob(job.number, job.folder).status()
        target = _target(job)
        state = target.state()
        if state is None:
            if target.code is not None:
                return JobStatus(f"AWS job {target.job.identifier}: ended with exit code {target.code}", target.code)
            raise ConfigError(
                f"AWS has nothing of job {target.job.identifier}: it has ended, and everything was removed, or it was "
                "never launched"
            )
        return JobStatus(state.text, state.code)

    def follow(self, job: LaunchedJob) -> int:
        """Print the log of instance 0 until the job has ended, fetch the results, and remove everything."""
        if ElsewhereJob.owns(job.number):
            return ElsewhereJob(job.number, job.folder).follow()
        target = _target(job)
        record = target.objects.record()
        if record is None:
            status = self.status(job)
            if status.code is None:
                raise ConfigError(
                    f"{status.text}; its record is missing in {target.job.place}, so it can't be followed"
                )
            echo(status.text, file=sys.stderr)
            return status.code
        state = _wait_for_end(target, record)
        folder = job.folder.parent if job.folder is not None else Path(record["run_folder"])
        code = 1 if state.code is None else state.code
        target.remember(code)
        is_fetched = False
        try:
            target.objects.print_log()
            number = target.objects.fetch(folder, int(record["nodes"]))
            is_fetched = True
            if number:
                echo(f"{number} files of the run are in {folder}", file=sys.stderr, flush=True)
        finally:  # nothing is paid for any more, and what wasn't fetched can be fetched by another `follow`
            remove(target.aws, target.job, keep_objects=not is_fetched)
        return code

    def cancel(self, job: LaunchedJob) -> None:
        """Ask the run to save and stop, then remove everything. What is gone already is no fault."""
        if ElsewhereJob.owns(job.number):
            ElsewhereJob(job.number, job.folder).cancel()
            return
        target = _target(job)
        try:
            _stop(target)
        finally:
            removed = remove(target.aws, target.job)
        if target.code is None:
            target.remember(Stopped.exit_code)
        if not removed:
            echo(f"nothing of AWS job {target.job.identifier} was left", file=sys.stderr)


AWS = AwsLauncher()


def _notes(command: JobCommand, options: AwsOptions) -> list[str]:
    notes = [
        "when it has ended, the instances, their disks, groups and objects are removed: by `--follow`, `follow` or "
        f"`cancel`; the instances terminate themselves, after {options.max_hours:g} hours at the latest"
    ]
    if command.nodes and command.in_folder:
        notes.append(f"checkpoints: {checkpoints(command, options)}; they stay there")
    if options.spot:
        notes.append("the second ec2 run-instances is made only if there are no spot instances")
    return notes


def _refuse_missing(command: JobCommand, options: AwsOptions, copied: set[str]) -> None:
    """Raise ConfigError if the command names a file or a folder that the instances don't get."""
    problems = []
    source = Path(options.source).resolve()
    for word in command.words[1:]:
        path = Path(word)
        if word.startswith("-") or "=" in word or not path.exists():
            continue
        is_below = options.source != "none" and path.resolve().is_relative_to(source)
        inside = path.resolve().relative_to(source) if is_below else None
        if inside is None or not any(name == str(inside) or name.startswith(f"{inside}/") for name in copied):
            message = (
                f"{word} is here, and not among the files that are copied to the instances, which are those that git "
                "knows below --source; add it there, or read it from a bucket"
            )
            problems.append(Problem("", "", message))
    if problems:
        raise ConfigError(problems)


# --- the state of a job ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _AwsState:
    """The state of a job.

    Attributes:
        text: A line for a person.
        code: The run's exit code; None while it has not ended.
        live: Number of instances that have not ended.
        ends: Exit codes by instance.
        first: Id of instance 0, if it is known.
    """

    text: str
    code: int | None
    live: int
    ends: Mapping[str, int]
    first: str | None


class _FollowedJob:
    """A job of AWS, and what its run's folder here remembers of it."""

    def __init__(self, job: AwsJob, profile: str | None, record: Path | None, code: int | None) -> None:
        self.job = job
        self.aws = AwsCalls(job.region, profile)
        self.objects = JobObjects(self.aws, job)
        self.code = code
        self._record = record

    def state(self) -> _AwsState | None:
        """Return the job's state; None: nothing of it is left."""
        listed = instances(self.aws, self.job)
        ends = self.objects.ends()
        if not listed and not ends:
            return None
        live = [each for each in listed if state_of(each) in LIVE]
        states: dict[str, int] = {}
        for each in listed:
            states[state_of(each)] = states.get(state_of(each), 0) + 1
        known = ", ".join(f"{number} {state}" for state, number in states.items()) or "gone"
        code = None
        if not live or len(ends) >= len(listed):
            code = self.code if self.code is not None else _code(ends, len(listed))
        text = f"AWS job {self.job.identifier}: instances {known}"
        if code is not None:
            why = next((reason for each in listed if (reason := reason_of(each))), "") if not ends else ""
            text += f", exit code {code}{f' ({why})' if why else ''}"
        return _AwsState(text, code, len(live), ends, str(listed[0]["InstanceId"]) if listed else None)

    def remember(self, code: int) -> None:
        """Write the exit code into the run's folder here."""
        if self._record is None:
            return
        try:
            known = json.loads(read_bounded(self._record, MAX_JSON_BYTES))
            write_files({self._record: json.dumps({**known, "code": code}, indent=2) + "\n"})
        except (OSError, ValueError, RunFailed) as error:
            echo(f"note: {self._record} isn't updated: {error}", file=sys.stderr)


def _code(ends: Mapping[str, int], nodes: int) -> int:
    """Return the exit code of a job: the first that is not 0, of an instance that has reported one."""
    failed = [code for _, code in sorted(ends.items()) if code]
    return failed[0] if failed else int(len(ends) < nodes or not ends)


def _target(job: LaunchedJob) -> _FollowedJob:
    profile, code, path = None, None, None
    if job.folder is not None:
        path = job.folder / RECORD_FILE
        try:
            record = json.loads(read_bounded(path, MAX_JSON_BYTES))
            profile, code = record.get("profile"), record.get("code")
        except (OSError, ValueError, AttributeError):
            raise ConfigError(f"{path} is missing or damaged; give the job's identifier") from None
    return _FollowedJob(job_named(job.number), profile, path, code)


def _wait_for_end(target: _FollowedJob, record: Mapping[str, Any]) -> _AwsState:
    """Print log and state until the job has ended. Raises RunFailed if AWS doesn't answer for long."""
    began = answered_at = time.monotonic()
    first_end: float | None = None
    shown, has_reported = "", False
    while True:
        try:
            state = target.state() or _AwsState(f"AWS job {target.job.identifier}: gone", 1, 0, {}, None)
            has_reported = has_reported or target.objects.has_reported()
            target.objects.print_log()
            answered_at = time.monotonic()
        except RunFailed:
            if time.monotonic() - answered_at > _PATIENCE_S:
                raise
            time.sleep(_POLL_S)
            continue
        if state.text != shown:
            shown = state.text
            echo(shown, file=sys.stderr, flush=True)
        first_end = (first_end or time.monotonic()) if state.ends else None
        if state.code is not None:
            _explain(target, state)
            return state
        if first_end is not None and time.monotonic() - first_end > _OTHERS_S:
            echo(f"note: {len(state.ends)} instances have ended, and the others didn't", file=sys.stderr)
            return state if not (codes := list(state.ends.values())) else _with_code(state, max(codes) or 1)
        if not has_reported and time.monotonic() - began > 60 * float(record["boot_minutes"]):
            echo(f"note: no instance has reported anything in {record['boot_minutes']:g} minutes", file=sys.stderr)
            _explain(target, _with_code(state, 1))
            return _with_code(state, 1)
        time.sleep(_POLL_S)


def _with_code(state: _AwsState, code: int) -> _AwsState:
    return _AwsState(state.text, code, state.live, state.ends, state.first)


def _explain(target: _FollowedJob, state: _AwsState) -> None:
    """Print the log of the instance that has failed, if it isn't instance 0, or the console of one without a log."""
    failed = next((node for node, code in sorted(state.ends.items()) if code), None)
    if failed not in (None, "0") and not state.ends.get("0"):
        lines = target.objects.log_of(str(failed)).splitlines()[-20:]
        echo("\n".join([f"--- the log of instance {failed} ends with:", *lines]), file=sys.stderr, flush=True)
    if state.code and not state.ends and state.first is not None and (text := console_end(target.aws, state.first)):
        echo(f"--- the console of {state.first} ends with:\n{text}", file=sys.stderr, flush=True)


def _stop(target: _FollowedJob) -> None:
    """Ask the run to save and stop, and wait for it; a job whose run has not begun needs no waiting."""
    try:
        state = target.state()
        if state is None or state.code is not None or not state.live or not target.objects.has_reported():
            return
        target.objects.ask_to_stop()
        echo("waiting for the run to save and stop; Ctrl-C leaves that to its instances", file=sys.stderr, flush=True)
        wait_until(lambda: (now := target.state()) is None or now.code is not None, _STOPPING_S, _POLL_S)
        target.objects.print_log()
    except Failure as failure:
        write_stderr(f"the run could not be asked to save: {failure}")
